"""Measure the time that ZeRO 3 adds to a layer on its device: hooks, and copies before and after each collective."""

from __future__ import annotations

import pickle
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...torch_compat import idle_group

#: Copies of a layer in the measured module. FSDP treats the outer module as one more layer without parameters.
NUM_COPIES = 2
#: Ranks of the group whose collectives move nothing.
NUM_RANKS = 2


class ZeroTimes(NamedTuple):
    """Seconds of a device for one all-gather of a layer's parameters, and for one reduce-scatter of their gradients.

    They do not contain the time of the bytes on links.
    """

    all_gather_seconds: float = 0.0
    reduce_scatter_seconds: float = 0.0


#: Shape and dtype of each parameter of a layer.
ShapesAndDtypes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


#: Program of another process, which reads the arguments of :func:`measure_alone` and writes the result.
_PROGRAM = (
    "import pickle, sys; from reshard.scheduler.autoparallel.modules.zero_times import measure_alone; "
    "result = measure_alone(*pickle.load(sys.stdin.buffer)); sys.stdout.buffer.write(pickle.dumps(result))"
)
#: Time limit of that process.
MEASURE_ALONE_TIMEOUT_SECONDS = 300.0


def measure_zero_times(layers: Sequence[ShapesAndDtypes], device: str, repeats: int) -> list[ZeroTimes]:
    """Times of layers with these parameters under ``fully_shard``, over a group whose collectives return at once.

    Only the work of the device and its host for an all-gather and a reduce-scatter remains. If this process has a world
    group, another process measures on the same device. Layers that ``fully_shard`` does not shard, or that have no
    gradients, have times of 0: those with a parameter that has no dimension, no element or no floating-point dtype, or
    with parameters of several dtypes.

    Warns:
        UserWarning: the other process failed; all times are then 0.
    """
    if not dist.is_initialized():
        return _measure_in_group(layers, device, repeats)
    if torch.device(device).type == "cuda" and torch.device(device).index is None:
        device = f"cuda:{torch.cuda.current_device()}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=pickle.dumps((list(layers), device, repeats)),
            capture_output=True,
            check=True,
            timeout=MEASURE_ALONE_TIMEOUT_SECONDS,
        )
        return list(pickle.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, pickle.UnpicklingError) as error:
        warnings.warn(
            f"the search counts no calls and copies of ZeRO 3, as measuring them failed: {error}", stacklevel=2
        )
        return [ZeroTimes()] * len(layers)


def measure_alone(layers: Sequence[ShapesAndDtypes], device: str, repeats: int) -> list[ZeroTimes]:
    """:func:`measure_zero_times` in a separate process, whose current device becomes the measured one."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    return _measure_in_group(layers, device, repeats)


def _measure_in_group(layers: Sequence[ShapesAndDtypes], device: str, repeats: int) -> list[ZeroTimes]:
    with idle_group(NUM_RANKS):
        mesh = dist.init_device_mesh(torch.device(device).type, (NUM_RANKS,))
        return [_measure(shapes, device, mesh, repeats) for shapes in layers]


class _Parameters(nn.Module):
    """Uses one value of each parameter, so each parameter has a whole gradient."""

    def __init__(self, shapes: ShapesAndDtypes, device: str) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.values:
            x = x + value.reshape(-1)[0]
        return x


def _measure(shapes: ShapesAndDtypes, device: str, mesh: Any, repeats: int) -> ZeroTimes:
    """Seconds of one layer, as differences of steps: with and without sharding, and reduce-scatters."""
    from torch.distributed.fsdp import fully_shard

    dtypes = {dtype for _, dtype in shapes}
    is_sharded = len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)
    if not is_sharded or any(not shape or 0 in shape for shape, _ in shapes):
        return ZeroTimes()
    try:
        plain, sharded = (nn.Sequential(*(_Parameters(shapes, device) for _ in range(NUM_COPIES))) for _ in range(2))
        for layer in sharded:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
        times: dict[str, list[float]] = {"plain": [], "all-gathers": [], "reduce-scatters": []}
        for turn in range(repeats + 1):
            for name, module in (("plain", plain), ("all-gathers", sharded), ("reduce-scatters", sharded)):
                if module is sharded:
                    sharded.set_requires_gradient_sync(name == "reduce-scatters")
                seconds = _time_of_step(module, device)
                module.zero_grad(set_to_none=True)
                if turn:  # the first turn warms up
                    times[name].append(seconds)
    except (MemoryError, torch.OutOfMemoryError):
        return ZeroTimes()
    medians = {name: statistics.median(values) for name, values in times.items()}
    gather = (medians["all-gathers"] - medians["plain"]) / (2 * NUM_COPIES)  # one for the forward, one for the backward
    return ZeroTimes(max(0.0, gather), max(0.0, (medians["reduce-scatters"] - medians["all-gathers"]) / NUM_COPIES))


def _time_of_step(module: nn.Module, device: str) -> float:
    start = time.perf_counter()
    module(torch.zeros((), device=device)).backward()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
