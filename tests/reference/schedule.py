"""Reference implementation of ``native/multicast/schedule.cpp``: makes a schedule from a workload."""

from __future__ import annotations

import numpy as np

from reshard.planner.multicast.chunk_workload import ChunkWorkload, Nics
from reshard.planner.multicast.native_schedule import ChunkSchedule, put_in_order
from tests.reference.chunk_scheduler import ChunkScheduler
from tests.reference.circulant_broadcast import send_in_circles
from tests.reference.linearization import linearize
from tests.reference.pod_chunk_scheduler import PodChunkScheduler
from tests.reference.rank_assignment import RankAssignment


def schedule_python(nics: Nics, workload: ChunkWorkload) -> ChunkSchedule:
    """See :func:`reshard.planner.multicast.native_schedule.make_schedule`."""
    if workload.is_broadcast:
        chunk_sends = send_in_circles(nics, workload)
    else:
        chunk_sends = (PodChunkScheduler if nics.pod else ChunkScheduler)(nics, workload).run()
    messages = RankAssignment(nics, workload, chunk_sends).run()
    after_offsets = np.cumsum([0] + [len(row) for row in messages.after])
    after = np.array([i for row in messages.after for i in row], dtype=np.int64)
    piece, sender, receiver, source = (
        np.array(column, dtype=np.int64)
        for column in (messages.piece, messages.sender, messages.receiver, messages.source)
    )
    host = np.array([nics.host[nic] for nic in nics.of_rank])
    crosses = host[sender] != host[receiver]
    if nics.have_equal_rates:
        # A message ends after those it depends on. At equal ends, messages between hosts come before those inside
        # hosts.
        order = np.lexsort((~crosses, np.array(messages.end, dtype=np.float64)))
    else:
        order = np.array(linearize(messages, crosses.tolist()), dtype=np.int64)
    staged = np.isin(np.arange(len(piece)), sorted(messages.staged))
    return put_in_order(ChunkSchedule(piece, sender, receiver, source, after_offsets, after, staged), order)
