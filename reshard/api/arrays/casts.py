"""Arrays in the form in which they travel: cast to another dtype, or encoded by a block codec.

A cast never allocates a second shard. A narrowing cast happens on the sender, message by message as it packs. For a
widening cast, the receiver stores the narrow elements in the destination's memory and casts them in place.

A codec allocates the encoded shard at both ends: it encodes from the source's dtype and decodes into the destination's
dtype, while other messages are on the wire (:mod:`reshard.runtime.cpu.encoded_shards`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from reshard.codecs import CODED_DTYPES, ErrorSums
from reshard.codecs.raw_bytes import write_into
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError
from reshard.public_api import caller_level
from reshard.runtime.autograd import mark_written
from reshard.runtime.cpu.encoded_shards import DecodedTarget, EncodedSource
from reshard.runtime.cpu.staging import CastSource
from reshard.runtime.cuda.device_encoding import DeviceDecodedTarget, encode_shard
from reshard.runtime.cuda.stream import STREAMS
from reshard.sharding import TensorSpec

#: Scratch memory for in-place casts, in bytes.
CAST_BYTES = 2**20


def wire_dtype(src: str, dst: str | None) -> str:
    """The dtype on the wire: the destination's, or the source's if that is narrower."""
    return src if dst is None or ITEMSIZE[dst] > ITEMSIZE[src] else dst


def check_cast(src: str, dst: str, what: str) -> None:
    """Raise ArgumentError unless torch can cast ``src`` to ``dst`` and the cast loses at most precision.

    Floating-point dtypes cast to floating-point dtypes of any width, and complex to complex. Any other cast must be a
    type promotion in torch.

    Args:
        what: name of the tensor in the error.
    """
    if src == dst:
        return
    a, b = getattr(torch, src), getattr(torch, dst)
    is_same_kind = (a.is_floating_point and b.is_floating_point) or (a.is_complex and b.is_complex)
    try:
        if not is_same_kind and not _promotes(a, b):
            raise ArgumentError(f"{what}: cannot cast {src} to {dst}: values could change by more than rounding")
        torch.zeros(1, dtype=a, device="cpu").to(b)
        negative = torch.tensor([-1.0], dtype=torch.float32, device="cpu")
        if b.is_floating_point and float(negative.to(b).float()) > 0 and not float(negative.to(a).float()) > 0:
            raise ArgumentError(f"{what}: cannot cast {src} to {dst}, which has no negative values")
    except (RuntimeError, TypeError) as error:
        text = str(error).splitlines()[0]
        reason = "" if "INTERNAL ASSERT" in text else f": {text}"  # torch asserts on dtypes without arithmetic
        raise ArgumentError(f"{what}: torch cannot cast {src} to {dst}{reason}") from error


def warn_of_float8(src: str, dst: str | None, what: str) -> None:
    """Warn if a call casts wider numbers to float8: it has no scale, so most of their range is lost.

    Args:
        what: name of the tensor in the warning.
    """
    if dst is None or ITEMSIZE[src] <= 1 or not dst.startswith("float8"):
        return
    info = torch.finfo(getattr(torch, dst))
    warnings.warn(
        f"{what}: dst_dtype={dst} casts {src} without a scale: numbers beyond {info.max:g} overflow or saturate, and "
        f"those below {info.smallest_normal:g} lose bits or become 0; scale the tensor before, or send it with scales "
        "by Quantize of reshard.weights",
        stacklevel=caller_level(),
    )


def _promotes(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether torch promotes ``a`` to ``b``. Integers compare by range, as torch has no rules for uint16 to uint64."""
    integers = [not (item.is_floating_point or item.is_complex or item is torch.bool) for item in (a, b)]
    if all(integers):
        return torch.iinfo(b).min <= torch.iinfo(a).min and torch.iinfo(a).max <= torch.iinfo(b).max
    return torch.promote_types(a, b) is b


def wire_source(
    array: torch.Tensor | None, spec: TensorSpec, device_type: str = "cpu"
) -> torch.Tensor | CastSource | EncodedSource | None:
    """A source shard as the plan's tensor ``spec`` sends it: encoded or cast while it is sent, or unchanged.

    Args:
        device_type: device type of the transfer. A transfer on a stream sends shards that are encoded before.
    """
    if spec.codec is None or array is None:
        return cast_source(array, spec.dtype)
    if device_type in STREAMS:
        return encode_shard(array, spec.codec, spec.ndim - 1)
    return EncodedSource(array.contiguous(), spec.codec, spec.ndim - 1)


