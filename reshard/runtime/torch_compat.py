"""Parts of torch that are not public. ``reshard`` uses only public names elsewhere, with three exceptions.

``sharding/spec`` and ``forks`` lie below this module. ``compression/fsdp_collectives`` derives classes from private
ones, which are slow to import. The engine of ``reshard.scheduler`` has its own module of this name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414  # for others
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: PLC0414


@contextlib.contextmanager
def named_group(name: str) -> Iterator[None]:
    """Within the context, torch gives this name to a process group that only its own ranks make.

    Torch derives the name from the number of groups on the rank, in which the ranks of the new group may differ.
    """
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda _: name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


@contextlib.contextmanager
def gloo_groups_on(devices: list[Any]) -> Iterator[None]:
    """Within the context, new Gloo process groups use these network devices. Otherwise each makes a new device.

    The thread of a device wakes up 100 times a second, also while no data moves. All groups of a device share it.
    """
    # The class stays, since torch compares types with it; only its constructor changes.
    group_class: Any = c10d.ProcessGroupGloo
    original = group_class.__init__

    def on_devices(group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object) -> None:
        # torch 2.14 also passes enable_reconfigure=False
        options = group_class._Options()
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
        original(group, store, rank, size, options)

    group_class.__init__ = on_devices
    try:
        yield
    finally:
        group_class.__init__ = original


def gloo_devices(process_group: dist.ProcessGroup) -> list[Any]:
    """The network devices of a process group for CPU tensors; none if it does not use Gloo for them."""
    if not dist.is_gloo_available():
        return []
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors
        return []
    return list(backend.options._devices) if isinstance(backend, c10d.ProcessGroupGloo) else []


def collective_device(process_group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors a process group (None: the world) can send: the CPU if it can, else this rank's GPU."""
    try:
        (process_group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def held_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The children of a module, as the dict that it keeps them in."""
    return module._modules


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes of a tensor in place."""
    return tensor._version


def local_of(array: Any) -> torch.Tensor:
    """The local tensor of a DTensor, outside of autograd; another tensor as it is."""
    local: torch.Tensor = getattr(array, "_local_tensor", array)
    return local


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks expect one call with the whole gradient of a backward."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_saved_tensor_hooks() -> bool:
    """Whether hooks replace the tensors that autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_transformed(array: object) -> bool:
    """Whether a tensor belongs to a ``torch.func`` transform."""
    return isinstance(array, torch.Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(array))


def call_after_backward(callback: Callable[[], object]) -> None:
    """Call ``callback()`` at the end of the backward that runs now. An error that it raises ends the backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def run_backward(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` without comparing shapes of plain roots, which takes longer than a small backward.

    Args:
        roots: where the backward starts.
        gradients: gradients of the roots, each of the shape of its root.
    """
    if torch._C._are_functorch_transforms_active() or any(type(root) is not torch.Tensor for root in roots):
        torch.autograd.backward(roots, gradients)
    else:
        run = torch.autograd.graph._engine_run_backward
        run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_alive(process_group: Any) -> bool:
    """Whether torch knows this process group and has not destroyed it."""
    return process_group is not None and process_group in c10d._world.pg_map


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """The store that the ranks of a process group met in."""
    return c10d._get_process_group_store(process_group)


def all_gather_single(out: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """The collective of this name, which torch 2.11 knows only as ``all_gather_into_tensor``, now deprecated."""
    # looked up at each call, as the other collectives are
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, part, **options)


def timeout_of(process_group: dist.ProcessGroup) -> float:
    """Seconds after which a collective of CPU tensors of a process group fails."""
    seconds: float = process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


#: Integers of each size. Equal dtypes are copied as them: on a GPU ``_foreach_copy_`` does not know all dtypes, and may
#: change the bits of NaNs.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copies:
    """Copies each source to the target at its place, in one call for many small tensors, as often as wanted."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if all(
            target.dtype == source.dtype and target.itemsize in _WORDS and not target.is_complex()
            for target, source in zip(targets, sources, strict=True)
        ):
            targets, sources = (
                [tensor.view(_WORDS[tensor.itemsize]) for tensor in side] for side in (targets, sources)
            )
        self._targets, self._sources = list(targets), list(sources)

    def __call__(self) -> None:
        """Copy what the sources hold now."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class CopyToMany:
    """Copies a tensor to several of its dtype, one for each index of its first dim, or all of it to one."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        first = targets[0]
        self._words = None if first.is_complex() else _WORDS.get(first.itemsize)
        self._targets = [target if self._words is None else target.view(self._words) for target in targets]

    def __call__(self, tensor: torch.Tensor) -> None:
        """Copy what the tensor holds now."""
        words = tensor if self._words is None else tensor.view(self._words)
        torch._foreach_copy_(self._targets, list(words.unbind()) if len(self._targets) > 1 else [words])
