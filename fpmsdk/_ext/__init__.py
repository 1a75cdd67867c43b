"""Compiled modules, built from ext/*.pyx. They know numpy and fpmsdk.errors, nothing else."""
