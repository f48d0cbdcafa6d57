"""The errors that name lost ranks: the ranks, what this rank waited for, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from reshard.coordination.liveness.status import HEARTBEAT_TIMEOUT_SECONDS
from reshard.errors import RankLostError, RemoteError, TransferTimeoutError
from reshard.formatting import describe_ranks, format_ranks
from reshard.plan import Plan


def rank_gone_error(rank: int, why: object) -> RemoteError:
    """The error for a rank that will not answer any more, and the reason that it or its connection gave."""
    return RemoteError(f"rank {rank} is gone: {why}")


def rank_closed_error(rank: int) -> RemoteError:
    """The error for a rank whose connections ended during a transfer, without a goodbye."""
    return rank_gone_error(rank, "it closed its connection during a transfer")


def rank_closed_with_store_error(rank: int, error: object) -> RemoteError:
    """The error for a rank whose connections ended, and with it the store.

    Args:
        rank: lost rank.
        error: error of the store.
    """
    return rank_gone_error(rank, f"it closed its connection, and the store is lost: {error}")


def rank_stopped_error(rank: int, *, is_silent: bool) -> RemoteError:
    """The error for a rank that was awaited in a call, and sends no heartbeat or whose process has ended."""
    return rank_gone_error(
        rank, f"it sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:g} s" if is_silent else "its process has ended"
    )


def rank_silent_error(rank: int) -> RemoteError:
    """The error for a rank that sends no heartbeat during a transfer."""
    return RemoteError(f"rank {rank} sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:g} s during a transfer")


def rank_unreachable_error(rank: int, how: object) -> RemoteError:
    """The error for a rank to which a connection broke, but which may still run."""
    return RemoteError(f"rank {rank} is gone or unreachable: {how}")


def hub_lost_error(hub: int, own_rank: int, error: object, *, is_gone: bool) -> RemoteError:
    """The error for the rank that decides a round, after this rank lost its connection to it.

    Args:
        hub: rank that decides the round.
        own_rank: this rank.
        error: error of the connection.
        is_gone: whether no other connection reaches it either.
    """
    if is_gone:
        return rank_gone_error(hub, f"its connection to rank {own_rank} ended ({error})")
    return RemoteError(f"rank {own_rank} lost its connection to rank {hub}: {error}")


def hub_left_error(hub: int, address: str, port: int, advice: str) -> RemoteError:
    """The error for the rank that decides a round, if nothing listens at its address any more."""
    return RemoteError(
        f"rank {hub} has left: nothing listens at {address} port {port} any more, so its process has ended or its "
        f"group is closed{advice}"
    )


def ranks_late_error(ranks: Sequence[int], members: Sequence[int], timeout_seconds: float) -> TransferTimeoutError:
    """The error for members that missed a round."""
    return TransferTimeoutError(
        f"{describe_ranks(ranks)} did not call within {timeout_seconds:g} s; ranks {format_ranks(members)} take part"
    )


def ranks_missed_error(ranks: Collection[int], what: str = "call") -> RankLostError:
    """The error for ranks without which a fault-tolerant transfer or a Mover goes on."""
    return RankLostError(f"{describe_ranks(sorted(ranks))} did not {what} in time", sorted(ranks))


def ranks_lost_earlier_error(ranks: Sequence[int]) -> RemoteError:
    """The error for members of a call that is not fault tolerant, but of which an earlier call lost some."""
    return RemoteError(f"{_describe_past(ranks)} lost in an earlier call; create a new group of the remaining ranks")


def ranks_lost_in_transfer_error(
    ranks: Sequence[int], survivors: Sequence[int], missing_bytes: int, plan: Plan, recover: Callable[[], None]
) -> RankLostError:
    """The error for ranks that a transfer lost, if the surviving ranks can move what is missing.

    Args:
        ranks: lost ranks.
        survivors: ranks that can move the missing bytes.
        missing_bytes: number of bytes that destinations still need.
        plan: plan of the survivors.
        recover: function that runs this plan.
    """
    return RankLostError(
        f"{_describe_past(ranks)} lost in a transfer; {describe_ranks(survivors)} can move the {missing_bytes} missing "
        "bytes: call recover() of this error on every surviving rank",
        ranks,
        plan=plan,
        recover=recover,
    )


def ranks_lost_with_regions_error(
    ranks: Sequence[int], tensors: Sequence[str], needed_by: Sequence[int], kept: str
) -> RankLostError:
    """The error for ranks that were the last holders of regions.

    Args:
        ranks: lost ranks.
        tensors: names of the tensors of these regions; empty for the only tensor.
        needed_by: surviving ranks that lack the regions.
        kept: what every out holds, as text.
    """
    return RankLostError(
        f"{describe_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} lost, and with "
        f"{'them' if len(ranks) > 1 else 'it'} regions of {', '.join(tensors) or 'the tensor'}: "
        f"{describe_ranks(needed_by)} still need{'s' * (len(needed_by) == 1)} them and no surviving rank holds them; "
        f"{kept}",
        ranks,
        tensors,
    )


def grid_ranks_stopped_error(ranks: Sequence[int], silent_seconds: float | None) -> RemoteError:
    """The error for ranks of a grid that a collective waited for.

    Args:
        ranks: ranks that will not start it.
        silent_seconds: seconds without a heartbeat; None if their processes have ended.
    """
    why = (
        "gone: the process has ended"
        if silent_seconds is None
        else f"gone or stopped: no heartbeat for {silent_seconds:g} s"
    )
    return RemoteError(
        f"{describe_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {why}; a collective of a grid failed"
    )


def _describe_past(ranks: Sequence[int]) -> str:
    return f"{describe_ranks(ranks)} {'were' if len(ranks) > 1 else 'was'}"
