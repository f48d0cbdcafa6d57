"""Training on emulated hosts, all methods in turns: ``python -m microbench.training.compare_schedules gpt``.

Small models with the study's layouts, stage graphs and communication-to-compute ratios; 64 microbatches. With real
computation two stages of one device each; with timed computation, where a device sleeps for as long as it would
compute, two and four stages of several devices.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import reshard
from microbench.emulation.cluster import Cluster, ClusterError
from microbench.emulation.links import nominal
from microbench.harness.calibrate import deviations, mean_topology, measure_cluster
from microbench.harness.steal_time import merge_laps
from microbench.harness.suite import MOST_DEVIATION, describe_machine, stderr
from microbench.training.worker import MOST_TRIES, Method, Training, measure_stages, train_alone, train_in_turns
from reshard.scheduler import (
    Edge,
    Pipeline,
    Schedule,
    Stage,
    auto_schedule,
    block_transfers,
    defer_recvs,
    eager_1f1b,
    one_f_one_b,
    simulate,
    to_chrome_trace,
)
from reshard.scheduler.costs import price_edge
from reshard.scheduler.training.gpt import GPTConfig
from reshard.scheduler.training.u_transformer import UTransformerConfig
from reshard.topology.files import topology_from_json
from reshard.topology.model import Topology

NUM_MICROBATCHES = 64
_BALANCING_STEPS = 8
OURS, SIGNAL, PREDECESSOR = "ours", "signal only", "predecessor"
#: Seconds that the busiest link is busy with one microbatch's forward, over those of a stage's forward. Where stages
#: skip others, that is also what crosses between one half of the stages and the other.
RATIOS = {"gpt": 0.3, "u_transformer": 1.5}

Build = Callable[[Pipeline, int], Schedule]


@dataclass(frozen=True)
class Setting:
    """One table: a model, how many stages of how many devices, and whether they compute or sleep."""

    model: str
    config: Any
    is_timed: bool
    ratio: float
    rate: str = "1 Gbit/s"

    @property
    def title(self) -> str:
        """For people."""
        kind = "timed computation" if self.is_timed else "real computation"
        devices = len(self.config.meshes()[0].ranks)
        return f"{self.model}, {self.config.pp} stages of {devices} devices, {kind}"


def settings(model: str) -> dict[str, Setting]:
    """Of a model, by name."""
    ratio = RATIOS[model]
    timed: Any
    real: Any
    if model == "gpt":
        batch = 8 * NUM_MICROBATCHES
        timed = GPTConfig(256, 4, 4, batch, NUM_MICROBATCHES, 2, 2, 2, 256, 256, "float32")
        four = replace(timed, dp=2, tp=1, pp=4)
        real = GPTConfig(128, 8, 4, 2 * batch, NUM_MICROBATCHES, 1, 1, 2, 128, 256, "float32")
    else:
        batch = 64 * NUM_MICROBATCHES
        timed = UTransformerConfig(8, batch, NUM_MICROBATCHES, (8, 5), (1, 2), groups=4)
        four = replace(timed, split=(3, 3, 4, 3))
        real = replace(timed, batch=4 * NUM_MICROBATCHES, split=(9, 4), mesh=(1, 1), num_heads=2)
    return {
        "timed 2": Setting(model, timed, True, ratio),
        "timed 4": Setting(model, four, True, ratio),
        "real 2": Setting(model, real, False, ratio),
    }


def make_topology(setting: Setting, rate: float | str) -> Topology:
    """A host per stage, with as many devices as that has."""
    meshes = setting.config.meshes()
    hosts = [{"devices": len(mesh.ranks), "nics": [rate]} for mesh in meshes]
    return topology_from_json({"hosts": hosts})


def make_pipeline(
    setting: Setting,
    costs: list[tuple[float, ...]],
    topology: Topology,
    strategy: str | None,
    links: Topology,
    message_seconds: float = 0.0,
) -> Pipeline:
    """With the costs of stages as given and those of edges as planned for a topology and timed on links.

    Each transfer takes ``message_seconds`` more: what starting it costs, and waking those who wait for it.
    """
    meshes = setting.config.meshes()
    stages = tuple(
        Stage(*cost[:3], mesh=mesh, whole_backward_seconds=cost[3] if len(cost) > 3 else None)
        for cost, mesh in zip(costs, meshes, strict=True)
    )
    edges = []
    for edge in setting.config.edges(meshes):
        priced = price_edge(edge, topology, strategy=strategy, links=links)
        there, back = priced.forward_seconds + message_seconds, priced.backward_seconds + message_seconds
        edges.append(replace(priced, forward_seconds=there, backward_seconds=back))
    return Pipeline(stages, tuple(edges))


def with_transfers(pipeline: Pipeline, seconds: float) -> Pipeline:
    """The same with edges that take so long each, and share nothing."""
    edges = [
        replace(e, forward_seconds=seconds, backward_seconds=seconds, forward_loads=(), backward_loads=())
        for e in pipeline.edges
    ]
    return replace(pipeline, edges=tuple(edges))


def busiest_seconds(edges: list[Edge]) -> float:
    """Of one microbatch's forward on the busiest link."""
    busy: dict[str, float] = {}
    for edge in edges:
        for link, seconds in edge.forward_loads:
            busy[link] = busy.get(link, 0.0) + seconds
    return max(busy.values())


