"""Add transfers to the computations of a schedule.

All transfers have one order, and every pp rank posts its ends in this order. So no schedule can deadlock, not even if
each send and each receive blocks its pp rank until the transfer is complete. Proof: take the first incomplete transfer.
Both of its pp ranks have completed all transfers that they posted before, so both post this one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from ..pipeline import Pipeline
from .actions import Action, Kind, StageChannel, compute_seconds
from .schedule import Schedule

#: Receives posted on a channel in addition to the one that the next computation needs. Two keep the channel busy: one
#: in progress and one queued after it. The common order of transfers can require more.
RECVS_AHEAD = 2


def add_transfers(
    name: str,
    rank_actions: Sequence[Sequence[Action]],
    pipeline: Pipeline,
    pp_rank_of_stage: Sequence[int],
    num_microbatches: int,
) -> Schedule:
    """A schedule with every send right after its producer and every receive ahead of its consumer.

    The order of transfers is that in which their producers end, by the costs of the pipeline, in seconds. Receives are
    posted as early as this order and ``RECVS_AHEAD`` allow. If the costs are right and no links are shared, a
    schedule of this package takes as long as if each channel posted its receives independently of the others.

    Args:
        name: name of the schedule.
        rank_actions: computations of each pp rank, in order.
        pipeline, pp_rank_of_stage, num_microbatches: what the schedule is for.

    Returns:
        The schedule, which ``check_one_order`` accepts.
    """
    posts: list[list[Action]] = [[] for _ in rank_actions]  # transfers of each pp rank, in the common order
    for producer in _sorted_by_end(rank_actions, pipeline, pp_rank_of_stage):
        for other, kind in _ends_of(producer, pipeline)[1]:
            if pp_rank_of_stage[other] != pp_rank_of_stage[producer.stage]:
                recv = Action(_RECV_OF[kind], other, producer.microbatch, producer.stage)
                posts[pp_rank_of_stage[producer.stage]].append(Action(kind, producer.stage, producer.microbatch, other))
                posts[pp_rank_of_stage[other]].append(recv)
    return Schedule(
        name,
        tuple(tuple(_with_transfers(*item, pipeline)) for item in zip(rank_actions, posts, strict=True)),
        tuple(pp_rank_of_stage),
        num_microbatches,
    )


def computations(schedule: Schedule) -> list[list[Action]]:
    """The computations of each pp rank, without transfers."""
    return [[action for action in actions if not action.kind.is_transfer] for actions in schedule.rank_actions]


_RECV_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


def _sorted_by_end(
    rank_actions: Sequence[Sequence[Action]], pipeline: Pipeline, pp_rank_of_stage: Sequence[int]
) -> Iterable[Action]:
    """Computations of all pp ranks in the order in which they end, if transfers use a shared link one after another.

    Computations that never start, because the pp ranks deadlock, come last.
    """
    at, free = [0] * len(rank_actions), [0.0] * len(rank_actions)
    arrived: dict[_Input, float] = {}
    waiting: dict[_Input, int] = {}  # the pp rank that waits for an input
    free_at: dict[object, float] = {}  # by channel and by link
    running: list[tuple[float, int]] = []  # end of the computation of each pp rank

    def start(pp_rank: int) -> None:
        if at[pp_rank] == len(rank_actions[pp_rank]):
            return
        action, begin = rank_actions[pp_rank][at[pp_rank]], free[pp_rank]
        for other, kind in _ends_of(action, pipeline)[0]:
            needed = kind, action.stage, other, action.microbatch
            if needed not in arrived:
                waiting[needed] = pp_rank
                return
            begin = max(begin, arrived[needed])
        heapq.heappush(running, (begin + compute_seconds(action.kind, pipeline.stages[action.stage]), pp_rank))

    for pp_rank in range(len(rank_actions)):
        start(pp_rank)
    while running:
        end, pp_rank = heapq.heappop(running)
        action = rank_actions[pp_rank][at[pp_rank]]
        yield action
        at[pp_rank], free[pp_rank] = at[pp_rank] + 1, end
        woken = {pp_rank}
        for other, kind in _ends_of(action, pipeline)[1]:
            arrival = end
            if pp_rank_of_stage[other] != pp_rank_of_stage[action.stage]:
                edge = pipeline.edge_between[min(action.stage, other), max(action.stage, other)]
                is_forward = kind is Kind.SEND_F
                busy: dict[object, float] = dict(edge.forward_loads if is_forward else edge.backward_loads)
                busy[action.stage, other] = edge.forward_seconds if is_forward else edge.backward_seconds
                begin = max(end, *(free_at.get(item, 0.0) for item in busy))
                free_at |= {item: begin + seconds for item, seconds in busy.items()}
                arrival = free_at[action.stage, other]
            needed = _RECV_OF[kind], other, action.stage, action.microbatch
            arrived[needed] = arrival
            if needed in waiting:
                woken.add(waiting.pop(needed))
        for item in sorted(woken):
            start(item)
    yield from itertools.chain.from_iterable(actions[index:] for index, actions in zip(at, rank_actions, strict=True))


#: A receive that a computation needs: (kind of receive, stage, other stage, microbatch).
_Input = tuple[Kind, int, int, int]


def _with_transfers(actions: Sequence[Action], transfers: Sequence[Action], pipeline: Pipeline) -> list[Action]:
    """The computations of a pp rank with its transfers, which keep their order."""
    producer: dict[Action, int] = {}  # index of the computation after which each send comes
    consumer: dict[Action, int] = {}  # index of the computation before which each receive comes
    for index, action in enumerate(actions):
        recvs, sends = _ends_of(action, pipeline)
        producer |= {Action(kind, action.stage, action.microbatch, other): index for other, kind in sends}
        consumer |= {Action(kind, action.stage, action.microbatch, other): index for other, kind in recvs}
    transfers = [item for item in transfers if item in producer or item in consumer]
    # Number of computations before each transfer, at most: it precedes its consumer, and any later transfer.
    latest = [consumer[item] if item in consumer else producer[item] + 1 for item in transfers]
    latest = [*itertools.accumulate(reversed(latest), min)][::-1]
    out: list[Action] = []
    num_out = 0  # computations in out
    latest_of: dict[StageChannel, list[int]] = {}  # latest places of the receives so far
    for transfer, place in zip(transfers, latest, strict=True):
        if not transfer.kind.is_send:
            places = latest_of.setdefault(transfer.channel, [])
            places.append(place)
            # Post when the computation that needs the receive RECVS_AHEAD places earlier on this channel begins.
            place = places[-1 - RECVS_AHEAD] if len(places) > RECVS_AHEAD else 0
        out += actions[num_out:place]
        num_out = max(num_out, place)
        out.append(transfer)
    return [*out, *actions[num_out:]]


_Ends = list[tuple[int, Kind]]


def _ends_of(action: Action, pipeline: Pipeline) -> tuple[_Ends, _Ends]:
    """Receives before and sends after a computation, each with the stage at the other end."""
    inputs, outputs = pipeline.inputs[action.stage], pipeline.outputs[action.stage]
    if action.kind is Kind.F:
        return [(other, Kind.RECV_F) for other in inputs], [(other, Kind.SEND_F) for other in outputs]
    if action.kind in (Kind.B, Kind.I):
        return [(other, Kind.RECV_B) for other in outputs], [(other, Kind.SEND_B) for other in inputs]
    return [], []
