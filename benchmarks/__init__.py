"""Benchmarks: each compares side by side in one run, says on what, and writes its figures with ``--json FILE``."""
