"""Block-wise quantization to float8 with scales, equal to that of the whole tensor to the last bit.

The scale of a block depends on its largest magnitude. Ranks that share a block exchange the largest magnitudes of their
parts. Then each rank quantizes its own part, whatever the sharding. No weights move before they are quantized.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.sharding import Box, check_integer
from reshard.weights.mapping.rules import match_names
from reshard.weights.model.holdings import Holding, join_dim
from reshard.weights.model.manifest import Manifest, ManifestEntry

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
#: Elements that are quantized at a time.
_BAND_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Quantize:
    """Tensors that a trainer publishes in float8 (e4m3), for example ``Quantize("{p}_proj.weight")``.

    The last two dims are cut into blocks; blocks at the end may be smaller. Each has a scale in float32, in a tensor of
    its own: ``weight_scale_inv`` for ``weight``. Value and scale multiply to the weight, as in the checkpoints of
    DeepSeek-V3: the scale is the largest magnitude of the block over 448, or 1 for a block of zeros.

    Attributes:
        name: pattern of names, see :class:`reshard.weights.Rename`.
        block: rows and columns of a block.
        suffix: suffix that turns the name of a weight into the name of its scales.

    Raises:
        ArgumentError: an argument is not valid.
    """

    name: str
    block: tuple[int, int] = (128, 128)
    suffix: str = "_scale_inv"

    def __post_init__(self) -> None:
        if not isinstance(self.block, tuple) or len(self.block) != 2:
            raise ArgumentError(f"Quantize: block is {self.block!r:.40}; it must be (rows, columns)")
        for size in self.block:
            check_integer(size, "Quantize: a side of block", 1, 2**31)
        if not self.suffix:
            raise ArgumentError("Quantize: suffix is empty; scales need a name of their own")


class _Scratch:
    """Memory in float32 that all bands use in turn, so that no band allocates its own.

    Args:
        device: device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, device=device)

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """The memory as a tensor of this shape. It holds the values of the last use."""
        count = math.prod(shape)
        if self._memory.numel() < count:
            self._memory = torch.empty(count, device=self._memory.device)
        return self._memory[:count].view(*shape)


