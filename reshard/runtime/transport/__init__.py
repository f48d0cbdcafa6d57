"""Transports, which move bytes between ranks: their interface, and the connections of Gloo and NCCL.

Imports :mod:`reshard.runtime.cuda` and the root.
"""

from .interface import ROUNDING_SECONDS, BrokenConnectionError, Transport, Work, join, wait_for

__all__ = ["ROUNDING_SECONDS", "BrokenConnectionError", "Transport", "Work", "join", "wait_for"]