@dataclass(frozen=True)
class ChannelMover:
    """How a method moves tensors and orders actions."""

    name: str
    strategy: str | None
    build: Build
    blocks: bool = False


def _blocking(pipeline: Pipeline, num: int) -> Schedule:
    return block_transfers(one_f_one_b(pipeline, num), pipeline)


def _at_consumer(pipeline: Pipeline, num: int) -> Schedule:
    return defer_recvs(one_f_one_b(pipeline, num), pipeline)


def _in_memory_of(other: Build) -> Build:
    """Ours in the memory that a device has to have for another."""

    def build(pipeline: Pipeline, num: int) -> Schedule:
        return auto_schedule(pipeline, num, memory_limit_bytes=max(other(pipeline, num).peak_bytes(pipeline)))

    return build


WAYS = (
    ChannelMover("send/recv, blocking 1F1B", "send_recv", _blocking, blocks=True),
    ChannelMover(PREDECESSOR, "local_all_gather", _at_consumer),
    ChannelMover("broadcast, blocking 1F1B", "broadcast_greedy", _blocking, blocks=True),
    ChannelMover("broadcast, overlapped 1F1B", "broadcast_greedy", one_f_one_b),
    ChannelMover("eager-1F1B", "broadcast_greedy", eager_1f1b),
    ChannelMover("ours, memory of 1F1B", None, _in_memory_of(one_f_one_b)),
    ChannelMover(OURS, None, _in_memory_of(eager_1f1b)),
)


