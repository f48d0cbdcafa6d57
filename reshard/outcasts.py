"""What ends the company of some ranks for good: calls that can no longer be told apart, and ranks left behind.

Calls carry no number, since ranks take part in different ones: those of one set of ranks belong together by their
order. A rank that leaves a call by itself (its time is up, its caller is interrupted) breaks that order: whoever comes
later may come to the call that was left or, having skipped it, to the next one, and nothing in the call tells. So from
then on these ranks refuse to call together, each as soon as it learns of it from the others' beacons.

Where losses are borne, ranks that did not come are lost for good: the others make no call with them any more, and tell
them so if they do come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from reshard.agreement import Record, Verdict
from reshard.beacon import publish_beacon
from reshard.errors import DisagreementError, RemoteError
from reshard.failures import LeavingError
from reshard.group import Group
from reshard.mesh import format_ranks


class OutcastError(LeavingError):
    """The others go on without this rank."""

    def __init__(self, text: str) -> None:
        super().__init__(Verdict(error=(RemoteError.__name__, text)))


class LostError(LeavingError):
    """Others have found out that ranks are lost, and go on in this very call."""

    def __init__(self, lost: Collection[int]) -> None:
        super().__init__(Verdict(lost=sorted(lost)))


_CALLS = "makes call"
_ADVICE = "make a new group to go on"


class OutOfStepError(LeavingError):
    """The ranks of a call may be in different ones."""

    def __init__(self, text: str) -> None:
        super().__init__(Verdict(error=(DisagreementError.__name__, text), loses_step=True))


def lose_step(group: Group, members: Sequence[int], why: str) -> None:
    """Note that calls of these ranks can no longer be told apart."""
    name = format_ranks(members)
    if name not in group.beacon["out_of_step"]:
        known = _ADVICE in why
        because = f"calls of ranks {name} can no longer be told apart, because in one of them {why}: {_ADVICE}"
        group.beacon["out_of_step"][name] = why if known else because
        publish_beacon(group)


def check_together(group: Group, members: Sequence[int], bears_loss: bool) -> None:
    """Raise unless these ranks may call.

    Raises:
        DisagreementError: their calls can no longer be told apart.
        RemoteError: some of them are lost, and the call does not bear that.
    """
    text = group.beacon["out_of_step"].get(format_ranks(members))
    if text is not None:
        raise DisagreementError(text)
    lost = [rank for rank in members if rank in group.beacon["lost"]]
    if lost and not bears_loss:
        raise RemoteError(
            f"rank{'s' * (len(lost) > 1)} {format_ranks(lost)} {'were' if len(lost) > 1 else 'was'} lost in an earlier "
            "call, which the others went on without"
        )


def go_on_without(group: Group, lost: Collection[int]) -> None:
    """Note that no call is made with these ranks any more."""
    known = set(group.beacon["lost"])
    if not known.issuperset(lost):
        group.beacon["lost"] = sorted(known.union(lost))
        publish_beacon(group)


def those_left(group: Group, members: Sequence[int]) -> tuple[int, ...]:
    """The ranks that are not lost."""
    return tuple(rank for rank in members if rank not in group.beacon["lost"])


def find_outcast(group: Group, members: Sequence[int], rank: int, beacon: dict[str, Any]) -> None:
    """Raise if a rank, by what it left in the store, makes no call with these ranks or with this one any more.

    Raises:
        OutcastError, OutOfStepError.
    """
    if group.rank in beacon["lost"]:
        raise OutcastError(
            f"rank {rank} goes on without rank {group.rank}, which did not come to a call in time: make a new group"
        )
    text = beacon["out_of_step"].get(format_ranks(members))
    if text is not None:
        raise OutOfStepError(text)


def count_call(group: Group, members: Sequence[int], bears_loss: bool) -> str:
    """Count a call; what rounds of it say of themselves.

    Where losses are borne ranks may leave it one by one for a call of fewer, which must be of the same one.
    """
    members = tuple(members)
    group.calls[members] = group.calls.get(members, 0) + 1
    return f"{_CALLS} {group.calls[members]} of ranks {format_ranks(members)}" if bears_loss else ""


def uncount_call(group: Group, members: Sequence[int]) -> None:
    """Take a call back that another rank had left alone, without counting it."""
    group.calls[tuple(members)] -= 1


def find_mixed(records: Sequence[Record]) -> Verdict | None:
    """What all take from a round to which ranks came for different things; None if it was for the same."""
    first = records[0]
    for record in records[1:]:
        places = (first.place, record.place)
        if "" in places and all(place.startswith(("", _CALLS)[bool(place)]) for place in places):
            continue  # calls that differ in whether they bear losses: their arguments say so
        if record.place != first.place:
            (a, a_place), (b, b_place) = ((one.rank, one.place or "calls again") for one in (first, record))
            text = (
                f"ranks disagree on what comes next: rank {a} {a_place}, rank {b} {b_place}; transfers that bear "
                f"losses are waited for on every rank, in the same order: {_ADVICE}"
            )
            return Verdict(error=(DisagreementError.__name__, text), loses_step=True)
    return None
