"""Outlines of batches, and the division of batches into parts, microbatches and samples of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import count_of
from reshard.runtime.array_bytes import digest_array
from reshard.sharding import Mesh

from .stage_mesh import layout_of_samples, num_sample_shards, ranks_with_own_samples

#: ``{name: value}``. A value is a tensor with one entry per sample in its first dim, or goes to all replicas undivided.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class BatchEntry:
    """Dtype and shape of one tensor of a batch, or another value. The shape of a divided tensor omits the samples."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_divided: bool = False
    value: Any = None

    def __str__(self) -> str:
        if not self.dtype:
            return f"{self.name}={self.value!r}"
        return f"{self.name}: {self.dtype} {['samples', *self.shape] if self.is_divided else list(self.shape)}"


@dataclass(frozen=True)
class BatchOutline:
    """Description of a batch without the values of its tensors: number of samples, and entries sorted by name."""

    num_samples: int
    entries: tuple[BatchEntry, ...]

    def __str__(self) -> str:
        return f"{count_of(self.num_samples, 'sample')} of {', '.join(map(str, self.entries))}"

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return [entry.name for entry in self.entries]

    def empty(self, num_samples: int, device: str = "cpu") -> dict[str, Any]:
        """A batch of this outline with another number of samples and uninitialized values."""
        made: dict[str, Any] = {}
        for entry in self.entries:
            shape = (num_samples, *entry.shape) if entry.is_divided else entry.shape
            made[entry.name] = entry.value
            if entry.dtype:
                made[entry.name] = torch.empty(shape, dtype=getattr(torch, entry.dtype), device=device)
        return made

    def to_json(self) -> list[Any]:
        """Plain values."""
        return [self.num_samples, [[e.name, e.dtype, list(e.shape), e.is_divided, e.value] for e in self.entries]]

    @classmethod
    def from_json(cls, data: Any) -> BatchOutline:
        """The inverse of :meth:`to_json`."""
        num_samples, entries = data
        return cls(
            num_samples, tuple(BatchEntry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in entries)
        )


def name_batch(batch: Any, names: Sequence[str]) -> Batch:
    """A batch as ``{name: value}``. A tensor or a tuple gets the names of the model's inputs, in order.

    Raises:
        ArgumentError: there are more values than names, or the batch is of another type.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if not names:
        raise ArgumentError(f"stages given as modules need a batch as a dict, not {type(batch).__name__}")
    values = [batch] if isinstance(batch, torch.Tensor) else batch
    if not isinstance(values, (list, tuple)):
        raise ArgumentError(
            f"a batch must be a dict of tensors, a tensor or a tuple of tensors, not {type(batch).__name__}"
        )
    if len(values) > len(names):
        raise ArgumentError(f"the batch has {len(values)} values, but the model takes {', '.join(names)}")
    return dict(zip(names, values, strict=False))


def has_no_sample(batch: Batch) -> bool:
    """Whether the batch has tensors of 0 samples. Other tensors may have a first dim of size 1, as for any batch."""
    sizes = {item.shape[0] for item in batch.values() if isinstance(item, torch.Tensor) and item.dim()}
    return 0 in sizes and sizes <= {0, 1}


def outline_batch(batch: Batch) -> BatchOutline:
    """The outline of a batch.

    The first tensor with a dim gives the number of samples. Other tensors are divided if their first dim has this size.
    A scalar, or a tensor whose first dim is 1, goes to all replicas undivided.

    Raises:
        ArgumentError: a value cannot be passed to a stage, or tensors have different numbers of samples.
    """
    for name, value in batch.items():
        if not isinstance(name, str):
            raise ArgumentError(f"the batch has a key {name!r}; keys must be names")
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested or value.is_meta):
            kind = "nested" if value.is_nested else "without data" if value.is_meta else str(value.layout)
            raise ArgumentError(f"{name!r} of the batch is a tensor that is {kind}; its tensors must be dense")
    num_samples = next(
        (item.shape[0] for item in batch.values() if isinstance(item, torch.Tensor) and item.dim()), None
    )
    if num_samples is None:
        raise ArgumentError(f"the batch has no tensor with samples; it has {sorted(map(str, batch))}")
    if num_samples == 0:
        raise ArgumentError("the batch has 0 samples; it needs at least 1")
    entries = []
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            is_divided = value.dim() > 0 and value.shape[0] == num_samples
            if not is_divided and value.dim() > 0 and value.shape[0] != 1:
                raise ArgumentError(
                    f"{name!r} of the batch has {value.shape[0]} samples, but the first tensor has {num_samples}; the "
                    "first dim must be the samples, or 1"
                )
            shape = tuple(value.shape[1:] if is_divided else value.shape)
            entries.append(BatchEntry(name, dtype_name(value.dtype), shape, is_divided))
        elif value is None or isinstance(value, (bool, int, float, str)):
            entries.append(BatchEntry(name, value=value))
        else:
            raise ArgumentError(
                f"{name!r} of the batch is {type(value).__name__}; it must be a tensor, a number, a string or None"
            )
    return BatchOutline(num_samples, tuple(entries))


def check_dtypes(outline: BatchOutline, example: BatchOutline) -> None:
    """Raise ArgumentError if a tensor has another kind of dtype than in the example; integers may differ in width.

    :class:`FakeModel` cannot find all of these errors, because some operations accept dtypes on fake tensors that they
    refuse on real ones.
    """
    expected = {entry.name: entry.dtype for entry in example.entries}
    for entry in outline.entries:
        other = expected.get(entry.name, "")
        if entry.dtype and other and _kind_of(entry.dtype) != _kind_of(other):
            raise ArgumentError(
                f"{entry.name!r} of the batch is {entry.dtype}, but {other} in the example of compile; convert it"
            )


def _kind_of(dtype: str) -> str:
    """The dtype; "integer" for those of integers and bools."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return dtype if torch_dtype.is_floating_point or torch_dtype.is_complex else "integer"


