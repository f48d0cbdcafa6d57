"""Benchmarks. Each module with a ``main`` runs as a command: ``python -m microbench.transfers.loopback``."""
