"""Messages of a round of agreement: the requests of the ranks, and the decision that all ranks get back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard.coordination.groups.calling_threads import Caller
from reshard.errors import BY_NAME, RemoteError, ReshardError


def read_json(text: str | bytes, pattern: Any) -> Any:
    """The value of a JSON text that matches a pattern.

    Args:
        pattern: a type; a list with one pattern for all elements; a tuple with a pattern for each element; a dict with
            a pattern for each key, or ``{str: pattern}`` for any keys.

    Raises:
        ValueError: the text is not JSON, or does not match.
    """
    value = json.loads(text)
    if not _matches(value, pattern):
        raise ValueError(f"not of the form {pattern}")
    return value


def _matches(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, type):
        return isinstance(value, pattern) and not (pattern is int and isinstance(value, bool))
    if isinstance(pattern, list):
        return isinstance(value, list) and all(_matches(item, pattern[0]) for item in value)
    if isinstance(pattern, tuple):
        return isinstance(value, list) and len(value) == len(pattern) and all(map(_matches, value, pattern))
    if not isinstance(value, dict):
        return False
    if str in pattern:
        return all(_matches(item, pattern[str]) for item in value.values())
    return value.keys() == pattern.keys() and all(_matches(value[key], item) for key, item in pattern.items())


@dataclass(frozen=True)
class TensorRequest:
    """The arguments of one rank for one tensor.

    Attributes:
        shape, dtype: shape and dtype of the global tensor; None if the rank does not know it.
        dst_dtype: dtype of the result; None: ``dtype``.
        is_dtensor: whether the rank passes a DTensor. If any rank does, all ranks of a destination DeviceMesh get one.
        local, out: ``(shape, dtype)`` of the source shard and of the array to fill; None if there is none.
        devices: device types of these arrays.
        digest: digest of the source shard if the call passes no source spec. All source shards must then be equal.
        corners: digest of the corners of a source shard whose global shape the rank does not know, if they tell whether
            shards differ.
    """

    shape: list[int] | None = None
    dtype: str | None = None
    dst_dtype: str | None = None
    is_dtensor: bool = False
    local: tuple[list[int], str] | None = None
    out: tuple[list[int], str] | None = None
    devices: list[str] = field(default_factory=list)
    digest: int | None = None
    corners: int | None = None


@dataclass(frozen=True)
class RoundRequest:
    """The request of one rank in a round.

    Attributes:
        arguments: ``(name, value)`` pairs that must be equal on all ranks.
        error: class and text of a local error.
        attempt: number of rounds that the rank has started.
        left: for each member, the number of shared calls that this rank may have left (see
            :mod:`reshard.coordination.liveness.call_sequence`).
        why_left: class and text of the error that ended the last of these calls.
        are_members_unknown: whether the members of these calls are unknown.
        skipped: ``{hash of ranks: [count, ranks]}`` of the calls of this rank in which it is no member.
        other_calls: ``{hash of ranks: count}`` of the calls of this rank with sets of ranks that lack a member of this
            call.
        purpose: purpose of the round; "" for an ordinary call that is not fault tolerant.
        caller: the calling thread.
        job: name of the job that should be the whole joined group, in the first rounds; "" if there is none.
        payload: data for all other ranks.
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
    job: str = ""
    payload: Any = None

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, without copies of the request's values: a payload may be large."""
        tensors = {name: vars(tensor) for name, tensor in self.tensors.items()}
        return {**vars(self), "tensors": tensors, "caller": vars(self.caller)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundRequest:
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
        equal: the tensors whose shards seem to be equal, although the layout divides the tensor.
        lost: members that a fault-tolerant call has lost.
        payloads: ``RoundRequest.payload`` of each rank.
        lagging: ranks on which the call fails; empty: all. The other ranks wait for the next call of these ranks.
        skipped: ``{hash of ranks: [count, ranks]}`` of calls by a rank that is not their member. The receiver of the
            decision is a member, and counts them as handled.
        out_of_sync: why the calls of these ranks can no longer be matched; "" if they can.
    """

    error: tuple[str, str] | None = None
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    hostnames: dict[int, str] = field(default_factory=dict)
    dtensors: list[str] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
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
        """The decision whose ``vars`` were sent as JSON, which turns ranks that are keys into text."""
        by_rank = {name: {int(rank): value for rank, value in data[name].items()} for name in _BY_RANK}
        return cls(**{**data, **by_rank})

    def raise_error(self) -> None:
        """Raise the common error, if there is one."""
        if self.error is not None:
            raise rebuild_error(*self.error)


#: Fields of a Decision whose keys are ranks.
_BY_RANK = ("hostnames", "attempts", "payloads")


def rebuild_error(name: str, text: str) -> ReshardError:
    """The inverse of :func:`describe_error`. An unknown class gives a RemoteError."""
    return BY_NAME.get(name, RemoteError)(text)


def parse_error(text: str | bytes) -> ReshardError:
    """The error that a rank has written to the store as :func:`describe_error` gives it.

    Raises:
        ValueError: the text is something else.
    """
    return rebuild_error(*read_json(text, (str, str)))


def name_rank(rank: int, text: str) -> str:
    """Prefix an error text with the rank that raised it, unless the text names this rank or starts with a rank."""
    return text if re.search(rf"\brank {rank}\b|^rank \d+\b", text) else f"rank {rank}: {text}"


def describe_error(error: BaseException) -> tuple[str, str]:
    """Class name and text of an error, with which other ranks can raise it."""
    name = type(error).__name__
    if name in BY_NAME:
        return name, str(error)
    return "RemoteError", f"{name}: {error}" if str(error) else name


@dataclass
class RankStatus:
    """The status that a rank publishes in the store for ranks that wait for it.

    A rank writes its own status. One exception: another process may write that the rank is dead.

    Attributes:
        waiting: members and attempt of the round in which the rank waits; None if it waits in none.
        skipped: ``{hash of ranks: [count, ranks]}`` of the calls of the rank in which it is no member.
        errors: number of calls that failed on the rank before their members were known.
        abandoned: ``{member as text: number}`` of abandoned calls with each member; not part of ``errors``.
        error: class and text of the last error.
        are_members_unknown: whether the members of the calls in ``errors`` are unknown.
        out_of_sync: ``{set of ranks: why its calls can no longer be matched}``.
    """

    waiting: dict[str, Any] | None = None
    skipped: dict[str, list[Any]] = field(default_factory=dict)
    errors: int = 0
    abandoned: dict[str, int] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    are_members_unknown: bool = False
    out_of_sync: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is something else.
        """
        values = read_json(text, dict)
        pattern = _STATUS | {name: type(None) for name in ("waiting", "error") if values.get(name) is None}
        if not _matches(values, pattern):
            raise ValueError(f"not of the form {pattern}")
        return cls(**{**values, "error": values["error"] and tuple(values["error"])})


_STATUS = {
    "waiting": {"members": [int], "attempt": int},
    "skipped": {str: (int, [int])},
    "errors": int,
    "abandoned": {str: int},
    "error": (str, str),
    "are_members_unknown": bool,
    "out_of_sync": {str: str},
}
