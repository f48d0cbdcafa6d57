"""Requests that ranks exchange before a call, and the decision computed from them. Pure functions, no communication."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from reshard.coordination.groups.agreement_messages import (
    Decision,
    RoundRequest,
    TensorRequest,
    describe_error,
    name_rank,
    rebuild_error,
)
from reshard.errors import ArgumentError, DisagreementError, ReshardError
from reshard.formatting import describe_ranks
from reshard.plan import Plan
from reshard.sharding import AnyLayout, cut_tiles, find_global_shape, find_minority
from reshard.topology import topology_to_json

#: Maximum number of characters of an argument in an error text.
MAX_VALUE_TEXT = 240


def resolve(requests: Sequence[RoundRequest], layouts: Mapping[str, tuple[AnyLayout, AnyLayout]]) -> Decision:
    """The decision that follows from the requests of all members; the same whichever rank computes it.

    Args:
        requests: one per rank, ascending.
        layouts: ``{tensor: (src, dst)}``, equal on all ranks.
    """
    try:
        _raise_local_errors(requests)
        _raise_disagreements(requests)
        device_type = _resolve_device_type(requests)
        dtensors, equal, shapes, dtypes = [], [], {}, {}
        for name, (src, dst) in layouts.items():
            tensors = {request.rank: request.tensors[name] for request in requests}
            what = f"tensor {name!r}" if name else "the tensor"
            if any(tensor.is_dtensor for tensor in tensors.values()):
                dtensors.append(name)
            dtypes[name] = _resolve_dtype(what, tensors)
            shapes[name] = _resolve_shape(what, tensors, src)
            _check_locals(what, tensors, src, dst, shapes[name], dtypes[name])
            _check_replicas(what, tensors)
            if _seem_equal([tensors[rank] for rank in src.ranks if rank in tensors], shapes[name]):
                equal.append(name)
        return Decision(
            shapes=shapes,
            dtypes=dtypes,
            dtensors=dtensors,
            equal=equal,
            device_type=device_type,
            hostnames={request.rank: request.hostname for request in requests},
            generation=max(request.generation for request in requests),
        )
    except ReshardError as error:
        return Decision(error=describe_error(error))


def resolve_partial(
    requests: Sequence[RoundRequest], layouts: Mapping[str, tuple[AnyLayout, AnyLayout]], members: Sequence[int]
) -> Decision:
    """Like :func:`resolve`, but members without a request are lost."""
    return replace(resolve(requests, layouts), lost=sorted(set(members) - {request.rank for request in requests}))


def gather_reports(requests: Sequence[RoundRequest], members: Sequence[int], dead: Collection[int]) -> Decision:
    """A decision with the payload of each rank, and the lost ranks.

    A rank is lost if it sent no request. If a rank is missing or failed, ranks that died after their request are lost
    too.

    Args:
        requests: one per rank that came.
        members: all ranks.
        dead: ranks whose process is known to have ended.
    """
    reports = {request.rank: request.payload for request in requests}
    lost = [rank for rank in members if rank not in reports]
    if lost or any(report["failed"] for report in reports.values()):
        lost = sorted({*lost, *dead})
    reports = {rank: report for rank, report in reports.items() if rank not in lost}
    return Decision(generation=max(request.generation for request in requests), lost=lost, payloads=reports)


def _raise_local_errors(requests: Sequence[RoundRequest]) -> None:
    failed = [request for request in requests if request.error is not None]
    if failed:
        name, text = failed[0].error or ("", "")
        everywhere = len(failed) == len(requests) and all(request.error == failed[0].error for request in failed)
        raise rebuild_error(name, text if everywhere else name_rank(failed[0].rank, text))


def _raise_disagreements(requests: Sequence[RoundRequest]) -> None:
    arguments = {request.rank: request.arguments for request in requests}
    for entries in zip(*arguments.values(), strict=False):
        values = dict(zip(arguments, entries, strict=True))
        minority = find_minority(values)
        if minority is not None:
            majority, odd = minority
            (name, value), (other_name, other) = values[majority[0]], values[odd[0]]
            names = name if name == other_name else f"{name} or {other_name}"
            value, other = contrast(value, other)
            raise DisagreementError(
                f"ranks disagree on {names}: {_ranks_pass(majority)} {value}, {_ranks_pass(odd)} {other}"
            )
    minority = find_minority({rank: len(given) for rank, given in arguments.items()})
    if minority is not None:
        counts = [f"{_ranks_pass(ranks)} {len(arguments[ranks[0]])}" for ranks in minority]
        raise DisagreementError(f"ranks disagree on the number of arguments: {', '.join(counts)}")


def _ranks_pass(ranks: Sequence[int]) -> str:
    return f"{describe_ranks(ranks)} pass{'es' * (len(ranks) == 1)}"


def contrast(a: str, b: str) -> tuple[str, str]:
    """Two texts that differ; if one is long, an excerpt of each around the first difference."""
    if max(len(a), len(b)) <= MAX_VALUE_TEXT:
        return a, b
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, first - MAX_VALUE_TEXT // 4)
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    stop = start + MAX_VALUE_TEXT
    return f"{'...' * (start > 0)}{text[start:stop]}{'...' * (stop < len(text))}"


def _resolve_device_type(requests: Sequence[RoundRequest]) -> str:
    """The device type of all tensors; the CPU if there are none."""
    first: dict[str, str] = {}
    for request in requests:
        for name, tensor in request.tensors.items():
            for kind in tensor.devices:
                first.setdefault(kind, f"rank {request.rank} passes {name or 'the tensor'!r} on {kind}")
    if len(first) > 1:
        raise DisagreementError(f"tensors must be on one device type: {', '.join(first.values())}")
    return next(iter(first), "cpu")


def _resolve_dtype(what: str, tensors: Mapping[int, TensorRequest]) -> str:
    ranks_of: dict[str, dict[str, list[int]]] = {}  # dtype -> verb for the error text -> ranks
    for rank, tensor in tensors.items():
        for value, verb in ((tensor.dtype, "pass"), (tensor.local and tensor.local[1], "hold")):
            if value:
                ranks_of.setdefault(value, {}).setdefault(verb, []).append(rank)
    if not ranks_of:
        raise ArgumentError(f"{what}: no rank knows the dtype; pass dtype=, or a shard on each source rank")
    if len(ranks_of) > 1:
        texts = []
        for value, by_verb in ranks_of.items():
            verb, ranks = next(iter(by_verb.items()))
            holds = f"{describe_ranks(ranks)} hold{'s' * (len(ranks) == 1)}"
            texts.append(f"{_ranks_pass(ranks)} dtype {value}" if verb == "pass" else f"{holds} {value}")
        raise DisagreementError(f"{what}: ranks disagree on the dtype: {', '.join(texts)}")
    return next(iter(ranks_of))


def _resolve_shape(what: str, tensors: Mapping[int, TensorRequest], src: AnyLayout) -> list[int]:
    given = {rank: tuple(tensor.shape) for rank, tensor in tensors.items() if tensor.shape is not None}
    minority = find_minority(given)
    if minority is not None:
        texts = [f"{_ranks_pass(ranks)} shape {list(given[ranks[0]])}" for ranks in minority]
        raise DisagreementError(f"{what}: ranks disagree on the global shape: {', '.join(texts)}")
    if given:
        return list(next(iter(given.values())))
    sizes = {rank: tensors[rank].local for rank in src.ranks if rank in tensors}
    return find_global_shape(what, {rank: local[0] for rank, local in sizes.items() if local is not None}, src)


def _check_locals(
    what: str,
    tensors: Mapping[int, TensorRequest],
    src: AnyLayout,
    dst: AnyLayout,
    shape: Sequence[int],
    dtype: str,
) -> None:
    src_tiles, dst_tiles = cut_tiles(src, shape), cut_tiles(dst, shape)
    src_ranks, dst_ranks = set(src.ranks), set(dst.ranks)
    for rank, tensor in tensors.items():
        if rank in src_ranks:
            assert tensor.local is not None  # otherwise the rank has a local error
            expected = list(src_tiles.local_shape(rank))
            if tensor.local[0] != expected:
                raise ArgumentError(
                    f"{what}: rank {rank} passes a shard of shape {tensor.local[0]}, but {src} "
                    f"of global shape {list(shape)} gives it {expected}"
                )
        if tensor.out is not None:
            if rank not in dst_ranks:
                raise ArgumentError(f"{what}: rank {rank} passes out= but is not in the destination layout")
            expected = list(dst_tiles.local_shape(rank))
            dst_dtype = tensor.dst_dtype or dtype
            if list(tensor.out) != [expected, dst_dtype]:
                raise ArgumentError(
                    f"{what}: rank {rank} passes out= with {tensor.out[1]} {tensor.out[0]}, "
                    f"but its shard is {dst_dtype} {expected}"
                )


def _check_replicas(what: str, tensors: Mapping[int, TensorRequest]) -> None:
    """Raise if shards that must be replicas differ."""
    holders: dict[int, list[int]] = {}
    for rank, tensor in tensors.items():
        if tensor.digest is not None:
            holders.setdefault(tensor.digest, []).append(rank)
    if len(holders) > 1:
        majority, *others = sorted(holders.values(), key=len, reverse=True)
        odd = sorted(rank for ranks in others for rank in ranks)
        raise DisagreementError(
            f"{what}: {describe_ranks(odd)} hold{'s' * (len(odd) == 1)} other elements than "
            f"{describe_ranks(majority)}, but without src_spec "
            "every source rank holds the whole tensor; pass src_spec= if it is sharded"
        )


def _seem_equal(sources: Sequence[TensorRequest], shape: Sequence[int]) -> bool:
    """Whether source ranks that do not pass the global shape seem to hold equal shards of a tensor that is divided."""
    if any(source.corners is None or source.local is None for source in sources):
        return False
    held = {(source.corners, tuple(source.local[0])) for source in sources if source.local is not None}
    return len(held) == 1 and next(iter(held))[1] != tuple(shape)


def plan_arguments(plan: Plan) -> list[tuple[str, str]]:
    """The arguments to compare in order to report the first difference between two plans."""
    entries = [("the number of tensors", str(len(plan.tensors))), ("strategy", plan.strategy)]
    entries.append(("staging_bytes", str(plan.staging_bytes)))
    for spec in plan.tensors:
        entries.append((f"tensor {spec.name}" if spec.name is not None else "the tensor", str(spec)))
    entries.append(("topology", str(topology_to_json(plan.topology))))
    entries.append(("plan hash", plan.plan_hash))
    return entries
