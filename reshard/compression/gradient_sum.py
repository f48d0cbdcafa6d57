"""All-reduce of gradients over data-parallel replicas, encoded between hosts."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.arrays.dtensors import is_dtensor
from reshard.api.arrays.tensor_checks import DEVICE_TYPES, find_storage_problem, has_overlapping_elements
from reshard.codecs import BlockCodec, parse_codec
from reshard.compression.feedback import CodingErrors
from reshard.compression.host_sums import GroupLevel, padded_size, split_by_host, sum_over_hosts
from reshard.coordination import all_gather_json
from reshard.coordination.device_mesh import end_with, new_group
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief
from reshard.public_api import not_compiled

#: Dtypes of gradients. Sums are computed in fp32.
GRADIENT_DTYPES = ("float32", "bfloat16", "float16")

#: Values of a piece. While a piece travels between hosts, the next one is summed and encoded.
PIECE_VALUES = 2**20


class GradientSum:
    """All-reduce of gradients over the ranks of a process group. All ranks get the same bits.

    With L ranks on each of H hosts and n values:

    1. Ranks of a host exchange raw fp32 slices, and each sums one slice of ``n / L`` values in the order of ranks.
    2. Ranks at the same place of their hosts exchange encoded parts of their slice, and each sums one part.
    3. Each part is encoded once. The ranks at the same place gather it, then the ranks of each host. Every rank
       decodes the same bytes.

    A host sends ``2 n (H - 1) / H`` encoded values, as a ring of hosts would. No value is encoded more than twice.

    Args:
        codec: the name of a block codec; ``"int4x128-bf16"`` has the least error at 4 bits. None: no codec.
        group: a torch process group; default: the world. All its ranks must create the sum.
        host_of_rank: the host of each rank of the group; default: by host name. All hosts need equally many ranks.
        average: divide by the number of ranks.
        feedback: add each rank's coding errors to its next gradients. The errors are kept by parameter name, and are in
            :meth:`state_dict`. At 4 bits and more, training with Adam does not need it.
        module: the module inside DDP, for :func:`~reshard.compression.ddp_hook` with ``feedback``.

    Attributes:
        names: parameter names of ``module`` by ``id``.

    Raises:
        ArgumentError: there is no such codec, or hosts have different numbers of ranks.
        DisagreementError: ranks pass different arguments.
    """

    def __init__(
        self,
        codec: str | None,
        group: dist.ProcessGroup | None = None,
        *,
        host_of_rank: Sequence[int] | None = None,
        average: bool = True,
        feedback: bool = False,
        module: torch.nn.Module | None = None,
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"group must be a torch process group, not {type(group).__name__}")
        self._group = dist.group.WORLD if group is None else group
        self._size, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        failure, given = None, None
        try:
            self.codec: BlockCodec | None = None if codec is None else parse_codec(codec)
            given = _read_hosts(host_of_rank)
            for name, flag in (("average", average), ("feedback", feedback)):
                if not isinstance(flag, bool):
                    raise ArgumentError(f"{name} is {brief(flag)}; it must be True or False")
            if module is not None and not isinstance(module, torch.nn.Module):
                raise ArgumentError(f"module must be a torch module, not {type(module).__name__}")
        except ArgumentError as error:
            failure = str(error)
        hosts = self._agree([] if failure else [codec, given, average, feedback], failure)
        self._average, self.feedback = average, feedback
        named = () if module is None else module.named_parameters()
        self.names = {id(parameter): name for name, parameter in named}
        levels = split_by_host(hosts, self._rank)
        if levels is None:
            counts = ", ".join(f"{host} has {number}" for host, number in Counter(hosts).items())
            raise ArgumentError(f"a hierarchical sum needs equally many ranks on each host, but {counts}")
        self._groups = tuple(self._new_group(ranks) for ranks in levels)
        end_with(self, self._groups)
        self._inside, self._across = map(GroupLevel, self._groups)
        self._hashes: dict[tuple[Any, ...], int] = {}
        self._errors = CodingErrors()
        self._buffers: dict[str, torch.Tensor] = {}

    def _agree(self, arguments: list[Any], failure: str | None) -> list[Any]:
        """The host of each rank, after comparing the arguments of all ranks. Raises the error of any rank."""
        every = all_gather_json([arguments, socket.gethostname(), failure], self._group)
        _raise_first([failed for _, _, failed in every])
        for rank, (other, _, _) in enumerate(every):
            if other != every[0][0]:
                raise DisagreementError(
                    f"ranks disagree on a gradient sum: rank 0 passes codec, host_of_rank, average and feedback "
                    f"{every[0][0]}, rank {rank} passes {other}"
                )
        hosts: list[Any] = [name for _, name, _ in every] if arguments[1] is None else arguments[1]
        if len(hosts) != self._size:
            raise ArgumentError(f"host_of_rank has {len(hosts)} entries, but the group has {self._size} ranks")
        return hosts

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup:
        world = [dist.get_global_rank(self._group, rank) for rank in ranks]
        return new_group(world, backend="gloo")

    @not_compiled
    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace each gradient by the sum or mean over all ranks, in place.

        The ranks compare names, dtypes and shapes. If those of any rank are wrong or differ, all ranks raise the same
        error, and no gradient has changed.

        Args:
            gradients: ``{parameter name: gradient}``, fp32, bf16 or fp16 tensors, or DTensors, of which the local
                shards are summed; the same names in the same order on all ranks. Gradients on a GPU are copied to the
                host and back.

        Raises:
            ArgumentError: a gradient is no tensor, of another dtype or device, sparse, or overlaps itself in memory; or
                its kept error has another size.
            DisagreementError: ranks pass other gradients.
        """
        self.sum(gradients)

    def sum(self, gradients: Mapping[str, torch.Tensor], known_error: ArgumentError | None = None) -> None:
        """Sum as a call does. ``known_error`` is an error that this rank has found before; all ranks raise it."""
        failure, given, is_mapping = None, [], isinstance(gradients, Mapping)
        try:
            if known_error is not None:
                raise known_error
            gradients = {name: _local_of(name, item) for name, item in gradients.items()} if is_mapping else gradients
            self.check(gradients)
            given = [(str(name), dtype_name(value.dtype), list(value.shape)) for name, value in gradients.items()]
        except ArgumentError as error:
            failure = str(error)
        self._compare(given, failure)
        gradients = {name: gradient.detach() for name, gradient in gradients.items()}
        sizes = [gradient.numel() for gradient in gradients.values()]
        if not sum(sizes):
            return
        flat = self._flatten(list(gradients.values()))
        pieces = flat[: sum(sizes)].split(sizes)
        self._errors.add_to(list(zip(gradients, pieces, strict=True)))
        errors = torch.zeros_like(flat) if self.feedback and self.codec is not None else None
        received = self._buffer("received", flat.numel())
        sum_over_hosts(
            flat, self._inside, self._across, self.codec, errors=errors, received=received, piece_values=PIECE_VALUES
        )
        for gradient, piece in zip(gradients.values(), pieces, strict=True):
            if gradient.device.type != "cpu" or gradient.data_ptr() != piece.data_ptr():
                gradient.copy_(piece.view(gradient.shape))
        if errors is not None:
            self._errors.keep(list(zip(gradients, errors[: sum(sizes)].split(sizes), strict=True)))

    def _flatten(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The gradients, divided if averaged, then zeros. A single fp32 gradient that needs no zeros is not copied."""
        numel = sum(gradient.numel() for gradient in gradients)
        size = padded_size(numel, self._size, self.codec)
        first = gradients[0]
        is_plain = first.dtype == torch.float32 and first.is_contiguous() and first.device.type == "cpu"
        if numel == first.numel() == size and is_plain:
            flat = first.view(-1)
        else:
            flat = self._buffer("values", size)
            values = [gradient.to("cpu").reshape(-1) for gradient in gradients]
            torch.cat(values, out=flat[:numel])
            flat[numel:] = 0
        return flat.div_(self._size) if self._average else flat

    def check(self, gradients: Mapping[str, Any]) -> None:
        """Raise ArgumentError if this rank cannot sum these gradients."""
        if not isinstance(gradients, Mapping):
            raise ArgumentError(f"gradients must be {{name: gradient}}, not {type(gradients).__name__}")
        for name, gradient in gradients.items():
            self._check_one(name, gradient)

    def _check_one(self, name: str, gradient: Any) -> None:
        if not isinstance(gradient, torch.Tensor):
            raise ArgumentError(f"the gradient of {name!r} is {type(gradient).__name__}, not a torch tensor")
        if gradient.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"the gradient of {name!r} was made in inference mode, and cannot change outside of it; pass a clone"
            )
        if gradient.layout is not torch.strided or gradient.device.type not in DEVICE_TYPES:
            kinds = " or ".join(DEVICE_TYPES)
            raise ArgumentError(f"the gradient of {name!r} must be a dense tensor on {kinds}, not on {gradient.device}")
        if dtype_name(gradient.dtype) not in GRADIENT_DTYPES:
            supported = ", ".join(GRADIENT_DTYPES)
            raise ArgumentError(f"the gradient of {name!r} is {dtype_name(gradient.dtype)}; supported are {supported}")
        if has_overlapping_elements(gradient):
            raise ArgumentError(
                f"the gradient of {name!r} has overlapping elements: its strides are {gradient.stride()}"
            )
        if problem := find_storage_problem(gradient):
            raise ArgumentError(f"the gradient of {name!r} is a {problem}")
        kept = self._errors.size_of(name)
        if kept is not None and kept != gradient.numel():
            raise ArgumentError(
                f"the gradient of {name!r} has {gradient.numel()} values, but its kept error has {kept}"
            )

    def _compare(self, given: list[tuple[str, str, list[int]]], failure: str | None) -> None:
        """Raise the same error on all ranks unless all pass the same gradients and no rank has a ``failure``.

        Otherwise, collectives of unequal sizes would abort the process, and a rank that leaves a sum would enter the
        next sum while others are still in this one. The group of the caller may be in use by another thread.
        """
        signature = tuple((name, dtype, *shape) for name, dtype, shape in given)
        digest = 0 if failure else self._hash_of(signature)
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        for group in self._groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest == smallest != 0:
            return
        every: Any = [[self._rank, given, failure]]
        for group in self._groups:
            every = [entry for entries in all_gather_json(every, group) for entry in entries]
        every.sort(key=lambda entry: entry[0])
        _raise_first([failed for _, _, failed in every])
        first = every[0][1]
        for rank, other, _ in every:
            if other != first:
                mine, yours = next(pair for pair in itertools.zip_longest(first, other) if pair[0] != pair[1])
                raise DisagreementError(
                    f"ranks disagree on the gradients of a sum: rank 0 passes {_describe(mine)}, rank {rank} "
                    f"{_describe(yours)}"
                )

    def _hash_of(self, signature: tuple[Any, ...]) -> int:
        """A positive number that is the same on all ranks with the same signature."""
        known = self._hashes.get(signature)
        if known is None:
            data = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()
            known = self._hashes[signature] = (int.from_bytes(data, "big") >> 2) + 1
        return known

    def _buffer(self, name: str, numel: int) -> torch.Tensor:
        """Scratch memory, which the next sum reuses."""
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < numel:
            kept = self._buffers[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return kept[:numel]

    @functools.cached_property
    def thread(self) -> ThreadPoolExecutor:
        """One thread, which runs sums in the order in which they are submitted."""
        return ThreadPoolExecutor(1, thread_name_prefix="reshard-gradients")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The coding errors that this rank adds to its next gradients, by parameter name."""
        return self._errors.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        self._errors.load_state_dict(state)


def _local_of(name: str, gradient: Any) -> Any:
    """The local shard of a DTensor; any other value unchanged."""
    if not is_dtensor(gradient):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        raise ArgumentError(f"the gradient of {name!r} is a DTensor with a pending sum; redistribute it first")
    return gradient.to_local()


def _read_hosts(host_of_rank: Any) -> list[int] | None:
    try:
        return None if host_of_rank is None else [operator.index(host) for host in host_of_rank]
    except Exception:  # such as a tensor's
        raise ArgumentError(
            f"host_of_rank is {brief(host_of_rank)}; it must have the host number of each rank"
        ) from None


def _raise_first(failures: Sequence[str | None]) -> None:
    """Raise the first failure as an ArgumentError that names the rank."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise ArgumentError(f"rank {rank}: {failure}")


def _describe(gradient: tuple[str, str, list[int]] | None) -> str:
    return "fewer" if gradient is None else f"{gradient[0]!r} of {gradient[1]} {gradient[2]}"
