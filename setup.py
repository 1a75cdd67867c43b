"""Build the Cython extensions of fpmsdk; everything else is declared in pyproject.toml.

Sources live in ext/*.pyx, one file per compiled module; shared declarations live in fpmsdk/_ext/*.pxd.
"""

from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

# -ffp-contract=off: every result must have the same bits with and without fused multiply-add hardware.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "-g0"]

# Cython tracks the declarations that a source names, but looks for those of the module itself beside the source.
generated = [path.stat().st_mtime for path in Path("build/cython").rglob("*.c")]
declared = [path.stat().st_mtime for path in Path("fpmsdk/_ext").glob("*.pxd")]
stale = bool(generated) and min(generated) < max(declared)

extensions = [
    Extension(
        f"fpmsdk._ext.{source.stem}",
        [str(source)],
        include_dirs=[numpy.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
        extra_compile_args=COMPILE_ARGS,
    )
    for source in sorted(Path("ext").glob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        build_dir="build/cython",
        include_path=["."],
        force=stale,
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "embedsignature": True,
        },
    )
)
