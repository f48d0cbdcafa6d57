"""The copy of a trainer's weights that is sent while training goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.runtime.torch_compat import Copies
from reshard.weights.model.holdings import ModelState, StateReader, Value, synchronize
from reshard.weights.model.manifest import Manifest
from reshard.weights.model.quantize import Quantizer


class Snapshot:
    """The local shards of one version. One thread copies and another one sends, but never both at once.

    Args:
        reader: reader of the model.
        manifest: manifest of the model when it was first read.
        dtype: dtype of floating-point tensors; None to keep theirs.
        quantizer: quantizer of tensors that are published in float8.
        on_host: whether the copy is in host memory.
        keeps_base: whether the version before is kept, too.

    Attributes:
        arrays, values: tensors, and numbers and strings, by name.
        version: number of the version; None before the first one.
        base, base_version: the tensors of the version that was published before it, and its number.
    """

    def __init__(
        self,
        reader: StateReader,
        manifest: Manifest,
        dtype: torch.dtype | None,
        quantizer: Quantizer | None,
        *,
        on_host: bool = False,
        keeps_base: bool = False,
    ) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self.base: dict[str, torch.Tensor] = {}
        self.base_version: int | None = None
        self._on_host, self._keeps_base = on_host, keeps_base
        self.values: dict[str, Value] = {}
        self._reader, self._manifest, self._dtype, self._quantizer = reader, manifest, dtype, quantizer
        self._checked: ModelState | None = None
        self._paired: ModelState | None = None
        self._copies = Copies([], [])
        self.version: int | None = None
        self._lock = threading.RLock()  # held while copying
        self._idle = threading.Condition(self._lock)  # notified when sending ends
        self._is_sending = False

    def read(self) -> ModelState:
        """The state of the model.

        Raises:
            ArgumentError: the tensors of the model have changed.
        """
        state = self._reader.read()
        if state is self._checked:
            return state
        for name, holding in state.holdings.items():
            entry = self._manifest.entries.get(name)
            kept = self._kept(holding.array)
            if entry is None or entry.shape != holding.shape or entry.dtype != dtype_name(kept):
                raise ArgumentError(f"{name!r} has changed its shape or dtype, or is new; make a new Publisher")
        missing = set() if self._checked is None else self._checked.holdings.keys() - state.holdings.keys()
        if missing:
            raise ArgumentError(f"{min(missing)!r} is gone from the model; make a new Publisher")
        self._checked = state
        return state

    def take(
        self, state: ModelState, measured: Sequence[Mapping[str, Any]], version: int, last: int | None, seconds: float
    ) -> None:
        """Copy the weights of a model.

        Args:
            state: state of the model.
            measured: what all ranks have measured for the quantizer.
            version: number of the version.
            last: number of the last version that all ranks have published; None if there is none.
            seconds: how long to wait for a version that is being sent.

        Raises:
            TransferTimeoutError: a version is still being sent.
        """
        with self._lock:  # released by an interrupt at any line
            if not self._idle.wait_for(lambda: not self._is_sending, seconds):
                raise TransferTimeoutError(f"version {self.version} is still being sent after {seconds:g} s")
            held, self.version, self._paired = self.version, None, None if self._keeps_base else self._paired
            if self._keeps_base and held is not None and held == last:
                self.base_version = None  # first: an interrupt may come between the assignments
                self.arrays, self.base = self.base, self.arrays
                self.base_version = last
            if state is not self._paired:
                self._copies, self._paired = self._pair(state), state
            self._copies()
            if self._quantizer is not None:
                self._quantizer.quantize(state.holdings, measured, self.arrays, self._on_host)
            synchronize(holding.array for holding in state.holdings.values())
            self.values.clear()
            self.values.update(state.values)
            self.version = version

    def _pair(self, state: ModelState) -> Copies:
        """The copies of a model's weights to the snapshot."""
        copies, arrays = [], []
        for name, holding in state.holdings.items():
            if self._quantizer is not None and name in self._quantizer.names:
                continue
            known, array = self.arrays.get(name), holding.array
            if known is None or known.shape != array.shape:
                device = "cpu" if self._on_host else array.device
                known = torch.empty(array.shape, dtype=self._kept(array), device=device)
            self.arrays[name] = known
            copies.append(known)
            arrays.append(array)
        return Copies(copies, arrays)

    @contextlib.contextmanager
    def sending(self, version: int) -> Iterator[None]:
        """Keep the snapshot as it is.

        Raises:
            ArgumentError: it is not of this version.
        """
        with self._lock:
            if self.version != version:
                raise ArgumentError(f"version {version} is no longer there; the trainer holds {self.version}")
            self._is_sending = True
        try:
            yield
        finally:
            with self._lock:
                self._is_sending = False
                self._idle.notify_all()

    def _kept(self, array: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and array.is_floating_point() else array.dtype
