"""Benchmarks, run as commands: ``python -m microbench.loopback``."""
