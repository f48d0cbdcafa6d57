"""What ranks send to a round of agreement, and the decision that they get back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard.coordination.calling_threads import Caller
from reshard.errors import BY_NAME, RemoteError, ReshardError


@dataclass(frozen=True)
class TensorRequest:
    """What one rank passes for one tensor.

    ``shape`` and ``dtype`` are global, if given; ``dst_dtype`` is the dtype of the result if it differs. ``local`` and
    ``out`` are ``(shape, dtype)`` of the source shard and of the array to fill; ``devices`` are their device types. If
    one rank passes a DTensor (``is_dtensor``), all ranks of a DeviceMesh get one. ``digest`` is the digest of the
    source shard if the call passes no spec, so that all shards must be equal.
    """

    shape: list[int] | None = None
    dtype: str | None = None
    dst_dtype: str | None = None
    is_dtensor: bool = False
    local: tuple[list[int], str] | None = None
    out: tuple[list[int], str] | None = None
    devices: list[str] = field(default_factory=list)
    digest: int | None = None


@dataclass(frozen=True)
class Request:
    """What one rank sends to a round.

    Attributes:
        arguments: ``(name, value)`` pairs that must be equal on all ranks.
        error: class and text of a local error. attempt: number of rounds that the rank has started.
        left, why_left: for each member, how many calls with it the rank may have left; error of the last of them (see
            :mod:`reshard.coordination.liveness.call_sequence`).
        are_members_unknown: whether the members of those calls are unknown.
        skipped: ``{hash of ranks: [count, ranks]}`` of this rank's calls whose members are other ranks only.
        other_calls: ``{hash of ranks: count}`` of this rank's calls that do not include all members of this one.
        purpose: purpose of the round; "" for an ordinary call that is not fault tolerant.
        caller: the calling thread. payload: data for all other ranks.
    """

    rank: int
    arguments: list[tuple[str, str]] = field(default_factory=list)
    tensors: dict[str, TensorRequest] = field(default_factory=dict)
    hostname: str = ""
    generation: int = 0
    error: tuple[str, str] | None = None
    attempt: int = 0
    left: list[int] = field(default_factory=list)
    why_left: tuple[str, str] | None = None
    are_members_unknown: bool = False
    skipped: dict[str, Any] = field(default_factory=dict)
    other_calls: dict[str, int] = field(default_factory=dict)
    purpose: str = ""
    caller: Caller = field(default_factory=Caller)
    payload: Any = None

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of :meth:`to_json`."""
        values = dict(data)
        values["tensors"] = {name: TensorRequest(**tensor) for name, tensor in values["tensors"].items()}
        values["arguments"] = [tuple(entry) for entry in values["arguments"]]
        values["caller"] = Caller(**values.get("caller", {}))
        for name in ("error", "why_left"):
            values[name] = tuple(values[name]) if values[name] is not None else None
        return cls(**values)


@dataclass(frozen=True)
class Decision:
    """The common result of a round: an error, or what the ranks agreed on.

    Attributes:
        lost: members that missed a fault-tolerant round. payloads: ``Request.payload`` of each rank.
        lagging: ranks that the error is for, if not all; the others then wait for the next call of these ranks.
        skipped: calls that another rank made without the receiver, which the receiver counts as handled.
        out_of_sync: why the calls of these ranks can no longer be matched, if so.
    """

    error: tuple[str, str] | None = None
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    hostnames: dict[int, str] = field(default_factory=dict)
    dtensors: list[str] = field(default_factory=list)
    device_type: str = "cpu"
    generation: int = 0
    round: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    skipped: dict[str, Any] = field(default_factory=dict)
    lagging: list[int] = field(default_factory=list)
    out_of_sync: str = ""
    lost: list[int] = field(default_factory=list)
    payloads: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """From ``vars(decision)`` after a trip through JSON, which turns ranks that are keys into text."""
        by_rank = {name: {int(rank): value for rank, value in data[name].items()} for name in _BY_RANK}
        return cls(**{**data, **by_rank})

    def raise_error(self) -> None:
        """Raise the common error, if there is one."""
        if self.error is not None:
            raise rebuild_error(*self.error)


#: Fields of a Decision whose keys are ranks.
_BY_RANK = ("hostnames", "attempts", "payloads")


def rebuild_error(name: str, text: str) -> ReshardError:
    """The exception for an error that another rank described."""
    return BY_NAME.get(name, RemoteError)(text)


def name_rank(rank: int, text: str) -> str:
    """An error text with the rank that raised it, unless the text names that rank or starts with another one."""
    return text if re.search(rf"\brank {rank}\b|^rank \d+\b", text) else f"rank {rank}: {text}"


def describe_error(error: BaseException) -> tuple[str, str]:
    """Class name and text of an error, to be raised on other ranks."""
    name = type(error).__name__
    if name in BY_NAME:
        return name, str(error)
    return "RemoteError", f"{name}: {error}" if str(error) else name


@dataclass
class RankStatus:
    """What one rank publishes in the store about itself, for ranks that wait for it.

    Another process changes it only to report the rank dead.

    Attributes:
        waiting: members and attempt of the round that the rank waits in; None if it waits in none.
        skipped: ``{hash of ranks: [count, ranks]}`` of calls whose members are other ranks only.
        errors: number of calls that the rank may have left, with any members. given: the same by member, as text.
        error: class and text of the last error. are_members_unknown: whether the members of the calls left are unknown.
        lost: ranks that this rank counts as lost.
        out_of_sync: for each set of ranks, why its calls can no longer be matched.
    """

    waiting: dict[str, Any] | None = None
    skipped: dict[str, list[Any]] = field(default_factory=dict)
    errors: int = 0
    given: dict[str, int] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    are_members_unknown: bool = False
    lost: list[int] = field(default_factory=list)
    out_of_sync: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """The inverse of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**{**values, "error": values["error"] and tuple(values["error"])})
