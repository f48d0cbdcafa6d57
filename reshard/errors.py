"""Every error that reshard raises on purpose.

::

    ReshardError
    ├── MeshError            a mesh that cannot be: repeated ranks, doubled axis names, wrong sizes
    ├── LayoutError          a spec or a set of regions that does not fit its mesh or its tensor
    │   └── PartialError     a placement with a pending reduction, which is not supported
    ├── PlanError            a plan that does not deliver, or a text that is not a plan
    ├── ScheduleError        a schedule that does not fit its pipeline or never ends, or a text that is not one
    ├── TopologyError        a description of hosts and links that does not fit the ranks
    ├── ArgumentError        a call whose tensors, shapes, dtypes or keywords do not fit its layouts
    ├── DisagreementError    ranks that called with different arguments
    ├── ResourceError        a rank has no file descriptors left for connections
    ├── RemoteError          another rank failed; carries its rank and its text
    │   └── RankLostError    ranks died where ``on_loss`` asks to go on without them; offers how
    ├── TransferTimeoutError nothing moved within ``timeout_seconds``
    └── VerificationError    a shard does not hold what its source held; found only where ``verify=True``

Each message names the thing, the rule and the numbers. An error found while ranks agree is raised
alike on every calling rank, before a byte moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class ReshardError(Exception):
    """Base of every error raised on purpose by this package."""


class MeshError(ReshardError, ValueError):
    """A mesh that cannot be."""


class LayoutError(ReshardError, ValueError):
    """A layout that does not fit its mesh or its tensor."""


class PartialError(LayoutError):
    """A placement with a pending reduction."""


class PlanError(ReshardError, ValueError):
    """A plan that does not deliver what it must, or a text that is not a plan."""


class ScheduleError(ReshardError, ValueError):
    """A schedule that does not fit its pipeline or never ends, or a text that is not a schedule."""


class TopologyError(ReshardError, ValueError):
    """A topology that does not fit the ranks."""


class ArgumentError(ReshardError, ValueError):
    """A call whose tensors, shapes, dtypes or keywords do not fit its layouts."""


class DisagreementError(ReshardError, ValueError):
    """Ranks that took part in one call with different arguments."""


class ResourceError(ReshardError, RuntimeError):
    """A rank may not open as many file descriptors as its connections take."""


class RemoteError(ReshardError, RuntimeError):
    """Another rank failed while this one was taking part in a transfer."""


class RankLostError(RemoteError):
    """Ranks were lost in a transfer that was asked to bear it, see ``on_loss`` of :func:`reshard.reshard`.

    Attributes:
        ranks: those that are lost. regions: of the tensors, that no rank which is left holds although one needs them.
        plan: what would bring the others all that they still miss; None if regions are lost, or the caller did not
            ask for an offer.
    """

    def __init__(
        self,
        text: str,
        ranks: Sequence[int] = (),
        regions: Sequence[str] = (),
        plan: Any = None,
        recover: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(text)
        self.ranks, self.regions, self.plan = tuple(ranks), tuple(regions), plan
        self._recover = recover

    def __reduce__(self) -> Any:
        """Pickled without what it offers, which is a matter of the process that got it."""
        return RankLostError, (str(self), self.ranks, self.regions)

    def recover(self) -> Any:
        """Move what is missing as ``plan`` says; every rank that got this error calls, and gets its shard.

        Raises:
            RankLostError: nothing is offered, or further ranks were lost.
        """
        if self._recover is None:
            raise RankLostError(f"there is no way to recover: {self}", self.ranks, self.regions)
        return self._recover()


class TransferTimeoutError(ReshardError, TimeoutError):
    """An agreement or a transfer did not finish within ``timeout_seconds``."""


class VerificationError(ReshardError, RuntimeError):
    """A destination shard does not hold what the source held."""


#: Classes that travel between ranks by name, so that every rank raises the same one.
BY_NAME: dict[str, type[ReshardError]] = {
    cls.__name__: cls
    for cls in (
        ReshardError,
        MeshError,
        LayoutError,
        PartialError,
        PlanError,
        TopologyError,
        ArgumentError,
        DisagreementError,
        ResourceError,
        RemoteError,
        RankLostError,
        TransferTimeoutError,
        VerificationError,
        ScheduleError,
    )
}
