"""The time of a plan whose tensors are encoded while earlier messages are sent, and decoded while later ones arrive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.cost.simulator import simulate
from reshard.dtypes import ITEMSIZE
from reshard.plan import MessageTable, Plan, cut_chunks
from reshard.topology import CodecRate, Topology


def encoded_makespan(
    plan: Plan,
    rate: CodecRate | Sequence[CodecRate | None],
    topology: Topology | None = None,
    *,
    encodes_first: bool = False,
) -> float:
    """The time in seconds until all ranks have decoded the encoded tensors of a plan.

    The model follows :mod:`reshard.runtime.cpu.encoded_shards`, which encodes whole rows of a shard:

    * A rank encodes the rows of its messages one after another, in the plan's order, and each row once for all
      receivers. A message starts when its rows are encoded. The transfer is late by the longest time that any message
      waits for its encoding.
    * A rank decodes rows one after another, as their last message arrives. Relays neither encode nor decode.
    * Each rank has a core for each of the two.

    Args:
        rate: rates of the codec, or a list with rates for each tensor of the plan, None where it is not encoded.
        topology: hosts, rates and latencies; omitted, those of the plan.
        encodes_first: ranks encode everything before the transfer, as calls with ``max_error`` do.
    """
    timeline = simulate(plan, topology)
    messages = timeline.messages
    is_copy = messages.sender == messages.receiver
    rates = [rate] * len(plan.tensors) if isinstance(rate, CodecRate) else rate
    encode, decode = (
        np.array([0.0 if item is None else 1 / getattr(item, f"{what}_bytes_per_second") for item in rates])
        for what in ("encode", "decode")
    )
    encoders = _EncodedRuns.of(plan, messages, "src", messages.source == -1, encode)
    decoders = _EncodedRuns.of(plan, messages, "dst", np.ones(len(messages), dtype=bool), decode)
    encoded = np.zeros(len(messages))
    encoded[encoders.message] = encoders.finish(np.arange(len(encoders.seconds)))[encoders.of_message]
    if encodes_first:
        late = float(encoded.max(initial=0.0))
    else:
        begin = (topology or plan.topology).start_seconds
        waits = begin + encoded - timeline.start
        late = max(float(waits[(encoded > 0) & ~is_copy].max(initial=0.0)), 0.0)
    arrived = np.where(is_copy, encoded, timeline.finish + late)
    complete = np.zeros(len(decoders.seconds))
    np.maximum.at(complete, decoders.of_message, arrived[decoders.message])
    decoded = decoders.finish(complete, complete)
    return max(float(decoded.max(initial=0.0)), timeline.makespan_seconds + late)


class _EncodedRuns:
    """The runs of rows that ranks encode on one side, in the plan's order.

    Attributes:
        rank, seconds: ``(runs,)`` the rank, and the seconds that it takes.
        message, of_message: ``(messages that are encoded,)`` row of the message table, and run of its rows.
    """

    def __init__(self, rank: np.ndarray, seconds: np.ndarray, message: np.ndarray, of_message: np.ndarray) -> None:
        self.rank, self.seconds, self.message, self.of_message = rank, seconds, message, of_message

    @classmethod
    def of(
        cls, plan: Plan, messages: MessageTable, side: str, chosen: np.ndarray, seconds_per_byte: np.ndarray
    ) -> _EncodedRuns:
        """The runs of the chosen messages. Their seconds are scaled so that no row is encoded twice.

        Args:
            seconds_per_byte: ``(tensors,)`` to encode the plain values.
        """
        transfers = plan.transfers
        ranks = messages.sender if side == "src" else messages.receiver
        first_box = transfers.first_box[messages.transfer]
        tensor = transfers.box_tensor[first_box]
        row_bytes, shard_bytes = _plain_bytes(plan, side, int(max(plan.ranks)) + 1)
        message = np.flatnonzero(chosen & (row_bytes[tensor, ranks] > 0))
        start, stop = cut_chunks(transfers, messages.transfer[message], messages.chunk[message], first_box[message])
        keys = np.stack([ranks[message], tensor[message], start[:, 0], stop[:, 0]])
        distinct, first, of_message = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        rank, of, begin, end = distinct[:, order]
        work = (end - begin) * row_bytes[of, rank]
        total = np.bincount(rank, weights=work, minlength=shard_bytes.shape[1])
        share = shard_bytes.sum(axis=0) / np.maximum(total, 1.0)
        if side == "src":  # a rank may send only a part of a source shard, but decodes a whole destination shard
            share = np.minimum(share, 1.0)
        return cls(rank, work * share[rank] * seconds_per_byte[of], message, number[of_message.ravel()])

    def finish(self, order: np.ndarray, ready: np.ndarray | None = None) -> np.ndarray:
        """The time at which each run is encoded, if a rank encodes one run after another.

        Args:
            order: ``(runs,)`` numbers by which a rank sorts its runs.
            ready: when each run can be encoded; default: 0.
        """
        done = np.empty(len(self.rank))
        sequence = np.lexsort((order, self.rank))
        rank, work = self.rank[sequence], self.seconds[sequence]
        if not len(rank):
            return done
        first = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
        lengths = np.diff(np.append(first, len(rank)))
        sums = np.cumsum(work)
        spent = sums - np.repeat(sums[first] - work[first], lengths)  # per rank, each run included
        idle = np.zeros(len(rank)) if ready is None else ready[sequence] - (spent - work)
        for begin, length in zip(first.tolist(), lengths.tolist(), strict=True):
            idle[begin : begin + length] = np.maximum.accumulate(idle[begin : begin + length])
        done[sequence] = spent + np.maximum(idle, 0.0)
        return done


def _plain_bytes(plan: Plan, side: str, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """``(tensors, ranks)`` bytes of plain values in a row, and in all rows, of the shards of encoded tensors."""
    row_bytes, shard_bytes = np.zeros((2, len(plan.tensors), num_ranks))
    for number, spec in enumerate(plan.tensors):
        if spec.coding is None or spec.codec is None:
            continue
        element = spec.codec.values * ITEMSIZE[spec.coding.dtype]
        shards = spec.src_tiles if side == "src" else spec.dst_tiles
        for rank in shards.layout.ranks:
            rows, *inner = shards.local_shape(rank)
            row_bytes[number, rank] = np.prod(inner, dtype=np.float64) * element
            shard_bytes[number, rank] = rows * row_bytes[number, rank]
    return row_bytes, shard_bytes
