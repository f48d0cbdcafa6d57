"""Call public functions of one process with nonsense: ``python -m tests.campaigns.nonsense_calls --runs 20000``.

A trial takes a valid call, and puts a value of a wrong type, size or text in place of one argument, or of one item
inside an argument. The call must return, or raise an error of this package whose text can be encoded.
"""

from __future__ import annotations

import argparse
import io
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from decimal import Decimal
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import reshard
from reshard import Layout, Mesh, RegionLayout, Topology, planner
from reshard.formatting import brief
from reshard.weights.mapping.rules import Rule
from tests.campaigns.entry_points import grids, schedules, searches, transfers, weights
from tests.campaigns.nonsense import ARGUMENTS

#: Time limit of one call.
LIMIT_SECONDS = 20.0

_ENDLESS = []
_ENDLESS.append(_ENDLESS)
VALUES = (
    *ARGUMENTS,
    *("\ud800", "x" * 100_000, "\x00", "S0", "R R R", "1x1", "0", "-1", "int8x128", "é", b"\xff", "x/../y"),
    *(float("inf"), float("-inf"), 1e308, 5e-324, -0.5, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 1j, Decimal("NaN")),
    *((), (0,), (-1,), (None, None), ("", ""), ((),), (1, 2, 3), [[]], [2**63], ["a"], [1.5], ["\ud800"], set(), {1}),
    *({0: 0}, {"": None}, {None: 1}, {"w": (6, 4)}, {"w": None}, {"\ud800": 1}, _ENDLESS, range(0), range(3), slice(1)),
    *(
        np.float64("nan"),
        np.int64(-1),
        np.zeros((0, 3)),
        np.array(["a", None], dtype=object),
        np.array(1),
        np.arange(4),
    ),
    *(torch.ones(2, 2), torch.ones(2, dtype=torch.int64), torch.ones(3, requires_grad=True), torch.tensor(3)),
    *(Path("/dev/null/x"), nn.Linear(2, 2), Ellipsis, NotImplemented, io.StringIO("x"), iter([1, 2]), np.dtype("f4")),
    *(Mesh.of(2), Layout(Mesh.of(2), "S0"), Topology((0, 0)), Mesh.of(1), RegionLayout({0: [[(0, 2)]]})),
)


#: Arguments that are functions of the caller. An error that such a function raises is the caller's.
CALLBACKS = ("loss", "blocks", "convert", "wrap", "prepare", "choose", "measure", "plan", "schedule", "run", "strategy")
#: Values whose fields are checked when they are used.
AS_GIVEN = (planner.PlanProblem, planner.Routes, *get_args(Rule))


class Timeout(BaseException):
    """A call exceeded the time limit."""


#: Functions that return ``{name: (function, valid arguments)}``. The last one closes the default group.
FAMILIES = (
    *(transfers.of_sharding, transfers.of_topologies, transfers.of_plans, weights.of_compression, weights.of_weights),
    *(grids.of_parallel, schedules.of_schedules, searches.of_searches, transfers.of_groups),
)


def find_doors():
    """``{name: (function, valid arguments)}`` of all families. Needs a default process group."""
    return {name: door for family in FAMILIES for name, door in family().items()}


def spots(value, path=(), depth=3):
    """The paths of the items inside an argument, at most ``depth`` deep; the argument itself is ``()``."""
    yield path
    if depth and isinstance(value, (list, tuple)):
        for number, item in enumerate(value[:8]):
            yield from spots(item, (*path, number), depth - 1)
    elif depth and isinstance(value, Mapping):
        for key in list(value)[:8]:
            yield from spots(value[key], (*path, key), depth - 1)


def put(value, path, new):
    """A copy of the argument with another item at a path. Containers are copied, their other items are not."""
    if not path:
        return new
    if isinstance(value, Mapping):
        return {key: put(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    items = [put(item, path[1:], new) if number == path[0] else item for number, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def try_call(doors, seed):
    """Make one call. Returns the call as text, and its end: ``"returned"``, or class and text of the error."""
    chance = random.Random(seed)
    name = chance.choice(sorted(doors))
    function, arguments = doors[name]
    key = chance.choice(sorted(arguments))
    path = chance.choice([*spots(arguments[key])]) if chance.random() < 0.5 else ()
    new = chance.choice([value for value in VALUES if key not in CALLBACKS or not callable(value)])
    where = f"{key}{''.join(f'[{part!r}]' for part in path)}"
    begun = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**{**arguments, key: put(arguments[key], path, new)})
            if not isinstance(result, AS_GIVEN):
                str(result)
        end = "returned"
    except reshard.ReshardError as error:
        end = f"{type(error).__name__}: {error}"
    except Timeout:
        end = f"raw: did not end within {LIMIT_SECONDS:g} s"
    except Exception as error:
        end = f"raw {type(error).__name__}: {brief(error, 200)} in {_place_of(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return f"{name}: {where}={brief(new)}, seed {seed}, {time.monotonic() - begun:.1f} s", end


def run_campaign(num_runs, seed=0, doors=None):
    """Run trials. Returns how they ended, and ``[(call, raw error)]``."""
    signal.signal(signal.SIGALRM, _stop)
    doors = find_doors() if doors is None else doors
    ends, wrong = Counter(), []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # a text may be taken for the name of a file to write
        for number in range(seed, seed + num_runs):
            call, end = try_call(doors, number)
            ends[end.partition(":")[0]] += 1
            if end.startswith("raw"):
                wrong.append((call, end))
    return ends, wrong


def _place_of(error):
    """File and line of this package that an error passed last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/reshard/" in frame.filename or "/scheduler/" in frame.filename] or frames
    return f"{ours[-1].filename}:{ours[-1].lineno}"


def _stop(*_):
    raise Timeout


def main():
    """Print what is wrong. Returns 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.nonsense_calls", description=__doc__)
    parser.add_argument("--runs", type=int, default=20000, help="number of trials (20000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial (0)")
    parser.add_argument("--only", default="", help="calls whose name has this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    doors = {name: door for name, door in find_doors().items() if options.only in name}
    ends, wrong = run_campaign(options.runs, options.seed, doors)
    print(f"{options.runs} calls, {len(wrong)} wrong; {dict(ends)}")
    for call, end in wrong:
        print(f"  {call}: {end[:300]}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
