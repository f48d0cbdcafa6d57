"""The errors that reshard raises on purpose.

::

    ReshardError
    ├── MeshError            invalid mesh: repeated ranks, repeated axis names, wrong sizes
    ├── LayoutError          a spec or a set of regions does not fit its mesh or its tensor
    │   └── PartialError     a placement has a pending reduction, which is not supported
    ├── PlanError            a plan does not deliver every element, or a text is not a plan
    ├── ScheduleError        a schedule does not fit its pipeline or deadlocks, or a text is not a schedule
    ├── TopologyError        a topology does not fit the ranks
    ├── ArgumentError        tensors, shapes, dtypes or keywords do not fit the layouts
    │   └── OptionError      a call lacks an argument or has an unknown keyword; also a TypeError
    ├── DisagreementError    ranks called with different arguments
    ├── ResourceError        a rank has too few file descriptors or threads, or too many collectives under way
    ├── RemoteError          another rank failed; the text names the rank and its error
    │   └── RankLostError    ranks were lost in a fault-tolerant transfer; may offer a recovery plan
    ├── CompressionError     a codec changes the tensors more than ``max_error`` allows, or your codec raised an error
    ├── TransferTimeoutError ranks did not agree, or a transfer did not finish, within ``timeout_seconds``
    └── VerificationError    a shard differs from its source; only with ``verify=True``

Each message names the thing, the rule and the numbers. An error found while ranks agree on a call is raised
on every calling rank, with the same text, before any data moves. Lines of more than 2,000 characters are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reshard.formatting import cut_lines


class ReshardError(Exception):
    """Base of every error raised on purpose by this package."""

    #: Whether the other ranks of a call know of the error, or need not know of it.
    is_published_by_reshard = True

    def __init__(self, *args: Any) -> None:
        # a text, name or spec of the caller's may have any length
        super().__init__(*(cut_lines(argument) if isinstance(argument, str) else argument for argument in args))


class MeshError(ReshardError, ValueError):
    """An invalid mesh."""


class LayoutError(ReshardError, ValueError):
    """A layout that does not fit its mesh or its tensor."""


class PartialError(LayoutError):
    """A placement with a pending reduction."""


class PlanError(ReshardError, ValueError):
    """A plan that does not deliver every element, or a text that is not a plan."""


class ScheduleError(ReshardError, ValueError):
    """A schedule that does not fit its pipeline or deadlocks, or a text that is not a schedule."""


class TopologyError(ReshardError, ValueError):
    """A topology that does not fit the ranks."""


class ArgumentError(ReshardError, ValueError):
    """A call whose tensors, shapes, dtypes or keywords do not fit its layouts."""


class OptionError(ArgumentError, TypeError):
    """A call lacks an argument, or has a keyword that the function does not take. The call has not begun."""


class DisagreementError(ReshardError, ValueError):
    """Ranks made one call with different arguments."""


class ResourceError(ReshardError, RuntimeError):
    """A rank's limit of file descriptors or threads is too low, or it has too many collectives under way."""


class RemoteError(ReshardError, RuntimeError):
    """Another rank failed during a call or a transfer."""


class RankLostError(RemoteError):
    """Ranks were lost in a fault-tolerant transfer; see ``on_loss`` of :func:`reshard.reshard`.

    Attributes:
        ranks: the lost ranks.
        regions: tensor regions that a surviving rank needs and no surviving rank holds.
        plan: the plan that delivers all missing data; None if regions are lost or ``on_loss`` is not ``"offer"``.
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
        """Pickle without the plan and its recovery, which belong to the process that raised the error."""
        return RankLostError, (str(self), self.ranks, self.regions)

    def recover(self) -> Any:
        """Run ``plan`` and return this rank's shard. Every rank that got this error must call it.

        Raises:
            RankLostError: the error has no plan, or more ranks were lost.
        """
        if self._recover is None:
            raise RankLostError(f"cannot recover: {self}", self.ranks, self.regions)
        return self._recover()


class CompressionError(ReshardError, RuntimeError):
    """A codec changes tensors by more than the ``max_error`` of the call, and no data has moved.

    Or a codec that the caller implements raised an error; the text names the codec and the error.
    """


class TransferTimeoutError(ReshardError, TimeoutError):
    """An agreement or a transfer did not finish within ``timeout_seconds``."""


class VerificationError(ReshardError, RuntimeError):
    """A destination shard differs from its source."""


#: Error classes by name. Ranks send an error as its class name and text, so that all raise the same class.
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
        OptionError,
        DisagreementError,
        ResourceError,
        RemoteError,
        RankLostError,
        CompressionError,
        TransferTimeoutError,
        VerificationError,
        ScheduleError,
    )
}
