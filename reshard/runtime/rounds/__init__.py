"""Runs a program in rounds of grouped messages, as NCCL needs. Does not import torch."""
