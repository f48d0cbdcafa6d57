"""Installers: they put a version that has arrived into an engine, by a copy or through the engine's own loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, VerificationError
from reshard.runtime.autograd import mark_written
from reshard.weights.model.holdings import ShardRegions, Value, read_state, synchronize, write_values
from reshard.weights.model.pieces import RegionPair
from reshard.weights.recorded_loader import LoadWeights, Recording

TensorsByName = dict[str, torch.Tensor]
#: Elements that are cast at a time.
_CAST_ELEMENTS = 1 << 20


class Installer(Protocol):
    """Puts versions into an engine, on one rank.

    Attributes:
        keeps_last: whether the arrays of the previous version stay allocated, so that :meth:`install` can restore it.
    """

    keeps_last: bool

    def allocate(self, pieces: Sequence[RegionPair], known: TensorsByName) -> TensorsByName:
        """Memory for a version by name, in the dtypes of the pieces. ``known`` is used again where it fits."""

    def install(
        self, arrays: TensorsByName, values: Mapping[str, Value], is_right: Callable[[TensorsByName], bool]
    ) -> None:
        """Put a version into the engine.

        Args:
            arrays: its local shards.
            values: its numbers and strings.
            is_right: whether arrays with these names hold the version, by their digests.

        Raises:
            VerificationError: what is in the engine afterwards differs from the version.
        """


class CopyIntoModel:
    """Copies versions into the parameters and buffers of a model."""

    keeps_last = False

    def __init__(self, model: Any, shards: Mapping[str, ShardRegions] | None) -> None:
        self._model, self._shards = model, shards

    def allocate(self, pieces: Sequence[RegionPair], known: TensorsByName) -> TensorsByName:
        """See :class:`Installer`."""
        held = read_state(self._model, self._shards).holdings
        arrays = {}
        for piece in pieces:
            name = piece.target.name
            if name in held and name not in arrays:
                like = held[name].array
                arrays[name] = _allocate(like.shape, piece.dtype, like.device, known.get(name))
        return arrays

    def install(
        self, arrays: TensorsByName, values: Mapping[str, Value], is_right: Callable[[TensorsByName], bool]
    ) -> None:
        """See :class:`Installer`."""
        held = read_state(self._model, self._shards).holdings
        live = {name: held[name].array for name in arrays}
        with torch.no_grad():
            for name, array in live.items():
                array.copy_(arrays[name])
        synchronize(live.values())
        mark_written(live.values())
        write_values(self._model, values)
        if not is_right({name: _undo_cast(array, arrays[name]) for name, array in live.items()}):
            raise VerificationError(
                "the model differs from the version that was copied into it; is some of its memory shared, or written "
                "by another thread?"
            )


class ReceiveInPlace:
    """Receives versions in the parameters and buffers of a model. Meanwhile, the model holds no complete version."""

    keeps_last = False

    def __init__(self, model: Any, shards: Mapping[str, ShardRegions] | None) -> None:
        self._model, self._shards = model, shards

    def allocate(self, pieces: Sequence[RegionPair], known: TensorsByName) -> TensorsByName:
        """See :class:`Installer`. The arrays are those of the model."""
        held = read_state(self._model, self._shards).holdings
        for piece in pieces:
            array = held[piece.target.name].array if piece.target.name in held else None
            if array is not None and array.dtype != getattr(torch, piece.dtype):
                raise ArgumentError(
                    f"{piece.target.name!r} is {dtype_name(array.dtype)}, but {piece.dtype} is published, and nothing "
                    'is cast in place: use mode="shadow", or publish in the dtype of the engine'
                )
        return {piece.target.name: held[piece.target.name].array for piece in pieces if piece.target.name in held}

    def install(
        self, arrays: TensorsByName, values: Mapping[str, Value], is_right: Callable[[TensorsByName], bool]
    ) -> None:
        """See :class:`Installer`."""
        mark_written(arrays.values())
        write_values(self._model, values)
        held = read_state(self._model, self._shards).holdings
        if not is_right({name: held[name].array for name in arrays}):
            raise VerificationError(
                "the model differs from the version that arrived in it; has another thread written?"
            )


class LoadThroughEngine:
    """Hands whole tensors to the loader of an engine, which may cut, fuse and pack them."""

    keeps_last = True

    def __init__(self, load_weights: LoadWeights) -> None:
        self._load_weights = load_weights

    def allocate(self, pieces: Sequence[RegionPair], known: TensorsByName) -> TensorsByName:
        """See :class:`Installer`."""
        cpu = torch.device("cpu")
        return {
            piece.target.name: _allocate(piece.shape, piece.dtype, cpu, known.get(piece.target.name))
            for piece in pieces
        }

    def install(
        self, arrays: TensorsByName, values: Mapping[str, Value], is_right: Callable[[TensorsByName], bool]
    ) -> None:
        """See :class:`Installer`."""
        self._load_weights(iter(arrays.items()))
        if not is_right(arrays):
            raise VerificationError("the loader of the engine has changed the tensors that it was given")


class CopyAsRecorded:
    """Copies each region that the loader uses to the place where the loader would put it."""

    keeps_last = False

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def allocate(self, pieces: Sequence[RegionPair], known: TensorsByName) -> TensorsByName:
        """See :class:`Installer`."""
        recording, arrays = self._recording, {}
        for name, dtype in {piece.target.name: piece.dtype for piece in pieces}.items():
            if name in recording.held:
                arrays[name] = _allocate(recording.shape(name), dtype, recording.device, known.get(name))
        return arrays

    def install(
        self, arrays: TensorsByName, values: Mapping[str, Value], is_right: Callable[[TensorsByName], bool]
    ) -> None:
        """See :class:`Installer`. What has arrived is verified, and compared with the parameters bit for bit."""
        regions = list(self._recording.replay(arrays))
        synchronize(region for region, _ in regions)
        mark_written(self._recording.parameters())
        if not is_right(arrays) or not all(_is_cast(region, arrived) for region, arrived in regions):
            raise VerificationError("a parameter differs from what was copied into it; has another thread written?")


def _allocate(shape: Sequence[int], dtype: str, device: torch.device, known: torch.Tensor | None) -> torch.Tensor:
    wanted = getattr(torch, dtype)
    if known is not None and (tuple(known.shape), known.dtype, known.device) == (tuple(shape), wanted, device):
        return known
    return torch.zeros(tuple(shape), dtype=wanted, device=device)  # what is padded stays zero


def _undo_cast(array: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """A parameter in the dtype in which it arrived: the arrived tensor, if the parameter is its cast."""
    if array.dtype == arrived.dtype:
        return array
    return arrived if _is_cast(array, arrived) else array.to(arrived.dtype)


def _is_cast(array: torch.Tensor, arrived: torch.Tensor) -> bool:
    """Whether an array holds the bits of another one in its dtype. Compares a few rows at a time, in one memory."""
    if not array.ndim:
        array, arrived = array[None], arrived[None]
    rows = max(1, _CAST_ELEMENTS // max(1, array[:1].numel()))
    cast = torch.empty_like(array[:rows])
    return all(
        torch.equal(_bits(part), _bits(cast[: len(part)].copy_(other)))
        for part, other in zip(array.split(rows), arrived.split(rows), strict=True)
    )


def _bits(array: torch.Tensor) -> torch.Tensor:
    """The bits of an array as integers, so that NaN equals NaN; the array itself if no integers have its item size."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return array.view(words[array.itemsize]) if array.itemsize in words else array