class Quantizer:
    """Quantizes the local shards of a model.

    Args:
        rules: rules that say which tensors are quantized.
        manifest: manifest of the model.

    Attributes:
        manifest: manifest of the quantized model.

    Raises:
        ArgumentError: a rule matches no tensor, or one that cannot be quantized.
    """

    def __init__(self, rules: Sequence[Quantize], manifest: Manifest) -> None:
        self._blocks: dict[str, tuple[int, int]] = {}
        self._scale_names: dict[str, str] = {}
        self._shared: dict[str, np.ndarray] = {}
        entries, tied = dict(manifest.entries), dict(manifest.tied)
        masks: dict[Any, np.ndarray] = {}
        for rule in rules:
            if not isinstance(rule, Quantize):
                raise ArgumentError(f"quantize has {rule!r:.60}, which is not a Quantize")
            names = [name for name, _ in match_names(rule.name, manifest.entries)]
            if not names:
                raise ArgumentError(f"{rule} matches no tensor of the trainer")
            for name in names:
                entry, scales = manifest.entries[name], f"{name}{rule.suffix}"
                _check(rule, name, entry)
                if name in self._blocks or scales in manifest.entries:
                    raise ArgumentError(f"{rule}: {name!r} is quantized twice, or has scales already")
                self._blocks[name], self._scale_names[name] = rule.block, scales
                entries[name] = replace(entry, dtype="float8_e4m3fn")
                entries[scales] = _scales_of(entry, rule.block, name)
                if name in tied:
                    tied[scales] = f"{tied[name]}{rule.suffix}"
                else:
                    key = entry.shape, entry.held, rule.block
                    if key not in masks:
                        masks[key] = _find_shared(entry, rule.block)
                    self._shared[name] = masks[key]
        self.manifest = replace(manifest, entries=entries, tied=tied)

    @property
    def names(self) -> Collection[str]:
        """The tensors that are quantized."""
        return self._scale_names

    @property
    def has_shared(self) -> bool:
        """Whether several ranks hold parts of one block."""
        return any(mask.any() for mask in self._shared.values())

    def measure(self, holdings: Mapping[str, Holding]) -> dict[str, Any]:
        """The largest magnitudes of this rank's parts of shared blocks, as JSON; for :meth:`quantize`."""
        max_by_name = {}
        for name, mask in self._shared.items():
            if name in holdings and holdings[name].boxes and mask.any():
                outer, magnitudes = self._find_magnitudes(name, holdings[name])
                at = np.nonzero(mask[_slices(outer)])
                indices = np.ravel_multi_index(
                    tuple(part + lo for part, (lo, _) in zip(at, outer, strict=True)), mask.shape
                )
                max_by_name[name] = [indices.tolist(), magnitudes.cpu().numpy()[at].tolist()]
        return max_by_name

    def quantize(
        self,
        holdings: Mapping[str, Holding],
        measured: Sequence[Mapping[str, Any]],
        known: dict[str, torch.Tensor],
        on_host: bool = False,
    ) -> None:
        """Quantize the tensors of the rules.

        Args:
            holdings: what this rank holds, by name.
            measured: results of :meth:`measure` of all ranks.
            known: gets the quantized arrays and their scales by name; those of the last call are used again.
            on_host: whether these are in host memory.
        """
        for name, scales_name in self._scale_names.items():
            if name not in holdings:
                continue
            holding, (rows, columns) = holdings[name], self._blocks[name]
            device = holding.array.device
            kept = torch.device("cpu") if on_host else device
            quantized = _reuse(known, name, holding.array.shape, _FLOAT8, kept)
            outer, magnitudes = self._find_magnitudes(name, holding)
            shared = torch.from_numpy(_merge(name, measured, self._shared[name].shape)[_slices(outer)])
            magnitudes = torch.maximum(magnitudes, shared.to(device))
            is_zero = magnitudes == 0
            factors = torch.where(is_zero, 1.0, _LARGEST / torch.where(is_zero, 1.0, magnitudes))
            scratch, of_elements = _Scratch(device), _Scratch(device)
            for (part, lead, top, left), (out, *_) in zip(
                _bands(holding.array, holding.boxes, rows), _bands(quantized, holding.boxes, rows), strict=True
            ):
                of_block = factors[tuple(at - lo for at, (lo, _) in zip(lead, outer, strict=False))]
                of_row = (torch.arange(top, top + part.shape[0], device=device)) // rows - outer[-2][0]
                of_column = (torch.arange(left, left + part.shape[1], device=device)) // columns - outer[-1][0]
                of_element = torch.index_select(of_block[of_row], 1, of_column, out=of_elements.take(part.shape))
                out.copy_(scratch.take(part.shape).copy_(part).mul_(of_element).clamp_(-_LARGEST, _LARGEST))
            inverse, boxes = 1.0 / factors, _scale_boxes(holding.boxes, (rows, columns), name)
            parts = [inverse[_slices(box, outer)] for box in boxes]
            scales = torch.cat(parts, join_dim(boxes)) if parts else inverse
            _reuse(known, scales_name, scales.shape, torch.float32, kept).copy_(scales)

    def _find_magnitudes(self, name: str, holding: Holding) -> tuple[Box, torch.Tensor]:
        """The largest magnitude of a rank's part of each block, and the region of the scales for these blocks."""
        rows, columns = self._blocks[name]
        boxes = _scale_boxes(holding.boxes, (rows, columns), name)
        outer = tuple((min(lo for lo, _ in pairs), max(hi for _, hi in pairs)) for pairs in zip(*boxes, strict=True))
        outer = outer or ((0, 0),) * holding.array.ndim
        block_max = torch.zeros([hi - lo for lo, hi in outer], device=holding.array.device)
        scratch = _Scratch(holding.array.device)
        for part, lead, top, left in _bands(holding.array, holding.boxes, rows):
            height, width = part.shape
            padding = left % columns, -(left + width) % columns, top % rows, -(top + height) % rows
            padded = scratch.take(part.shape).copy_(part).abs_()
            padded = torch.nn.functional.pad(padded, padding) if any(padding) else padded
            largest = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
            of_block = block_max[tuple(at - lo for at, (lo, _) in zip(lead, outer, strict=False))]
            down, right = top // rows - outer[-2][0], left // columns - outer[-1][0]
            place = of_block[down : down + largest.shape[0], right : right + largest.shape[1]]
            place.copy_(torch.maximum(place, largest))
        return outer, block_max


def _check(rule: Quantize, name: str, entry: ManifestEntry) -> None:
    """Raise ArgumentError unless a tensor can be quantized."""
    dtype = getattr(torch, entry.dtype)
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ArgumentError(f"{rule}: {name!r} is {entry.dtype}; only floating-point tensors of 2 bytes or more fit")
    if len(entry.shape) < 2 or 0 in entry.shape:
        raise ArgumentError(f"{rule}: {name!r} has shape {list(entry.shape)}, which has no blocks")


