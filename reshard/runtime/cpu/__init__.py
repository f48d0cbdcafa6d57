"""Runs a program on host memory with torch: staging buffers, posting and waiting, verification."""
