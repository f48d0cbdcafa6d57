"""Transports, which move bytes between ranks: their interface, and the connections of Gloo and NCCL.

Imports :mod:`reshard.runtime.cuda` and the root.
"""

from .connections import ABORT_TAG, Connections, GlooTransport, abort_group
from .interface import ROUNDING_SECONDS, BrokenConnectionError, Transport, Work, join, wait_for
from .shared_memory import MIN_SHARED_BYTES, SHARED_MEMORY_VARIABLE, SharedMemory

__all__ = [
    "ABORT_TAG",
    "MIN_SHARED_BYTES",
    "ROUNDING_SECONDS",
    "SHARED_MEMORY_VARIABLE",
    "BrokenConnectionError",
    "Connections",
    "GlooTransport",
    "SharedMemory",
    "Transport",
    "Work",
    "abort_group",
    "join",
    "wait_for",
]
