"""One transfer of a whole model between the ranks of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from reshard.api.mover import Mover
from reshard.api.preparation.plan_per_host import plan_in_group
from reshard.coordination import Group, find_group, leave_interrupted, publish_exceptions, publish_interruption
from reshard.coordination.topology_discovery import find_topology
from reshard.errors import ArgumentError
from reshard.plan import ranks_of
from reshard.runtime.autograd import mark_written
from reshard.sharding import TensorSpec
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.topology import Topology
from reshard.weights.install import TensorsByName
from reshard.weights.mapping.rules import Rule, check_rules
from reshard.weights.membership.team import run_collectively
from reshard.weights.model.holdings import ModelState, read_state, write_values
from reshard.weights.model.manifest import Manifest, merge_states, state_of_rank
from reshard.weights.model.pieces import Side, Specs, match
from reshard.weights.model.quantize import Quantize, Quantizer
from reshard.weights.model.verify import Checker, add_all, view_of
from reshard.weights.routes.route import RouteOptions

F = TypeVar("F", bound=Callable[..., Any])


def _leave_interrupted(error: BaseException, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    group = find_group(kwargs.get("group"))
    leave_interrupted(error, group, lambda: range(group.size))


def _ending_on_all_ranks(function: F) -> F:
    """Let an exception such as KeyboardInterrupt on one rank end a call of a group on all its ranks."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = find_group(kwargs.get("group"))
        with publish_interruption(group, lambda: range(group.size)):
            return function(*args, **kwargs)

    return cast(F, publish_exceptions(_leave_interrupted)(call))


@_ending_on_all_ranks
def transfer_state_dict(
    src: Any = None,
    dst: Any = None,
    *,
    group: Any = None,
    rules: Sequence[Rule] | None = None,
    quantize: Sequence[Quantize] = (),
    memory_bytes: int = 1 << 30,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    topology: Topology | None = None,
) -> None:
    """Copy the state of a model to a model on the same or other ranks, whatever the shardings. Every rank calls it.

    The digests of what has landed are compared with those of the source.

    Args:
        src: this rank's shards of the source: a module, or a nested mapping of tensors; None on other ranks.
        dst: this rank's shards of the destination, which are overwritten; None on other ranks. Numbers and strings
            of the source are written to a mapping too.
        group: the process group (default: the world) or the result of :func:`reshard.join` of all ranks.
        rules: see :mod:`reshard.weights.mapping.rules`. Default: the rules of the families of models that fit.
        quantize: which tensors of the source arrive in float8, with the scales of their blocks.
        memory_bytes: memory for data in transit on each rank, at least 192 KiB.
        timeout_seconds: limit of each agreement, and of the transfer.
        topology: hosts and links of the ranks. Default: host names give them.

    Raises:
        ArgumentError: a tensor is missing on one side, has another shape, or cannot be cast. Nothing has moved.
        VerificationError: what has landed differs from the source.
        ReshardError: a rank failed; ``dst`` may hold tensors of both.
    """
    group = find_group(group)
    states: dict[str, ModelState | None] = {"src": None, "dst": None}

    def describe() -> dict[str, Any]:
        RouteOptions(DEFAULT_TIMEOUT_SECONDS, timeout_seconds, memory_bytes, topology)
        check_rules(rules)
        states.update(src=None if src is None else read_state(src), dst=None if dst is None else read_state(dst))
        return {side: None if state is None else state_of_rank(state) for side, state in states.items()}

    seconds = timeout_seconds if isinstance(timeout_seconds, (int, float)) else DEFAULT_TIMEOUT_SECONDS
    reports = run_collectively(group, describe, "describes its state", seconds)
    source, target = (_merge(reports, side, group.size) for side in ("src", "dst"))
    sent = {} if states["src"] is None else {name: holding.array for name, holding in states["src"].holdings.items()}
    if quantize:
        source = _quantize(group, quantize, source, states["src"], sent, seconds)
    target = replace(target, rules=check_rules(rules))
    pieces = match(source, target, "the destination")
    specs = Specs(source, {0: target})
    tensors = [specs.spec([{0: piece}], f"{number} {piece}") for number, piece in enumerate(pieces)]
    if topology is None:
        topology = find_topology(group, timeout_seconds=seconds)
    live = {} if states["dst"] is None else {name: holding.array for name, holding in states["dst"].holdings.items()}
    dtypes = {piece.target.name: piece.dtype for piece in pieces}
    landed = {name: _receive_buffer(array, dtypes[name]) for name, array in live.items() if name in dtypes}
    if group.rank in ranks_of(tensors):
        device = "cuda" if source.device == target.device == "cuda" else "cpu"
        with plan_in_group(
            group, tensors, topology=topology, staging_bytes=memory_bytes, timeout_seconds=seconds
        ) as plan:
            mover = Mover(plan, group, timeout_seconds=seconds, device=device)
        with mover:
            mover(
                _views(tensors, [piece.source for piece in pieces], source, sent, group.rank),
                out=_views(tensors, [piece.target for piece in pieces], target, landed, group.rank),
            )
    _verify(group, Checker(source, target, pieces), sent, landed, seconds)
    with torch.no_grad():
        for name, array in landed.items():
            if array is not live[name]:
                live[name].copy_(array)
    mark_written(live.values())
    if dst is not None:
        write_values(dst, source.values)


def _verify(group: Group, checker: Checker, sent: TensorsByName, landed: TensorsByName, seconds: float) -> None:
    """Compare the digests of what has landed on any rank with those of the source."""

    def digest_both() -> dict[str, Any]:
        return {
            "sent": checker.digest_source(sent, group.rank),
            "landed": checker.digest_target(landed, group.rank),
        }

    digests = run_collectively(group, digest_both, "verifies what has landed", seconds)
    checker.compare(
        add_all([report["sent"] for report in digests.values()]),
        {rank: report["landed"] for rank, report in digests.items()},
    )


def _quantize(
    group: Group,
    rules: Sequence[Quantize],
    source: Manifest,
    state: ModelState | None,
    sent: TensorsByName,
    seconds: float,
) -> Manifest:
    """Replace tensors of the source by quantized ones; returns the manifest of those."""
    quantizer = Quantizer(rules, source)
    holdings = {} if state is None else state.holdings

    def measure() -> dict[str, Any]:
        return {"measured": quantizer.measure(holdings)}

    measured = run_collectively(group, measure, "measures what it quantizes", seconds)
    kept = {name: array for name, array in sent.items() if name not in quantizer.names}
    sent.clear()
    quantizer.quantize(holdings, [report["measured"] for report in measured.values()], sent)
    sent.update(kept)
    return quantizer.manifest


def _merge(reports: Mapping[int, Mapping[str, Any]], side: str, size: int) -> Manifest:
    states = {rank: report[side] for rank, report in reports.items() if report[side] is not None}
    if not states:
        raise ArgumentError(f"no rank passes {side}=")
    return replace(merge_states(states, f"{side}="), size=size)


def _receive_buffer(array: torch.Tensor, dtype: str) -> torch.Tensor:
    """The memory in which the values of a tensor arrive: the tensor itself, or a buffer in the dtype of the source."""
    wanted = getattr(torch, dtype)
    return array if array.dtype == wanted else torch.empty_like(array, dtype=wanted)


def _views(
    tensors: Sequence[TensorSpec], sides: Sequence[Side], model: Manifest, arrays: TensorsByName, rank: int
) -> dict[str | None, torch.Tensor | None]:
    """The parts of each tensor of a plan that a rank holds."""
    pairs = zip(tensors, sides, strict=True)
    return {spec.name: view_of(side, model, arrays, rank) for spec, side in pairs}
