"""Coded collectives for FSDP2: parameters that are gathered, and gradients that are reduced and scattered.

>>> for module in model.modules():  # doctest: +SKIP
...     if isinstance(module, FSDPModule):
...         module.set_custom_all_gather(CodedAllGather("int8x128"))
...         module.set_custom_reduce_scatter(CodedReduceScatter("int8x128"))

All messages of a collective are coded, inside a host too. All ranks decode the same bytes, their own included, so that
gathered parameters are equal on all ranks. The sharded parameters that the optimizer changes are not coded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from reshard.codecs import CODED_DTYPES, BlockCodec, parse_codec
from reshard.compression.collectives import decode_rows, encode_rows, gather, reduce_scatter
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError


class _Coded:
    def __init__(self, codec: str) -> None:
        self.codec: BlockCodec = parse_codec(codec)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor for the plain values."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or dtype_name(tensor.dtype) not in CODED_DTYPES:
            raise ArgumentError(
                f"codec {self.codec.name} codes {', '.join(CODED_DTYPES)} on the CPU, not "
                f"{dtype_name(tensor.dtype)} on {tensor.device.type}"
            )


class CodedAllGather(_Coded, AllGather):
    """An all-gather for ``FSDPModule.set_custom_all_gather`` that sends the elements of a block codec.

    Raises:
        ArgumentError: there is no such codec; when called: tensors that it does not code.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather the inputs of all ranks into the output."""
        self._check(input_tensor)
        coded = encode_rows(input_tensor.reshape(1, -1), self.codec)
        decode_rows(gather(coded, group)(), output_tensor.view(dist.get_world_size(group), -1), self.codec)


class CodedReduceScatter(_Coded, ReduceScatter):
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sends the elements of a block codec.

    Ranks add in fp32, in rank order.

    Raises:
        ArgumentError: there is no such codec; when called: tensors that it does not code, or not a sum or an average.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum or average over all ranks to the output."""
        self._check(input_tensor)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ArgumentError(f"a coded reduce-scatter computes sums and averages, not {op}")
        world = dist.get_world_size(group)
        total = reduce_scatter(input_tensor.view(world, -1).float(), group, self.codec)
        output_tensor.copy_((total / world if op == dist.ReduceOp.AVG else total).view(output_tensor.shape))
