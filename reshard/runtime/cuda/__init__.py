"""Transfers on CUDA devices: NCCL communicators, streams, and the kernel that packs strided regions."""
