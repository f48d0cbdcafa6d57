"""Benchmarks, run as commands: ``python -m microbench.transfers.loopback``."""
