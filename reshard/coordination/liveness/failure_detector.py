"""Failure detection: errors of an awaited rank, found from the status that it published in the store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from reshard.coordination.groups.agreement_messages import (
    Decision,
    RankStatus,
    describe_error,
    name_rank,
    rebuild_error,
)
from reshard.coordination.groups.process_group import Group
from reshard.coordination.liveness.call_sequence import (
    CallLeftError,
    RoundEndedError,
    check_skipped,
    describe_unknown_members,
    has_left,
    is_behind,
)
from reshard.coordination.liveness.lost_ranks import rank_closed_with_store_error
from reshard.coordination.liveness.membership import MembersLostError, OutOfSyncError, check_published_membership
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.formatting import format_ranks

#: After the store is lost, time to wait for a broken connection, which shows which rank ended.
CAUSE_SECONDS = 1.0


def check_rank_status(
    group: Group, members: tuple[int, ...], rank: int, status: RankStatus, fault_tolerant: bool = False
) -> None:
    """Raise an error if, by its status, ``rank`` will not take part in the call in which this rank waits.

    There are three such cases: ``rank`` waits for this rank in a call with other members, it calls without this rank,
    or it has left this call.

    Args:
        members: ranks of the call in which this rank waits.
        rank: the awaited rank.
        status: its published status.

    Raises:
        DisagreementError, RoundEndedError.
    """
    check_published_membership(members, status)
    own_rank, waiting = group.rank, status.waiting
    if fault_tolerant and waiting:
        if set(waiting["members"]) > set(members):
            waiting = None  # it has not learned yet which ranks are lost
        elif own_rank in waiting["members"] and set(members) - set(waiting["members"]) <= group.lost:
            lost = set(members) - set(waiting["members"])
            if lost:
                raise MembersLostError(lost)
    if has_left(group, rank, status):
        name, text = status.error or ("RemoteError", "a rank left the call")
        if status.are_members_unknown:
            raise OutOfSyncError(members, describe_unknown_members(rank, text))
        raise CallLeftError((name, name_rank(rank, text)), members)
    if is_behind(group, rank, status):
        return  # it will notice that this rank has left the call that it waits in
    if waiting and waiting["members"] != list(members) and own_rank in waiting["members"]:
        other = group.call_groups.get(tuple(waiting["members"]))
        if other is None or other.rounds.answered.get(rank, -1) < waiting["attempt"]:
            (a, a_ranks), (b, b_ranks) = sorted([(own_rank, list(members)), (rank, waiting["members"])])
            error = DisagreementError(
                f"ranks disagree on who takes part: rank {a} calls with ranks {format_ranks(a_ranks)}, "
                f"rank {b} with ranks {format_ranks(b_ranks)}"
            )
            # This rank stops waiting now, so the other rank may not find the disagreement by itself.
            group.store.set(f"error/{rank}/{waiting['attempt']}", json.dumps(describe_error(error)))
            raise error
    check_skipped(group, members, rank, status)


def explain_loss(check_status: Callable[[], None], text: str, reason: Sequence[str] | None) -> Decision:
    """The decision after a connection ended. Its error is the first of these that exists.

    1. The error that ``check_status`` raises from the published status of the peer.
    2. ``reason``: class and text of the error that the peer sent before it closed the connection.
    3. A ``RemoteError`` with ``text``.
    """
    try:
        check_status()
    except RoundEndedError as ended:
        return ended.decision
    except ReshardError as known:
        return Decision(error=describe_error(known))
    except RuntimeError:  # the store is lost too
        pass
    return Decision(error=(RemoteError.__name__, text) if reason is None else (reason[0], reason[1]))


def explain_lost_store(group: Group, error: BaseException) -> ReshardError:
    """The error of a call that lost the store: the error that ended another rank, or one that names a lost rank."""
    if isinstance(error, RecursionError):  # a RuntimeError, too
        return RemoteError(f"rank {group.rank}: {type(error).__name__}: {error}")
    deadline = time.monotonic() + CAUSE_SECONDS
    while True:
        for call_group in list(group.call_groups.values()):
            reason = call_group.rounds.links.find_reason()
            if reason is not None:
                return rebuild_error(*reason)
            lost = call_group.rounds.links.find_lost()
            if lost is not None:
                return rank_closed_with_store_error(lost, error)
        if time.monotonic() > deadline:
            return RemoteError(
                f"rank {group.rank}: the store is lost: {error}. With init_method env://, rank 0 serves the store"
            )
        time.sleep(0.02)
