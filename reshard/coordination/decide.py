"""What ranks tell each other before a call, and what follows from it. Pure functions, no communication."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard.coordination.calling_threads import Caller
from reshard.errors import BY_NAME, ArgumentError, DisagreementError, RemoteError, ReshardError, TransferTimeoutError
from reshard.formatting import format_ranks, say_ranks
from reshard.plan.model import Plan
from reshard.sharding.layout import AnyLayout, Layout, RegionLayout
from reshard.sharding.spec import axis_of
from reshard.sharding.tiles import cut_shards
from reshard.topology.files import topology_to_json

#: Characters of an argument that an error shows.
MAX_VALUE_TEXT = 240


@dataclass
class TensorRequest:
    """What one rank knows of one tensor: the global shape and dtype if given, and its own arrays.

    ``local`` and ``out`` are ``(shape, dtype)`` of the shard it passes and of the array to fill; ``is_dtensor`` says
    that it passes a DTensor, so that every rank of a DeviceMesh gets one. ``devices`` are the types of device of both.
    ``dst_dtype`` is that of the result, None if no other than the source's. ``digest`` is of its shard, where the call
    gives no spec and so says that all shards are equal.
    """

    shape: list[int] | None = None
    dtype: str | None = None
    dst_dtype: str | None = None
    is_dtensor: bool = False
    local: tuple[list[int], str] | None = None
    out: tuple[list[int], str] | None = None
    devices: list[str] = field(default_factory=list)
    digest: int | None = None


@dataclass
class Request:
    """What one rank says when it calls.

    ``arguments`` are compared between ranks, entry by entry; ``error`` is a local error, class and text.
    ``attempt`` counts the rounds that the rank began. ``left`` counts for each member the calls with it that the rank
    may have left, ``why_left`` is the error of the last one, and ``many`` says that they may have been meant for
    different ranks; ``skipped`` and ``made`` count calls by who takes part: those that left the rank out though it
    called, and those that left out other members (see
    :mod:`reshard.coordination.liveness.call_sequence`). ``place`` says what the round is for if not a call; ``caller``
    is the thread that calls; ``said`` is for all others.
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
    many: bool = False
    skipped: dict[str, Any] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    place: str = ""
    caller: Caller = field(default_factory=Caller)
    said: Any = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
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


@dataclass
class Decision:
    """What all ranks take from a call: an error for all, or what they agreed on.

    ``lost`` are ranks that did not come to a round that bears it; ``said`` is what each other rank said. ``behind`` are
    those that the error is for, if it is not for all: the others wait for the next call of those. ``skipped`` are calls
    that another rank made without them, which they count as dealt with. ``out_of_sync`` says why calls of the ranks can
    no longer be told apart, if so (see :mod:`reshard.coordination.liveness.membership`).
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
    behind: list[int] = field(default_factory=list)
    out_of_sync: str = ""
    lost: list[int] = field(default_factory=list)
    said: dict[int, Any] = field(default_factory=dict)

    def raise_error(self) -> None:
        """Raise the common error, if there is one."""
        if self.error is not None:
            raise rebuild_error(*self.error)


def rebuild_error(name: str, text: str) -> ReshardError:
    """An error that another rank described."""
    return BY_NAME.get(name, RemoteError)(text)


def name_rank(rank: int, text: str) -> str:
    """An error's text with the rank that it comes from, unless it says so itself."""
    return text if re.search(rf"\brank {rank}\b|^rank \d+: ", text) else f"rank {rank}: {text}"


def describe_error(error: BaseException) -> tuple[str, str]:
    """Class and text of an error, to be raised on other ranks."""
    name = type(error).__name__
    if name in BY_NAME:
        return name, str(error)
    return "RemoteError", f"{name}: {error}" if str(error) else name


def missing_error(missing: Sequence[int], members: Sequence[int], timeout_seconds: float) -> tuple[str, str]:
    """The error of a round to which some members did not come."""
    return (
        TransferTimeoutError.__name__,
        f"{say_ranks(missing)} did not call within {timeout_seconds:g} s; ranks {format_ranks(members)} take part",
    )


