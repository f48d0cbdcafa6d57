"""The ``reshard`` command line. Each command is an entry point of the group :data:`COMMAND_GROUP`.

An entry point has the name of the command, and is a module as :mod:`reshard.cli.commands` describes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from reshard import __version__
from reshard.errors import ReshardError
from reshard.formatting import did_you_mean

#: Entry points of the commands.
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name a choice that is close to a wrong one."""

    def error(self, message: str) -> NoReturn:
        """End the process with an error."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all options\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            text = f"{value!r} is none of {', '.join(choices)}{did_you_mean(value, choices)}"
            raise argparse.ArgumentError(action, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _Parser(prog="reshard", description=_INTRO, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"reshard {__version__}")
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=COMMAND_GROUP)}
    names = sorted(entries)
    given = sys.argv[1:] if arguments is None else list(arguments)
    _check_command(parser, given, names)
    commands = parser.add_subparsers(dest="command", metavar=f"{{{','.join(names)}}}")
    # only the modules that this command line needs: their imports take a while
    modules = {name: entries[name].load() for name in names if not given or given[0] in (name, "-h", "--help")}
    parsers = {}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=_as_sentence(module.HELP))
        module.add_arguments(_with_examples(command, *module.EXAMPLES))
        parsers[name] = command
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parsers.get(options.command, parser), unknown)
    format_warning, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
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
    finally:
        warnings.formatwarning = format_warning
    parser.print_help()
    return 2


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning without the line of code that gives it, which means nothing to users of a command."""
    return f"reshard: warning: {message}\n"


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str], commands: Sequence[str]) -> None:
    """End the process if the first argument is no command, and name a close one."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        meant = did_you_mean(arguments[0], commands)
        parser.error(f"there is no command {arguments[0]!r}; commands are {', '.join(commands)}{meant}")


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End the process because of arguments that a command does not take, and name an option close to the first."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    meant = did_you_mean(unknown[0].partition("=")[0], options)
    parser.error(f"there is no option {' '.join(unknown)}{meant}")


def _as_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _with_examples(parser: argparse.ArgumentParser, *examples: str) -> argparse.ArgumentParser:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n  ".join(["examples:", *examples])
    return parser