def split_samples(num_samples: int, parts: int) -> list[int]:
    """Sizes of at most ``parts`` parts, as equal as possible, larger ones first, and none empty."""
    parts = min(parts, num_samples)
    share, extra = divmod(num_samples, parts)
    return [share + (part < extra) for part in range(parts)]


def split_microbatches(num_samples: int, num_microbatches: int, meshes: Sequence[Mesh]) -> list[int]:
    """Number of samples of each microbatch.

    The list is shorter if a microbatch would have fewer samples than replicas.
    """
    max_shards = max(map(num_sample_shards, meshes))
    return split_samples(num_samples, min(num_microbatches, max(1, num_samples // max_shards)))


def replica_samples(num_samples: int, mesh: Mesh, rank: int) -> range:
    """The samples of a microbatch that a rank of a stage computes."""
    layout = layout_of_samples(mesh)
    if not layout.local_shape((num_samples,), rank)[0]:
        return range(0)
    ((interval,),) = layout.regions((num_samples,), rank)
    return range(*interval)


def take_samples(batch: Batch, outline: BatchOutline, names: Sequence[str], samples: range) -> dict[str, Any]:
    """The named entries of a batch, with some of its samples."""
    taken = {}
    for entry in outline.entries:
        if entry.name in names:
            value = batch[entry.name]
            taken[entry.name] = value[samples.start : samples.stop] if entry.is_divided else value
    return taken


def take_unused_sample(batch: Batch, outline: BatchOutline, names: Sequence[str], is_whole: bool) -> dict[str, Any]:
    """The named entries with one sample that does not count: the first sample of a whole batch, otherwise ones."""
    if is_whole:
        return take_samples(batch, outline, names, range(1))
    ones: dict[str, Any] = {}
    for entry in outline.entries:
        shape = (1, *entry.shape) if entry.is_divided else entry.shape
        ones[entry.name] = torch.ones(shape, dtype=getattr(torch, entry.dtype)) if entry.dtype else entry.value
    return {name: value for name, value in ones.items() if name in names}


def digest_batch(batch: Batch) -> dict[str, int]:
    """The digest of each tensor of a batch."""
    return {name: digest_array(item.detach().cpu()) for name, item in batch.items() if isinstance(item, torch.Tensor)}


def check_same_values(digests: Mapping[int, Mapping[str, int]]) -> None:
    """Raise DisagreementError, on all ranks alike, if ranks pass batches with different values.

    Args:
        digests: digests of each tensor, by rank and name.
    """
    (first, expected), *others = sorted(digests.items())
    for rank, own in others:
        for name, digest in expected.items():
            if own[name] != digest:
                raise DisagreementError(
                    f"ranks {first} and {rank} pass different values of {name!r}; every rank must pass the same batch, "
                    "or its own samples with local_batch=True"
                )


def common_outline(
    outlines: Mapping[int, BatchOutline], settings: Mapping[int, Any], meshes: Sequence[Mesh]
) -> BatchOutline:
    """The outline of the whole batch.

    Args:
        outlines: outlines of the batch of each rank that passes one.
        settings: ``accumulate`` and ``local_batch`` of each rank.
        meshes: meshes of the stages.

    Raises:
        ArgumentError: no rank passes a batch. DisagreementError: ranks pass different ones.
    """
    if not outlines:
        raise ArgumentError("no rank passes a batch")
    (first, outline), *others = sorted(outlines.items())
    for rank, other in others:
        if other.entries != outline.entries:
            raise DisagreementError(f"ranks {first} and {rank} pass different batches: {outline}; {other}")
    for rank, value in settings.items():
        if value != settings[first]:
            raise DisagreementError(
                f"ranks {first} and {rank} pass different accumulate and local_batch: {settings[first]}; {value}"
            )
    if not settings[first][1]:
        for rank, other in others:
            if other.num_samples != outline.num_samples:
                raise DisagreementError(
                    f"ranks {first} and {rank} pass batches of {outline.num_samples} and {other.num_samples} samples; "
                    "if each passes its own samples, set local_batch=True"
                )
        return outline
    counts = {rank: item.num_samples for rank, item in outlines.items()}
    return BatchOutline(
        max(sum(counts.get(rank, 0) for rank in ranks_with_own_samples(mesh)) for mesh in meshes), outline.entries
    )
