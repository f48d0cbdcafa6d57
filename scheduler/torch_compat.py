"""Parts of torch that are not public, or that differ between versions. All other modules use public names only."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reshard.errors import ReshardError
from reshard.runtime.torch_compat import held_modules, run_backward, version_of

__all__ = [
    "FLASH_ATTENTION_ON_CPU",
    "NEEDS_DATA",
    "GroupedProducts",
    "StorageRef",
    "TorchDispatchMode",
    "copy_parts",
    "fake_mode",
    "fsdp_ranks",
    "gradient_dtype",
    "has_comm_hooks",
    "has_forward_pre_hooks",
    "held_modules",
    "held_tensors",
    "idle_group",
    "inner_tensor",
    "is_async",
    "is_connection_error",
    "is_fake",
    "is_profiling",
    "is_store_error",
    "is_strided_shard",
    "keep_rng",
    "largest_magnitudes",
    "multiply_",
    "reset_reducer",
    "run_backward",
    "share_parts",
    "storage_key",
    "tree_leaves",
    "version_of",
    "wait_inside",
]

#: Attention on the CPU, as dispatch modes see it.
FLASH_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

#: Errors of operations on fake tensors whose results depend on data, or that cannot run on such tensors.
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def fake_mode() -> Any:
    """A mode in which tensors have shapes, dtypes and devices, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def keep_rng(device_type: str) -> Iterator[None]:
    """Restore the states of the random number generators of torch, Python and NumPy when the context ends."""
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices, device_type="cuda"):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def is_profiling() -> bool:
    """Whether a profiler of torch runs, in any thread."""
    return torch.autograd.profiler._is_profiler_enabled


# Modules


def held_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its parameters and its buffers, without those of its submodules."""
    return module._parameters, module._buffers


def copy_parts(module: torch.nn.Module, paths: Collection[str]) -> torch.nn.Module:
    """A copy of a module that shares the children, parameters and buffers at these paths. All others are None."""
    cls: Any = type(module)
    made: torch.nn.Module = cls.__new__(cls)
    made.__dict__.update(module.__dict__)
    for kind in ("_modules", "_parameters", "_buffers"):
        made.__dict__[kind] = {name: part if name in paths else None for name, part in getattr(module, kind).items()}
    for name, child in module._modules.items():
        inside = [path[len(name) + 1 :] for path in paths if path.startswith(f"{name}.")]
        if child is not None and inside and name not in paths:
            made._modules[name] = copy_parts(child, inside)
    return made


def copy_without_data(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module and its descendants in which all parameters and buffers are None."""
    made = copy_parts(module, ())
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else copy_without_data(child)
    return made


@contextlib.contextmanager
def filled_in(module: torch.nn.Module, other: torch.nn.Module) -> Iterator[None]:
    """Within the context, descendants of ``module`` that are None are replaced by those of ``other``."""
    added: list[tuple[dict[str, Any], str]] = []

    def fill(module: torch.nn.Module, other: torch.nn.Module) -> None:
        for name, child in module._modules.items():
            replacement = other._modules.get(name)
            if replacement is not None and child is not None:
                fill(child, replacement)
            elif replacement is not None:
                module._modules[name] = replacement
                added.append((module._modules, name))

    fill(module, other)
    try:
        yield
    finally:
        for modules, name in added:
            modules[name] = None


def share_parts(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Let a module hold the same children, parameters and buffers as another one, also later ones."""
    for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        module.__dict__[kind] = other.__dict__[kind]


def has_forward_pre_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks may change the arguments of the forward."""
    return bool(module._forward_pre_hooks)


# DDP and FSDP


def has_comm_hooks(ddp: Any) -> bool:
    """Whether a communication hook is registered with DDP."""
    return bool(ddp._comm_hooks)


def reset_reducer(ddp: Any) -> None:
    """Reset DDP's reducer after a forward, which may have prepared it for a backward."""
    if isinstance(ddp, DistributedDataParallel):
        ddp.reducer._reset_state()


def fsdp_ranks(module: Any) -> set[int]:
    """World ranks of the shards and replicas of the parameters that an FSDP module holds itself."""
    state = module._get_fsdp_state()
    # Up to torch 2.11 all parameters of a module are on one mesh.
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    meshes = [group.mesh_info.mesh.mesh for group in groups if group is not None]
    return {rank for mesh in meshes for rank in mesh.flatten().tolist()}


# Tensors


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, before torch 2.10 always its own."""
    return (getattr(parameter, "grad_dtype", None) if hasattr(torch.Tensor, "grad_dtype") else None) or parameter.dtype


def storage_key(storage: torch.UntypedStorage) -> int:
    """A key that identifies a living storage, even one without data."""
    return storage._cdata


class StorageRef:
    """A weak reference to a storage, whichever tensors share it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak: int | None = storage._weak_ref()

    def nbytes(self) -> int | None:
        """The size of the storage in bytes; None after it was freed."""
        if self._weak is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        if storage is None:
            torch.UntypedStorage._free_weak_ref(self._weak)
            self._weak = None
            return None
        return int(storage.nbytes())


def is_strided_shard(placement: Any) -> bool:
    """Whether a placement of a DTensor shards a dim that a later mesh axis has sharded before (``_StridedShard``)."""
    return int(getattr(placement, "split_factor", 1)) > 1


def is_async(tensor: Any) -> bool:
    """Whether a tensor is the result of an asynchronous collective."""
    return hasattr(tensor, "trigger_wait")


def wait_inside(tensor: Any) -> torch.Tensor:
    """The plain tensor of an asynchronous collective, once the collective has ended."""
    return tensor.trigger_wait()


def inner_tensor(tensor: Any) -> torch.Tensor:
    """The tensor inside a DTensor or an asynchronous collective, or the tensor itself. It does not wait."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    inner = getattr(tensor, "_local_tensor", tensor)
    return inner.elem if is_async(inner) else inner


def multiply_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply plain tensors of one dtype and device in place."""
    torch._foreach_mul_(list(tensors), factor)


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The largest magnitude in each plain tensor; NaN or infinite if any element is."""
    return torch._foreach_norm(list(tensors), math.inf)


def is_connection_error(error: BaseException) -> bool:
    """Whether an error may come from a collective that lost another rank."""
    if isinstance(error, ReshardError):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def is_store_error(error: BaseException) -> bool:
    """Whether an error means that the store cannot be reached."""
    return isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) and not isinstance(error, ReshardError)


@contextlib.contextmanager
def idle_group(num_ranks: int) -> Iterator[None]:
    """A world group in which this process is rank 0, and whose collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class GroupedProducts(TorchDispatchMode):
    """Gives ``torch._grouped_mm`` on fake tensors its shape for any dtype: torch's own rule accepts bfloat16 only.

    Mixtures of experts in ``transformers`` call it, on the CPU in float32 too.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        left, right = args[:2]
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        groups = [len(offsets)] if offsets is not None and left.dim() == right.dim() == 2 else []
        groups = groups or ([left.shape[0]] if left.dim() == right.dim() == 3 else [])
        dtype = kwargs.get("out_dtype") or left.dtype
        return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=dtype)
