"""Benchmark rows: pairs of layouts and the emulated clusters they run on."""
