"""Fuzz all parsers and layout constructors in rotation: ``python -m tests.campaigns.fuzz --seconds 1800``.

Inputs are mutations of valid examples: huge and negative numbers, removed, repeated and swapped parts, JSON fields of
other types, and sometimes arbitrary values. Each input must produce a value or a ReshardError within the limits of time
and memory. A parsed plan, layout, topology or schedule must print and parse back to an equal value.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from reshard import (
    Layout,
    Mesh,
    RegionLayout,
    ReshardError,
    Topology,
    check_plan,
    find_bound,
    make_plan,
    scheduler,
)
from reshard.cli.main import main as cli_main
from reshard.cli.progress_bars import show_time
from reshard.plan import layout_from_json, parse_layout, parse_plan, plan_from_json, plan_to_json
from reshard.scheduler.ir.text import format_schedule, from_torch_csv, parse_schedule, to_torch_csv
from reshard.sharding.spec import parse_axis_names
from reshard.sharding.tiles import cut_tiles
from reshard.topology.machine_presets import MACHINES
from reshard.topology.topology_files import parse_rate, read_topology, topology_from_json, topology_to_json

#: Time limit of one input. Limit on the memory that the process allocates after its start.
LIMIT_SECONDS = 20.0
LIMIT_BYTES = 4 * 2**30
EXAMPLES_PER_ROUND = 100

_EDGES = ["0", "-1", "1", "7", "4294967296", "9223372036854775807", "1" + "0" * 30, "1e308", "nan", "-0.5", "", "x"]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_VALUES: Any = st.sampled_from(
    [None, True, 0, -1, 1, 3, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "x", [], {}, [[]]]
)


class Hang(BaseException):
    """An input exceeded the time limit."""


# Inputs


@st.composite
def _texts(draw: Any, examples: tuple[str, ...]) -> str:
    """A valid text with a few random changes."""
    text: str = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, 5))):
        a = draw(st.integers(0, len(text)))
        b = min(len(text), a + draw(st.integers(0, 30)))
        kind = draw(st.integers(0, 5))
        numbers = list(_NUMBER.finditer(text))
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:b] + text[a:b] * draw(st.integers(1, 40)) + text[b:]
        elif kind == 2 and numbers:
            at = draw(st.sampled_from(numbers))
            text = text[: at.start()] + draw(st.sampled_from(_EDGES)) + text[at.end() :]
        elif kind == 3:
            other = draw(st.sampled_from(examples))
            c = draw(st.integers(0, len(other)))
            text = text[:a] + other[c : c + 60] + text[b:]
        elif kind == 4:
            text = text[:a] + draw(st.text(max_size=6)) + text[b:]
        else:
            text = text[:a] + draw(st.sampled_from("()[]{}:;,->~ \n\t#*!&\"'\\")) * draw(st.integers(1, 60)) + text[a:]
    return text


@st.composite
def _trees(draw: Any, examples: tuple[Any, ...]) -> Any:
    """A valid JSON value with a few random changes."""
    tree = json.loads(json.dumps(draw(st.sampled_from(examples))))
    for _ in range(draw(st.integers(1, 4))):
        spots = list(_spots(tree))
        if not spots:
            return copy.deepcopy(draw(_VALUES))
        holder, key = draw(st.sampled_from(spots))
        kind = draw(st.integers(0, 3))
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1:
            other, at = draw(st.sampled_from(spots))
            with contextlib.suppress(LookupError):  # the spot may be deleted already
                holder[key] = json.loads(json.dumps(other[at]))
        elif kind == 2 and isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(draw(st.integers(1, 40)))]
        else:
            holder[key] = copy.deepcopy(draw(_VALUES))  # later changes must not modify the shared value
    return tree


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    """``(container, key or index)`` of each value inside a JSON value, at every depth."""
    keys: Any = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _spots(tree[key])


@st.composite
def _command_lines(draw: Any) -> list[str]:
    """A ``reshard plan`` command line, with some arguments missing or invalid."""
    given = {
        "--shape": "64,32",
        "--dtype": "float32",
        "--src-mesh": "2x2",
        "--src": "S0 S1",
        "--dst-mesh": "3x2",
        "--dst": "R S01",
        "--strategy": "auto",
        "--topology": draw(st.sampled_from([*MACHINES, "/dev/null", "no such file"])),
        "--format": draw(st.sampled_from(["text", "json", "html"])),
    }
    for name in draw(st.lists(st.sampled_from(sorted(given)), max_size=4)):
        if draw(st.booleans()):
            given.pop(name, None)
        elif name in given:
            given[name] = draw(_texts((given[name],)))
    for name in draw(st.lists(st.sampled_from(["--rank", "--dst-first-rank"]), max_size=1)):
        given[name] = draw(st.sampled_from(_EDGES))
    return ["plan", *(f"{name}={value}" for name, value in given.items())]


# Targets


def _read_plan(text: str) -> None:
    plan = parse_plan(text)
    assert parse_plan(str(plan)) == plan
    with contextlib.suppress(ReshardError):
        check_plan(plan)
        find_bound(plan.tensors, plan.topology)


def _read_plan_json(data: Any) -> None:
    plan = plan_from_json(data)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def _read_layout(text: str) -> None:
    layout = parse_layout(text)
    assert parse_layout(str(layout)) == layout
    with contextlib.suppress(ReshardError):
        cut_tiles(layout, (6, 5, 4))


def _read_layout_json(data: Any) -> None:
    cut_tiles(layout_from_json(data), (8, 8))


def _read_topology(suffix: str, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=suffix, encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        topology = read_topology(file.name)
    assert topology_from_json(json.loads(json.dumps(topology_to_json(topology)))) == topology


def _read_topology_json(data: Any) -> None:
    topology = topology_from_json(data)
    assert topology_from_json(json.loads(json.dumps(topology_to_json(topology)))) == topology


def _read_schedule(text: str) -> None:
    schedule = parse_schedule(text)
    assert parse_schedule(format_schedule(schedule)) == schedule
    with contextlib.suppress(ReshardError):
        scheduler.check_schedule(schedule, _pipeline())


def _read_csv(text: str) -> None:
    with contextlib.suppress(ReshardError):
        scheduler.check_schedule(from_torch_csv(text, _pipeline()), _pipeline())


def _read_spec(text: str) -> None:
    for mesh in (Mesh.of("2x3"), Mesh.of("2x2x2")):
        with contextlib.suppress(ReshardError):
            Layout(mesh, text)
        with contextlib.suppress(ReshardError):
            Layout(mesh, parse_axis_names(text))


def _build_layouts(data: Any) -> None:
    a, b = [*data, None, None][:2] if isinstance(data, list) else (data, None)
    for build in (
        lambda: Mesh(a, b),
        lambda: Mesh.of(a, axes=b),
        lambda: Mesh.from_array(a, b),
        lambda: Layout(Mesh.of("2x2"), a),
        lambda: RegionLayout(a, join_dim=b or 0),
        lambda: cut_tiles(Layout(Mesh.of(2), "S0"), a),
        lambda: make_plan(Layout(Mesh.of(2), a), Layout(Mesh.of(2), b), (8, 8), "int8"),
        lambda: parse_rate(a),
    ):
        with contextlib.suppress(ReshardError):
            build()


def _read_frames(data: bytes) -> None:
    """Parse bytes as the frames of a control connection."""
    from reshard.coordination.hub_and_spokes import MAX_HELLO_BYTES, _Peer

    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = _Peer.__new__(_Peer)
        peer.connection, peer._buffer = ours, bytearray(data)
        with contextlib.suppress(EOFError):
            while peer.frame(MAX_HELLO_BYTES) is not None:
                pass


def _run_command(arguments: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            status = cli_main(arguments)
        except SystemExit as end:  # raised by argparse
            status = int(end.code or 0)
    assert status in (0, 2), status
    assert status == 0 or "reshard" in errors.getvalue()


@functools.cache
def _pipeline() -> Any:
    return scheduler.Pipeline.of_costs([1.0] * 4, [2.0] * 4, [0.5] * 3)


def _targets() -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """``{name: (hypothesis strategy of the inputs, function to call with each)}``."""
    rows, columns = Layout(Mesh.of("2x2"), "S0 R"), Layout(Mesh.of("3x2", first_rank=4), "R S01")
    regions = RegionLayout({0: [[(0, 4), (0, 8)], [(8, 12), (0, 8)]], 1: [[(4, 8), (0, 8)], [(12, 16), (0, 8)]]})
    pods: dict[str, Any] = {
        "hosts": [{"devices": 4, "nics": ["25 Gbit/s", "10 Gbit/s"], "pod": 0}, {"devices": 2, "pod": 1}]
    }
    pods["pods"] = ["40 Gbit/s", {"egress": "10 Gbit/s", "ingress": "1 GB/s"}]
    plans = (
        make_plan(rows, columns, (16, 8), "float32"),
        make_plan(rows, columns, {"w": (16, 8), "b c": (16, 8)}, "bfloat16", strategy="broadcast_greedy"),
        make_plan(regions, Layout(Mesh.of(2, first_rank=2)), (16, 8), "int8", topology=Topology((0, 0, 1, 1))),
        make_plan(
            rows, columns, (16, 8), "int8", topology=Topology((0,) * 4 + (1,) * 6), strategy="gathered_multicast"
        ),
    )
    layouts = (str(rows), str(columns), str(regions), "('x', None) on Mesh(x=2, y=2; ranks 0-3)")
    schedules = [build(_pipeline(), 3) for build in (scheduler.gpipe, scheduler.one_f_one_b)]
    texts = tuple(json.dumps(item) for item in (pods, {"host_of_rank": [0, 0, 1], "nic_bytes_per_second": 1e9}))
    yaml = ("hosts:\n- devices: 4\n  nics: [25 Gbit/s]\n- devices: 2\nlatency_seconds: 1e-5\n",)
    specs = ("S0 R S1", "R S01", "('x', None, ('y', 'z'))", "(None, '0~2')")
    frame = len(b'["ab", 1]').to_bytes(4, "big") + b'["ab", 1]'
    return {
        "plan text": (_texts(tuple(map(str, plans))), _read_plan),
        "plan JSON": (_trees(tuple(plan_to_json(plan) for plan in plans)), _read_plan_json),
        "layout text": (_texts(layouts), _read_layout),
        "layout JSON": (_trees(tuple(plan_to_json(plans[i])["tensors"][0]["src"] for i in (0, 2))), _read_layout_json),
        "spec": (_texts(specs), _read_spec),
        "constructors": (_trees(([[2, 2], ["a", "b"]], [{"0": [[[0, 4]]]}, 0], ["S0 R", "R"])), _build_layouts),
        "topology JSON": (_trees((pods, json.loads(texts[1]))), _read_topology_json),
        "topology file": (_texts(texts), functools.partial(_read_topology, ".json")),
        "topology YAML": (_texts(yaml), functools.partial(_read_topology, ".yaml")),
        "schedule text": (_texts(tuple(map(format_schedule, schedules))), _read_schedule),
        "schedule CSV": (_texts(tuple(map(to_torch_csv, schedules))), _read_csv),
        "command line": (_command_lines(), _run_command),
        "control frames": (
            st.binary(max_size=64).map(lambda tail: frame + tail) | st.binary(max_size=64),
            _read_frames,
        ),
    }


# The campaign


def _checked(function: Callable[[Any], None], record: Callable[[float], None]) -> Callable[[Any], None]:
    """Wrap a target: it fails if it raises another exception than ReshardError, or exceeds the time limit.

    Args:
        function: the target. record: called with the seconds of each input that passed.
    """

    def check(data: Any) -> None:
        begun = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        try:
            function(data)
        except ReshardError:
            pass
        except Hang:
            raise AssertionError(f"did not end within {LIMIT_SECONDS:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        record(time.monotonic() - begun)

    return check


def fuzz(seconds: float, first_seed: int = 0) -> tuple[Counter[str], dict[str, float], list[str]]:
    """Fuzz all parsers in rotation until the time is over. Needs the SIGALRM handler that :func:`main` installs.

    Args:
        seconds: total duration.
        first_seed: seed of the first round; each round adds 1.

    Returns:
        For each parser, the number of inputs that passed; for each parser, the seconds of its slowest input; and a
        description of each failure.
    """
    counts: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    failures: list[str] = []
    ends = time.monotonic() + seconds

    def record(name: str, took: float) -> None:
        counts[name] += 1
        slowest[name] = max(slowest.get(name, 0.0), took)

    targets, num_rounds = _targets(), 0
    with show_time(seconds) as tick:
        while time.monotonic() < ends and targets:
            for name in list(targets):
                tick(name)
                strategy, function = targets[name]

                limits = settings(
                    max_examples=EXAMPLES_PER_ROUND,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=list(HealthCheck),
                    print_blob=False,
                )
                try:
                    with_seed: Any = seed(first_seed + num_rounds)
                    with_input: Any = given(strategy)
                    run: Any = with_seed(limits(with_input(_checked(function, functools.partial(record, name)))))
                    run()
                except Exception as error:
                    notes = "; ".join(getattr(error, "__notes__", []))
                    failures.append(f"{name}: {type(error).__name__}: {error} {notes}")
                    del targets[name]  # the next round would find the same failure
                if time.monotonic() >= ends:
                    break
            num_rounds += 1
    return counts, slowest, failures


def main() -> int:
    """Print the number of inputs and the slowest input of each parser; returns 1 if a parser failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.fuzz",
        description=__doc__,
        epilog="example: python -m tests.campaigns.fuzz --seconds 600 --seed 1000",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="total duration (60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (0)")
    options = parser.parse_args()

    def stop(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    vm_size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (vm_size + LIMIT_BYTES, resource.RLIM_INFINITY))
    counts, slowest, failures = fuzz(options.seconds, options.seed)
    print("| parser | inputs | slowest, s |\n|---|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count:,} | {slowest[name]:.2f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{counts.total():,} inputs, {len(failures)} parsers failed, peak memory {peak:.0f} MiB")
    for text in failures:
        print(text, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
