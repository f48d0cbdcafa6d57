"""The ``reshard`` command line: plan, demo, info and doctor, and the commands of other packages.

``plan`` is a module with ``HELP``, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(options) -> exit status``. Other
packages register such modules in the entry-point group :data:`COMMAND_GROUP`, under the name of the command.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from reshard import __version__
from reshard.errors import ArgumentError, ReshardError
from reshard.formatting import count_of, did_you_mean
from reshard.timeouts import check_timeout

#: Entry points of further commands.
COMMAND_GROUP = "reshard.commands"
_MAX_ERROR_CHARS = 2000
#: Exit status after Ctrl-C, as of a process that SIGINT ended.
_INTERRUPTED = 130

_INTRO = """\
Move a sharded tensor from one device mesh and layout to another.

A mesh is a grid of ranks: 2x4 is 2 hosts of 4 devices (the last axis counts the devices of a host).
A layout lists, for each tensor dim, the mesh axes that shard it: R for none, S0 for axis 0, S1 for axis 1, and S01 for
both, with axis 0 major.
Axes may have names: the mesh dp=2,tp=4 and the layout "(dp, -, tp)".

  reshard plan --shape 1024,1024,512 --dtype float32 --src-mesh 2x4 --src "S0 R R" --dst-mesh 3x4 --dst "S0 R R"
      print all messages in order, and a lower bound on the time that the network needs
  reshard demo
      move real tensors between processes on this machine and check every element
  reshard info
      print versions and the available backends
  torchrun --nnodes ... -m reshard doctor
      find what keeps the ranks of a job from reaching each other: interfaces, ports, versions
  reshard train gpt3-125m --shrink 8 --meshes 1x2,2x2 --steps 200
      train a model over pipeline stages
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="reshard", description=_INTRO, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"reshard {__version__}")
    entries = sorted(importlib.metadata.entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name)
    loaders: dict[str, Callable[[], Any]] = {"plan": _load_plan, **{entry.name: entry.load for entry in entries}}
    names = ["plan", "demo", "info", "doctor", *(entry.name for entry in entries)]
    given = sys.argv[1:] if arguments is None else list(arguments)
    _check_command(parser, given, names)
    commands = parser.add_subparsers(dest="command", metavar=f"{{{','.join(names)}}}")
    # only the modules that this command line needs: their imports take a while
    modules = {name: load() for name, load in loaders.items() if not given or given[0] in (name, "-h", "--help")}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=_as_sentence(module.HELP))
        module.add_arguments(_with_examples(command, *module.EXAMPLES))
    _add_own_commands(commands)
    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            return _demo(options)
        if options.command == "info":
            return _info()
        if options.command == "doctor":
            return _doctor(options.timeout)
        if options.command in modules:
            status: int = modules[options.command].run(options)
            return status
    except ReshardError as error:
        text = str(error)
        if len(text) > _MAX_ERROR_CHARS:
            half = _MAX_ERROR_CHARS // 2
            text = f"{text[:half]}\n...\n{text[-half:]}"  # a traceback ends with the error
        print(f"reshard: {type(error).__name__}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reshard: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, closed the pipe
        sys.stderr.close()
        return 0
    parser.print_help()
    return 2


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str], commands: Sequence[str]) -> None:
    """End the process if the first argument is no command, and name a close one."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        meant = did_you_mean(arguments[0], commands)
        parser.error(f"there is no command {arguments[0]!r}; commands are {', '.join(commands)}{meant}")


def _load_plan() -> Any:
    from reshard.cli import plan

    return plan


def _add_own_commands(commands: Any) -> None:
    """Declare the small commands of this package."""
    help_of_demo = "move real tensors between processes"
    demo = commands.add_parser("demo", help=help_of_demo, description=_as_sentence(help_of_demo))
    _with_examples(
        demo,
        "reshard demo",
        "reshard demo --divide 8    # smaller tensors",
        "reshard demo --device cuda --share-gpus    # 4 ranks",
    )
    demo.add_argument(
        "--divide", type=int, default=4, help="divide each dim of the 2023 study's tensors by this (default: 4)"
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)")
    demo.add_argument(
        "--share-gpus", action="store_true", help="let the 4 ranks of --device cuda share GPUs: right, but slow"
    )
    _with_examples(commands.add_parser("info", help="print versions and backends"), "reshard info")
    help_of_doctor = "find what is wrong with this machine; under torchrun, what keeps ranks from reaching each other"
    doctor = commands.add_parser("doctor", help=help_of_doctor, description=_as_sentence(help_of_doctor))
    of_a_job = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m reshard doctor"
    _with_examples(doctor, "reshard doctor", of_a_job)
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for all ranks (default: 60)")


def _as_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _with_examples(parser: argparse.ArgumentParser, *examples: str) -> argparse.ArgumentParser:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n  ".join(["examples:", *examples])
    return parser


def _demo(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("the demo needs torch: pip install 'reshard[torch]'")
    if not 1 <= options.divide <= 128:
        raise ArgumentError(f"--divide is {options.divide}; it must be from 1 to 128")
    from reshard.cli.demo import run_demo, run_demo_on_gpus

    if options.device == "cuda":
        return run_demo_on_gpus(options.share_gpus)
    if options.share_gpus:
        raise ArgumentError("--share-gpus needs --device cuda")
    return run_demo(options.divide)


def _doctor(timeout_seconds: float) -> int:
    """Run the doctor. Rank 0 returns 1 if there are problems. Other ranks return 0: a failure would end rank 0."""
    from reshard.cli.machine import can_run_jobs, examine_machine

    check_timeout(timeout_seconds)
    if not {"RANK", "WORLD_SIZE"} & set(os.environ) or not can_run_jobs():
        return print_findings(*examine_machine())
    from reshard.cli.doctor import examine

    findings = examine(timeout_seconds)
    return print_findings(*findings) if os.environ.get("RANK") == "0" else 0


def print_findings(lines: Sequence[str], problems: Sequence[str]) -> int:
    """Print what a doctor found. Returns 1 if there are problems, else 0."""
    for line in (*lines, *(f"PROBLEM {problem}" for problem in problems), *([] if problems else ["no problems found"])):
        print(line)
    return 1 if problems else 0


def _info() -> int:
    from reshard.cli.machine import why_torch_fails

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