def resolve(requests: Sequence[Request], layouts: Mapping[str, tuple[AnyLayout, AnyLayout]]) -> Decision:
    """What follows from the requests of all ranks of a call; the same on whichever rank works it out.

    Args:
        requests: one per rank, ascending. layouts: ``{tensor: (src, dst)}`` as the ranks agree they are.
    """
    try:
        _raise_local_errors(requests)
        _raise_disagreements(requests)
        decision = Decision(
            hostnames={request.rank: request.hostname for request in requests},
            generation=max(request.generation for request in requests),
            device_type=_resolve_device_type(requests),
        )
        for name, (src, dst) in layouts.items():
            tensors = {request.rank: request.tensors[name] for request in requests}
            what = f"tensor {name!r}" if name else "the tensor"
            if any(tensor.is_dtensor for tensor in tensors.values()):
                decision.dtensors.append(name)
            decision.dtypes[name] = _resolve_dtype(what, tensors)
            decision.shapes[name] = _resolve_shape(what, tensors, src)
            _check_locals(what, tensors, src, dst, decision.shapes[name], decision.dtypes[name])
            _check_replicas(what, tensors)
        return decision
    except ReshardError as error:
        return Decision(error=describe_error(error))


def resolve_left(
    requests: Sequence[Request], layouts: Mapping[str, tuple[AnyLayout, AnyLayout]], members: Sequence[int]
) -> Decision:
    """As :func:`resolve`, where some of the members said nothing: they are lost."""
    decision = resolve(requests, layouts)
    decision.lost = sorted(set(members) - {request.rank for request in requests})
    return decision


def gather_said(requests: Sequence[Request], members: Sequence[int], dead: Collection[int]) -> Decision:
    """What each rank said; and who is lost: whoever said nothing, or died after it said it, unless nobody failed.

    Args:
        requests: of the ranks that came. members: all; dead: those whose process has ended, as far as is known.
    """
    said = {request.rank: request.said for request in requests}
    lost = [rank for rank in members if rank not in said]
    if lost or any(one["failed"] for one in said.values()):
        lost = sorted({*lost, *dead})
    said = {rank: one for rank, one in said.items() if rank not in lost}
    return Decision(generation=max(request.generation for request in requests), lost=lost, said=said)


def _raise_local_errors(requests: Sequence[Request]) -> None:
    failed = [request for request in requests if request.error is not None]
    if failed:
        name, text = failed[0].error or ("", "")
        everywhere = len(failed) == len(requests) and all(request.error == failed[0].error for request in failed)
        raise rebuild_error(name, text if everywhere else name_rank(failed[0].rank, text))


def find_odd(values: Mapping[int, Any]) -> tuple[list[int], list[int]] | None:
    """The ranks with the most common value, the lowest rank's at a tie, and those with the next; None if all agree."""
    ranks_of: dict[Any, list[int]] = {}
    for rank in sorted(values):
        ranks_of.setdefault(values[rank], []).append(rank)
    if len(ranks_of) < 2:
        return None
    most, odd, *_ = sorted(ranks_of.values(), key=len, reverse=True)
    return most, odd


def _raise_disagreements(requests: Sequence[Request]) -> None:
    arguments = {request.rank: request.arguments for request in requests}
    for entries in zip(*arguments.values(), strict=False):
        values = dict(zip(arguments, entries, strict=True))
        found = find_odd(values)
        if found is not None:
            most, odd = found
            (name, value), (other_name, other) = values[most[0]], values[odd[0]]
            said = name if name == other_name else f"{name} or {other_name}"
            value, other = contrast(value, other)
            raise DisagreementError(f"ranks disagree on {said}: {_pass(most)} {value}, {_pass(odd)} {other}")
    found = find_odd({rank: len(given) for rank, given in arguments.items()})
    if found is not None:
        counts = [f"{say_ranks(ranks)} {len(arguments[ranks[0]])}" for ranks in found]
        raise DisagreementError(f"ranks disagree on how many arguments they pass: {', '.join(counts)}")


