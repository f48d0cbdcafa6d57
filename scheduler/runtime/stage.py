"""One stage on this rank: its module and its microbatches in flight. Other modules send and receive its tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from reshard.api.arrays.tensor_checks import check_movable, wait_for_collective
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.gradients.declared_sums import CHECK_EVERY, sum_gradients
from reshard.gradients.weight_grad_store import WeightGradStore
from reshard.sharding import TensorSpec

from .. import torch_compat
from ..gradients.data_parallel import check_module, is_fsdp, mark_failed, no_grad_sync, prepare_backward, without_ddp
from ..pipeline import Pipeline
from .local_tensors import cut_to_no_samples, full, is_dtensor, localize, sample_of_ones, starts_backward

Tensors = dict[str, torch.Tensor]

#: Range of a weight that is not 0. The gradients of a microbatch are multiplied by it.
_MIN_WEIGHT, _MAX_WEIGHT = 1e-30, 1e30


_NOTHING = contextlib.nullcontext()


class StageOutput(NamedTuple):
    """The result of the module of a stage.

    A module may also return a dict of ``tensors``, or one tensor. One tensor is the only tensor of the outgoing edges,
    or the loss if the stage has no outgoing edges.

    Attributes:
        tensors: ``{name: tensor}`` of the outgoing edges, as local shards or DTensors.
        loss: scalar from which the backward starts: the mean over the samples of this rank. None: this stage has no
            loss.
        metrics: ``{name: scalar}``, each the mean over the samples of this rank. They get no gradient.
        weight: number of items that the loss and the metrics are means over, such as tokens; None: samples. The unit
            must be the same for all microbatches and replicas. Only for :class:`PipelineEngine`.
    """

    tensors: Mapping[str, Any] = {}
    loss: Any = None
    metrics: Mapping[str, Any] = {}
    weight: Any = None


@dataclass(frozen=True)
class SentShards:
    """The local shards that a stage sends after a forward on one rank.

    Attributes:
        tensors: ``{stage: tensors}`` of the outgoing edges.
        shapes: for each stage, the spec, the name, the shape and the dtype of each shard.
        are_empty: whether no shard has an element.
    """

    tensors: Mapping[int, tuple[TensorSpec, ...]]
    shapes: Mapping[int, tuple[tuple[TensorSpec, str, torch.Size, torch.dtype], ...]]
    are_empty: bool

    @classmethod
    def of(cls, pipeline: Pipeline, stage: int, rank: int) -> SentShards:
        """The local shards that ``rank`` sends after a forward of ``stage``."""
        tensors = {edge.dst: edge.tensors for edge in pipeline.edges if edge.src == stage}
        shapes = {
            dst: tuple(
                (spec, str(spec.name), torch.Size(spec.src_tiles.local_shape(rank)), getattr(torch, spec.dtype))
                for spec in specs
            )
            for dst, specs in tensors.items()
        }
        return cls(tensors, shapes, not any(size.numel() for shards in shapes.values() for _, _, size, _ in shards))


@dataclass(slots=True)
class _Microbatch:
    """A microbatch between its forward and the end of its backward.

    Attributes:
        leaves: inputs from other stages, as leaves of the autograd graph.
        sent: outputs for each later stage, with their autograd graph.
        loss: with its autograd graph.
        metrics: numbers.
        weight: weight of the loss and the metrics, if the module returns one.
        weight_grads: the deferred weight-gradient pass; None unless the backward has two passes.
    """

    leaves: Tensors
    sent: dict[int, Tensors]
    loss: torch.Tensor | None
    metrics: dict[str, float] = field(default_factory=dict)
    weight: float | None = None
    weight_grads: WeightGradStore | None = None


class StageRun:
    """One stage on this rank.

    Args:
        stage: index of the stage.
        module: takes tensors as keyword arguments and returns a :class:`StageOutput`.
        pipeline: gives the edges of the stage.
        rank: this rank.
        autocast: device type and dtype of ``torch.autocast`` in the forward; None: no autocast.

    Attributes:
        is_fsdp: whether FSDP shards parameters of the module.

    Raises:
        ArgumentError: the module cannot run in a pipeline.
    """

    def __init__(
        self,
        stage: int,
        module: Any,
        pipeline: Pipeline,
        rank: int,
        autocast: tuple[str, torch.dtype] | None = None,
    ) -> None:
        check_module(stage, module)
        self.stage, self.module, self._rank = stage, module, rank
        self.autocast = functools.partial(torch.autocast, *autocast) if autocast else contextlib.nullcontext
        self._incoming = [edge for edge in pipeline.edges if edge.dst == stage]
        self._outgoing = [edge for edge in pipeline.edges if edge.src == stage]
        self._with_gradient = {edge.src: tuple(str(spec.name) for spec in edge.gradients) for edge in self._incoming}
        self._output_names = sorted({str(spec.name) for edge in self._outgoing for spec in edge.tensors})
        self._returns_gradients = any(self._with_gradient.values())
        self._buffers: list[Mapping[str, torch.Tensor | None]] = []
        self._parameters: list[torch.Tensor] = []
        self._in_flight: dict[int, _Microbatch] = {}
        self._checked_names: set[str] | None = None
        self._num_sums = 0
        self.is_fsdp = is_fsdp(module)

    def begin(self) -> None:
        """Before the actions of a step, note where the module has its buffers and its parameters."""
        self._buffers = [torch_compat.held_tensors(module)[1] for module in self.module.modules()]
        self._parameters = list(self.module.parameters())

    def forward(
        self,
        microbatch: int,
        received: Mapping[int, Tensors],
        fed: Mapping[str, Any],
        *,
        train: bool = True,
        is_split: bool = False,
        without_samples: Mapping[int, tuple[TensorSpec, ...]] | None = None,
    ) -> dict[int, Tensors]:
        """Run the forward of a microbatch. Returns the local shards to send to each later stage.

        Args:
            microbatch: index of the microbatch.
            received: local shards from each earlier stage.
            fed: inputs that the caller of ``step`` passes, by name.
            train: keep the autograd graph for a backward.
            is_split: whether the backward is split into two passes.
            without_samples: if this replica has no sample of the microbatch, ``{stage: tensors}`` of the outgoing
                edges. The module then runs on one sample that does not count. ``fed`` has this sample.

        Raises:
            ArgumentError: the module does not accept the inputs or changes one in place, or an output is missing or
                invalid.
        """
        leaves: Tensors = {}
        for src, with_gradient in self._with_gradient.items():
            for name, array in received[src].items():
                leaves[name] = array.detach().requires_grad_(train and name in with_gradient)
        duplicates = leaves.keys() & fed.keys()
        if duplicates:
            raise ArgumentError(f"stage {self.stage} receives {sorted(duplicates)} from another stage and from feed")
        self._check_call({*leaves, *fed})
        live = _Microbatch(leaves, {}, None, weight_grads=WeightGradStore([]) if train and is_split else None)
        versions = {name: torch_compat.version_of(leaf) for name, leaf in leaves.items()}
        inputs = leaves if without_samples is None else {name: sample_of_ones(leaf) for name, leaf in leaves.items()}
        with no_grad_sync(self.module), torch.set_grad_enabled(train), self.autocast():
            with live.weight_grads or _NOTHING:
                returned = self.module(**inputs, **fed)
            output = self._to_stage_output(returned)
            for edge in self._outgoing:
                passed_on = {name: leaves[name] for name in edge.passed_on}
                sent = self._select({**output.tensors, **passed_on}, edge.dst, edge.tensors)
                if without_samples is not None:
                    sent = cut_to_no_samples(sent, without_samples[edge.dst], self._rank)
                live.sent[edge.dst] = sent
        for name, leaf in leaves.items():
            if torch_compat.version_of(leaf) != versions[name]:
                raise ArgumentError(
                    f"stage {self.stage} changed its input {name!r} in place, but the sending stage may still use it; "
                    "change a copy"
                )
        if output.loss is not None and not isinstance(output.loss, torch.Tensor):
            raise ArgumentError(f"stage {self.stage} gives {type(output.loss).__name__} as loss; it must be a tensor")
        live.loss = full(output.loss)
        live.metrics = {
            str(name): self._to_number(f"the metric {name!r}", value) for name, value in output.metrics.items()
        }
        if output.weight is not None:
            live.weight = self._to_number("a weight", output.weight)
            if not 0 <= live.weight < math.inf:
                raise ArgumentError(f"stage {self.stage} gives the weight {live.weight}; it must be 0 or more")
            if live.weight and not _MIN_WEIGHT <= live.weight <= _MAX_WEIGHT:
                raise ArgumentError(
                    f"stage {self.stage} gives the weight {live.weight:g}; it must be 0, or from {_MIN_WEIGHT:g} to "
                    f"{_MAX_WEIGHT:g}, so that float32 gradients times it stay finite"
                )
        self._check_loss(live.loss, output)
        if train:
            self._check_gradients(live)
        self._in_flight[microbatch] = live
        return self._to_send(live.sent)

    def _to_send(self, outputs: Mapping[int, Tensors]) -> dict[int, Tensors]:
        """The outputs without their graph. A buffer is copied, because the next forward may change it."""
        if not outputs:
            return {}
        buffers = [array for held in self._buffers if held for array in held.values() if array is not None]
        storages = {
            array.untyped_storage().data_ptr()
            for array in buffers
            if array.layout is torch.strided and not is_dtensor(array)
        }
        if not storages:
            return {dst: {name: array.detach() for name, array in sent.items()} for dst, sent in outputs.items()}

        def plain(array: torch.Tensor) -> torch.Tensor:
            detached = array.detach()
            return detached.clone() if detached.untyped_storage().data_ptr() in storages else detached

        return {dst: {name: plain(array) for name, array in sent.items()} for dst, sent in outputs.items()}

    def skip(
        self,
        microbatch: int,
        received: Mapping[int, Tensors],
        tensors_of: Mapping[int, tuple[TensorSpec, ...]],
        *,
        is_split: bool,
    ) -> dict[int, Tensors]:
        """Return empty outputs in place of :meth:`forward` if this replica has no sample: many modules fail on 0
        samples.
        """
        leaves = {name: array for arrays in received.values() for name, array in arrays.items()}
        self._in_flight[microbatch] = _Microbatch(
            leaves, {}, None, weight_grads=WeightGradStore([]) if is_split else None
        )
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

        def empty(spec: TensorSpec) -> torch.Tensor:
            return torch.empty(spec.src_tiles.local_shape(self._rank), dtype=getattr(torch, spec.dtype), device=device)

        return {dst: {str(spec.name): empty(spec) for spec in tensors} for dst, tensors in tensors_of.items()}

    def _check_call(self, names: set[str]) -> None:
        """Raise ArgumentError if the module does not accept these keyword arguments."""
        if names == self._checked_names:
            return
        self._checked_names = names
        module = without_ddp(self.module)
        if any(map(torch_compat.has_forward_pre_hooks, (self.module, module))):  # hooks may change the names
            return
        try:
            inspect.signature(module.forward).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ArgumentError(
                f"stage {self.stage} cannot be called with {sorted(names)}, the names from its edges and feed: {error}"
            ) from None

    def _check_loss(self, loss: torch.Tensor | None, output: StageOutput) -> None:
        """Raise ArgumentError unless the loss is a real scalar, which a stage without outgoing edges must have."""
        if loss is None:
            if self._outgoing:
                return
            raise ArgumentError(
                f"stage {self.stage} sends nothing to another stage and returns the tensors "
                f"{sorted(map(str, output.tensors))} without a loss, so it gets no gradient; return "
                "StageOutput(loss=...)"
            )
        if loss.numel() != 1:
            raise ArgumentError(f"stage {self.stage} gives a loss of shape {list(loss.shape)}; it must be a scalar")
        if not loss.is_floating_point():
            raise ArgumentError(f"stage {self.stage} gives a loss of {dtype_name(loss.dtype)}; it must be real")

    def _to_number(self, what: str, value: Any) -> float:
        """A metric or a weight as a number."""
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ArgumentError(
                    f"stage {self.stage} gives {what} as {dtype_name(value.dtype)} {list(value.shape)}; "
                    "it must be a real scalar"
                )
            return float(full(value.detach()))  # type: ignore[arg-type]
        if isinstance(value, (int, float)):
            return float(value)
        raise ArgumentError(f"stage {self.stage} gives {what} as {type(value).__name__}, not a number")

    def _check_gradients(self, live: _Microbatch) -> None:
        """Raise ArgumentError if a backward would not reach parameters or inputs that need gradients."""
        missing = next(
            (
                (edge, spec)
                for edge in self._outgoing
                for spec in edge.gradients
                if not live.sent[edge.dst][str(spec.name)].requires_grad
            ),
            None,
        )
        is_loss_detached = live.loss is not None and not live.loss.requires_grad
        if missing is None and not is_loss_detached:
            return
        is_trainable = any(parameter.requires_grad for parameter in self.module.parameters())
        if not is_trainable and not any(leaf.requires_grad for leaf in live.leaves.values()):
            return
        if missing is None or is_loss_detached:
            raise ArgumentError(f"the loss of stage {self.stage} has no gradient: was it detached?")
        edge, spec = missing
        raise ArgumentError(
            f"stage {self.stage} gives {spec.name!r} without a gradient: was it detached? If it needs "
            f"none, name it in without_gradient of edge {edge.src} -> {edge.dst}"
        )

    def loss_of(self, microbatch: int) -> tuple[torch.Tensor | None, dict[str, float], float | None]:
        """The detached loss, the metrics and their weight of a microbatch in flight; None if absent."""
        live = self._in_flight[microbatch]
        return None if live.loss is None else live.loss.detach(), live.metrics, live.weight

    def drop(self, microbatch: int) -> None:
        """Forget a microbatch that gets no backward."""
        del self._in_flight[microbatch]

    def backward(
        self, microbatch: int, gradients: Mapping[int, Tensors], loss_weight: float, *, is_last: bool
    ) -> dict[int, Tensors]:
        """Run a whole backward or an input-gradient pass. Returns the gradients to send to each earlier stage.

        Args:
            microbatch: index of the microbatch.
            gradients: gradients of the sent tensors, from each later stage.
            loss_weight: weight of this microbatch's loss in the total loss.
            is_last: whether this is the last backward of the stage in this step.
        """
        live = self._in_flight[microbatch]
        roots: list[torch.Tensor] = []
        root_gradients: list[torch.Tensor] = []
        for dst, sent in live.sent.items():
            for name, gradient in gradients.get(dst, {}).items():
                if sent[name].requires_grad:
                    roots.append(sent[name])
                    root_gradients.append(gradient)
        if live.loss is not None and live.loss.requires_grad and starts_backward(live.loss, loss_weight, roots):
            roots.append(live.loss)
            root_gradients.append(torch.full_like(live.loss, loss_weight))
        if self.is_fsdp:
            prepare_backward(self.module, is_last=is_last)
        if roots:
            with no_grad_sync(self.module):
                torch_compat.run_backward(roots, root_gradients)
        in_use: set[int] = set()
        held = [] if live.weight_grads is None else live.weight_grads.held
        if held or self._returns_gradients:
            in_use = self._unshare_parameter_gradients(held)
        to_send = {
            src: {name: _gradient_of(live.leaves[name], in_use) for name in names}
            for src, names in self._with_gradient.items()
        }
        live.leaves, live.sent, live.loss = {}, {}, None
        if live.weight_grads is None:
            del self._in_flight[microbatch]
        return to_send

    def _unshare_parameter_gradients(self, held: Sequence[torch.Tensor]) -> set[int]:
        """Copy each parameter gradient that shares memory with ``held``: later backwards add to it in place.

        Autograd may store a gradient without a copy. ``.grad`` can then share memory with a tensor of the backward, or,
        if the gradient passed through a view, with the gradient of another parameter.

        Returns:
            Storage addresses of the strided gradients of all parameters.
        """
        held_storages = {_storage_address(item) for item in held}
        in_use = set()
        for parameter in self.module.parameters() if self.is_fsdp else self._parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if held_storages and _storage_address(gradient) in held_storages:
                gradient = parameter.grad = gradient.clone()
            in_use.add(_storage_address(gradient))
        return in_use

    def finish(self, microbatch: int) -> None:
        """Run the deferred weight-gradient pass of a microbatch."""
        store = self._in_flight.pop(microbatch).weight_grads
        assert store is not None
        with no_grad_sync(self.module):
            store.finish()

    def sum_declared_gradients(self) -> None:
        """After the last backward, sum the declared gradients. Every ``CHECK_EVERY`` steps, also compare replicas."""
        sum_gradients(self.module, check_replicas=self._num_sums % CHECK_EVERY == 0)
        self._num_sums += 1

    def forget(self) -> None:
        """After a failed step, drop its microbatches in flight."""
        for live in self._in_flight.values():
            if live.weight_grads is not None:
                live.weight_grads.forget()
        self._in_flight.clear()
        mark_failed(self.module)

    def _to_stage_output(self, output: Any) -> StageOutput:
        if isinstance(output, StageOutput):
            return output
        if not isinstance(output, torch.Tensor) and isinstance(output, Mapping):
            return StageOutput(output)
        names = self._output_names
        if isinstance(output, torch.Tensor) and not names:
            return StageOutput(loss=output)
        if not isinstance(output, torch.Tensor) or len(names) != 1:
            raise ArgumentError(
                f"stage {self.stage} must return a StageOutput or a dict with the tensors {names}, not "
                f"{type(output).__name__}"
            )
        return StageOutput({names[0]: output})

    def _select(self, outputs: Mapping[str, Any], dst: int, tensors: tuple[TensorSpec, ...]) -> Tensors:
        """The local shards of the outputs that one edge sends to stage ``dst``."""
        selected = {}
        for spec in tensors:
            name = str(spec.name)
            if name not in outputs:
                raise ArgumentError(
                    f"stage {self.stage} returns {sorted(map(str, outputs))}, not {name!r}, which stage {dst} needs"
                )
            selected[name] = localize(outputs[name], spec)
            check_movable(selected[name], f"{name!r} of stage {self.stage}", self._rank)
        return selected

    def check_sizes(self, microbatch: int, sent: Mapping[int, Tensors], expected: SentShards) -> None:
        """Raise ArgumentError unless outputs have the dtypes and local shapes that the edges expect on this rank."""
        for dst, shards in expected.shapes.items():
            for spec, name, shape, dtype in shards:
                array = sent[dst][name]
                if array.shape != shape or array.dtype != dtype:
                    raise ArgumentError(
                        f"stage {self.stage} gives {spec.name!r} as {dtype_name(array.dtype)} {list(array.shape)}; "
                        f"the edge to stage {dst} says {spec.dtype} {list(shape)} on rank {self._rank} (microbatch "
                        f"{microbatch}; a smaller last microbatch needs last_pipeline)"
                    )


def _gradient_of(leaf: torch.Tensor, in_use: Collection[int]) -> torch.Tensor:
    """The gradient of an input; a copy if its storage is in use."""
    gradient: torch.Tensor = torch.zeros_like(leaf) if leaf.grad is None else wait_for_collective(leaf.grad)
    return gradient.clone() if _storage_address(gradient) in in_use else gradient


def _storage_address(array: torch.Tensor) -> int:
    """Address of the storage of an array, or of the inner tensor of a DTensor or of an asynchronous result."""
    return int(torch_compat.inner_tensor(array).untyped_storage().data_ptr())
