"""Benchmarks of native code and GPU kernels against the code that they replace."""
