"""Runs a program on CPU tensors: staging buffers, posting and waiting, verification."""
