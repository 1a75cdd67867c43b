"""Collection campaigns: plan, cells, attempts on executors, native artifacts, evidence, publication.

Source: collector.md.
"""
