"""``reshard doctor``: finds what is wrong with a machine, or with the machines of a job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from reshard.timeouts import check_timeout

HELP = "find what is wrong with this machine; under torchrun, what keeps ranks from reaching each other"
EXAMPLES = (
    "reshard doctor",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m reshard doctor",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for all ranks (default: 60)")


def run(options: argparse.Namespace) -> int:
    """1 if there are problems, else 0. Ranks other than 0 return 0: torchrun would end rank 0 once one fails."""
    from reshard.cli.machine_checks import can_run_jobs, examine_machine

    check_timeout(options.timeout)
    if not {"RANK", "WORLD_SIZE"} & set(os.environ) or not can_run_jobs():
        return print_findings(*examine_machine())
    from reshard.cli.job_checks import examine

    findings = examine(options.timeout)
    return print_findings(*findings) if os.environ.get("RANK") == "0" else 0


def print_findings(lines: Sequence[str], problems: Sequence[str]) -> int:
    """Print what a doctor found. Returns 1 if there are problems, else 0."""
    for line in (*lines, *(f"PROBLEM {problem}" for problem in problems), *([] if problems else ["no problems found"])):
        print(line)
    return 1 if problems else 0
