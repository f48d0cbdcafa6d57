"""Find the layers of a torch model, with the code that cuts models into stages."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from reshard.arguments import check_arguments
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError

from ... import torch_compat
from ...model_stages.partition.batches import BatchOutline, name_batch, outline_batch
from ...model_stages.partition.blocks import Block, BlockStage
from ...model_stages.partition.stage_graph import FakeModel, NeedsDataError, StageGraph
from ...model_stages.partition.traced_cut import UntraceableError
from ...model_stages.pipe import Pipe
from ...model_stages.placement import Placement
from ...model_stages.profile import SavedBytes, count_saved_bytes
from ...model_stages.tensor_parallel import find_plan
from ..inputs.layer_graph import Layer, LayerGraph, Tensor
from .grid_sizes import SizeRecorder, find_grid_refusal


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of attention: two products for each pair of positions."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


#: Operations that torch's counter does not know.
_ATTENTION = {torch_compat.FLASH_ATTENTION_ON_CPU: _attention_flops}


@dataclass(frozen=True)
class TracedModel:
    """A torch model as layers.

    Attributes:
        graph: the layers and the tensors between them.
        pipe: the model cut before every layer.
        outline: outline of a batch.
        stage_graph: what the layers exchange.
        autocast: dtype of ``torch.autocast``; None for that of the parameters.
    """

    graph: LayerGraph
    pipe: Pipe
    outline: BatchOutline
    stage_graph: StageGraph
    autocast: torch.dtype | None = None


@check_arguments(max_tp=(1, 2**22))
def trace_module(
    model: torch.nn.Module,
    example: Any,
    cuts: str | Sequence[str] = (),
    *,
    loss: Callable[..., Any] | None = None,
    blocks: Callable[[Any], Sequence[Block]] | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    max_tp: int = 1,
    name: str | None = None,
    autocast: torch.dtype | None = None,
) -> TracedModel:
    """Divide a model into layers.

    A model whose forward can be cut nowhere is one layer, which has the name of its class: pass no ``cuts``. A model is
    also one layer if its forward cannot be traced, or if a layer computes something that depends on data. A warning
    says why. The work of such a model is counted on a copy with values.

    Args:
        model: the whole model, with or without values; it is not changed.
        example: a batch, as for :meth:`reshard.scheduler.Pipe.compile`.
        cuts: paths of the modules that begin the second and each further layer, in the order of the forward. They may
            contain the wildcards of :mod:`fnmatch`, such as ``"layers.*"`` and ``"layers.[1-3]"``.
        loss, blocks, tp_plan: as for :class:`reshard.scheduler.Pipe`.
        max_tp: largest tensor-parallel degree that the plan allows, for example the number of heads.
        name: name of the graph; default: the class of the model.
        autocast: as for :class:`reshard.scheduler.Pipe`.

    Raises:
        ArgumentError: no module has such a path, or the model cannot be cut there. The text names the module.
    """
    paths = _find_paths(model, [cuts] if isinstance(cuts, str) else list(cuts))
    options = {"loss": loss, "blocks": blocks, "autocast": autocast}
    try:
        pipe, outline, stage_graph = _cut(model, example, paths, options)
    except (UntraceableError, NeedsDataError) as error:
        warnings.warn(f"{type(model).__name__} is one layer, which no stage divides: {error}", stacklevel=2)
        paths = []
        pipe, outline, stage_graph = _cut(model, example, paths, options)
    tensors = tuple(
        Tensor(
            value.name,
            _samples_first(value.shape, value.sample_dim),
            value.dtype,
            value.writer,
            value.readers,
            value.has_gradient,
        )
        for value in stage_graph.values
    )
    stages = pipe.cut(outline.names).build(model)
    if any(isinstance(stage, BlockStage) for stage in stages):
        for number, stage in enumerate(stages):
            stage.outputs = tuple(value.name for value in stage_graph.values if value.writer == number)
    plan = find_plan(Placement(tp=2, tp_plan=tp_plan), model, None, 0) if max_tp > 1 else {}
    layers = []
    for number, (stage, path) in enumerate(zip(stages, ["", *paths], strict=True)):
        label = path or ("first" if paths else type(model).__name__)
        received = [tensor for tensor in tensors if number in tensor.readers]
        work, recorder = _measure_work(stage, outline, stage_graph, number, autocast, plan, path)
        layer = _make_layer(label, stage, received, work, plan, max_tp)
        layer = replace(layer, key=_class_key(stage, layer, received, outline, stage_graph, number))
        layers.append(_with_grid(layer, stage, stage_graph, number, recorder))
    dtype = dtype_name(autocast or next((p.dtype for p in model.parameters()), torch.float32))
    graph = LayerGraph(tuple(layers), tensors, dtype, name or type(model).__name__, _find_ties(stages))
    return TracedModel(graph, pipe, outline, stage_graph, autocast)


def _find_ties(stages: Sequence[torch.nn.Module]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The layers that share parameters, and the number of shared parameters."""
    owners: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            owners.setdefault(id(parameter), []).append(number)
            sizes[id(parameter)] = parameter.numel()
    shared: dict[tuple[int, ...], int] = {}
    for key, layers in owners.items():
        if len(layers) > 1:
            shared[tuple(layers)] = shared.get(tuple(layers), 0) + sizes[key]
    return tuple(sorted(shared.items()))


