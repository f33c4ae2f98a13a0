"""Benchmarks: ``python -m bench run`` and ``model``."""
