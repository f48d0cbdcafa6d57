"""Collectives whose messages are encoded by a block codec. All ranks that receive a message decode the same bits.

A collective works on rows. In an exchange, row ``i`` goes to member ``i`` of the process group. Rows are flat fp32, and
the size of a row is a multiple of the codec's number of values per element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from reshard.codecs import BlockCodec
from reshard.runtime.torch_compat import all_gather_single

#: Waits for a collective that was started, and returns what it received.
Wait = Callable[[], torch.Tensor]


def encode_rows(rows: torch.Tensor, codec: BlockCodec | None) -> torch.Tensor:
    """Encode rows to ``(rows, bytes)`` uint8. Without a codec, return the rows themselves."""
    if codec is None:
        return rows
    encoded = torch.empty(len(rows), codec.nbytes(rows.shape[1:], 0), dtype=torch.uint8, device=rows.device)
    codec.encode(rows, encoded, 1)
    return encoded


def decode_rows(
    encoded: torch.Tensor, out: torch.Tensor, codec: BlockCodec | None, *, accumulate: bool = False
) -> None:
    """Decode what :func:`encode_rows` returned. Write the rows to ``out``, or add them to it."""
    if codec is not None:
        codec.decode(encoded, out, 1, accumulate=accumulate)
    elif accumulate:
        out.add_(encoded)
    else:
        out.copy_(encoded)


def exchange(rows: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None) -> Wait:
    """Start to send row i to member i. The result has a row from each member, and is written to ``out`` if given."""
    received = torch.empty_like(rows) if out is None else out
    return _wait_for(dist.all_to_all_single(received, rows, group=group, async_op=True), received)


def all_gather(row: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start to gather the rows of all members, in their order."""
    received = row.new_empty(dist.get_world_size(group), row.numel())
    return _wait_for(all_gather_single(received, row.reshape(1, -1), group=group, async_op=True), received)


def _wait_for(work: Any, received: torch.Tensor) -> Wait:
    def wait() -> torch.Tensor:
        work.wait()
        return received

    return wait


def reduce_scatter(
    rows: torch.Tensor, group: dist.ProcessGroup, codec: BlockCodec | None, errors: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the rows that all members have for this member, in the order of members.

    The contribution of this member is not encoded.

    Args:
        errors: array of the shape of ``rows`` for the coding errors: ``rows`` minus the decoded rows.
    """
    me = dist.get_rank(group)
    sent = encode_rows(rows, codec)
    wait = exchange(sent, group)
    if errors is not None:
        decode_rows(sent, errors, codec)
        torch.sub(rows, errors, out=errors)
        errors[me] = 0
    received = wait()
    total = torch.zeros_like(rows[0])
    for member in range(len(rows)):
        if member == me:
            total += rows[me]
        else:
            decode_rows(received[member : member + 1], total[None], codec, accumulate=True)
    return total
