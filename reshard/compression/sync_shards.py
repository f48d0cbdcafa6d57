"""The shards that a rank passes for a version of the weights: checked, and on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.api.dtensors import check_same_layout, is_dtensor, layout_of
from reshard.api.memory_in_use import check_unused
from reshard.api.tensor_checks import DEVICE_TYPES, check_array, check_no_aliasing, wait_for_collective
from reshard.coordination import Group
from reshard.errors import ArgumentError
from reshard.runtime.cuda.host_copies import to_device, to_host
from reshard.sharding import TensorSpec

Shards = Mapping[str, torch.Tensor]


class SyncShards:
    """The arrays of one rank for one version. Those on a GPU are copied to the host, and results back.

    Args:
        specs: the weights. group: the group of the ranks. tensors, out: see :class:`WeightSync`.

    Attributes:
        tensors, out: as passed; after :meth:`read`, shards on the CPU, without DTensors.
    """

    def __init__(self, specs: Sequence[TensorSpec], group: Group, tensors: Any, out: Any) -> None:
        self._specs, self._group = specs, group
        self.tensors, self.out = tensors, out
        self._results: Shards = {}
        self._is_read = False

    def read(self) -> None:
        """Check the arrays, and copy those on a GPU to the host. Later calls do nothing.

        Raises:
            ArgumentError: an array does not fit its shard, a name is unknown, a source and an ``out`` share memory, a
                DTensor has another layout, or a transfer still uses an array.
        """
        if self._is_read:
            return
        names = [spec.name or "" for spec in self._specs]
        sources, targets = self._check(self.tensors, "src"), self._check(self.out, "dst")
        check_no_aliasing(sources, targets, names)
        check_unused(sources, targets, names)
        by_name = [
            {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
            for arrays in (sources, targets)
        ]
        self._results = by_name[1]
        self.tensors, self.out = (
            None if given is None else {name: to_host(array) for name, array in shards.items()}
            for given, shards in zip((self.tensors, self.out), by_name, strict=True)
        )
        self._is_read = True

    def copy_back(self) -> None:
        """Copy received shards from the host into the arrays on a GPU that were passed as ``out``, if any."""
        for name, result in self._results.items():
            if self.out[name] is not result:
                to_device(self.out[name], result.device, result)

    def _check(self, arrays: Any, side: str) -> list[torch.Tensor | None]:
        role = "the source" if side == "src" else "the destination"
        _check_names(arrays, [spec.name for spec in self._specs], "the source" if side == "src" else "out")
        rank, found = self._group.rank, []
        for spec in self._specs:
            shards = spec.src_shards if side == "src" else spec.dst_shards
            shape = shards.local_shape(rank) if rank in shards.layout.ranks else None
            array: Any = None if arrays is None or shape is None else arrays.get(spec.name or "")
            if is_dtensor(array):
                what = f"{role} DTensor of {spec.name!r}"
                layout = layout_of(array, self._group)
                check_same_layout(layout, shards.layout, spec.shape, rank, what, "the WeightSync")
                array = array.to_local()
            array = wait_for_collective(array) if side == "src" else array
            kind = array.device.type if isinstance(array, torch.Tensor) else "cpu"
            kind = kind if kind in DEVICE_TYPES else "cpu"
            found.append(check_array(array, shape, spec.dtype, role, spec.name, rank, kind))
        return found


def _check_names(arrays: Any, names: Sequence[str | None], what: str) -> None:
    """Raise ArgumentError unless ``arrays`` is None or a mapping without unknown names."""
    if arrays is not None and not isinstance(arrays, Mapping):
        raise ArgumentError(f"{what} must be {{name: shard}} or None, not {type(arrays).__name__}")
    unknown = [] if arrays is None else [name for name in arrays if name not in names]
    if unknown:
        raise ArgumentError(f"{what} has {unknown[0]!r:.60}, which the weights do not have")
