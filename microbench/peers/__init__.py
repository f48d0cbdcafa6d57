"""What moves tensors in the benchmarks: our strategies, and what users would use instead."""
