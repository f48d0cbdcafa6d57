"""Apply a compression policy to an engine: all-reduces of gradients, FSDP's collectives, edges and grids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from reshard.codecs import CODED_DTYPES, measure_rates, parse_codec
from reshard.compression import CompressedAllGather, CompressedReduceScatter, Policy
from reshard.compression.encoded_collectives import Wait
from reshard.compression.feedback import CodingErrors
from reshard.compression.host_sums import padded_size, split_by_host, sum_over_hosts
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.planner import Strategy
from reshard.topology import CodecRate, Topology

from ..ir.schedule import Schedule
from ..passes.edge_codecs import choose_codecs, compress_edges
from ..pipeline import Pipeline
from ..transfer_costs import price_edge
from .data_parallel import is_fsdp
from .tied_params import TiedParameters

#: ``exchange(received, sent, rows)`` sends ``rows[i]`` rows to replica ``i``, and receives as many from it.
ExchangeRows = Callable[[torch.Tensor, torch.Tensor, list[int]], None]


class CompressedSums:
    """All-reduces of gradients over replicas of a stage, raw inside a host and encoded between hosts.

    If all replicas share one host, or hosts have different numbers of replicas, each replica counts as a host.

    Args:
        codec: name of a block codec.
        hosts: host of each replica.
        position: index of this replica.
        sizes: ``{name: number of values}`` of the parameters.
        feedback: whether to add the coding errors of a step to the gradients of the next step.
        raw_steps: number of first steps whose sums are not encoded.

    Attributes:
        errors: coding errors of this replica; None without feedback.
        steps: number of steps taken.
    """

    def __init__(
        self,
        codec: str,
        hosts: Sequence[int],
        position: int,
        sizes: Mapping[str, int],
        *,
        feedback: bool = False,
        raw_steps: int = 0,
    ) -> None:
        self._codec, self._size = parse_codec(codec), len(hosts)
        levels = split_by_host(hosts, position) if len(set(hosts)) > 1 else None
        self._levels = levels or ([position], list(range(self._size)))
        self._position, self._raw_steps, self._sizes = position, raw_steps, sizes
        self.errors = CodingErrors() if feedback else None
        self.steps = 0

    def can_compress(self, gradients: torch.Tensor) -> bool:
        """Whether the sums of these gradients are encoded in this step."""
        is_codable = gradients.device.type == "cpu" and dtype_name(gradients.dtype) in CODED_DTYPES
        return is_codable and self.steps >= self._raw_steps

    def add(self, gradients: torch.Tensor, parts: Sequence[tuple[str, int]], exchange: ExchangeRows) -> None:
        """Replace flat gradients by their sum over the replicas. All replicas get the same bits.

        Args:
            gradients: the gradients of several parameters, concatenated.
            parts: ``(name, number of values)`` of each of these parameters, in order.
            exchange: exchanges rows with the other replicas.
        """
        size = padded_size(gradients.numel(), self._size, self._codec)
        flat = torch.zeros(size, dtype=torch.float32, device="cpu")
        flat[: gradients.numel()] = gradients
        errors = None if self.errors is None else torch.zeros(size, dtype=torch.float32, device="cpu")
        names, sizes = zip(*parts, strict=True)
        if self.errors is not None:
            self.errors.add_to(list(zip(names, flat[: gradients.numel()].split(sizes), strict=True)))
        inside, across = (_ReplicaSubset(members, self._position, self._size, exchange) for members in self._levels)
        sum_over_hosts(flat, inside, across, self._codec, errors=errors)
        gradients.copy_(flat[: gradients.numel()])
        if self.errors is not None and errors is not None:
            self.errors.keep(list(zip(names, errors[: gradients.numel()].split(sizes), strict=True)))

    def load_errors(self, errors: Mapping[str, torch.Tensor]) -> None:
        """Restore the errors of this stage's parameters. Errors with other names or sizes are ignored."""
        if self.errors is not None:
            self.errors.load_state_dict({k: v for k, v in errors.items() if self._sizes.get(k) == v.numel()})


