"""Why a rank that is waited for does not come, as far as what it left in the store tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from reshard.coordination.decide import Decision, describe_error, name_rank
from reshard.coordination.liveness.call_sequence import (
    HasLeftError,
    LeavingError,
    describe_unknown,
    find_skipped,
    has_left,
)
from reshard.coordination.liveness.membership import LostError, OutOfSyncError, find_membership_error
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.formatting import format_ranks


def find_elsewhere(
    group: Group, members: tuple[int, ...], rank: int, status: dict[str, Any], fault_tolerant: bool = False
) -> None:
    """Raise if a rank waits for us elsewhere, calls without us, has left this call, or will not come any more.

    Args:
        members: who takes part in the call that we wait in. status: what the rank left.

    Raises:
        DisagreementError, LeavingError.
    """
    find_membership_error(group, members, rank, status)
    me, waiting = group.rank, status["waiting"]
    if fault_tolerant and waiting:
        if set(waiting["members"]) > set(members):
            waiting = None  # it has yet to hear who is lost
        elif me in waiting["members"] and set(members) - set(waiting["members"]) <= set(status["lost"]):
            lost = set(members) - set(waiting["members"])
            if lost:
                raise LostError(lost)
    if waiting and waiting["members"] != list(members) and me in waiting["members"]:
        other = group.channels.get(tuple(waiting["members"]))
        if other is None or other.rendezvous.answered.get(rank, -1) < waiting["attempt"]:
            (a, a_ranks), (b, b_ranks) = sorted([(me, list(members)), (rank, waiting["members"])])
            error = DisagreementError(
                f"ranks disagree on who takes part: rank {a} calls with ranks {format_ranks(a_ranks)}, "
                f"rank {b} with ranks {format_ranks(b_ranks)}"
            )
            said = json.dumps(describe_error(error))  # it may not find out by itself: we stop waiting now
            group.store.set(f"told/{rank}/{waiting['attempt']}", said)
            raise error
    find_skipped(group, members, rank, status)
    if has_left(group, rank, status):
        name, text = status["error"]
        if status["many"]:
            raise OutOfSyncError(members, describe_unknown(rank, text))
        raise HasLeftError((name, name_rank(rank, text)), members)


def explain_loss(look: Callable[[], None], text: str) -> Decision:
    """Why a connection to a rank ended: what ``look`` raises, as that rank published it; else ``text``."""
    try:
        look()
    except LeavingError as left:
        return left.decision
    except ReshardError as known:
        return Decision(error=describe_error(known))
    except RuntimeError:  # the store is gone too
        pass
    return Decision(error=(RemoteError.__name__, text))
