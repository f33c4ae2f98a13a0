"""Benchmarks: ``python -m bench run --device cpu``."""
