"""The twin of ``native/schedule.cpp``: schedules from a workload."""

from __future__ import annotations

import numpy as np

from reshard.planner.multicast.native_schedule import Schedule, put_in_order
from reshard.planner.multicast.workload import Freight, Ports
from tests.reference.chunk_scheduler import Dealer
from tests.reference.linearization import find_sequence
from tests.reference.pod_chunk_scheduler import PodDealer
from tests.reference.rank_assignment import Landing


def schedule_python(ports: Ports, freight: Freight) -> Schedule:
    """Who sends which piece to whom."""
    deals = (PodDealer if ports.pod else Dealer)(ports, freight).run()
    made = Landing(ports, freight, deals).run()
    after_at = np.cumsum([0] + [len(row) for row in made.after])
    after = np.array([i for row in made.after for i in row], dtype=np.int64)
    piece, sender, receiver, source = (
        np.array(column, dtype=np.int64) for column in (made.piece, made.sender, made.receiver, made.source)
    )
    host = np.array([ports.host[port] for port in ports.of_rank])
    crosses = host[sender] != host[receiver]
    if ports.are_alike:  # what starts first ends first, and what arrives comes before what is done with it
        order = np.lexsort((~crosses, np.array(made.end, dtype=np.float64)))
    else:
        order = np.array(find_sequence(made, crosses.tolist()), dtype=np.int64)
    return put_in_order(Schedule(piece, sender, receiver, source, after_at, after), order)
