"""Benchmarks: ``python -m bench run``, ``model``, ``traffic`` and ``host``."""
