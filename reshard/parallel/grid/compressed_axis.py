"""The collectives of matrix products, with messages encoded by a block codec.

A message is encoded only if that makes it shorter. Both ends compute its size from the number of values. In an
all-gather, a rank encodes and decodes its own part too, so that all ranks hold the same bits. Sums and exchanges do not
compress a rank's own part. If several ranks of an axis share a host, sums inside the host are not encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from reshard.codecs import CODED_DTYPES, BlockCodec
from reshard.dtypes import dtype_name

from .grid_axis import Axis
from .pending import PendingResult


class CompressedAxis:
    """The ``all_gather``, ``reduce_scatter`` and ``exchange`` of an :class:`Axis`, with encoded messages.

    Args:
        axis: the ranks.
        codec: encodes messages of fp32, bf16 and fp16 values; other dtypes are sent raw.
    """

    def __init__(self, axis: Axis, codec: BlockCodec) -> None:
        self._axis, self._codec = axis, codec

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """See :meth:`Axis.all_gather`."""
        axis, shape = self._axis, (sum(sizes), *part.shape[1:])
        if axis.size == 1 or dtype_name(part.dtype) not in CODED_DTYPES:
            return axis.all_gather(part, sizes)
        row_numel = part[:1].numel() if len(part) else part.new_empty((1, *part.shape[1:])).numel()
        numels = [size * row_numel for size in sizes]
        nbytes = [self._message_bytes(numel, part.itemsize) for numel in numels]
        result = part.new_empty(sum(numels))
        pending = axis.all_gather(self._encode([part]), nbytes)

        def finish() -> torch.Tensor:
            for data, target in zip(pending.wait().split(nbytes), result.split(numels), strict=True):
                self._decode(data, target)
            return result.view(shape)

        return PendingResult(None, finish)

    def reduce_scatter(self, array: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """See :meth:`Axis.reduce_scatter`."""
        axis = self._axis
        if axis.size == 1 or not array.numel() or dtype_name(array.dtype) not in CODED_DTYPES:
            return axis.reduce_scatter(array, sizes)
        if axis.levels is not None:
            return axis.levels.reduce_scatter(array, sizes, CompressedAxis(axis.levels.between, self._codec))
        parts = array.split(list(sizes))
        own, numel = parts[axis.index], parts[axis.index].numel()
        received_bytes = [self._message_bytes(numel, array.itemsize)] * axis.size
        sent_bytes = [self._message_bytes(part.numel(), array.itemsize) for part in parts]
        received_bytes[axis.index] = sent_bytes[axis.index] = 0
        others = [part for position, part in enumerate(parts) if position != axis.index]
        pending = axis.start_exchange(self._encode(others), sent_bytes, received_bytes)

        def finish() -> torch.Tensor:
            total = torch.zeros(numel, dtype=torch.float32, device="cpu")
            for position, data in enumerate(pending.wait().split(received_bytes)):
                if position == axis.index:
                    total += own.reshape(-1)
                else:
                    self._decode(data, total, array.dtype, accumulate=True)
            return total.to(array.dtype).view(own.shape)

        return PendingResult(None, finish)

    def exchange(self, sent: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> torch.Tensor:
        """See :meth:`Axis.exchange`."""
        return self.start_exchange(sent, send_sizes, receive_sizes).wait()

    def start_exchange(
        self, sent: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> PendingResult:
        """See :meth:`Axis.start_exchange`."""
        axis = self._axis
        if axis.size == 1 or dtype_name(sent.dtype) not in CODED_DTYPES:
            return axis.start_exchange(sent, send_sizes, receive_sizes)
        parts = sent.split(list(send_sizes))
        sent_bytes, received_bytes = (
            [self._message_bytes(numel, sent.itemsize) for numel in sizes] for sizes in (send_sizes, receive_sizes)
        )
        received_bytes[axis.index] = sent_bytes[axis.index] = 0
        others = [part for position, part in enumerate(parts) if position != axis.index]
        pending = axis.start_exchange(self._encode(others), sent_bytes, received_bytes)

        def finish() -> torch.Tensor:
            result = sent.new_empty(sum(receive_sizes))
            messages = zip(pending.wait().split(received_bytes), result.split(list(receive_sizes)), strict=True)
            for position, (message, target) in enumerate(messages):
                if position == axis.index:
                    target.copy_(parts[position])
                else:
                    self._decode(message, target)
            return result

        return PendingResult(None, finish)

    def _message_bytes(self, numel: int, itemsize: int) -> int:
        return min(self._codec.nbytes((numel,), 0), numel * itemsize)

    def _is_encoded(self, numel: int, itemsize: int) -> bool:
        return self._codec.nbytes((numel,), 0) < numel * itemsize

    def _encode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The concatenated messages of some parts, as bytes."""
        sizes = [self._message_bytes(part.numel(), part.itemsize) for part in parts]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        for part, start, size in zip(parts, accumulate(sizes, initial=0), sizes, strict=False):
            flat = part.contiguous().reshape(-1)
            if self._is_encoded(part.numel(), part.itemsize):
                self._codec.encode(flat, out[start : start + size], 0)
            else:
                out[start : start + size] = flat.view(torch.uint8)
        return out

    def _decode(
        self, data: torch.Tensor, target: torch.Tensor, dtype: torch.dtype | None = None, *, accumulate: bool = False
    ) -> None:
        """Write the values of a message to a flat target, or add them. ``dtype`` is that of the sender's values."""
        dtype = dtype or target.dtype
        if not target.numel():
            return
        if self._is_encoded(target.numel(), dtype.itemsize):
            self._codec.decode(data, target, 0, accumulate=accumulate)
        elif accumulate:
            target += data.clone().view(dtype)  # clone() aligns the bytes, as view() requires
        else:
            target.copy_(data.clone().view(dtype))
