"""Benchmarks of pipeline training on emulated hosts."""
