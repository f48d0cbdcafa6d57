"""One stage on this rank: its module, and the microbatches that it has begun. No communication between stages."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.api.tensor_checks import check_movable, waited_for
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.runtime.cpu.weight_grad_store import PutOff
from reshard.sharding.layout import Layout
from reshard.sharding.tensor_spec import TensorSpec

from ..graph import Pipeline
from .data_parallel import (
    announce_backward,
    check_module,
    quiet,
    spoil,
    without_ddp,
)

#: The name of the output that a backward starts from.
LOSS = "loss"
Tensors = dict[str, torch.Tensor]


@dataclass
class _Live:
    """A microbatch between its forward and the end of its backward."""

    leaves: Tensors
    sent: dict[int, Tensors]  # by the stage that it goes to, with the graph
    loss: torch.Tensor | None
    put_off: PutOff = field(default_factory=lambda: PutOff([]))


class StageRun:
    """One stage on this rank.

    Args:
        stage: which. module: called with named tensors, gives named tensors. halves: microbatches whose backward comes
            in two.

    Raises:
        ArgumentError: the module does not fit.
    """

    def __init__(self, stage: int, module: Any, pipeline: Pipeline, rank: int, halves: Collection[int]) -> None:
        check_module(stage, module, bool(halves))
        self.stage, self.module, self._rank, self._halves = stage, module, rank, halves
        self._incoming = [edge for edge in pipeline.edges if edge.dst == stage]
        self._outgoing = [edge for edge in pipeline.edges if edge.src == stage]
        self._live: dict[int, _Live] = {}
        self._called_with: set[str] | None = None

    def forward(self, microbatch: int, received: Mapping[int, Tensors], fed: Mapping[str, Any]) -> dict[int, Tensors]:
        """What goes to each later stage, as local shards.

        Args:
            received: from each earlier stage. fed: from outside.

        Raises:
            ArgumentError: an output is missing, or not what the edge says.
        """
        leaves: Tensors = {}
        for edge in self._incoming:
            with_gradient = {spec.name for spec in edge.gradients}
            for name, array in received[edge.src].items():
                leaves[name] = array.detach().requires_grad_(name in with_gradient)
        doubled = leaves.keys() & fed.keys()
        if doubled:
            raise ArgumentError(f"stage {self.stage} gets {sorted(doubled)} from another stage and is fed it too")
        self._check_call({*leaves, *fed})
        live = _Live(leaves, {}, None)
        put_off = live.put_off if microbatch in self._halves else contextlib.nullcontext()
        versions = {name: leaf._version for name, leaf in leaves.items()}
        with quiet(self.module), put_off:
            outputs = self._name(self.module(**leaves, **fed))
            live.sent = {edge.dst: self._take(outputs, edge.dst, edge.tensors) for edge in self._outgoing}
        for name, leaf in leaves.items():
            if leaf._version != versions[name]:
                raise ArgumentError(
                    f"stage {self.stage} changed {name!r} in place, which another stage gave it and may still use; "
                    "change a copy"
                )
        loss = outputs.get(LOSS)
        if loss is not None and not isinstance(loss, torch.Tensor):
            raise ArgumentError(f"stage {self.stage} gives {type(loss).__name__} as loss; it must be a tensor")
        live.loss = _whole(loss)
        self._check_gradients(live, outputs)
        self._live[microbatch] = live
        buffers = [array for array in self.module.buffers() if not _is_dtensor(array)]
        own = {array.untyped_storage().data_ptr() for array in buffers if array.layout is torch.strided}

        def give(array: torch.Tensor) -> torch.Tensor:
            """What is sent; a copy of a buffer, which the next forward may change."""
            plain = array.detach()
            return plain.clone() if plain.untyped_storage().data_ptr() in own else plain

        return {dst: {name: give(array) for name, array in sent.items()} for dst, sent in live.sent.items()}

    def _check_call(self, names: set[str]) -> None:
        """Raise ArgumentError if the module cannot be called with these names."""
        if names == self._called_with:
            return
        self._called_with = names
        module = without_ddp(self.module)
        if self.module._forward_pre_hooks or module._forward_pre_hooks:  # which may call it with other names
            return
        try:
            inspect.signature(module.forward).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ArgumentError(
                f"stage {self.stage} cannot be called with {sorted(names)}, which edges bring and feed holds: {error}"
            ) from None

    def _check_gradients(self, live: _Live, outputs: Mapping[str, Any]) -> None:
        """Raise ArgumentError if backward would not reach what should learn."""
        if not self._outgoing and live.loss is None:
            raise ArgumentError(
                f"stage {self.stage} gives nothing to another stage and returns {sorted(map(str, outputs))}; it must "
                f"return a {LOSS!r}, or nothing would learn"
            )
        if live.loss is not None and live.loss.numel() != 1:
            raise ArgumentError(
                f"stage {self.stage} gives a loss of shape {list(live.loss.shape)}; it must be a scalar"
            )
        if live.loss is not None and not live.loss.is_floating_point():
            raise ArgumentError(f"stage {self.stage} gives a loss of {dtype_name(live.loss.dtype)}; it must be real")
        learns = any(parameter.requires_grad for parameter in self.module.parameters())
        if not learns and not any(leaf.requires_grad for leaf in live.leaves.values()):
            return
        if live.loss is not None and not live.loss.requires_grad:
            raise ArgumentError(f"the loss of stage {self.stage} has no gradient: was it detached?")
        for edge in self._outgoing:
            for spec in edge.gradients:
                if not live.sent[edge.dst][str(spec.name)].requires_grad:
                    raise ArgumentError(
                        f"stage {self.stage} gives {spec.name!r} without a gradient: was it detached? If it needs "
                        f"none, name it in without_gradient of edge {edge.src} -> {edge.dst}"
                    )

    def loss_of(self, microbatch: int) -> torch.Tensor | None:
        """The loss of a microbatch that has not ended, without its graph."""
        loss = self._live[microbatch].loss
        return None if loss is None else loss.detach()

    def backward(
        self, microbatch: int, gradients: Mapping[int, Tensors], loss_weight: float, *, is_last: bool
    ) -> dict[int, Tensors]:
        """The gradients that go to each earlier stage; those of weights too, or what puts them off.

        Args:
            gradients: from each later stage. loss_weight: of this microbatch's loss in the total.
        """
        live = self._live[microbatch]
        roots: list[torch.Tensor] = []
        weights: list[torch.Tensor | None] = []
        for dst, sent in live.sent.items():
            for name, gradient in gradients.get(dst, {}).items():
                if sent[name].requires_grad:
                    roots.append(sent[name])
                    weights.append(gradient)
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            weights.append(torch.full_like(live.loss, loss_weight))
        announce_backward(self.module, is_last=is_last)
        if roots:
            with quiet(self.module):
                torch.autograd.backward(roots, weights)
        own: set[int] = set()
        if live.put_off.held or any(edge.gradients for edge in self._incoming):
            own = self._keep_apart(live.put_off.held)
        back = {}
        for edge in self._incoming:
            back[edge.src] = {str(spec.name): _gradient_of(live.leaves[str(spec.name)], own) for spec in edge.gradients}
        live.leaves, live.sent, live.loss = {}, {}, None
        if microbatch not in self._halves:
            del self._live[microbatch]
        return back

    def _keep_apart(self, held: Sequence[torch.Tensor]) -> set[int]:
        """See that no gradient of a parameter, which later backwards add to, is memory that is still read.

        Autograd takes a gradient as it is where nobody else seems to have it; one that it got through a view of a
        parameter may lie in another one's memory.

        Returns:
            Where gradients of parameters lie.
        """
        reads = {_place(each) for each in held}
        own = set()
        for parameter in self.module.parameters():
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if _place(gradient) in reads:
                gradient = parameter.grad = gradient.clone()
            own.add(_place(gradient))
        return own

    def finish(self, microbatch: int) -> None:
        """The second half of a backward: what it put off."""
        with quiet(self.module):
            self._live.pop(microbatch).put_off.finish()

    def forget(self) -> None:
        """Drop what a step excluded that did not end."""
        for live in self._live.values():
            live.put_off.forget()
        self._live.clear()
        spoil(self.module)

    def _name(self, outputs: Any) -> Mapping[str, Any]:
        """A single tensor is what the only edge carries, or the loss."""
        if isinstance(outputs, Mapping):
            return outputs
        names = {spec.name for edge in self._outgoing for spec in edge.tensors} or {LOSS}
        if not isinstance(outputs, torch.Tensor) or len(names) != 1:
            raise ArgumentError(
                f"stage {self.stage} must return {{name: tensor}} for {sorted(map(str, names))}, "
                f"not {type(outputs).__name__}"
            )
        return {str(names.pop()): outputs}

    def _take(self, outputs: Mapping[str, Any], dst: int, tensors: tuple[TensorSpec, ...]) -> Tensors:
        taken = {}
        for spec in tensors:
            name = str(spec.name)
            if name not in outputs:
                raise ArgumentError(
                    f"stage {self.stage} returns {sorted(map(str, outputs))}, not {name!r}, which stage {dst} needs"
                )
            taken[name] = _localize(outputs[name], spec)
            check_movable(taken[name], f"{name!r} of stage {self.stage}", self._rank)
        return taken

    def check_sizes(
        self, microbatch: int, sent: Mapping[int, Tensors], tensors_of: Mapping[int, tuple[TensorSpec, ...]]
    ) -> None:
        """Raise ArgumentError unless local shards are what the layouts give this rank."""
        for dst, tensors in tensors_of.items():
            for spec in tensors:
                array = sent[dst][str(spec.name)]
                expected = list(spec.src_shards.local_shape(self._rank))
                if list(array.shape) != expected or dtype_name(array.dtype) != spec.dtype:
                    raise ArgumentError(
                        f"stage {self.stage} gives {spec.name!r} as {dtype_name(array.dtype)} {list(array.shape)}; "
                        f"the edge to stage {dst} says {spec.dtype} {expected} on rank {self._rank} (microbatch "
                        f"{microbatch}; a last one that is smaller needs last_pipeline)"
                    )


def _gradient_of(leaf: torch.Tensor, taken: Collection[int]) -> torch.Tensor:
    """Of what came in; a copy where it lies in memory that is taken."""
    gradient: torch.Tensor = torch.zeros_like(leaf) if leaf.grad is None else waited_for(leaf.grad)
    return gradient.clone() if _place(gradient) in taken else gradient


def _place(array: torch.Tensor) -> int:
    """Where an array lies; of a DTensor, or of what a collective has yet to fill, where its elements do."""
    inner = getattr(array, "_local_tensor", array)
    return int(getattr(inner, "elem", inner).untyped_storage().data_ptr())


class _Waited(torch.autograd.Function):
    """What a collective that is under way gives, as plain memory and with the graph."""

    @staticmethod
    def forward(ctx: Any, array: Any) -> Any:
        return array.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _plain(value: torch.Tensor) -> torch.Tensor:
    plain: torch.Tensor = _Waited.apply(value) if hasattr(value, "trigger_wait") else value  # type: ignore[no-untyped-call]
    return plain


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "redistribute")


def _localize(value: Any, spec: TensorSpec) -> torch.Tensor:
    """The shard of this rank; of a DTensor by way of the edge's layout, pending sums reduced."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{spec.name!r} is {type(value).__name__}, not a tensor")
    if not _is_dtensor(value):
        return _plain(value)
    mesh = value.device_mesh
    layout = spec.src
    if not isinstance(layout, Layout) or layout.ranks != tuple(mesh.mesh.flatten().tolist()):
        raise ArgumentError(f"{spec.name!r} is a DTensor on {mesh}, but its edge has it on {layout}")
    return _plain(value.redistribute(placements=layout.to_placements()).to_local())


def _whole(loss: Any) -> torch.Tensor | None:
    if _is_dtensor(loss):
        return _plain(loss.full_tensor())
    return None if loss is None else _plain(loss)
