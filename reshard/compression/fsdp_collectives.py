"""Encoded collectives for FSDP2: parameters that are gathered, and gradients that are reduced and scattered.

>>> for module in model.modules():  # doctest: +SKIP
...     if isinstance(module, FSDPModule):
...         module.set_custom_all_gather(CompressedAllGather("int8x128"))
...         module.set_custom_reduce_scatter(CompressedReduceScatter("int8x128"))

All messages of a collective are encoded, inside a host too. All ranks decode the same bytes, their own included, so
that gathered parameters are equal on all ranks. The sharded parameters that the optimizer changes are not encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from reshard.arguments import check_arguments
from reshard.codecs import CODED_DTYPES, BlockCodec, parse_codec
from reshard.compression.encoded_collectives import all_gather, decode_rows, encode_rows, reduce_scatter
from reshard.compression.feedback import check_state
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import brief


class _Encoded:
    def __init__(self, codec: str) -> None:
        self.codec: BlockCodec = parse_codec(codec)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor for the plain values."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(
        self, tensor: torch.Tensor, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None
    ) -> None:
        """Raise ArgumentError unless the codec encodes ``tensor``, and ``whole`` holds a ``part`` of each rank."""
        if tensor.device.type != "cpu" or dtype_name(tensor.dtype) not in CODED_DTYPES:
            raise ArgumentError(
                f"codec {self.codec.name} encodes {', '.join(CODED_DTYPES)} on the CPU, not "
                f"{dtype_name(tensor.dtype)} on {tensor.device.type}"
            )
        world = dist.get_world_size(group)
        if whole.numel() != world * part.numel() or not whole.is_contiguous() or not part.is_contiguous():
            raise ArgumentError(
                f"{type(self).__name__} of {world} ranks got tensors of shapes {list(part.shape)} and "
                f"{list(whole.shape)}; the second needs {world} times the elements of the first, and both must be "
                "contiguous"
            )


class CompressedAllGather(_Encoded, AllGather):
    """An all-gather for ``FSDPModule.set_custom_all_gather`` that sends the elements of a block codec.

    Raises:
        ArgumentError: there is no such codec; when called: tensors that it does not encode.
    """

    @check_arguments()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        async_op: bool = False,
    ) -> None:
        """Gather the inputs of all ranks into the output."""
        self._check(input_tensor, output_tensor, input_tensor, group)
        encoded = encode_rows(input_tensor.reshape(1, -1), self.codec)
        decode_rows(all_gather(encoded, group)(), output_tensor.view(dist.get_world_size(group), -1), self.codec)


class CompressedReduceScatter(_Encoded, ReduceScatter):
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sends the elements of a block codec.

    Ranks add in fp32, in rank order.

    Args:
        feedback: add the errors of this rank's codings to its next gradients. Each FSDP module needs an object of its
            own then, since the errors belong to its parameters.

    Raises:
        ArgumentError: there is no such codec; when called: tensors that it does not encode, not a sum or an average, or
            gradients of another size than before with ``feedback``.
    """

    @check_arguments()
    def __init__(self, codec: str, *, feedback: bool = False) -> None:
        super().__init__(codec)
        self._feedback = feedback
        self._errors: torch.Tensor | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's coding errors, flat fp32; empty before the first call and without ``feedback``."""
        return {} if self._errors is None else {"errors": self._errors.reshape(-1).clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned on this rank."""
        check_state(state)
        self._errors = state["errors"].clone() if self._feedback and "errors" in state else None

    @check_arguments()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum or average over all ranks to the output."""
        self._check(input_tensor, input_tensor, output_tensor, group)
        if not isinstance(op, (dist.ReduceOp, type(dist.ReduceOp.SUM))) or op not in (
            dist.ReduceOp.SUM,
            dist.ReduceOp.AVG,
        ):
            raise ArgumentError(f"an encoded reduce-scatter computes sums and averages, not {brief(op)}")
        world = dist.get_world_size(group)
        rows, errors = input_tensor.view(world, -1).float(), None
        if self._feedback:
            errors = torch.empty_like(rows)
            if self._errors is not None:
                if self._errors.numel() != rows.numel():
                    raise ArgumentError(
                        f"a CompressedReduceScatter with feedback has errors of {self._errors.numel()} values, but "
                        f"gets {rows.numel()}: give each FSDP module a separate CompressedReduceScatter"
                    )
                rows = rows + self._errors.view(rows.shape)
        total = reduce_scatter(rows, group, self.codec, errors)
        if errors is not None:  # errors of blocks with NaN or infinity would spoil all later gradients
            self._errors = torch.nan_to_num(errors, nan=0.0, posinf=0.0, neginf=0.0)
        output_tensor.copy_((total / world if op == dist.ReduceOp.AVG else total).view(output_tensor.shape))