def _cut(
    model: torch.nn.Module, example: Any, paths: Sequence[str], options: Mapping[str, Any]
) -> tuple[Pipe, BatchOutline, StageGraph]:
    """A model cut before some modules, the outline of a batch, and what the layers exchange."""
    pipe = Pipe(model, paths, stages=[Placement()] * (len(paths) + 1), **options)
    outline = outline_batch(name_batch(example, pipe.input_names))
    fake_model = FakeModel(model, pipe.cut(outline.names), autocast=options["autocast"])
    return pipe, outline, fake_model.find(outline)


def _find_paths(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """The module paths that the patterns name, in the order of the model, without the first module of a model."""
    names = [name for name, _ in model.named_modules() if name]
    paths: list[str] = []
    for pattern in patterns:
        parts = pattern.count(".")
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern) and name.count(".") == parts]
        if not matches:
            more = ", ..." if len(names) > 12 else ""
            raise ArgumentError(
                f"{type(model).__name__} has no module {pattern!r}; it has {', '.join(names[:12])}{more}; "
                "wildcards are those of fnmatch, such as layers.* or layers.[1-3]"
            )
        paths += [match for match in matches if match not in paths]
    return paths


def _samples_first(shape: tuple[int, ...], sample_dim: int | None) -> tuple[int, ...]:
    """The shape of one sample, with samples in the first dim. A tensor without samples counts for each sample."""
    if sample_dim is None:
        return (1, *shape)
    return (shape[sample_dim], *shape[:sample_dim], *shape[sample_dim + 1 :])


def layer_inputs(
    outline: BatchOutline, graph: StageGraph, number: int, num_samples: int, device: str
) -> dict[str, Any]:
    """Values that a layer reads for ``num_samples`` samples: zeros for integers, small numbers otherwise."""
    made: dict[str, Any] = {}
    for entry in outline.entries:
        if entry.name in graph.inputs[number]:
            shape = (num_samples, *entry.shape) if entry.is_divided else entry.shape
            made[entry.name] = _fill(shape, getattr(torch, entry.dtype), device) if entry.dtype else entry.value
    for value in graph.values:
        if number in value.readers:
            tensor = _fill(value.shape_for(num_samples), getattr(torch, value.dtype), device)
            made[value.name] = tensor.requires_grad_(value.has_gradient)
    return made


