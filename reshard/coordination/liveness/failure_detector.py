"""Why a rank that is waited for does not come, as far as what it left in the store tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from reshard.coordination.decide import Verdict, describe_error, name_rank
from reshard.coordination.liveness.call_sequence import (
    HasLeftError,
    LeavingError,
    describe_unknown,
    find_skipped,
    has_left,
)
from reshard.coordination.liveness.membership import LostError, OutOfStepError, find_outcast
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.formatting import format_ranks


def find_elsewhere(
    group: Group, members: tuple[int, ...], rank: int, beacon: dict[str, Any], bears_loss: bool = False
) -> None:
    """Raise if a rank waits for us elsewhere, calls without us, has left this call, or will not come any more.

    Args:
        members: who takes part in the call that we wait in. beacon: what the rank left.

    Raises:
        DisagreementError, LeavingError.
    """
    find_outcast(group, members, rank, beacon)
    me, waiting = group.rank, beacon["waiting"]
    if bears_loss and waiting:
        if set(waiting["members"]) > set(members):
            waiting = None  # it has yet to hear who is lost
        elif me in waiting["members"] and set(members) - set(waiting["members"]) <= set(beacon["lost"]):
            lost = set(members) - set(waiting["members"])
            if lost:
                raise LostError(lost)
    if waiting and waiting["members"] != list(members) and me in waiting["members"]:
        other = group.channels.get(tuple(waiting["members"]))
        if other is None or other.meeting.answered.get(rank, -1) < waiting["attempt"]:
            (a, a_ranks), (b, b_ranks) = sorted([(me, list(members)), (rank, waiting["members"])])
            error = DisagreementError(
                f"ranks disagree on who takes part: rank {a} calls with ranks {format_ranks(a_ranks)}, "
                f"rank {b} with ranks {format_ranks(b_ranks)}"
            )
            said = json.dumps(describe_error(error))  # it may not find out by itself: we stop waiting now
            group.store.set(f"told/{rank}/{waiting['attempt']}", said)
            raise error
    find_skipped(group, members, rank, beacon)
    if has_left(group, rank, beacon):
        name, text = beacon["error"]
        if beacon["many"]:
            raise OutOfStepError(members, describe_unknown(rank, text))
        raise HasLeftError((name, name_rank(rank, text)), members)


def explain_loss(look: Callable[[], None], text: str) -> Verdict:
    """Why a connection to a rank ended: what ``look`` raises, as that rank published it; else ``text``."""
    try:
        look()
    except LeavingError as left:
        return left.verdict
    except ReshardError as known:
        return Verdict(error=describe_error(known))
    except RuntimeError:  # the store is gone too
        pass
    return Verdict(error=(RemoteError.__name__, text))
