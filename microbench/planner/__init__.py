"""Benchmarks of planning: quality of plans, planning time and checking time. No tensor is moved."""
