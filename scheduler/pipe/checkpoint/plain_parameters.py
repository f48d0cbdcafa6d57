"""The parameters of this rank with the names and the shapes of the whole model, as checkpoints store them.

On a grid of :mod:`reshard.parallel`, several DTensors, or a transposed one, may stand for one parameter of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from reshard.formatting import unwrapped_name
from reshard.parallel.state import find_plain_forms

from ...runtime import torch_compat
from ...runtime.data_parallel import without_ddp


@dataclass(frozen=True)
class PlainParameter:
    """A parameter of the whole model.

    Attributes:
        name: its name in the whole model. parameters: the parameters of this rank that it is made of, by concatenation
            along dim 0.
        is_transposed: whether it is the transpose of the concatenation.
    """

    name: str
    parameters: tuple[torch.nn.Parameter, ...]
    is_transposed: bool = False

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors in the shapes of ``parameters`` as one tensor in the shape of the whole model, without a copy."""
        if len(tensors) == 1 and not self.is_transposed:
            return tensors[0]
        return JoinedTensor(tensors, self.is_transposed)


def named_state(module: torch.nn.Module) -> tuple[list[PlainParameter], dict[str, torch.Tensor]]:
    """The parameters of a stage, each under all of its names, and its persistent buffers."""
    state = {unwrapped_name(name): value for name, value in without_ddp(module).state_dict(keep_vars=True).items()}
    found = []
    forms = find_plain_forms(without_ddp(module))
    for name, form in {unwrapped_name(name): form for name, form in forms.items()}.items():
        found.append(
            PlainParameter(name, tuple(state.pop(unwrapped_name(part)) for part in form.parts), form.is_transposed)
        )
    buffers = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Parameter):
            found.append(PlainParameter(name, (value,)))
        elif isinstance(value, torch.Tensor):
            buffers[name] = value
    return found, buffers


class JoinedTensor(torch.Tensor):
    """DTensors that are concatenated along dim 0 and may be transposed. Only ``torch.distributed.checkpoint`` uses it.

    It has the methods with which torch saves and loads a tensor of several shards.
    """

    _chunks: list[tuple[ChunkStorageMetadata, torch.Tensor]]

    @staticmethod
    def __new__(cls, tensors: Sequence[Any], is_transposed: bool) -> JoinedTensor:
        """Join DTensors without copying their shards."""
        first = tensors[0]
        shape = [sum(each.shape[0] for each in tensors), *first.shape[1:]]
        made = torch_compat.make_shapeless_subclass(cls, shape[::-1] if is_transposed else shape, first)
        made._chunks, start = [], 0
        for each in tensors:
            sizes, (first_row, *others) = torch_compat.local_shape_and_offset(each)
            offsets = (first_row + start, *others)
            local = each.detach().to_local()
            if is_transposed:
                sizes, offsets, local = sizes[::-1], offsets[::-1], local.t()
            if local.numel():
                made._chunks.append((ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), local))
            start += each.shape[0]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{cls.__name__} is only saved and loaded; it does not compute {func}")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """One item to write per shard of this rank."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(local), self.size()),
            )
            for chunk, local in self._chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Offset and size of each shard of this rank."""
        return [chunk for chunk, _ in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor of the shard at the offset of ``index``."""
        return next(local for chunk, local in self._chunks if chunk.offsets == index.offset)
