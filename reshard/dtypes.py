"""Names and sizes of element types, without importing torch.

A dtype is a plain string (``"float32"``): geometry and plans only need its size.
"""

from __future__ import annotations

from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import brief, did_you_mean

_BY_SIZE = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}

#: torch's integers of less than a byte, which have a byte each. Errors do not list them all.
_NARROW = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
#: Bytes per element of each supported dtype.
ITEMSIZE: dict[str, int] = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
ITEMSIZE |= dict.fromkeys(_NARROW, 1)

_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
_ALIASES |= {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
#: Common names that fit several dtypes, and the dtype that most people mean.
_AMBIGUOUS = {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
_AMBIGUOUS |= {"e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2", "fp4": "float4_e2m1fn_x2"}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a string, a torch dtype, or a NumPy or ml_dtypes dtype.

    Raises:
        ArgumentError: the dtype is unknown, or its elements are not whole bytes.
    """
    name: Any
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type) and hasattr(dtype, "__name__"):  # np.float32, float
        name = {"float": "float64", "int": "int64", "complex": "complex128"}.get(dtype.__name__, dtype.__name__)
    else:
        try:
            name = getattr(dtype, "name", None) or str(dtype)
        except Exception:  # the object is the caller's
            name = dtype
    if isinstance(name, str):
        name = name.removeprefix("torch.")
        name = _ALIASES.get(name, name)
    if not isinstance(name, str) or name not in ITEMSIZE:
        listed = ", ".join(sorted(set(ITEMSIZE).difference(_NARROW)))
        meant = _AMBIGUOUS.get(name.lower()) if isinstance(name, str) else None
        hint = did_you_mean(name, [*ITEMSIZE, *_ALIASES]) if meant is None else f"; did you mean {meant!r}?"
        raise ArgumentError(
            f"dtype {brief(name)} is not supported{hint}; supported dtypes are {listed}, and of a byte each int1 to "
            "int7 and uint1 to uint7"
        )
    return name
