"""Warnings about what makes training on this machine's CPUs slower than a user may expect."""

from __future__ import annotations

import os
import platform
from pathlib import Path

#: Flags of CPUs that compute in these dtypes, on x86 and on ARM. The second ones also compute in bfloat16 by float32.
_FLOAT16 = {"avx512_fp16", "amx_fp16", "asimdhp"}
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "avx512bw"}


def read_flags(place: str | Path = "/proc/cpuinfo") -> frozenset[str]:
    """The flags of this machine's CPUs; empty if they cannot be read."""
    try:
        lines = Path(place).read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), frozenset()
    )


def describe_slow_float16(device: str, autocast: str, flags: frozenset[str]) -> str:
    """A warning if a device computes in float16, and its CPU has no arithmetic for that; else empty."""
    if not device.startswith("cpu") or autocast != "float16" or not flags or flags & _FLOAT16:
        return ""
    faster = "bfloat16" if flags & _BFLOAT16 else "none"
    return (
        f"warning: this CPU ({platform.machine()}) has no arithmetic in float16, in which this preset computes: "
        f"--autocast {faster} is several times as fast"
    )


def describe_shared_cores(num_ranks: int, num_cores: int | None = None) -> str:
    """A warning if ranks share cores, for a training plan with times of one rank alone; else empty."""
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    if num_ranks <= cores:
        return ""
    return (
        f"warning: {num_ranks} ranks share {cores} cores, but the times of the training plan are of layers measured by "
        f"one rank alone, so steps take up to about {num_ranks / cores:.2g} times as long as it predicts; --plan tune "
        "measures steps of all ranks"
    )
