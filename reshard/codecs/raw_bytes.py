"""Arrays of NumPy, ml_dtypes and torch as flat bytes, without importing any of them but NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError

#: Number of a dtype for the native and GPU kernels.
DTYPE_NUMBERS = {"float32": 0, "bfloat16": 1, "float16": 2}


def decoded_dtype(dtype: Any) -> str:
    """The dtype into which elements are decoded for a result of this dtype: the same, or fp32 to be cast.

    All receivers must use the same one: a value beyond the range of the result is limited while it is decoded only.
    """
    name = dtype_name(dtype)
    return name if name in DTYPE_NUMBERS else "float32"


def flat_bytes(array: Any) -> np.ndarray:
    """A view of a contiguous CPU array as flat uint8.

    Raises:
        ArgumentError: the array is not contiguous.
    """
    if isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise ArgumentError(f"a codec needs contiguous arrays; this one of shape {list(array.shape)} has strides")
        return array.reshape(-1).view(np.uint8)
    if not array.is_contiguous():
        raise ArgumentError(f"a codec needs contiguous tensors; this one of shape {list(array.shape)} has strides")
    import torch

    flat = array.detach().as_strided((array.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def write_into(target: Any, values: Any) -> None:
    """Copy values into a tensor, which may have been made in inference mode, whatever the mode of this thread."""
    import torch

    with torch.inference_mode(target.is_inference()):
        target.copy_(values)


def dtype_number(array: Any, codec: str) -> int:
    """The number of an array's dtype for the kernels; raises ArgumentError if the codec cannot encode it."""
    name = dtype_name(array.dtype)
    if name not in DTYPE_NUMBERS:
        raise ArgumentError(f"codec {codec} encodes {', '.join(DTYPE_NUMBERS)}, not {name}")
    return DTYPE_NUMBERS[name]


def num_columns(array: Any, num_row_dims: int | None) -> int:
    """The number of values in a row of an array whose first ``num_row_dims`` dims count rows; all but one by default.

    A row is never empty, so that the number of rows of an empty array does not matter.
    """
    dims = max(len(array.shape) - 1, 0) if num_row_dims is None else num_row_dims
    return max(math.prod(array.shape[dims:]), 1)
