"""Bytes that stages exchange, for all ranges of layers at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..inputs.layer_graph import LayerGraph, Tensor


@dataclass(frozen=True, eq=False)
class RangeBytes:
    """Bytes of one sample that a stage of layers ``first`` to ``end - 1`` exchanges. Arrays are ``[first, end]``.

    Attributes:
        received: bytes that a rank receives in a forward, if the stage divides features over columns.
        sent: bytes that a rank sends in a forward, if the stage divides features over columns.
        returned: bytes of the gradients of what was sent, without division over columns.
    """

    received: np.ndarray
    sent: np.ndarray
    returned: np.ndarray

    @classmethod
    def of(cls, graph: LayerGraph, cols: int) -> RangeBytes:
        """The bytes of all ranges: the tensors of :meth:`LayerGraph.between`, counted as ``cut_sample_bytes`` does."""
        size = len(graph.layers) + 1
        received, sent, returned = (np.zeros((size, size)) for _ in range(3))
        first, end = np.arange(size)[:, None], np.arange(size)[None, :]
        upper = first < end
        for tensor, last_holder, next_reader in _neighbours(graph):
            nbytes = tensor.sample_bytes / (cols if tensor.has_gradient else 1)
            received += np.where(upper & (tensor.writer < first) & (next_reader[:, None] < end), nbytes, 0.0)
            leaves = upper & (last_holder[None, :] >= first) & (tensor.readers[-1] >= end)
            sent += np.where(leaves, nbytes, 0.0)
            returned += np.where(leaves & tensor.has_gradient, tensor.sample_bytes, 0.0)
        return cls(received, sent, returned)


def bytes_of_cuts(graph: LayerGraph, *, only_gradients: bool = False) -> np.ndarray:
    """``[first, cut, end]``: bytes of a sample from a stage of layers first to cut to one of layers cut to end.

    For a chain, bytes depend on the cut alone, so the table has the shape ``[1, cut, 1]``. With ``only_gradients``, the
    bytes are those of the gradients that return.
    """
    size = len(graph.layers) + 1
    sides = 1 if graph.is_chain else size
    table = np.zeros((sides, size, sides))
    cut = np.arange(size)[None, :, None]
    first, end = np.arange(sides)[:, None, None], np.arange(sides)[None, None, :]
    if graph.is_chain:
        end = np.full((1, 1, 1), size - 1)
    inside = (first < cut) & (cut < end)
    for tensor, last_holder, next_reader in _neighbours(graph):
        crosses = (last_holder[None, :, None] >= first) & (next_reader[None, :, None] < end)
        if tensor.has_gradient or not only_gradients:
            table += np.where(inside & crosses, tensor.sample_bytes, 0)
    return table


def _neighbours(graph: LayerGraph) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray]]:
    """For each tensor and each layer: the last holder of the tensor before the layer, and its next reader.

    A holder is the writer or a reader. The last holder is -1 if there is none; the next reader is the number of layers
    + 1 if there is none. The layer itself counts as next.
    """
    size = len(graph.layers) + 1
    layers = np.arange(size)
    for tensor in graph.tensors:
        holders = np.array([-1, tensor.writer, *tensor.readers])
        readers = np.array([*tensor.readers, size])
        last_holder = holders[np.searchsorted(holders, layers, side="left") - 1]
        yield tensor, last_holder, readers[np.searchsorted(readers, layers, side="left")]