def encode_source(array: torch.Tensor | None, spec: TensorSpec) -> tuple[torch.Tensor | None, ErrorSums]:
    """The elements of an encoded tensor's source shard, and the sums of their errors."""
    if array is None:
        return None, ErrorSums()
    assert spec.codec is not None
    source, num_row_dims = array.contiguous(), spec.ndim - 1
    num_elements = spec.codec.num_elements(array.shape[num_row_dims:], 0)
    encoded = torch.empty(
        (*array.shape[:num_row_dims], num_elements, spec.itemsize), dtype=torch.uint8, device=array.device
    )
    return encoded, spec.codec.encode_measured(source, encoded, num_row_dims)


def wire_target(
    target: torch.Tensor | None, spec: TensorSpec, device_type: str = "cpu"
) -> torch.Tensor | DecodedTarget | DeviceDecodedTarget | None:
    """The array that receives a destination shard: a new one for an encoded tensor, else a view of the target.

    Tells autograd that the target changes.
    """
    mark_written([target])
    if spec.codec is None or target is None:
        return receive_view(target, spec.dtype)
    plain = target.detach()  # the target may be a parameter that requires grad
    if device_type in STREAMS:
        return DeviceDecodedTarget(plain, spec.codec, spec.ndim - 1)
    is_direct = plain.is_contiguous() and dtype_name(plain.dtype) in CODED_DTYPES
    return DecodedTarget(plain, spec.codec, spec.ndim - 1, decodes_early=is_direct)


def finish_received(received: Sequence[Any], targets: Sequence[torch.Tensor | None]) -> None:
    """Decode or cast what :func:`wire_target` received into the targets."""
    for array, target in zip(received, targets, strict=True):
        if isinstance(array, DecodedTarget | DeviceDecodedTarget):
            array.finish()
        else:
            cast_received([array], [target])


def unfinished(received: Sequence[Any], targets: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The targets that :func:`finish_received` writes."""
    return [target for array, target in zip(received, targets, strict=True) if array is not target]


def cast_source(array: torch.Tensor | None, dtype: str) -> torch.Tensor | CastSource | None:
    """The source itself if it has this dtype, else a wrapper that casts the part of each message."""
    if array is None or array.dtype == getattr(torch, dtype):
        return array
    return CastSource(array, getattr(torch, dtype))


def receive_view(target: torch.Tensor | None, dtype: str) -> torch.Tensor | None:
    """A view of the target's memory that receives elements of ``dtype``, which must not be wider than the target's.

    In a dense target, the view covers the last bytes and keeps the element order. In any other target, each element
    is received in the first bytes of its slot. :func:`cast_received` then casts them in place.
    """
    if target is None or target.dtype == getattr(torch, dtype):
        return target
    narrow = getattr(torch, dtype)
    target = target.detach()
    if not target.numel():
        return torch.empty(target.shape, dtype=narrow, device=target.device)
    ratio = target.element_size() // narrow.itemsize
    first = target.storage_offset() * ratio
    strides = target.stride()
    if _is_dense(target):
        first += target.numel() * (ratio - 1)
    else:
        strides = tuple(stride * ratio for stride in strides)
    return _bytes_of_storage(target).view(narrow).as_strided(target.shape, strides, first)


def cast_received(received: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> None:
    """Cast the views of :func:`receive_view` to their targets in place, with at most :data:`CAST_BYTES` of scratch."""
    for array, target in zip(received, targets, strict=True):
        if array is None or target is None or array is target or not target.numel():
            continue
        wide = target.detach()  # the target may be a parameter that requires grad
        if not _is_dense(wide):
            for narrow_piece, wide_piece in zip(_pieces(array), _pieces(wide), strict=True):
                write_into(wide_piece, narrow_piece.clone())
            continue
        # In ascending order, each write ends before the narrow elements that are still to be read.
        narrow_row, wide_row = (item.as_strided((item.numel(),), (1,)) for item in (array, wide))
        step = max(1, CAST_BYTES // wide.element_size())
        for index in range(0, wide.numel(), step):
            write_into(wide_row[index : index + step], narrow_row[index : index + step].clone())


def _is_dense(array: torch.Tensor) -> bool:
    """Whether the elements fill one contiguous memory range, in any order of dims."""
    span = 1
    for stride, size in sorted(zip(array.stride(), array.shape, strict=True)):
        if size > 1:
            if stride != span:
                return False
            span *= size
    return True


def _bytes_of_storage(array: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=array.device).set_(array.untyped_storage())  # type: ignore[call-overload]


def _pieces(array: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of an array in row-major order, each of at most ``CAST_BYTES // 16`` elements."""
    max_numel = CAST_BYTES // 16
    if array.numel() <= max_numel or not array.ndim:
        yield array
    elif array.numel() // len(array) > max_numel:
        for part in array:
            yield from _pieces(part)
    else:
        yield from array.split(max(1, max_numel * len(array) // array.numel()))
