"""Run benchmark rows, time them and report the results."""
