"""Native code and GPU kernels beside what they replace."""
