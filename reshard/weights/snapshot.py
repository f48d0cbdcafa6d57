"""The copy of a trainer's weights that is sent while training goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.weights.holdings import Shard, Value, read_state, synchronize
from reshard.weights.manifest import Manifest


class Snapshot:
    """The local shards of one version. One thread copies, another one sends; never both at once.

    Args:
        dtype: dtype of floating-point tensors; None: their own.
        shards: what plain tensors hold, see :class:`reshard.weights.Publisher`.

    Attributes:
        arrays, values: tensors, and numbers and strings, by name.
    """

    def __init__(self, dtype: torch.dtype | None, shards: Mapping[str, Shard] | None) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self.values: dict[str, Value] = {}
        self._dtype, self._shards = dtype, shards
        self._version: int | None = None
        self._lock = threading.Lock()

    def take(self, model: Any, manifest: Manifest, version: int, seconds: float) -> None:
        """Copy the weights of a model.

        Args:
            manifest: of the model when it was first read.
            seconds: how long to wait for a version that is being sent.

        Raises:
            ArgumentError: the tensors of the model have changed.
            TransferTimeoutError: a version is still being sent.
        """
        state = read_state(model, self._shards)
        for name, holding in state.holdings.items():
            entry = manifest.entries.get(name)
            kept = self._kept(holding.array)
            if entry is None or entry.shape != holding.shape or entry.dtype != dtype_name(kept):
                raise ArgumentError(f"{name!r} has changed its shape or dtype, or is new; make a new Publisher")
        missing = self.arrays.keys() - state.holdings.keys()
        if missing:
            raise ArgumentError(f"{min(missing)!r} is gone from the model; make a new Publisher")
        if not self._lock.acquire(timeout=seconds):
            raise TransferTimeoutError(f"version {self._version} is still being sent after {seconds:g} s")
        try:
            self._version = None
            for name, holding in state.holdings.items():
                known, array = self.arrays.get(name), holding.array
                if known is None or known.shape != array.shape:
                    known = self.arrays[name] = torch.empty(array.shape, dtype=self._kept(array), device=array.device)
                known.copy_(array)
            synchronize(self.arrays.values())
            self.values.clear()
            self.values.update(state.values)
            self._version = version
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def sending(self, version: int) -> Iterator[None]:
        """Keep the snapshot as it is.

        Raises:
            ArgumentError: it is not of this version.
        """
        with self._lock:
            if self._version != version:
                raise ArgumentError(f"version {version} is no longer there; the trainer holds {self._version}")
            yield

    def _kept(self, array: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and array.is_floating_point() else array.dtype
