"""Encoded shards of transfers on a stream: whole shards are encoded before, and decoded after, on the caller's stream.

Kernels encode tensors on a GPU. Tensors on the CPU, on which tests run this path, are encoded by the native codecs.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from reshard.codecs import BlockCodec, ElementCodec
from reshard.codecs.raw_bytes import decoded_dtype, write_into
from reshard.errors import ArgumentError


def check_device_codec(codec: Any, device_type: str) -> None:
    """Raise ArgumentError unless this process can encode tensors on this type of device."""
    if device_type == "cpu":
        return
    name = getattr(codec, "name", codec)
    if not isinstance(codec, BlockCodec):
        raise ArgumentError(f"codec {name} encodes CPU tensors only; these are on {device_type}")
    if importlib.util.find_spec("triton") is None:
        raise ArgumentError(f"codec {name} needs Triton for tensors on {device_type}, and Triton is not installed")


def encode_shard(plain: torch.Tensor, codec: ElementCodec, num_row_dims: int) -> torch.Tensor:
    """The elements of a shard: uint8, ``(rows..., elements, bytes of an element)``, on its device."""
    source = plain.contiguous()
    encoded = _empty_elements(source, codec, num_row_dims)
    if source.device.type == "cpu":
        codec.encode(source, encoded, num_row_dims)
    else:
        from reshard.runtime.cuda.codec_kernels import encode_on_device  # imports Triton

        assert isinstance(codec, BlockCodec)
        encode_on_device(codec, source, encoded, num_row_dims)
    return encoded


class DeviceDecodedTarget:
    """A destination shard, and the array that receives its elements.

    Args:
        plain: the shard; any dtype and strides.

    Attributes:
        plain: the shard.
        encoded: uint8, ``(rows..., elements, bytes of an element)``, on the device of the shard.
    """

    def __init__(self, plain: torch.Tensor, codec: ElementCodec, num_row_dims: int) -> None:
        self.plain, self._codec, self._num_row_dims = plain, codec, num_row_dims
        self.encoded = _empty_elements(plain, codec, num_row_dims)

    def finish(self) -> None:
        """Decode, on the current stream."""
        plain = self.plain
        dtype = getattr(torch, decoded_dtype(plain.dtype))
        is_direct = plain.is_contiguous() and plain.dtype == dtype
        target = plain if is_direct else torch.empty(plain.shape, dtype=dtype, device=plain.device)
        if plain.device.type == "cpu":
            self._codec.decode(self.encoded, target, self._num_row_dims)
        else:
            from reshard.runtime.cuda.codec_kernels import decode_on_device  # imports Triton

            assert isinstance(self._codec, BlockCodec)
            decode_on_device(self._codec, self.encoded, target, self._num_row_dims)
        if not is_direct:
            write_into(plain, target)


def _empty_elements(plain: torch.Tensor, codec: ElementCodec, num_row_dims: int) -> torch.Tensor:
    shape = (*plain.shape[:num_row_dims], codec.num_elements(plain.shape[num_row_dims:], 0), codec.element[1])
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.uint8, device=plain.device)
