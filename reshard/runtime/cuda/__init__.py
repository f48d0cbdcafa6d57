"""NCCL communicators, streams and the kernel that packs regions."""
