"""Check the staging limits of a plan. A rank stages a message for others from its arrival to its last use."""

from __future__ import annotations

import numpy as np

from reshard.errors import PlanError
from reshard.plan.check.message_boxes import MessageBoxes
from reshard.plan.value.plan import MAX_RECVS_AHEAD


def check_staging(boxes: MessageBoxes, staged: np.ndarray) -> None:
    """Raise PlanError if a rank stages data that it never forwards, too many messages, or too many bytes.

    The limits are :func:`~reshard.plan.value.plan.num_recv_slots` messages and ``staging_bytes``.

    Args:
        boxes: the boxes of a plan in which each sender has the data that it sends.
        staged: ``(rows,)`` bool: the receiver of this box stages it, because its own shard does not need it.
    """
    if not staged.any():
        return
    plan, messages = boxes.plan, boxes.messages
    itemsize = np.array([spec.itemsize for spec in plan.tensors], dtype=np.int64)
    nbytes = np.where(staged, (boxes.numel * itemsize[boxes.tensor])[boxes.piece], 0)
    last_use = np.full(len(boxes), -1, dtype=np.int64)
    fed = np.flatnonzero(boxes.source >= 0)
    np.maximum.at(last_use, boxes.source[fed], fed)
    unused = np.flatnonzero(staged & (last_use < 0))
    if len(unused):
        row = int(unused[0])
        raise PlanError(
            f"{boxes.name(row)} brings {nbytes[row]} bytes to rank {boxes.receiver[row]}, "
            "which neither needs nor forwards them"
        )
    is_relayed = np.logical_or.reduceat(staged, messages.id)
    relayed = np.flatnonzero(is_relayed)
    last = boxes.message[np.maximum.reduceat(np.where(staged, last_use, -1), messages.id)[relayed]]
    staging_bytes = min(plan.staging_bytes, 2**62)
    message_bytes = np.add.reduceat(nbytes, messages.id)

    # Message i arrives at time 2 * i. A staged message is released at 2 * j + 1, where j is the last message that
    # forwards it.
    is_relay = np.zeros(1 + int(boxes.receiver.max()), dtype=bool)
    is_relay[messages.receiver[relayed]] = True
    arriving = np.flatnonzero(is_relay[messages.receiver] & (messages.sender != messages.receiver))
    largest = np.zeros(len(is_relay), dtype=np.int64)
    np.maximum.at(largest, messages.receiver[arriving], messages.nbytes[arriving])
    slots = np.clip(staging_bytes // 2 // np.maximum(largest, 1), 1, MAX_RECVS_AHEAD)
    rank = np.concatenate([messages.receiver[arriving], messages.receiver[relayed]])
    time = np.concatenate([2 * arriving, 2 * last + 1])
    order = np.lexsort((time, rank))
    num_change = np.concatenate([is_relayed[arriving].astype(np.int64), np.full(len(relayed), -1)])[order]
    bytes_change = np.concatenate([message_bytes[arriving], -message_bytes[relayed]])[order]
    num_held, bytes_held = np.cumsum(num_change), np.cumsum(bytes_change)  # at the end, each rank is back at 0
    rank, time, arrives = rank[order], time[order], time[order] % 2 == 0
    full = arrives & (num_held - num_change >= slots[rank])
    over = arrives & (bytes_held > staging_bytes)
    wrong = np.flatnonzero(full | over)
    if not len(wrong):
        return
    at = wrong[time[wrong].argmin()]
    ident = messages.id[time[at] // 2]
    if full[at]:
        raise PlanError(
            f"message {ident}: rank {rank[at]} must receive it while staging {num_held[at] - num_change[at]} messages "
            f"for others, but it can stage at most {slots[rank[at]]} of {largest[rank[at]]} bytes"
        )
    raise PlanError(
        f"message {ident}: rank {rank[at]} would stage {bytes_held[at]} bytes, but staging_bytes is {staging_bytes}"
    )