class StageSums:
    """The encoded sums of the stages of one rank.

    Args:
        sums: by stage; None where the gradients of a stage are not encoded.
        reduce_scatters: see :func:`find_reduce_scatters`.
        ties: parameters that several stages share.
    """

    def __init__(
        self,
        sums: Mapping[int, CompressedSums | None],
        reduce_scatters: Mapping[str, CompressedReduceScatter],
        ties: TiedParameters,
    ) -> None:
        self._sums = {stage: item for stage, item in sums.items() if item is not None}
        self._reduce_scatters, self._ties = dict(reduce_scatters), ties
        self._steps = 0  # counted here, so that ranks without encoded sums have the same count

    def count_step(self) -> None:
        """Count a step for ``raw_steps`` of the policy."""
        self._set_steps(self._steps + 1)

    def _set_steps(self, steps: int) -> None:
        self._steps = self._ties.steps = steps
        for item in self._sums.values():
            item.steps = steps

    def state_dict(self) -> dict[str, Any]:
        """The steps taken, and this rank's coding errors by stage and name of the parameter or FSDP module."""
        errors = {
            f"{stage}.{name}": error
            for stage, item in self._sums.items()
            if item.errors is not None
            for name, error in item.errors.state_dict().items()
        }
        kept = {key: item.state_dict().get("errors") for key, item in self._reduce_scatters.items()}
        errors |= {key: of_scatter for key, of_scatter in kept.items() if of_scatter is not None}
        return {"steps": self._steps, "errors": errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank. Errors of other stages are ignored."""
        self._set_steps(state["steps"])
        for stage, item in self._sums.items():
            prefix = f"{stage}."
            own = {key: error for key, error in state["errors"].items() if key.startswith(prefix)}
            item.load_errors({key.removeprefix(prefix): error for key, error in own.items()})
        for key, reduce_scatter in self._reduce_scatters.items():
            reduce_scatter.load_state_dict({"errors": state["errors"][key]} if key in state["errors"] else {})


class _ReplicaSubset:
    """Some of the replicas. They exchange rows over the connections of all replicas."""

    def __init__(self, members: Sequence[int], own: int, num_replicas: int, exchange: ExchangeRows) -> None:
        self.size, self.index = len(members), members.index(own)
        self._rows = [int(position in members) for position in range(num_replicas)]
        self._exchange = exchange

    def exchange(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> Wait:
        received = torch.empty_like(rows) if out is None else out
        self._exchange(received, rows, self._rows)
        return lambda: received

    def all_gather(self, rows: torch.Tensor) -> Wait:
        return self.exchange(rows.reshape(1, -1).repeat(self.size, 1))


def compress_sums(
    policy: Policy, topology: Topology, replicas: Sequence[int], rank: int, module: torch.nn.Module
) -> CompressedSums | None:
    """The encoded sums of gradients over the replicas of a stage; None if the policy does not compress them.

    Args:
        policy: the codec is ``policy.dp``.
        topology: hosts of the ranks.
        replicas: ranks of the replicas.
        rank: this rank.
        module: module of the stage, under DDP.
    """
    if policy.dp is None:
        return None
    sizes = {name: parameter.numel() for name, parameter in module.module.named_parameters()}  # type: ignore[union-attr, operator]
    hosts, feedback = [topology.host_of_rank[replica] for replica in replicas], "dp" in policy.feedback
    return CompressedSums(policy.dp, hosts, replicas.index(rank), sizes, feedback=feedback, raw_steps=policy.raw_steps)


def describe_modules(
    modules: Mapping[int, torch.nn.Module], schedule: Schedule, tied_stages: Collection[int]
) -> dict[str, list[int]]:
    """For each kind of parallelism, the stages of this rank that have it. Tied stages count as having "dp"."""
    stages_of: dict[str, list[int]] = {"dp": [], "zero": [], "tp": [], "torch tp": [], "pp": []}
    if len(schedule.rank_actions) > 1:
        stages_of["pp"] = list(modules)
    for stage, module in sorted(modules.items()):
        if isinstance(module, DistributedDataParallel) or stage in tied_stages:
            stages_of["dp"].append(stage)
        if is_fsdp(module):
            stages_of["zero"].append(stage)
        if any(map(_is_cut, module.modules())):
            stages_of["tp"].append(stage)
        elif any("tp" in _mesh_dims(parameter) for parameter in module.parameters()):
            stages_of["torch tp"].append(stage)
    return stages_of


def _is_cut(module: torch.nn.Module) -> bool:
    """Whether :func:`reshard.parallel.parallelize` has returned the module."""
    return hasattr(module, "reshard_grid")


def _mesh_dims(parameter: Any) -> tuple[str, ...]:
    return tuple(getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ())


def check_policy(policy: Policy, described: Sequence[Mapping[str, Sequence[int]]], device: str) -> None:
    """Raise ArgumentError if the policy names a dimension that the stages do not have, on all ranks alike.

    Args:
        described: what :func:`describe_modules` found on each rank.
        device: device type of the stages.
    """
    stages = {kind: sorted({stage for item in described for stage in item[kind]}) for kind in described[0]}
    if policy.dimensions and device != "cpu":
        raise ArgumentError(f"engines code CPU tensors only, so compression={policy} cannot be used on {device}")
    lacks = {
        "pp": "all stages are on the same ranks",
        "dp": "no stage has replicas under DDP or a tied parameter, whose gradients the engine sums",
        "zero": "no stage is sharded by fully_shard",
        "tp": "no stage is on a grid of reshard.parallel",
    }
    for dimension in policy.dimensions:
        if dimension == "tp" and stages["torch tp"]:
            raise ArgumentError(
                f"compression={policy} has tp=, but torch's own collectives join the tensor-parallel ranks of stages "
                f"{stages['torch tp']}; only stages on a grid of reshard.parallel can be encoded"
            )
        if dimension in lacks and not stages[dimension]:
            raise ArgumentError(f"compression={policy} has {dimension}=, but {lacks[dimension]}")
        if dimension == "optimizer":
            raise ArgumentError(
                f"compression={policy} has optimizer=, but an engine moves no optimizer state; pass the policy to "
                "reshard.parallel.relayout"
            )


def measure_codecs(policy: Policy, topology: Topology) -> dict[str, tuple[float, float]]:
    """Measure this rank's rates for the codecs between stages, if the topology has no rates for them."""
    known = {rate.codec for rate in topology.codec_rates}
    wanted = set(policy.pair("pp")) - known - {None}
    return {name: measure_rates(parse_codec(name)) for name in sorted(map(str, wanted))}


def add_codec_rates(topology: Topology, measured: Mapping[int, Mapping[str, Sequence[float]]]) -> Topology:
    """The topology with the rates of the slowest rank. ``measured``: results of :func:`measure_codecs`, by rank."""
    names = next(iter(measured.values()))
    slowest = {name: map(min, zip(*(item[name] for item in measured.values()), strict=True)) for name in names}
    rates = tuple(CodecRate(name, *pair) for name, pair in slowest.items())
    return replace(topology, codec_rates=(*topology.codec_rates, *rates))


def compress_pipelines(
    policy: Policy,
    schedule: Schedule,
    pipelines: tuple[Pipeline, ...],
    topology: Topology,
    strategy: str | Strategy | None,
) -> tuple[Pipeline, ...]:
    """Set the codecs of the policy on edges where they shorten the simulated iteration of the first pipeline."""
    if policy.pp is None:
        return pipelines
    price = functools.partial(price_edge, topology=topology, strategy=strategy)
    choice = choose_codecs(pipelines[0], lambda _: schedule, price, policy.pair("pp"), is_forced=policy.force_pp)
    return tuple(compress_edges(pipeline, choice.codecs) for pipeline in pipelines)


def code_modules(modules: Mapping[int, torch.nn.Module], policy: Policy) -> ArgumentError | None:
    """Replace the collectives of FSDP modules and grids of this rank by encoded ones, as the policy asks.

    Returns:
        An error if FSDP shards parameters that the codec cannot encode; otherwise None.
    """
    if policy.tp is not None:
        for grid in (part.reshard_grid for module in modules.values() for part in module.modules() if _is_cut(part)):
            grid.set_codec(policy.tp)  # type: ignore[union-attr, operator]
    all_gathers, reduce_scatters = policy.pair("zero")
    for stage, module in modules.items():
        if policy.zero is None or not is_fsdp(module):
            continue
        for name, parameter in module.named_parameters():
            if dtype_name(parameter.dtype) not in CODED_DTYPES:
                return ArgumentError(
                    f"compression has zero=, but {name!r} of stage {stage} is {dtype_name(parameter.dtype)}; codecs "
                    f"code {', '.join(CODED_DTYPES)}"
                )
        for name, submodule in module.named_modules():
            try:
                _encode_collectives(submodule, all_gathers, reduce_scatters, "zero" in policy.feedback)
            except ValueError:  # torch would not know which mesh is meant
                what = repr(name) if name else "the module"
                return ArgumentError(
                    f"compression has zero=, but {what} of stage {stage} has parameters on several meshes; wrap the "
                    "modules with parameters of each mesh by calls of fully_shard"
                )
    return None


def _encode_collectives(module: Any, all_gathers: str | None, reduce_scatters: str | None, feedback: bool) -> None:
    """Replace the collectives of a module, if FSDP shards it, by encoded ones; None keeps FSDP's own."""
    if all_gathers is not None and hasattr(module, "set_custom_all_gather"):
        module.set_custom_all_gather(CompressedAllGather(all_gathers))
    if reduce_scatters is not None and hasattr(module, "set_custom_reduce_scatter"):
        reduce_scatter = CompressedReduceScatter(reduce_scatters, feedback=feedback)
        module.set_custom_reduce_scatter(reduce_scatter)
        module.reshard_reduce_scatter = reduce_scatter


def find_reduce_scatters(modules: Mapping[int, torch.nn.Module]) -> dict[str, CompressedReduceScatter]:
    """The encoded reduce-scatters of FSDP modules, by stage and name of the module."""
    return {
        f"{stage}.reduce-scatter of {name}": submodule.reshard_reduce_scatter  # type: ignore[misc]
        for stage, module in modules.items()
        for name, submodule in module.named_modules()
        if hasattr(submodule, "reshard_reduce_scatter")
    }
