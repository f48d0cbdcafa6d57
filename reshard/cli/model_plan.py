"""``reshard plan --model``: all tensors of a model of transformers, from one combination of parallelism to another."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.cli.model_shapes import BY_COLUMNS, BY_ROWS, ModelShapes, ModelTensor, layer_of, read_model
from reshard.cli.progress_bars import show_elapsed
from reshard.cost import CostReport
from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of, did_you_mean, format_bytes, format_names
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.sharding import Layout, Mesh, Strided, TensorSpec, axis_of
from reshard.topology import Topology

#: Parallel dimensions, major first: consecutive ranks differ in tp first.
DIMENSIONS = ("pp", "dp", "fsdp", "ep", "tp")
#: Ranks of a host, unless a topology is given.
DEVICES = 8


def read_sizes(text: str, flag: str) -> dict[str, int]:
    """``{dimension: size}`` of a text such as ``fsdp=32`` or ``tp=8,dp=4``.

    Raises:
        ArgumentError: the text is not of this form, or names a dimension twice or one that does not exist.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not text:
            raise ArgumentError(f"--model also needs {flag}, such as {flag} fsdp=32 or {flag} tp=8,dp=4")
        if name not in DIMENSIONS:
            raise ArgumentError(
                f"{flag} is {brief(text)}; with --model it is such as fsdp=32 or tp=8,dp=4, of the dimensions "
                f"{', '.join(DIMENSIONS)}{did_you_mean(name, DIMENSIONS)}"
            )
        if not (size.isascii() and size.isdigit() and 0 < int(size[:10]) < 2**20) or name in sizes:
            raise ArgumentError(f"{flag} is {brief(text)}; each dimension needs one positive size, such as {name}=8")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in DIMENSIONS}


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a whole model.

    Attributes:
        model: its tensors.
        plan: the plan, with the tensors in the same order.
        planning_seconds: how long planning took.
    """

    model: ModelShapes
    plan: Plan
    planning_seconds: float


class Parallelism:
    """The layouts of a model's tensors on consecutive ranks.

    FSDP shards the first dim of each tensor, after tensor parallelism. Experts are sharded by ep if it is above 1, else
    by tp. Heads of keys and values are copied where tp is larger than their number.

    Args:
        model: the tensors.
        sizes: ``{dimension: size}`` of all :data:`DIMENSIONS`.
        flag: the option that gave them, for errors.
        first_rank: the lowest of the ranks.

    Raises:
        ArgumentError: tp does not divide the heads, or the model has no plan for tp or no experts.
    """

    def __init__(self, model: ModelShapes, sizes: Mapping[str, int], flag: str, first_rank: int) -> None:
        tp, heads, kv_heads = sizes["tp"], model.num_heads, model.num_kv_heads
        if tp > 1 and not any(tensor.tp_style for tensor in model.tensors):
            raise ArgumentError(f"{flag} has tp={tp}, but transformers has no tensor-parallel plan for {model.name}")
        if sizes["ep"] > 1 and not any(tensor.is_expert for tensor in model.tensors):
            raise ArgumentError(f"{flag} has ep={sizes['ep']}, but {model.name} has no experts")
        if heads and heads % tp:
            raise ArgumentError(
                f"{flag} has tp={tp}, which does not divide the {count_of(heads, 'attention head')} of {model.name}"
            )
        self._kv = math.gcd(tp, kv_heads) if kv_heads else tp
        if kv_heads and self._kv not in (tp, kv_heads):
            raise ArgumentError(
                f"{flag} has tp={tp}; neither it nor the {kv_heads} heads of keys and values of {model.name} divide "
                "the other"
            )
        self._sizes = dict(sizes)
        self.first_rank, self.num_ranks = first_rank, math.prod(sizes.values())
        layers = [layer for layer in map(layer_of, model.tensors) if layer is not None]
        self._num_layers = 1 + max((number for _, number in layers), default=0)
        prefixes = {prefix for prefix, _ in layers}
        if sizes["pp"] > 1 and len(prefixes) > 1:
            raise ArgumentError(
                f"{flag} has pp={sizes['pp']}, but {model.name} has several stacks of layers, "
                f"{format_names(prefixes)}; stages of such models are not known"
            )
        if sizes["pp"] > self._num_layers:
            raise ArgumentError(
                f"{flag} has pp={sizes['pp']}, but {model.name} has {count_of(self._num_layers, 'layer')}"
            )
        self._model = model

    def layouts(self) -> dict[str, Layout]:
        """The layout of each tensor, by name."""
        layout_of: dict[str, Layout] = {}
        stage = 0
        for tensor in self._model.tensors:
            layer = layer_of(tensor)
            if layer is not None:
                stage = layer[1] * self._sizes["pp"] // self._num_layers
            layout_of[tensor.name] = self._layout_of(tensor, stage)
        return layout_of

    def _layout_of(self, tensor: ModelTensor, stage: int) -> Layout:
        sizes, shape = self._sizes, tensor.shape
        num_ranks = self.num_ranks // sizes["pp"]
        axes = {name: sizes[name] for name in ("dp", "fsdp", "ep")} | {"kv": self._kv, "tp": sizes["tp"] // self._kv}
        first = self.first_rank + stage * num_ranks
        mesh = Mesh(range(first, first + num_ranks), axes)
        cuts: list[list[str | Strided]] = [[] for _ in shape]
        is_kv = re.search(r"\.[kv]_proj\.", tensor.name) is not None
        tp_axes = ["kv"] if is_kv else ["kv", "tp"]
        is_packed = tensor.tp_style.startswith("packed_") and len(shape) > 1  # gate and up, each sharded by itself
        steps = [Strided(axis, 2) if is_packed else axis for axis in tp_axes]
        if tensor.is_expert and sizes["ep"] > 1:
            cuts[0].append("ep")
        elif tensor.tp_style in BY_ROWS and shape:
            cuts[max(len(shape) - 2, 0)] += steps
        elif tensor.tp_style in BY_COLUMNS and len(shape) > 1:
            cuts[-1] += steps
        if shape and tensor.is_parameter:
            cuts[0].append("fsdp")
        return Layout(mesh, tuple(map(tuple, cuts)))


def hosts_of_eight(num_ranks: int) -> Topology:
    """Hosts of eight ranks, each with one NIC of 10 Gbit/s."""
    return Topology.uniform([rank // DEVICES for rank in range(num_ranks)])


def plan_model(
    source: str, src: str, dst: str, topology: Callable[[int], Topology], dtype: str | None = None, **options: Any
) -> ModelPlan:
    """Plan a whole model.

    Args:
        source: see :func:`read_model`.
        src: parallelism of the source, such as ``fsdp=32``.
        dst: parallelism of the destination, on the ranks that follow.
        topology: makes the topology of a number of ranks.
        dtype: dtype of the parameters; None: the dtype in the config.
        **options: further arguments of :func:`reshard.make_plan`.
    """
    src_sizes, dst_sizes = read_sizes(src, "--src"), read_sizes(dst, "--dst")  # before transformers is imported
    model = read_model(source, dtype)
    source_side = Parallelism(model, src_sizes, "--src", 0)
    target_side = Parallelism(model, dst_sizes, "--dst", source_side.num_ranks)
    network = topology(source_side.num_ranks + target_side.num_ranks)
    begun = time.perf_counter()
    with show_elapsed(f"planning {count_of(len(model.tensors), 'tensor')}"):
        plan = make_plan(
            source_side.layouts(),
            target_side.layouts(),
            {tensor.name: tensor.shape for tensor in model.tensors},
            {tensor.name: tensor.dtype for tensor in model.tensors},
            topology=network,
            **options,
        )
    return ModelPlan(model, plan, time.perf_counter() - begun)


def describe_move(planned: ModelPlan, src: str, dst: str) -> str:
    """The model, its size, and its parallelism on both sides, such as ``fsdp=32``."""
    return f"{planned.model.name} ({_describe_size(planned.plan)}) from {src} to {dst}"


def _describe_size(plan: Plan) -> str:
    return f"{count_of(len(plan.tensors), 'tensor')}, {format_bytes(sum(map(_nbytes, plan.tensors)))}"


def describe_model_plan(planned: ModelPlan, *, lists_classes: bool = True) -> str:
    """A summary of the plan of a model.

    Args:
        planned: the plan.
        lists_classes: whether to list classes of tensors, too: tensors of equal shape, dtype and layouts.
    """
    plan, model = planned.plan, planned.model
    across, inside, copied = plan.bytes_moved()
    shards = [format_bytes(_max_shard_bytes(plan, side)) for side in ("src", "dst")]
    return "\n".join(
        [
            f"model        {model.name}: {_describe_size(plan)}",
            f"topology     {plan.topology.describe()}",
            f"memory       at most {shards[0]} on a source rank, {shards[1]} on a destination rank, and "
            f"{format_bytes(plan.staging_bytes)} of staging",
            f"bytes        {format_bytes(across)} between hosts, {format_bytes(inside)} inside hosts, "
            f"{format_bytes(copied)} copied within ranks",
            f"messages     {plan.num_messages:,} by {plan.strategy}, planned in {planned.planning_seconds:.2f} s",
            str(CostReport(plan)),
            *(["", *_list_classes(planned)] if lists_classes else []),
        ]
    )


def _list_classes(planned: ModelPlan) -> list[str]:
    plan, model = planned.plan, planned.model
    classes: dict[tuple[str, str, str], list[int]] = {}
    for number, (spec, tensor) in enumerate(zip(plan.tensors, model.tensors, strict=True)):
        shape = f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"
        classes.setdefault((shape, _describe_layout(spec.src), _describe_layout(spec.dst)), []).append(number)
    lines = [f"{'tensors':>7}  {'bytes':>10}  {'shape':<28} {'source':<16} {'destination':<16} first"]
    for (shape, src, dst), numbers in classes.items():
        nbytes = format_bytes(sum(_nbytes(plan.tensors[number]) for number in numbers))
        first = model.tensors[numbers[0]].name
        lines.append(f"{len(numbers):>7}  {nbytes:>10}  {shape:<28} {src:<16} {dst:<16} {first}")
    return lines


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.itemsize


def _describe_layout(layout: Any) -> str:
    """The axes of more than one rank that shard each dim, such as ``(fsdp)`` or ``(-, tp)``."""
    size_of = dict(zip(layout.mesh.axes, layout.mesh.sizes, strict=True))
    dims = []
    for dim in layout.spec:
        axes = [axis for axis in map(axis_of, dim) if size_of[axis] > 1]
        dims.append("+".join(dict.fromkeys("tp" if axis == "kv" else axis for axis in axes)) or "-")
    while dims and dims[-1] == "-":
        dims.pop()
    return f"({', '.join(dims)})" if dims else "replicated"


def _max_shard_bytes(plan: Plan, side: str) -> int:
    """The largest number of bytes that a rank holds on one side."""
    held: dict[int, int] = {}
    for spec in plan.tensors:
        layout = getattr(spec, side)
        for rank in layout.ranks:
            held[rank] = held.get(rank, 0) + math.prod(layout.local_shape(spec.shape, rank)) * spec.itemsize
    return max(held.values())
