"""The grid of blocks in which a block codec encodes a tensor. It belongs to the tensor, never to a message.

A tensor ``[..., C]`` becomes a tensor of ``[..., C / 128]`` elements with the same layouts. Each rank encodes its own
shard, and all replicas, chunks and recovery pieces share the elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from reshard.codecs import CODED_DTYPES, CustomCodec, ElementCodec
from reshard.dtypes import ITEMSIZE
from reshard.sharding.dim_cuts import cut_dim
from reshard.sharding.layout import AnyLayout, Layout, RegionLayout
from reshard.sharding.spec import axis_of
from reshard.sharding.tensor_spec import Coding, TensorSpec

#: A tensor of fewer bytes is not encoded: its time is latency.
MIN_CODED_BYTES = 16 * 1024


def compress_tensor(spec: TensorSpec, codec: ElementCodec, wire_dtype: str | None = None) -> TensorSpec:
    """The tensor of elements that encodes ``spec``. Elements have fewer values than asked where the layouts demand it.

    The last dims are joined into one if neither layout cuts them, so that small last dims fill blocks.

    Args:
        wire_dtype: the dtype in which the tensor would travel without the codec; that of ``spec`` by default.

    Returns:
        The encoded tensor; or ``spec`` with :attr:`TensorSpec.raw_because` set if the codec cannot encode it, or would
        not make it smaller.
    """
    if spec.dtype not in CODED_DTYPES:
        return replace(spec, raw_because=f"{codec.name} encodes {', '.join(CODED_DTYPES)}, not {spec.dtype}")
    raw_bytes = math.prod(spec.shape) * ITEMSIZE[wire_dtype or spec.dtype]
    if raw_bytes < MIN_CODED_BYTES:
        return replace(spec, raw_because=f"its {raw_bytes} bytes are fewer than {MIN_CODED_BYTES}")
    best: tuple[int, ElementCodec, int] | None = None
    for values in codec.sizes:
        smaller = codec.with_values(values)
        for num_row_dims in _row_dims(spec):
            nbytes = smaller.nbytes(spec.shape, num_row_dims)
            if (best is None or nbytes < best[0]) and _fits(spec, num_row_dims, values):
                best = nbytes, smaller, num_row_dims
    if best is None:
        return replace(spec, raw_because=f"its cuts do not lie between blocks of {codec.sizes[-1]} values")
    nbytes, smaller, num_row_dims = best
    if nbytes >= raw_bytes:
        return replace(spec, raw_because=f"{codec.name} would take {nbytes} bytes instead of {raw_bytes}")
    columns = math.prod(spec.shape[num_row_dims:])
    return TensorSpec(
        (*spec.shape[:num_row_dims], -(-columns // smaller.values)),
        smaller.name,
        _coarsen(spec.src, smaller.values),
        _coarsen(spec.dst, smaller.values),
        spec.name,
        Coding(spec.shape, spec.dtype, smaller if isinstance(smaller, CustomCodec) else None),
    )


def _row_dims(spec: TensorSpec) -> Iterator[int]:
    """The numbers of leading dims that may count rows; the values of all other dims are encoded in a row."""
    if isinstance(spec.src, RegionLayout) or isinstance(spec.dst, RegionLayout):
        if spec.ndim:
            yield spec.ndim - 1
        return
    last_cut = max(len(spec.src.spec), len(spec.dst.spec)) - 1  # specs end with a dim that is cut
    if last_cut + 1 < spec.ndim:
        yield last_cut + 1
    if last_cut >= 0:
        yield last_cut


def _fits(spec: TensorSpec, num_row_dims: int, values: int) -> bool:
    """Whether both layouts cut the joined dim between elements only."""
    inner = math.prod(spec.shape[num_row_dims + 1 :])
    size = spec.shape[num_row_dims] * inner
    return all(
        _regions_fit(layout, size, values)
        if isinstance(layout, RegionLayout)
        else _cuts_fit(layout, spec.shape[num_row_dims], inner, num_row_dims, values)
        for layout in (spec.src, spec.dst)
    )


def _cuts_fit(layout: Layout, size: int, inner: int, dim: int, values: int) -> bool:
    """Whether the layout cuts the dim of elements where it cuts the tensor's ``dim``, whose indices hold ``inner``."""
    steps = layout.spec[dim] if dim < len(layout.spec) else ()
    sizes = [layout.mesh.axis_size(axis_of(step)) for step in steps]
    plain, encoded = cut_dim(size, steps, sizes), cut_dim(-(-size * inner // values), steps, sizes)
    return (
        len(plain.lo) == len(encoded.lo)
        and np.array_equal(plain.coord, encoded.coord)
        and np.array_equal(plain.lo * inner, encoded.lo * values)
        and np.array_equal(plain.hi * inner, np.minimum(encoded.hi * values, size * inner))
        and np.array_equal(plain.local * inner, encoded.local * values)
    )


def _regions_fit(layout: RegionLayout, size: int, values: int) -> bool:
    """Whether all boxes begin and end between elements, and only the last box of a rank has a padded one."""
    is_joined = layout.join_dim == layout.ndim - 1
    for _, boxes in layout.boxes:
        ends = [box[-1] for box in boxes]
        if any(lo % values or (hi % values and hi != size) for lo, hi in ends):
            return False
        if is_joined and any(hi % values for _, hi in ends[:-1]):
            return False
    return True


def _coarsen(layout: AnyLayout, values: int) -> AnyLayout:
    """The layout of the elements. A Layout has no sizes, so it stays as it is."""
    if isinstance(layout, Layout):
        return layout
    return layout.with_last_dim(lambda lo, hi: (lo // values, -(-hi // values)))