def _fill(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full(tuple(shape), 0.01, dtype=dtype, device=device)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def run_layer(module: Any, inputs: Mapping[str, Any], autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """Run a layer's forward. Returns its outputs that have a gradient."""
    device = next((item.device.type for item in inputs.values() if isinstance(item, torch.Tensor)), "cpu")
    with torch.autocast(device, autocast) if autocast is not None else contextlib.nullcontext():
        output = module(**{name: value for name, value in inputs.items() if name in _parameters(module, inputs)})
    values: list[Any] = []
    if isinstance(output, Mapping):
        values = list(output.values())
    else:
        values = [output.loss, *(output.tensors or {}).values()]
    return [item for item in values if isinstance(item, torch.Tensor) and item.requires_grad]


def _parameters(module: Any, inputs: Mapping[str, Any]) -> set[str]:
    if isinstance(module, BlockStage):
        return set(inputs)
    return {node.target for node in module.graph.nodes if node.op == "placeholder"}


def _measure_work(
    module: Any,
    outline: BatchOutline,
    graph: StageGraph,
    number: int,
    autocast: torch.dtype | None,
    plan: Mapping[str, Any],
    path: str,
) -> tuple[tuple[float, ...], SizeRecorder]:
    """Operations and saved bytes of the forward of one sample, and the saved bytes that tensor parallelism divides.

    Counted on tensors without data, or on a copy with values if the layer needs data. Tensor
    parallelism divides what is saved between a column-wise module and the end of the next row-wise one. The last number
    counts what is saved in the module at ``path``, which recomputation computes again.
    """

    def make_inputs(num_samples: int) -> dict[str, Any]:
        return layer_inputs(outline, graph, number, num_samples, "cpu")

    try:
        with torch_compat.fake_mode():
            return _count_work(_copy_onto(module, _without_data), make_inputs, autocast, plan, path)
    except torch_compat.NEEDS_DATA:
        with torch_compat.keep_rng("cpu"):
            return _count_work(_copy_onto(module, _with_values), make_inputs, autocast, plan, path)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU; of one on the meta device, a tensor of small numbers."""
    if tensor.is_meta:
        return _fill(tensor.shape, tensor.dtype, "cpu")
    return tensor.detach().to("cpu", copy=True)


def _copy_onto(module: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a module with other parameters and buffers."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        made = make(tensor)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copy.deepcopy(module, memo)


def _count_work(
    module: Any,
    make_inputs: Callable[[int], dict[str, Any]],
    autocast: torch.dtype | None,
    plan: Mapping[str, Any],
    path: str,
) -> tuple[tuple[float, ...], SizeRecorder]:
    """See :func:`_measure_work`."""
    counts = []
    for num_samples in (1, 2):
        inputs = make_inputs(num_samples)
        with (
            FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter,
            SizeRecorder(num_samples).on(module) as recorder,
            count_saved_bytes(torch_compat.storage_key) as counted,
        ):
            hooks = list(_mark_divided(module, plan, counted))
            run_layer(module, inputs, autocast)
        for hook in hooks:
            hook.remove()
        inner = dict(module.named_modules()).get(path)
        within = SavedBytes()
        if inner is not None:
            with count_saved_bytes(torch_compat.storage_key) as within:
                hooks = list(_count_within(inner, within))
                run_layer(module, inputs, autocast)
            for hook in hooks:
                hook.remove()
        counts.append((counter.get_total_flops(), counted.nbytes, counted.marked_bytes, within.marked_bytes))
    return tuple(max(0.0, float(two - item)) for item, two in zip(*counts, strict=True)), recorder


def _with_grid(layer: Layer, module: Any, graph: StageGraph, number: int, recorder: SizeRecorder) -> Layer:
    """The layer with the work that a grid of :mod:`reshard.parallel` would divide, or the reason why it cannot."""
    values = [value for value in graph.values if number in (value.writer, *value.readers)]
    refusal = find_grid_refusal(module, values)
    if refusal is not None:
        return replace(layer, grid_refusal=refusal)
    widths = [value.shape[-1] for value in values if value.has_gradient]
    return replace(layer, grid_sizes=recorder.sizes(min(widths, default=1)))


def _count_within(module: Any, counted: SavedBytes) -> Iterator[Any]:
    """Hooks that mark what is saved inside a module."""

    def begin(*_: Any) -> None:
        counted.is_marked = True

    def end(*_: Any) -> None:
        counted.is_marked = False

    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end)


def _mark_divided(module: Any, plan: Mapping[str, Any], counted: SavedBytes) -> Iterator[Any]:
    """Hooks that mark what is saved between a column-wise module and the end of the next row-wise one."""
    for name, inner in module.named_modules():
        style = _find_style(name, plan)
        if style is not None:

            def mark(*_: Any, is_marked: bool = type(style).__name__ == "ColwiseParallel") -> None:
                counted.is_marked = is_marked

            yield inner.register_forward_hook(mark)


def _find_style(name: str, plan: Mapping[str, Any]) -> Any:
    return next((style for pattern, style in plan.items() if fnmatch.fnmatch(name, pattern)), None)


def _make_layer(
    label: str,
    module: Any,
    received: Sequence[Tensor],
    work: tuple[float, ...],
    plan: Mapping[str, Any],
    max_tp: int,
) -> Layer:
    """A layer without the key of its class."""
    flops, saved, divided_saved, within = work
    params = {id(parameter): parameter for parameter in module.parameters()}
    divided, sums = 0, 0
    for name, inner in module.named_modules():
        style = _find_style(name, plan)
        if style is not None:
            divided += sum(parameter.numel() for parameter in inner.parameters(recurse=False))
            sums += type(style).__name__ == "RowwiseParallel"
    inputs = float(sum(tensor.sample_bytes for tensor in received))
    layer = Layer(
        label,
        "",
        flops,
        sum(parameter.numel() for parameter in params.values()),
        saved,
        min(saved, saved - within + inputs * bool(within)),  # only the module of the layer is computed again
    )
    if sums:
        total = layer.num_params
        layer = replace(
            layer,
            tp_limit=max_tp,
            tp_params=min(divided, total),
            tp_saved_bytes=min(divided_saved, saved),
            tp_all_reduces=sums,
            tp_all_reduce_bytes=inputs,
        )
    return layer


def _class_key(
    module: Any, layer: Layer, received: Sequence[Tensor], outline: BatchOutline, graph: StageGraph, number: int
) -> str:
    """A name of the layer's class: shapes, operations and dtypes, whatever the names of its parts."""
    kinds = [(type(submodule).__name__, submodule.extra_repr()) for submodule in module.modules()]
    shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in module.parameters()]
    inputs = sorted((tensor.shape, tensor.dtype) for tensor in received)
    batch = [(e.dtype, e.shape) for e in outline.entries if e.name in graph.inputs[number]]
    written = [(v.shape, v.dtype) for v in graph.values if v.writer == number]
    whole = module.view if isinstance(module, BlockStage) else module
    traced = module.graph.nodes if hasattr(module, "graph") else ()
    nodes = [getattr(node.target, "__name__", "") for node in traced if node.op == "call_function"]
    text = repr((kinds[1:], shapes, inputs, batch, written, nodes, layer.forward_flops, layer.saved_bytes))
    kind = "layer" if not layer.name else type(dict(module.named_modules()).get(layer.name, whole)).__name__
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:10]}"
