"""The contenders of the benchmarks: our strategies and the alternatives to this library."""
