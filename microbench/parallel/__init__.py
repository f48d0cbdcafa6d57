"""Tensor parallelism on grids: bytes on the wire, and times compared with the bound."""