def run_setting(setting: Setting, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all methods of a setting in turns; the record of it."""
    balance = _balance(setting, say)
    rate, costs = balance.rate, balance.costs
    message = {way.name: balance.blocked if way.blocks else balance.message for way in WAYS}
    message[SIGNAL] = balance.message
    shaped = make_topology(setting, rate)
    plain = nominal(shaped)
    pipelines = {way.name: make_pipeline(setting, costs, plain, way.strategy, plain, message[way.name]) for way in WAYS}
    schedules = {way.name: way.build(pipelines[way.name], NUM_MICROBATCHES) for way in WAYS}
    methods = [Method(way.name, schedules[way.name], way.strategy) for way in WAYS]
    methods.append(Method(SIGNAL, schedules[OURS], None, signal_only=True))
    expected = {
        method.name: simulate(method.schedule, pipelines.get(method.name, pipelines[OURS])).makespan_seconds
        for method in methods
    }
    say(f"{setting.title}: about {sum(expected.values()) * (repeats + 1):.0f} s")
    told = make_pipeline(setting, balance.told, plain, None, plain)
    training = Training(told, tuple(methods), plain, None if setting.is_timed else setting.config, repeats)
    with Cluster(shaped) as cluster:
        before = measure_cluster(cluster, plain)
        results = cluster.run(
            train_in_turns,
            training,
            timeout_seconds=600 + 4 * sum(expected.values()) * (MOST_TRIES * repeats + 1),
            on_report=lambda rank, said: say(f"  {said[0]}: {said[1].seconds:.2f} s"),
        )
        after = measure_cluster(cluster, plain)
    links = replace(mean_topology(before, after), start_seconds=0.0)  # the engine's own is measured with its stages
    moved = max(map(abs, deviations(after, before).values()))
    rows, predicted = [], {}
    alone = None if setting.is_timed else train_alone(setting.config, repeats)
    for method in methods:
        way = next((way for way in WAYS if way.name == method.name), None)
        pipeline = make_pipeline(setting, costs, plain, way.strategy if way else None, links, message[method.name])
        if method.signal_only:
            pipeline = with_transfers(pipeline, balance.message)
        predicted[method.name] = simulate(method.schedule, pipeline)
        laps = merge_laps([result["laps"][method.name] for result in results])
        seconds = [lap.seconds for lap in laps.kept()]
        rows.append(
            {
                "method": method.name,
                "seconds": seconds,
                "median_seconds": statistics.median(seconds),
                "disturbed": sum(lap.is_disturbed for lap in laps.kept()),
                "stolen": statistics.median(lap.stolen for lap in laps.kept()),
                "repeated": len(laps.done) - len(seconds),
                "predicted_seconds": predicted[method.name].makespan_seconds,
                "busy": statistics.median(lap.busy for lap in laps.kept()),
                "in_flight": list(method.schedule.in_flight),
                "off": None if alone is None or method.signal_only else _distance(alone, results, method.name),
            }
        )
    return {
        "kind": "setting",
        "title": setting.title,
        "stage_seconds": costs,
        "message_seconds": balance.message,
        "blocked_seconds": balance.blocked,
        "transfer_seconds": {f"{e.src}->{e.dst}": e.forward_seconds for e in pipelines[OURS].edges},
        "rate": rate,
        "moved": moved,
        "valid": moved <= MOST_DEVIATION,
        "rows": rows,
        "timelines": {name: (measured, predicted[name]) for name, measured in results[0]["timelines"].items()},
    }


def _distance(alone: tuple[float, float], results: list[dict[str, Any]], name: str) -> float:
    """How far loss and size of all gradients are from those of one process, relatively; the larger of both."""
    loss = next(result["losses"][name] for result in results if result["losses"][name] is not None)
    squares = sum(result["squares"][name] for result in results)
    return max(abs(loss / alone[0] - 1), abs(math.sqrt(squares / alone[1]) - 1))


@dataclass(frozen=True)
class _Balance:
    """The link's rate, what stages are told to take, what they do take, and what a message costs, in seconds.

    ``blocked`` is what it costs where both ends wait for it: who waits is not woken in the middle of something.
    """

    rate: float | str
    told: list[tuple[float, ...]]
    costs: list[tuple[float, ...]]
    message: float
    blocked: float


def _balance(setting: Setting, say: Callable[[str], None]) -> _Balance:
    """Measure the stages without communication, and choose what makes the ratio of both that of the model."""
    meshes = setting.config.meshes()

    def transfer(rate: float | str) -> float:
        topology = nominal(make_topology(setting, rate))
        return busiest_seconds([price_edge(edge, topology) for edge in setting.config.edges(meshes)])

    say(f"{setting.title}: measuring stages")
    forward = transfer(setting.rate) / setting.ratio if setting.is_timed else 1.0
    told: list[tuple[float, ...]] = [(forward, forward, forward)] * setting.config.pp
    topology = make_topology(setting, setting.rate)
    pipeline = make_pipeline(setting, told, topology, None, topology)
    training = Training(pipeline, (), topology, None if setting.is_timed else setting.config, 1)
    with Cluster(topology) as cluster:
        found = cluster.run(measure_stages, training, NUM_MICROBATCHES // 2, timeout_seconds=600.0)
    costs: list[tuple[float, ...]] = []
    for mesh in meshes:
        every = [found[rank]["stage"] for rank in mesh.ranks]
        costs.append(tuple(max(times) for times in zip(*every, strict=True)))
    rate: float | str = setting.rate
    if not setting.is_timed:
        rate = 1.25e8
        for _ in range(_BALANCING_STEPS):  # what passes as a burst does not grow with the rate
            rate *= transfer(rate) / (setting.ratio * max(cost[0] for cost in costs))
    return _Balance(rate, told, costs, found[0]["transfer"], found[0]["blocked"])


def format_setting(record: dict[str, Any]) -> str:
    """A table: seconds, gain over the predecessor, part of signal-only, predicted over measured."""
    rows = {row["method"]: row for row in record["rows"]}
    before, signal = rows[PREDECESSOR], rows[SIGNAL]
    costs = ", ".join("/".join(f"{1e3 * s:.1f}" for s in stage) for stage in record["stage_seconds"])
    transfers = ", ".join(f"{edge} {1e3 * s:.1f}" for edge, s in record["transfer_seconds"].items())
    lines = [
        f"{record['title']}",
        f"ms of a microbatch: forward/input/weights/whole backward {costs}; forward transfers {transfers}, "
        f"of which a message {1e3 * record['message_seconds']:.1f} ({1e3 * record['blocked_seconds']:.1f} blocking)",
        f"{'method':28}{'median s':>10}{'min':>9}{'max':>9}{'gain':>7}{'predicted':>10}{'of signal':>10}"
        f"{'pred/meas':>10}{'busy':>6}{'taken':>6}{'off by':>9}  in flight",
    ]
    for row in record["rows"]:
        median = row["median_seconds"]
        lines.append(
            f"{row['method']:28}{median:10.3f}{min(row['seconds']):9.3f}{max(row['seconds']):9.3f}"
            f"{before['median_seconds'] / median:7.3f}{before['predicted_seconds'] / row['predicted_seconds']:10.3f}"
            f"{signal['median_seconds'] / median:10.3f}{row['predicted_seconds'] / median:10.3f}"
            f"{row['busy']:6.0%}{row['stolen']:6.1%}"
            f"{'-' if row['off'] is None else format(row['off'], '.0e'):>9}"
            f"  {' '.join(map(str, row['in_flight']))}"
        )
    kept, disturbed, repeated = (
        sum(count)
        for count in zip(*((len(r["seconds"]), r["disturbed"], r["repeated"]) for r in record["rows"]), strict=True)
    )
    lines.append(
        f"{kept} iterations, {disturbed} of them disturbed; {repeated} more were repeated because the machine was "
        "taken away while they ran"
    )
    if not record["valid"]:
        lines.append("NOT VALID: the links moved")
    return "\n".join(lines)


def write_traces(folder: Path, name: str, timelines: dict[str, tuple[Any, Any]]) -> None:
    """Two files for each method."""
    folder.mkdir(parents=True, exist_ok=True)
    for method, both in timelines.items():
        for kind, timeline in zip(("measured", "predicted"), both, strict=True):
            file = "".join(c if c.isalnum() else "-" for c in f"{name} {method} {kind}") + ".json"
            (folder / file).write_text(to_chrome_trace(timeline))


def main(arguments: list[str] | None = None) -> int:
    """Run the settings of a model and print a table of each."""
    parser = argparse.ArgumentParser(prog="python -m microbench.training.compare_schedules", description=__doc__)
    parser.add_argument("model", choices=sorted(RATIOS))
    parser.add_argument("--setting", action="append", help="timed 2, timed 4 or real 2; all by default")
    parser.add_argument("--repeats", type=int, default=5, help="iterations of each method, after one more (5)")
    parser.add_argument("--out", type=Path, help="write records as JSON lines")
    parser.add_argument("--trace", type=Path, help="write Chrome traces there, measured and predicted")
    options = parser.parse_args(arguments)
    known = settings(options.model)
    wanted = options.setting or list(known)
    if not set(wanted) <= set(known) or not 1 <= options.repeats <= 1000:
        parser.error(f"settings are {', '.join(known)}; --repeats is 1 to 1000")
    records: list[dict[str, Any]] = [describe_machine(sys.argv[1:])]
    try:
        for name in wanted:
            record = run_setting(known[name], options.repeats, stderr)
            record["setting"] = name
            timelines = record.pop("timelines")
            if options.trace:
                write_traces(options.trace, f"{options.model} {name}", timelines)
            records.append(record)
            print(format_setting(record) + "\n", flush=True)
    except (ClusterError, reshard.ReshardError) as error:
        stderr(f"end_to_end: {error}")
        return 2
    if options.out:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0 if all(record.get("valid", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