def _pass(ranks: Sequence[int]) -> str:
    return f"{say_ranks(ranks)} pass{'es' * (len(ranks) == 1)}"


def contrast(a: str, b: str) -> tuple[str, str]:
    """Two texts that differ; where one is long, what surrounds their first difference."""
    if max(len(a), len(b)) <= MAX_VALUE_TEXT:
        return a, b
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, first - MAX_VALUE_TEXT // 4)
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    stop = start + MAX_VALUE_TEXT
    return f"{'...' * (start > 0)}{text[start:stop]}{'...' * (stop < len(text))}"


def _resolve_device_type(requests: Sequence[Request]) -> str:
    """The type of device that all tensors are on; the CPU where no rank passes one."""
    first: dict[str, str] = {}
    for request in requests:
        for name, tensor in request.tensors.items():
            for kind in tensor.devices:
                first.setdefault(kind, f"rank {request.rank} passes {name or 'the tensor'!r} on {kind}")
    if len(first) > 1:
        raise DisagreementError(f"tensors must be on one type of device: {', '.join(first.values())}")
    return next(iter(first), "cpu")


def _resolve_dtype(what: str, tensors: Mapping[int, TensorRequest]) -> str:
    said: dict[str, dict[str, list[int]]] = {}  # dtype -> how it is said -> by which ranks
    for rank, tensor in tensors.items():
        for value, how in ((tensor.dtype, "say"), (tensor.local and tensor.local[1], "hold")):
            if value:
                said.setdefault(value, {}).setdefault(how, []).append(rank)
    if not said:
        raise ArgumentError(f"{what}: no rank knows the dtype; pass dtype=, or a shard on each source rank")
    if len(said) > 1:
        texts = []
        for value, hows in said.items():
            how, ranks = next(iter(hows.items()))
            verb = f"{how}{'s' * (len(ranks) == 1)}{' dtype' * (how == 'say')}"
            texts.append(f"{say_ranks(ranks)} {verb} {value}")
        raise DisagreementError(f"{what}: ranks disagree on the dtype: {', '.join(texts)}")
    return next(iter(said))


def _resolve_shape(what: str, tensors: Mapping[int, TensorRequest], src: AnyLayout) -> list[int]:
    said = {rank: tuple(tensor.shape) for rank, tensor in tensors.items() if tensor.shape is not None}
    found = find_odd(said)
    if found is not None:
        texts = [f"{say_ranks(ranks)} say{'s' * (len(ranks) == 1)} {list(said[ranks[0]])}" for ranks in found]
        raise DisagreementError(f"{what}: ranks disagree on the global shape: {', '.join(texts)}")
    if said:
        return list(next(iter(said.values())))
    if isinstance(src, RegionLayout):
        boxes = [box for _, row in src.boxes for box in row]
        return [max((box[dim][1] for box in boxes), default=0) for dim in range(src.ndim)]
    return _shape_from_shards(what, {rank: tensors[rank].local for rank in src.ranks if rank in tensors}, src)


