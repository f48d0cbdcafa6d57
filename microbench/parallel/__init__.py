"""Tensor parallelism on grids: bytes on the wire, and times beside the bound."""
