"""Runs a program in rounds of grouped messages, for transports that match messages by order, such as NCCL. No torch."""