def _shape_from_shards(what: str, local: Mapping[int, tuple[list[int], str] | None], src: Layout) -> list[int]:
    """The global shape: along each dim the sizes of the parts that the first ranks of the mesh hold, added up.

    Raises:
        ArgumentError: no global shape gives the ranks shards of these sizes.
    """
    sizes: dict[int, tuple[int, ...]] = {}
    for rank in src.ranks:
        shard = local.get(rank)
        if shard is None:
            raise ArgumentError(
                f"{what}: rank {rank} does not know the shape; pass shape=, or a shard on each source rank"
            )
        sizes[rank] = tuple(shard[0])
    found = find_odd({rank: len(size) for rank, size in sizes.items()})
    if found is not None:
        (most, *_), (odd, *_) = found
        raise ArgumentError(
            f"{what}: rank {odd} passes a shard of shape {list(sizes[odd])}, rank {most} one of {list(sizes[most])}; "
            "shards of one tensor have the same number of dims"
        )
    ndim = len(sizes[src.ranks[0]])
    if len(src.spec) > ndim:
        raise ArgumentError(f"{what}: layout {src} shards dim {len(src.spec) - 1}, but shards have {ndim} dims")
    shape = []
    for dim in range(ndim):
        axes = [src.mesh.axes.index(axis_of(step)) for step in (src.spec[dim] if dim < len(src.spec) else ())]
        if not axes:
            found = find_odd({rank: size[dim] for rank, size in sizes.items()})
            shape.append(sizes[src.ranks[0] if found is None else found[0][0]][dim])
            continue
        line = src.mesh.array[tuple(slice(None) if i in axes else 0 for i in range(len(src.mesh.axes)))]
        shape.append(sum(sizes[rank][dim] for rank in line.ravel().tolist()))
    shards = cut_shards(src, shape)
    for rank, size in sizes.items():
        expected = shards.local_shape(rank)
        if size != expected:
            dim = next(dim for dim in range(ndim) if size[dim] != expected[dim])
            rule = "the dim is not sharded" if shape[dim] == expected[dim] else f"{src} cuts {shape[dim]} elements so"
            raise ArgumentError(
                f"{what}: rank {rank} passes {size[dim]} elements along dim {dim}, but should pass {expected[dim]}, as "
                f"{rule}; pass shape= if another rank is wrong, or a RegionLayout if the shards are right"
            )
    return shape


def _check_locals(
    what: str,
    tensors: Mapping[int, TensorRequest],
    src: AnyLayout,
    dst: AnyLayout,
    shape: Sequence[int],
    dtype: str,
) -> None:
    src_shards, dst_shards = cut_shards(src, shape), cut_shards(dst, shape)
    src_ranks, dst_ranks = set(src.ranks), set(dst.ranks)
    for rank, tensor in tensors.items():
        if rank in src_ranks:
            assert tensor.local is not None  # a local error says so before
            expected = list(src_shards.local_shape(rank))
            if tensor.local[0] != expected:
                raise ArgumentError(
                    f"{what}: rank {rank} passes a shard of shape {tensor.local[0]}, but {src} "
                    f"of global shape {list(shape)} gives it {expected}"
                )
        if tensor.out is not None:
            if rank not in dst_ranks:
                raise ArgumentError(f"{what}: rank {rank} passes out=, but is not in the destination layout")
            expected = list(dst_shards.local_shape(rank))
            dst_dtype = tensor.dst_dtype or dtype
            if list(tensor.out) != [expected, dst_dtype]:
                raise ArgumentError(
                    f"{what}: rank {rank} passes out of {tensor.out[1]} {tensor.out[0]}, "
                    f"but its shard is {dst_dtype} {expected}"
                )


def _check_replicas(what: str, tensors: Mapping[int, TensorRequest]) -> None:
    """Raise where shards that the call takes for replicas differ."""
    holders: dict[int, list[int]] = {}
    for rank, tensor in tensors.items():
        if tensor.digest is not None:
            holders.setdefault(tensor.digest, []).append(rank)
    if len(holders) > 1:
        most, *others = sorted(holders.values(), key=len, reverse=True)
        odd = sorted(rank for ranks in others for rank in ranks)
        raise DisagreementError(
            f"{what}: {say_ranks(odd)} hold{'s' * (len(odd) == 1)} other elements than {say_ranks(most)}, but without "
            "src_spec every source rank holds the whole tensor; pass src_spec= if it is sharded"
        )


def plan_arguments(plan: Plan) -> list[tuple[str, str]]:
    """What two ranks compare to find the first difference between their plans."""
    said = [("the number of tensors", str(len(plan.tensors))), ("strategy", plan.strategy)]
    said.append(("staging_bytes", str(plan.staging_bytes)))
    for spec in plan.tensors:
        said.append((f"tensor {spec.name}" if spec.name is not None else "the tensor", str(spec)))
    said.append(("topology", str(topology_to_json(plan.topology))))
    said.append(("plan hash", plan.plan_hash))
    return said