def _scale_boxes(boxes: Sequence[Box], block: tuple[int, int], name: str) -> tuple[Box, ...]:
    """The regions of the scales that belong to regions of a tensor that a rank joins: each block once."""
    dim = join_dim(boxes)
    scale_boxes: list[Box] = []
    for box in boxes:
        sizes = (*(1,) * (len(box) - 2), *block)
        scales = [(lo // size, -(-hi // size)) for (lo, hi), size in zip(box, sizes, strict=True)]
        if scale_boxes:
            lo, hi = scales[dim]
            if lo < scale_boxes[-1][dim][0]:
                raise ArgumentError(f"{name!r} cannot be quantized: a rank joins its regions in another order")
            scales[dim] = max(lo, scale_boxes[-1][dim][1]), hi
        if scales[dim][0] < scales[dim][1]:
            scale_boxes.append(tuple(scales))
    return tuple(scale_boxes)


def _scales_of(entry: ManifestEntry, block: tuple[int, int], name: str) -> ManifestEntry:
    """The scales of a tensor. Ranks that share a block both hold its scale."""
    rows, columns = entry.shape[-2:]
    shape = (*entry.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    return ManifestEntry(
        shape, "float32", tuple((rank, _scale_boxes(boxes, block, name)) for rank, boxes in entry.held)
    )


def _find_shared(entry: ManifestEntry, block: tuple[int, int]) -> np.ndarray:
    """The blocks of which some rank holds only a part."""
    mask = np.zeros(_scales_of(entry, block, "").shape, dtype=bool)
    for _, boxes in entry.held:
        for box in boxes:
            edges = []
            for (lo, hi), size, length in zip(box[-2:], block, entry.shape[-2:], strict=True):
                first, last = lo // size, -(-hi // size)
                is_part = np.zeros(last - first, dtype=bool)
                is_part[0] |= lo % size > 0
                is_part[-1] |= hi % size > 0 and hi < length
                edges.append(is_part)
            place = (*box[:-2], *((lo // size, -(-hi // size)) for (lo, hi), size in zip(box[-2:], block, strict=True)))
            mask[_slices(place)] |= edges[0][:, None] | edges[1]
    return mask


def _merge(name: str, measured: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> np.ndarray:
    """The largest magnitudes of shared blocks; zeros for others."""
    max_of_blocks = np.zeros(math.prod(shape), dtype=np.float32)
    for report in measured:
        if name in report:
            indices, magnitudes = report[name]
            max_of_blocks[indices] = np.maximum(max_of_blocks[indices], np.array(magnitudes, dtype=np.float32))
    return max_of_blocks.reshape(shape)


def _bands(
    array: torch.Tensor, boxes: Sequence[Box], rows: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...], int, int]]:
    """Matrices of a few rows of blocks each, with the indices of their first element in the whole tensor.

    Args:
        boxes: the regions that are joined in the array.
        rows: number of rows of a block.
    """
    dim, at = join_dim(boxes), 0
    for box in boxes:
        size = box[dim][1] - box[dim][0]
        local, at = array.narrow(dim, at, size), at + size
        (top, bottom), (left, right) = box[-2:]
        height = max(1, _BAND_ELEMENTS // (rows * (right - left))) * rows
        for lead in itertools.product(*(range(lo, hi) for lo, hi in box[:-2])):
            matrix = local[tuple(index - lo for index, (lo, _) in zip(lead, box, strict=False))]
            begin = top
            while begin < bottom:
                end = min(bottom, begin // rows * rows + height)
                yield matrix[begin - top : end - top], lead, begin, left
                begin = end


def _slices(box: Box, outer: Box | None = None) -> tuple[slice, ...]:
    """A region as slices, of the whole tensor or of an outer region."""
    return tuple(
        slice(lo - begin, hi - begin) for (lo, hi), (begin, _) in zip(box, outer or ((0, 0),) * len(box), strict=True)
    )


def _reuse(
    known: dict[str, torch.Tensor], name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The array of a name; a new one if the last one does not fit."""
    array = known.get(name)
    if array is None or (array.shape, array.dtype, array.device) != (shape, dtype, device):
        array = known[name] = torch.empty(shape, dtype=dtype, device=device)
    return array
