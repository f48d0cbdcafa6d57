"""Results of another dtype: elements are cast where that lets fewer bytes travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reshard.dtypes import ITEMSIZE
from reshard.errors import ArgumentError


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


def cast_source(array: torch.Tensor | None, dtype: str) -> torch.Tensor | None:
    """What is sent of a source: itself if it has this dtype."""
    return None if array is None else array.to(getattr(torch, dtype))


def landing_of(target: torch.Tensor | None, dtype: str) -> torch.Tensor | None:
    """Where elements of this dtype land: in the target itself if it has it, else beside it until they are cast."""
    if target is None or target.dtype == getattr(torch, dtype):
        return target
    return torch.empty(target.shape, dtype=getattr(torch, dtype), device=target.device)


def cast_landed(landed: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> None:
    """Fill the targets that elements landed beside."""
    for array, target in zip(landed, targets, strict=True):
        if target is not None and array is not None and array is not target:
            target.detach().copy_(array)  # of a parameter, whose gradient is no affair of this
