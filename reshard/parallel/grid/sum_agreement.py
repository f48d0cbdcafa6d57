"""Compare, before gradients are summed, which function each rank of an axis has called.

Without this comparison, ranks that call different functions, or a rank whose backward failed, would post different
collectives on one process group. Gloo then ends the process, or sums the gradients of different steps.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from typing import Protocol

import torch

from reshard.errors import DisagreementError, RemoteError
from reshard.formatting import describe_ranks

from .grid_axis import Axis
from .pending import PendingResult


class SumCall(enum.Enum):
    """The call that a rank makes. The value is its text in errors."""

    SUM = "called sync_gradients"
    BEGIN = "entered sync_during_backward"
    END = "left sync_during_backward"
    FAILED = "failed inside sync_during_backward"


_CALLS = list(SumCall)


class UnfinishedSums(Protocol):
    """Sums of gradients that run during a backward, or that its failure ended."""

    has_ended: bool
    num_begun: int

    def discard(self, num_begun: int) -> None:
        """Take part in the sums that other ranks have begun, at most ``num_begun``."""


class SumAgreement:
    """Agreement of the ranks of an axis on their calls. It has its own process group and messages of one size.

    Args:
        axis: an axis of a grid. All its ranks make one.
        device: device of the gradients.

    Attributes:
        unfinished: sums that run during a backward, or that did not end.

    Raises:
        RemoteError: another rank did not make one within the time-out of the axis.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._device = device
        self.unfinished: UnfinishedSums | None = None
        self._axis = axis.make_twin("called sync_gradients or entered sync_during_backward")

    @classmethod
    def of(cls, axis: Axis, device: torch.device) -> SumAgreement:
        """The agreement of an axis."""
        if axis not in _AGREEMENTS:
            _AGREEMENTS[axis] = cls(axis, device)
        return _AGREEMENTS[axis]

    def agree(self, call: SumCall, sums_hash: int = 0, value: int = 0) -> int:
        """Compare which call the ranks make, and with which gradients.

        Args:
            call: the call of this rank.
            sums_hash: hash of the gradients that are summed, below 2**63.
            value: any int64.

        Returns:
            The largest value of any rank.

        Raises:
            DisagreementError: the ranks do different things, or with different gradients; on all ranks.
            RemoteError: the backward of a rank failed; or a rank made no call within the time-out.
        """
        reports = self._start(call, sums_hash, value).wait().tolist()  # [call, hash, value] of each rank
        ranks_of: dict[SumCall, list[int]] = {}
        for rank, (number_of_call, _, _) in zip(self._axis.ranks, reports, strict=True):
            ranks_of.setdefault(_CALLS[number_of_call], []).append(rank)
        failed = ranks_of.get(SumCall.FAILED)
        if failed:
            raise RemoteError(f"{describe_ranks(failed)} {SumCall.FAILED.value}")
        if len(ranks_of) > 1:
            done = ", but ".join(f"{describe_ranks(ranks)} {item.value}" for item, ranks in ranks_of.items())
            raise DisagreementError(f"{done}; all ranks of a grid must call the same function in each step")
        for rank, (_, hash_of_rank, _) in zip(self._axis.ranks, reports, strict=True):
            if hash_of_rank != reports[0][1]:
                raise DisagreementError(
                    f"{describe_ranks([self._axis.ranks[0], rank])} sum the gradients of different models: names, "
                    "shapes or dtypes of their parameters differ"
                )
        return max(value_of_rank for _, _, value_of_rank in reports)

    def report_failure(self) -> None:
        """Let the other ranks know, in their next call, that the backward of this rank failed. Does not wait."""
        with contextlib.suppress(RuntimeError):  # the error of the backward is raised, not that of the connection
            self._start(SumCall.FAILED, 0, 0)

    def _start(self, call: SumCall, sums_hash: int, value: int) -> PendingResult:
        own = torch.tensor([[_CALLS.index(call), sums_hash, value]], dtype=torch.int64, device=self._device)
        return self._axis.all_gather(own, [1] * self._axis.size)


#: The agreement of each axis that has one.
_AGREEMENTS: weakref.WeakKeyDictionary[Axis, SumAgreement] = weakref.WeakKeyDictionary()
