"""The graph of stages: which tensors each edge carries, found by a run on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.sharding import Layout, Mesh, TensorSpec

from ... import torch_compat
from ...pipeline import Edge
from .batches import BatchOutline
from .blocks import BlockStage, copy_stage
from .stage_mesh import layout_of_tensor, num_sample_shards


class Cut(Protocol):
    """A model that is cut into stages."""

    num_stages: int
    inputs: frozenset[str]  # names of the values that a batch may have

    def build(self, root: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """The modules of all stages, which share parameters and submodules with ``root``."""


@dataclass(frozen=True)
class Value:
    """A tensor that one stage writes and later stages read.

    Attributes:
        name, dtype: name and dtype of the tensor.
        shape: shape for a batch of one sample.
        sample_dim: dim whose size is proportional to the samples of the batch; None: all replicas have the whole
            tensor.
        writer: stage that writes the tensor.
        readers: stages that read the tensor, ascending.
        has_gradient: whether the readers return a gradient.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sample_dim: int | None
    writer: int
    readers: tuple[int, ...]
    has_gradient: bool

    def shape_for(self, num_samples: int) -> tuple[int, ...]:
        """The shape for a batch of ``num_samples`` samples."""
        return tuple(size * num_samples if dim == self.sample_dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class StageGraph:
    """The tensors that the stages of a model exchange, and the inputs that they read, for batches of one outline.

    Attributes:
        values: tensors that cross from one stage to others.
        inputs: for each stage, the names of the inputs of the batch that it reads.
    """

    values: tuple[Value, ...]
    inputs: tuple[tuple[str, ...], ...]

    def edges(self, num_samples: int, meshes: Sequence[Mesh]) -> tuple[Edge, ...]:
        """Edges without costs, for a microbatch of ``num_samples`` samples.

        If several stages read a tensor, the writer sends it once, and each reader sends it on to the next reader.

        Raises:
            ArgumentError: a tensor cannot be divided over the replicas of a stage.
        """
        tensors: dict[tuple[int, int], list[TensorSpec]] = {}
        without_gradient: dict[tuple[int, int], set[str]] = {}
        passed_on: dict[tuple[int, int], set[str]] = {}
        for value in self.values:
            _check_gradient(value, meshes)
            hops = list(zip((value.writer, *value.readers), value.readers, strict=False))
            for src, dst in hops:
                layouts = [_layout(value, meshes[stage], num_samples) for stage in (src, dst)]
                spec = TensorSpec(value.shape_for(num_samples), value.dtype, layouts[0], layouts[1], value.name)
                tensors.setdefault((src, dst), []).append(spec)
                if not value.has_gradient:
                    without_gradient.setdefault((src, dst), set()).add(value.name)
                if src != value.writer:
                    passed_on.setdefault((src, dst), set()).add(value.name)
        return tuple(
            Edge(
                *ends,
                tensors=tuple(specs),
                without_gradient=frozenset(without_gradient.get(ends, ())),
                passed_on=frozenset(passed_on.get(ends, ())),
            )
            for ends, specs in sorted(tensors.items())
        )


def _check_gradient(value: Value, meshes: Sequence[Mesh]) -> None:
    """Refuse a value without samples whose gradient would have to be summed over replicas."""
    replicas = {stage: num_sample_shards(meshes[stage]) for stage in (value.writer, *value.readers)}
    if value.sample_dim is None and value.has_gradient and max(replicas.values()) > 1:
        stage = max(replicas, key=lambda number: replicas[number])
        raise ArgumentError(
            f"stage {value.writer} sends {value.name!r} of shape {list(value.shape)}, which has a gradient but no "
            f"dim of samples, and stage {stage} has {replicas[stage]} replicas; expand it to the samples before the "
            "cut, cut elsewhere, or use dp=1"
        )


def _layout(value: Value, mesh: Mesh, num_samples: int) -> Layout:
    replicas = num_sample_shards(mesh)
    per_sample = 1 if value.sample_dim is None else value.shape[value.sample_dim]
    if per_sample > 1 and num_samples % replicas:
        raise ArgumentError(
            f"{value.name!r} has {per_sample} entries of dim {value.sample_dim} for each sample, so a microbatch of "
            f"{num_samples} samples cannot be divided over {replicas} replicas; use a multiple of {replicas} samples"
        )
    return layout_of_tensor(mesh, len(value.shape), value.sample_dim, has_features=value.has_gradient)


class NeedsDataError(ArgumentError):
    """A stage computes something that depends on data, such as a branch on the values of a tensor."""


class FakeModel:
    """A copy of a model with fake tensors, which finds the stage graph for any outline of a batch.

    Args:
        model: the whole model, before it is parallelized; it is not changed.
        cut: the cut of the model.
        device_type: device type that the stages will run on.
        autocast: dtype of autocast in the stages; None: no autocast.
    """

    def __init__(
        self, model: torch.nn.Module, cut: Cut, device_type: str = "cpu", autocast: torch.dtype | None = None
    ) -> None:
        self._mode = torch_compat.fake_mode()
        self._autocast = autocast
        self._device_type = device_type
        #: Autocast depends on the device of the tensors. Nothing else does.
        self._device = "cpu" if autocast is None else device_type
        with self._mode:
            memo = _without_data(model, self._device)
        self._stages = cut.build(copy.deepcopy(model, memo))
        self._inputs = cut.inputs

    def find(self, outline: BatchOutline) -> StageGraph:
        """The stage graph for batches of this outline.

        The stages run twice, once with twice as many samples. A dim whose size doubles is the dim of samples.

        Raises:
            NeedsDataError: there are several stages, and one does not run on tensors without data.
            ArgumentError: the model does not accept the batch, a stage sends something that is not a tensor, or a dim
                of a sent tensor changes with the samples but is not proportional to them.
        """
        unknown = sorted(set(outline.names) - self._inputs)
        if unknown:
            raise ArgumentError(
                f"the batch has {unknown[0]!r}, which the stages do not read; with the example that they were cut for, "
                f"they read {', '.join(sorted(self._inputs))}"
            )
        few, many = (self._run(outline, num_samples) for num_samples in (outline.num_samples, 2 * outline.num_samples))
        values = []
        for (writer, name), (value, readers) in few.values.items():
            other = many.values[writer, name][0]
            for item in (value, other):
                if not isinstance(item, torch.Tensor):
                    raise ArgumentError(
                        f"stage {writer} makes {name!r} ({type(item).__name__}), which stage {readers[0]} reads; only "
                        "tensors can be sent: cut elsewhere, or pass blocks="
                    )
            sample_dim = _sample_dim(name, tuple(value.shape), tuple(other.shape))
            shape = tuple(
                size // outline.num_samples if dim == sample_dim else size for dim, size in enumerate(value.shape)
            )
            values.append(
                Value(name, dtype_name(value.dtype), shape, sample_dim, writer, tuple(readers), value.requires_grad)
            )
        return StageGraph(tuple(values), tuple(tuple(sorted(names)) for names in few.inputs))

    def find_failure(
        self,
        outline: BatchOutline,
        num_samples: int,
        graph: StageGraph,
        stage: int,
        shard: Callable[[torch.nn.Module], None] | None,
    ) -> str | None:
        """The error, as text, that a stage raises on a few samples of a batch; None if it raises none.

        Args:
            outline: outline of the batch.
            num_samples: how many.
            graph: graph for this outline.
            stage: index of the stage.
            shard: shards a copy of the stage in place, as on this rank; None: the stage is not sharded.
        """
        with self._without_computing():
            given = outline.empty(num_samples, self._device)
            for value in graph.values:
                if stage in value.readers:
                    given[value.name] = torch.empty(
                        value.shape_for(num_samples), dtype=getattr(torch, value.dtype), device=self._device
                    )
            module = self._stages[stage]
            try:
                if shard is not None:
                    module = copy_stage(module, _without_data(module, self._device))
                    shard(module)
                written, _ = _run_stage(module, given, given)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        for value in graph.values:
            if stage == value.writer and tuple(written[value.name].shape) != value.shape_for(num_samples):
                shape, expected = list(written[value.name].shape), list(value.shape_for(num_samples))
                return f"it gives {value.name!r} the shape {shape} instead of {expected}"
        return None

    @contextlib.contextmanager
    def _without_computing(self) -> Iterator[None]:
        autocast = torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None)
        with torch_compat.keep_rng(self._device_type), self._mode, torch_compat.GroupedProducts(), autocast:
            yield

    def _run(self, outline: BatchOutline, num_samples: int) -> _StagesRun:
        result = _StagesRun({}, [])
        with self._without_computing():
            batch = outline.empty(num_samples, self._device)
            latest: dict[str, tuple[Any, int]] = {}  # value and the stage that wrote it
            for stage, module in enumerate(self._stages):
                given = {**batch, **{name: value for name, (value, _) in latest.items()}}
                try:
                    written, read = _run_stage(module, given, batch)
                except torch_compat.NEEDS_DATA as error:
                    if len(self._stages) > 1:
                        raise NeedsDataError(
                            f"stage {stage} of the model does not run on tensors without data{_place(error, module)}, "
                            f"so the tensors that it sends are not known: {type(error).__name__}: {error}; put the "
                            "whole model in one stage"
                        ) from error
                    written, read = {}, _names_read(module) & set(given)
                except ArgumentError:
                    raise
                except Exception as error:
                    raise ArgumentError(
                        f"stage {stage} of the model does not run on a batch of {outline}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                for name in sorted(read & set(latest)):  # the same order on all ranks
                    value, writer = latest[name]
                    result.values.setdefault((writer, name), (value, []))[1].append(stage)
                result.inputs.append(read - set(latest))
                latest |= {name: (value, stage) for name, value in written.items()}
        return result


@dataclass(frozen=True)
class _StagesRun:
    """One run of all stages.

    Attributes:
        values: ``{(writer, name): (tensor, readers)}``.
        inputs: for each stage, the inputs that it reads.
    """

    values: dict[tuple[int, str], tuple[Any, list[int]]]
    inputs: list[set[str]]


def _run_stage(module: Any, given: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The values that a stage writes, and the names of the values in ``given`` that it reads."""
    if isinstance(module, BlockStage):
        output, read = module.run(given)
        return dict(output.tensors), read
    names = [node.target for node in module.graph.nodes if node.op == "placeholder"]
    missing = sorted(set(names) - set(given))
    if missing:
        raise ArgumentError(f"the batch has no {missing[0]!r}, which the model reads; it has {sorted(batch)}")
    output = module(**{name: given[name] for name in names})
    return dict(output) if isinstance(output, Mapping) else {}, set(names)


def _place(error: BaseException, stage: torch.nn.Module) -> str:
    """Text that names the innermost module of a stage in whose forward an error was raised."""
    names = {id(submodule): (name, type(submodule).__name__) for name, submodule in stage.named_modules() if name}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [names[key] for frame in frames if (key := id(frame.f_locals.get("self"))) in names]
    return f", because of {modules[-1][0]!r} ({modules[-1][1]})" if modules else ""


def _names_read(module: Any) -> set[str]:
    """The names of all values that a stage may read."""
    if isinstance(module, BlockStage):
        return module.reads
    return {node.target for node in module.graph.nodes if node.op == "placeholder"}


def _sample_dim(name: str, few: tuple[int, ...], many: tuple[int, ...]) -> int | None:
    """The dim that is twice as large in ``many``, the shape for twice as many samples; None if the shapes are equal."""
    changed = [dim for dim in range(len(few)) if len(many) == len(few) and few[dim] != many[dim]]
    if len(few) != len(many) or len(changed) > 1 or any(many[dim] != 2 * few[dim] for dim in changed):
        raise ArgumentError(
            f"{name!r}, which crosses between stages, has shape {list(few)}, and {list(many)} for twice as many "
            "samples; one dim must be proportional to the samples"
        )
    return changed[0] if changed else None


def _without_data(module: torch.nn.Module, device: str) -> dict[int, Any]:
    """Replacements for the parameters and buffers of a module in a copy without data, by id, for ``copy_stage``."""
    made: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        made[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return made


def find_ties(stages: Sequence[torch.nn.Module]) -> list[dict[int, str]]:
    """For each parameter that several stages use, ``{stage: its name there}``."""
    names: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), {})[stage] = name
    return [where for where in names.values() if len(where) > 1]
