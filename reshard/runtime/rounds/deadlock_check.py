"""Replays the rounds of all ranks on a transport that matches by order, to prove that they finish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from reshard.errors import PlanError
from reshard.runtime.program import Recv, Send
from reshard.runtime.rounds.round_assignment import Round


class Call(NamedTuple):
    """One call of the transport by one rank.

    Attributes:
        kind: what the rank does.
        peer: the rank at the other end; for a broadcast, the root.
        nbytes: bytes that move.
    """

    kind: Literal["send", "receive", "broadcast"]
    peer: int
    nbytes: int

    def __str__(self) -> str:
        preposition = {"send": "to", "receive": "from", "broadcast": "from"}[self.kind]
        return f"{self.kind} {self.nbytes} bytes {preposition} rank {self.peer}"


def calls_of(rounds: Iterable[Round]) -> list[list[Call]]:
    """The groups of one rank, each a list of calls in the order in which the rank posts them."""
    return [
        [
            *(_as_call([op]) for op in item.recvs),
            *(_as_call([op]) for op in item.sends),
            *map(_as_call, item.joined),
            *(
                Call("broadcast", broadcast.root, sum(op.nbytes for op in broadcast.parts))
                for broadcast in item.broadcasts
            ),
        ]
        for item in rounds
    ]


def _as_call(ops: Sequence[Recv | Send]) -> Call:
    nbytes = sum(op.nbytes for op in ops)
    return Call("send", ops[0].receiver, nbytes) if isinstance(ops[0], Send) else Call("receive", ops[0].sender, nbytes)


def check_calls(calls: Mapping[int, Sequence[Sequence[Call]]]) -> None:
    """Replay the groups of all ranks.

    A message moves when both ends are posted, and a broadcast when all ranks have posted it. Messages between two ranks
    match in the order in which both post them, and so do broadcasts. A group finishes when all its calls have; its rank
    then posts its next group.

    Args:
        calls: ``{rank: groups}``, each group a list of calls.

    Raises:
        PlanError: the ends of a message or of a broadcast differ in size or root, or ranks deadlock.
    """
    current = dict.fromkeys(calls, 0)
    left = {rank: list(groups[0]) if groups else [] for rank, groups in calls.items()}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, posted in left.items():
            for call in [call for call in posted if call.kind == "send"]:
                _move(rank, call, left)
        while _broadcast(left):
            pass
        for rank, groups in calls.items():
            while not left[rank] and current[rank] < len(groups):
                current[rank] += 1
                left[rank] = list(groups[current[rank]]) if current[rank] < len(groups) else []
                is_moving = True
    stuck = [rank for rank, posted in left.items() if posted]
    if stuck:
        rank = stuck[0]
        raise PlanError(f"ranks {stuck} deadlock: rank {rank} waits in its group {current[rank]} to {left[rank][0]}")


def _move(sender: int, call: Call, left: Mapping[int, list[Call]]) -> None:
    """Move one message if its receiver has posted the other end: its first receive from that sender."""
    receiver = call.peer
    if next(item for item in left[sender] if item[:2] == call[:2]) is not call:
        return  # an earlier message to the same rank has not moved
    end = next((item for item in left.get(receiver, ()) if item[:2] == ("receive", sender)), None)
    if end is None:
        return
    if end.nbytes != call.nbytes:
        raise PlanError(f"rank {sender} sends {call.nbytes} bytes to rank {receiver}, which receives {end.nbytes}")
    left[sender].remove(call)
    left[receiver].remove(end)


def _broadcast(left: Mapping[int, list[Call]]) -> bool:
    """Complete the first broadcast that each rank has posted, if all have one; returns whether it did."""
    first = {rank: [call for call in posted if call.kind == "broadcast"][:1] for rank, posted in left.items()}
    if not first or not all(first.values()):
        return False
    (first_rank, (expected,)), *others = first.items()
    for rank, (call,) in others:
        if call != expected:
            raise PlanError(f"rank {first_rank} posts: {expected}; but rank {rank} posts: {call}")
    for posted in left.values():
        posted.remove(expected)
    return True
