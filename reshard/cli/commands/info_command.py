"""``reshard info``: prints versions and the available backends."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform

from reshard import __version__
from reshard.formatting import count_of

HELP = "print versions and backends"
EXAMPLES = ("reshard info",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(options: argparse.Namespace) -> int:
    """Print them, one in a line."""
    from reshard.cli.machine_checks import why_torch_fails

    facts = [("reshard", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    for package in ("numpy", "scipy", "torch", "jax", "cupy", "ray"):
        try:
            facts.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            facts.append((package, "not installed"))
    backends = ["local (NumPy or torch arrays of one process)"]
    if importlib.util.find_spec("torch") is None:
        pass
    elif (reason := why_torch_fails()) is not None:
        backends.append(f"none of torch, which cannot be imported: {reason}")
    else:
        import torch
        import torch.distributed as dist

        if dist.is_available() and dist.is_gloo_available():
            backends.append("torch (Gloo, CPU tensors)")
        if dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available():
            backends.append(f"torch (NCCL, {count_of(torch.cuda.device_count(), 'GPU')})")
        if importlib.util.find_spec("ray") is not None:
            backends.append("ray (actors, Gloo)")
    if importlib.util.find_spec("cupy") is not None:
        backends.append("cupy (NCCL)")
    facts.append(("backends", ", ".join(backends)))
    for name, value in facts:
        print(f"{name:12} {value}")
    return 0
