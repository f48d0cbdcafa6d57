"""Transfers in progress: they run on a thread (CPU) or a stream (GPU), and callers wait for their handles."""

from reshard.api.transfers.handle import ConfirmedHandle, Handle
from reshard.api.transfers.queued import QueuedTransfers
from reshard.api.transfers.streamed import StreamedTransfers

__all__ = ["ConfirmedHandle", "Handle", "QueuedTransfers", "StreamedTransfers"]
