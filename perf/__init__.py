"""Benchmarks. Tests are in `tests/`; nothing there depends on a time."""
