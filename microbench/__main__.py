"""Run a benchmark: ``python -m microbench NAME [options]``. Without a name, the command lists all names."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from microbench.harness.case_options import BenchmarkOptionError
from microbench.harness.machine_description import describe_machine, format_machine, stderr
from reshard.cli.progress_bars import print_line
from reshard.errors import ReshardError

#: Name of a case -> its module: those below this folder that have options.
CASES = {
    path.stem: path
    for path in sorted(Path(__file__).parent.glob("*/*.py"))
    if "\ndef add_options(" in path.read_text(encoding="utf-8")
}


def _summary(path: Path) -> str:
    """The first line of the docstring of a module."""
    return path.read_text(encoding="utf-8").splitlines()[0].strip('"')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a case.

    Returns:
        The exit status of the case: 0 on success, 1 if a result is wrong or misses its goal; 2 if it could not run; 130
        after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m microbench",
        description=__doc__,
        epilog="\n".join(f"{name:18} {_summary(path)}" for name, path in CASES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=CASES, metavar="NAME", help="the case to run; NAME --help has its options")
    name = parser.parse_args(words[:1] or ["--help"]).name
    case = importlib.import_module(f"microbench.{CASES[name].parent.name}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m microbench {name}",
        description=case.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    case.add_options(parser)
    options = parser.parse_args(words[1:], argparse.Namespace(words=words))
    try:
        if os.environ.get("RANK", "0") == "0":
            print_line(format_machine(describe_machine(words)))
        return int(case.run(options) or 0)
    except BenchmarkOptionError as error:
        parser.error(str(error))
    except (ReshardError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            stderr(f"{name}: {type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        stderr(f"{name}: interrupted")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
