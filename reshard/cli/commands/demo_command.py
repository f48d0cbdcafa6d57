"""``reshard demo``: moves real tensors between processes and checks every element."""

from __future__ import annotations

import argparse
import importlib.util

from reshard.errors import ArgumentError

HELP = "move real tensors between processes"
EXAMPLES = (
    "reshard demo",
    "reshard demo --divide 8    # smaller tensors",
    "reshard demo --device cuda --share-gpus    # 4 ranks",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--divide", type=int, default=4, help="divide each dim of the 2023 study's tensors by this (default: 4)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)")
    parser.add_argument(
        "--share-gpus", action="store_true", help="let the 4 ranks of --device cuda share GPUs: right, but slow"
    )


def run(options: argparse.Namespace) -> int:
    """Run the demo; returns 0 if every element was correct."""
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("the demo needs torch: pip install 'reshard[torch]'")
    if not 1 <= options.divide <= 128:
        raise ArgumentError(f"--divide is {options.divide}; it must be from 1 to 128")
    from reshard.cli.demo_transfers import run_demo, run_demo_on_gpus

    if options.device == "cuda":
        return run_demo_on_gpus(options.share_gpus)
    if options.share_gpus:
        raise ArgumentError("--share-gpus needs --device cuda")
    return run_demo(options.divide)
