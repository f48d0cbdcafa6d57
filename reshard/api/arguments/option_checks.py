"""Checks of the options of a call: device type, compression, ``verify`` and ``on_loss``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from reshard.api.arguments.options import TransferOptions
from reshard.api.arrays.tensor_checks import DEVICE_TYPES
from reshard.codecs import LOSSLESS_CODECS, CustomCodec, find_codec, has_variable_size
from reshard.codecs.formats import FORMATS
from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.plan import Plan
from reshard.planner import AUTO_CODEC
from reshard.runtime.cuda.device_encoding import check_device_codec
from reshard.sharding import TensorSpec

#: Values of ``on_loss``. When ranks are lost, a call raises an error, raises an error with a recovery plan, or
#: recovers.
ON_LOSS = ("raise", "offer", "recover")

#: Values of ``on_error``. If a codec changes a tensor more than ``max_error`` allows, a call sends it raw, or raises.
ON_ERROR = ("raw", "raise")


def check_device_type(device: Any) -> None:
    """Raise ArgumentError unless this device type is supported and available."""
    if device not in DEVICE_TYPES:
        raise ArgumentError(f"device is {brief(device)}; it must be one of {', '.join(DEVICE_TYPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device is 'cuda', but this process has no CUDA device")


def check_compression(compression: Any, max_error: Any, on_error: Any) -> None:
    """Raise ArgumentError unless the codec exists, ``on_error`` is valid, and ``max_error`` limits a lossy codec."""
    is_auto = isinstance(compression, str) and compression == AUTO_CODEC
    if compression is not None and not is_auto and not has_variable_size(compression):
        find_codec(compression)
    if max_error is not None:
        if (
            isinstance(max_error, bool)
            or not isinstance(max_error, (int, float, np.integer, np.floating))
            or not 0 < max_error < math.inf
        ):
            raise ArgumentError(
                f"max_error is {brief(max_error)}; it must be a positive number (L2 error over L2 norm)"
            )
        if compression is None or has_variable_size(compression):
            reason = f"{compression} is lossless" if compression else "without compression= nothing is changed"
            raise ArgumentError(f"max_error is {brief(max_error)}, but {reason}")
    if not isinstance(on_error, str) or on_error not in ON_ERROR:
        raise ArgumentError(f"on_error is {brief(on_error)}; it must be one of {', '.join(map(repr, ON_ERROR))}")


def check_coding(plan: Plan, device: str) -> None:
    """Raise ArgumentError if a plan has encoded tensors that this process or device type cannot encode."""
    for spec in plan.tensors:
        if spec.coding is not None and isinstance(spec.codec, CustomCodec):
            spec.codec.check_implemented()
        if spec.codec is not None:
            check_device_codec(spec.codec, device)


def check_listed(plan: Plan, device: str, verify: bool) -> None:
    """Raise ArgumentError if a transfer needs all messages of a plan that does not list them."""
    if not plan.is_listed and (verify or device != "cpu"):
        what = "verify=True" if verify else f"a transfer between devices of type {device}"
        raise ArgumentError(
            f"{what} needs a list of all {plan.num_messages:,} messages, which a plan in closed form does not hold: "
            f"{'omit verify' if verify else 'pass tensors in host memory'}, or move the tensors in several calls"
        )


def check_flag(value: Any, name: str) -> None:
    """Raise ArgumentError unless a value is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {brief(value)}; it must be True or False")


def check_verify(verify: Any) -> None:
    """Raise ArgumentError unless ``verify`` is a bool."""
    check_flag(verify, "verify")


def check_on_loss(on_loss: Any) -> None:
    """Raise ArgumentError unless ``on_loss`` is one of :data:`ON_LOSS`."""
    if not isinstance(on_loss, str) or on_loss not in ON_LOSS:
        raise ArgumentError(f"on_loss is {brief(on_loss)}; it must be one of {', '.join(map(repr, ON_LOSS))}")


def needs_cpu(options: TransferOptions) -> bool:
    """Whether a transfer with these valid options needs its tensors in host memory."""
    if options["verify"] or options["on_loss"] != "raise" or options["max_error"] is not None:
        return True
    return encodes_on_cpu(options["compression"])


def encodes_on_cpu(codec: Any) -> bool:
    """Whether only the CPU encodes tensors of this codec: a custom one, a lossless one, or ``"auto"``."""
    if codec is None:
        return False
    if codec == AUTO_CODEC or has_variable_size(codec):
        return True
    return isinstance(find_codec(codec), CustomCodec)


def check_dtypes(codec: str, specs: Iterable[TensorSpec]) -> None:
    """Raise ArgumentError if a lossless codec does not compress the dtype of a tensor."""
    dtype = FORMATS[codec].dtype
    for spec in specs:
        if dtype and spec.dtype != dtype:
            what = f"tensor {spec.name!r}" if spec.name else "the tensor"
            raise ArgumentError(f"{what}: {codec} encodes {dtype}, not {spec.dtype}")


def check_lossless_codec(codec: Any, plan: Plan) -> None:
    """Raise ArgumentError unless a Mover of this plan can send its tensors as buckets of this codec."""
    if codec not in LOSSLESS_CODECS:
        raise ArgumentError(
            f"compression of a Mover is {codec!r}; it must be one of {', '.join(map(repr, LOSSLESS_CODECS))}: pass "
            "other codecs to make_plan"
        )
    for spec in plan.tensors:
        if spec.codec is not None:
            raise ArgumentError(f"the plan has tensors of codec {spec.dtype}, which {codec} cannot encode again")
    check_dtypes(codec, plan.tensors)
