"""Benchmarks of transfers between real processes."""
