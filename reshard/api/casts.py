"""Results of another dtype: elements are cast where that lets fewer bytes travel.

Nothing is cast beside the shards: a source is cast message by message as it is packed, and what is to become wider
lands in the destination's own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from reshard.dtypes import ITEMSIZE
from reshard.errors import ArgumentError
from reshard.runtime.cpu.staging import CastSource

#: Scratch memory for casts in place.
CAST_BYTES = 2**20


def travelling_dtype(src: str, dst: str | None) -> str:
    """The dtype that elements have under way: the destination's, unless the source's is narrower."""
    return src if dst is None or ITEMSIZE[dst] > ITEMSIZE[src] else dst


def check_cast(src: str, dst: str, what: str) -> None:
    """Raise ArgumentError unless torch casts one dtype to the other, and that keeps what numbers are.

    Between floating point dtypes, and between complex ones, any width will do; else only what torch promotes to.
    """
    if src == dst:
        return
    a, b = getattr(torch, src), getattr(torch, dst)
    is_alike = (a.is_floating_point and b.is_floating_point) or (a.is_complex and b.is_complex)
    try:
        if not is_alike and not _promotes(a, b):
            raise ArgumentError(f"{what}: {src} cannot become {dst} without loss of more than precision")
        torch.zeros(1, dtype=a).to(b)
        negative = torch.tensor([-1.0])
        if b.is_floating_point and float(negative.to(b).float()) > 0 and not float(negative.to(a).float()) > 0:
            raise ArgumentError(f"{what}: {src} cannot become {dst}, which has no sign")
    except (RuntimeError, TypeError) as error:
        text = str(error).splitlines()[0]
        said = "" if "INTERNAL ASSERT" in text else f": {text}"  # of dtypes that have no arithmetic at all
        raise ArgumentError(f"{what}: torch cannot cast {src} to {dst}{said}") from error


def _promotes(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether every number of one is one of the other; torch does not promote unsigned integers of several bytes."""
    integers = [not (one.is_floating_point or one.is_complex or one is torch.bool) for one in (a, b)]
    if all(integers):
        return torch.iinfo(b).min <= torch.iinfo(a).min and torch.iinfo(a).max <= torch.iinfo(b).max
    return torch.promote_types(a, b) is b


def cast_source(array: torch.Tensor | None, dtype: str) -> torch.Tensor | CastSource | None:
    """What is sent of a source: itself if it has this dtype, else what casts it message by message."""
    if array is None or array.dtype == getattr(torch, dtype):
        return array
    return CastSource(array, getattr(torch, dtype))


def landing_of(target: torch.Tensor | None, dtype: str) -> torch.Tensor | None:
    """Where elements of a dtype no wider than the target's land: in the target's own memory.

    A dense target takes them in its last bytes, in its own order of elements; any other takes each element in the first
    bytes of its place. :func:`cast_landed` then casts them where they are.
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


def cast_landed(landed: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> None:
    """Cast elements that landed as :func:`landing_of` says; scratch memory is at most :data:`CAST_BYTES`."""
    for array, target in zip(landed, targets, strict=True):
        if array is None or target is None or array is target or not target.numel():
            continue
        wide = target.detach()  # of a parameter, whose gradient is no affair of this
        if not _is_dense(wide):
            for piece, place in zip(_pieces(array), _pieces(wide), strict=True):
                place.copy_(piece.clone())
            continue
        # From the first element on: what is written ends before the elements that are still to be read.
        narrow_row, wide_row = (one.as_strided((one.numel(),), (1,)) for one in (array, wide))
        step = max(1, CAST_BYTES // wide.element_size())
        for at in range(0, wide.numel(), step):
            wide_row[at : at + step].copy_(narrow_row[at : at + step].clone())


def _is_dense(array: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in any order of dims."""
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
    """Views of an array, in row-major order, of at most :data:`CAST_BYTES` at 16 bytes an element."""
    most = CAST_BYTES // 16
    if array.numel() <= most or not array.ndim:
        yield array
    elif array.numel() // len(array) > most:
        for row in array:
            yield from _pieces(row)
    else:
        yield from array.split(max(1, most * len(array) // array.numel()))
