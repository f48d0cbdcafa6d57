"""Pipeline schedules of GPT and U-Transformer, compared with each other on emulated hosts.

The models are small. Layouts, stage graphs and communication-to-compute ratios are those of the 2023 study, with 64
microbatches. Settings with real computation have two stages of one device each. Settings with timed computation have
two or four stages of several devices, since their devices only sleep. The iterations of the methods are interleaved.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.harness.calibrate import deviations, mean_topology, measure_cluster
from microbench.harness.case_options import add_number, select
from microbench.harness.machine_description import describe_machine, stderr
from microbench.harness.records import write_records
from microbench.harness.steal_time import merge_laps
from microbench.harness.suite import MAX_DEVIATION
from microbench.training.methods import BASELINE, METHODS, OURS, SIGNAL
from microbench.training.training_rank import MAX_TRIES, Method, Training, measure_stages, train_alone, train_in_turns
from microbench.training.training_workload import TrainingWorkload
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler import Edge, Pipeline, Stage, simulate_schedule, to_chrome_trace
from reshard.scheduler.training.models.model_presets import GPTConfig, UTransformerConfig
from reshard.scheduler.transfer_costs import price_edge
from reshard.topology import Topology, topology_from_json

NUM_MICROBATCHES = 64
#: Number of iterations that search for the link rate of a setting with real computation.
_BALANCING_STEPS = 8
#: Communication-to-compute ratio: time of one microbatch's forward transfers on the busiest link, over the forward time
#: of a stage. With skip connections, the busiest link carries all traffic between the two halves of the stages.
RATIOS = {"gpt": 0.3, "u_transformer": 1.5}


@dataclass(frozen=True)
class TrainingSetting:
    """A model on stages, with real or timed computation. All methods run on it, and one table compares them.

    Attributes:
        is_timed: devices sleep instead of computing.
        ratio: the communication-to-compute ratio, as in ``RATIOS``.
        rate: link rate of each host. With real computation, only the first guess of the link rate.
    """

    model: str
    workload: TrainingWorkload
    is_timed: bool
    ratio: float
    rate: str = "1 Gbit/s"

    @property
    def title(self) -> str:
        """Title of the table."""
        kind = "timed computation" if self.is_timed else "real computation"
        devices = len(self.workload.meshes()[0].ranks)
        return f"{self.model}, {self.workload.pp} stages of {devices} devices, {kind}"


def settings(model: str) -> dict[str, TrainingSetting]:
    """The settings of a model, by name."""
    if model == "gpt":
        batch = 8 * NUM_MICROBATCHES
        gpt = GPTConfig(4, 4, 64, sequence=256, vocabulary=256, is_tied=False)
        timed = TrainingWorkload(gpt, batch, NUM_MICROBATCHES, "2x2,2x2", (2, 2))
        four = replace(timed, stages="2x1,2x1,2x1,2x1", layers=(1, 1, 1, 1))
        narrow = GPTConfig(8, 4, 32, sequence=128, vocabulary=256, is_tied=False)
        real = TrainingWorkload(narrow, 2 * batch, NUM_MICROBATCHES, "1x1,1x1", (4, 4))
    else:
        batch = 64 * NUM_MICROBATCHES
        timed = TrainingWorkload(UTransformerConfig(8, groups=4), batch, NUM_MICROBATCHES, "2x1,2x1", (8, 5))
        four = replace(timed, stages="2x1,2x1,2x1,2x1", layers=(3, 3, 4, 3))
        few = UTransformerConfig(8, num_heads=2, groups=4)
        real = TrainingWorkload(few, 4 * NUM_MICROBATCHES, NUM_MICROBATCHES, "1x1,1x1", (9, 4))
    return {
        "timed 2": TrainingSetting(model, timed, True, RATIOS[model]),
        "timed 4": TrainingSetting(model, four, True, RATIOS[model]),
        "real 2": TrainingSetting(model, real, False, RATIOS[model]),
    }


def make_topology(setting: TrainingSetting, rate: float | str) -> Topology:
    """One host per stage, with the devices of the stage and one NIC."""
    meshes = setting.workload.meshes()
    hosts = [{"devices": len(mesh.ranks), "nics": [rate]} for mesh in meshes]
    return topology_from_json({"hosts": hosts})


def make_pipeline(
    setting: TrainingSetting,
    costs: list[tuple[float, ...]],
    topology: Topology,
    strategy: str | None,
    links: Topology,
    message_seconds: float = 0.0,
) -> Pipeline:
    """The pipeline of a setting.

    Args:
        costs: forward, input-gradient and weight-gradient seconds of each stage, and optionally whole-backward seconds.
        topology: for planning the edges.
        strategy: strategy of the plans; None for the default strategy.
        links: for simulating the plans.
        message_seconds: added to each transfer: the time to start it and to wake the waiting processes.
    """
    meshes = setting.workload.meshes()
    stages = tuple(
        Stage(forward, backward, weight, mesh=mesh, whole_backward_seconds=rest[0] if rest else None)
        for (forward, backward, weight, *rest), mesh in zip(costs, meshes, strict=True)
    )
    edges = []
    for edge in setting.workload.edges():
        priced = price_edge(edge, topology, strategy=strategy, links=links)
        forward, backward = priced.forward_seconds + message_seconds, priced.backward_seconds + message_seconds
        edges.append(replace(priced, forward_seconds=forward, backward_seconds=backward))
    return Pipeline(stages, tuple(edges))


def with_transfers(pipeline: Pipeline, seconds: float) -> Pipeline:
    """The same pipeline, in which each transfer takes ``seconds`` and occupies no link."""
    edges = [
        replace(e, forward_seconds=seconds, backward_seconds=seconds, forward_loads=(), backward_loads=())
        for e in pipeline.edges
    ]
    return replace(pipeline, edges=tuple(edges))


def busiest_seconds(edges: list[Edge]) -> float:
    """Seconds that the forward transfers of one microbatch take on the busiest link."""
    busy: dict[str, float] = {}
    for edge in edges:
        for link, seconds in edge.forward_loads:
            busy[link] = busy.get(link, 0.0) + seconds
    return max(busy.values())


def run_setting(setting: TrainingSetting, repeats: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure all methods of a setting in turns. Returns the record of the results."""
    calibration = _calibrate(setting, log)
    rate, costs = calibration.rate, calibration.costs
    message = {spec.name: calibration.blocked if spec.is_blocking else calibration.message for spec in METHODS}
    message[SIGNAL] = calibration.message
    shaped = make_topology(setting, rate)
    plain = nominal(shaped)
    pipelines = {
        spec.name: make_pipeline(setting, costs, plain, spec.strategy, plain, message[spec.name]) for spec in METHODS
    }
    schedules = {spec.name: spec.build(pipelines[spec.name], NUM_MICROBATCHES) for spec in METHODS}
    methods = [Method(spec.name, schedules[spec.name], spec.strategy) for spec in METHODS]
    methods.append(Method(SIGNAL, schedules[OURS], None, signal_only=True))
    expected = {
        method.name: simulate_schedule(method.schedule, pipelines.get(method.name, pipelines[OURS])).makespan_seconds
        for method in methods
    }
    log(f"{setting.title}: about {sum(expected.values()) * (repeats + 1):.0f} s")
    nominal_pipeline = make_pipeline(setting, calibration.nominal_costs, plain, None, plain)
    real = None if setting.is_timed else setting.workload
    training = Training(nominal_pipeline, tuple(methods), plain, real, repeats)
    with EmulatedCluster(shaped) as cluster:
        before = measure_cluster(cluster, plain)
        results = cluster.run(
            train_in_turns,
            training,
            timeout_seconds=600 + 4 * sum(expected.values()) * (MAX_TRIES * repeats + 1),
            on_report=lambda rank, report: log(f"  {report[0]}: {report[1].seconds:.2f} s"),
        )
        after = measure_cluster(cluster, plain)
    links = replace(mean_topology(before, after), start_seconds=0.0)  # the message costs already include the start
    drift = max(map(abs, deviations(after, before).values()))
    rows, predicted = [], {}
    alone = None if real is None else train_alone(real, repeats)
    for method in methods:
        spec = next((spec for spec in METHODS if spec.name == method.name), None)
        pipeline = make_pipeline(setting, costs, plain, spec.strategy if spec else None, links, message[method.name])
        if method.signal_only:
            pipeline = with_transfers(pipeline, calibration.message)
        predicted[method.name] = simulate_schedule(method.schedule, pipeline)
        error = None if alone is None or method.signal_only else _relative_error(alone, results, method.name)
        rows.append(_row(method, results, predicted[method.name].makespan_seconds, error))
    return {
        "kind": "setting",
        "title": setting.title,
        "stage_seconds": costs,
        "message_seconds": calibration.message,
        "blocked_seconds": calibration.blocked,
        "transfer_seconds": {f"{e.src}->{e.dst}": e.forward_seconds for e in pipelines[OURS].edges},
        "rate": rate,
        "moved": drift,
        "valid": drift <= MAX_DEVIATION,
        "rows": rows,
        "timelines": {name: (measured, predicted[name]) for name, measured in results[0]["timelines"].items()},
    }


def _row(
    method: Method, results: list[dict[str, Any]], predicted_seconds: float, error: float | None
) -> dict[str, Any]:
    """The record of a method: measured and predicted seconds of a step, and the :func:`_relative_error` ("off")."""
    laps = merge_laps([result["laps"][method.name] for result in results])
    kept = laps.kept()
    seconds = [lap.seconds for lap in kept]
    return {
        "method": method.name,
        "seconds": seconds,
        "median_seconds": statistics.median(seconds),
        "disturbed": sum(lap.is_disturbed for lap in kept),
        "stolen": statistics.median(lap.steal_share for lap in kept),
        "repeated": len(laps.done) - len(seconds),
        "predicted_seconds": predicted_seconds,
        "busy": statistics.median(lap.busy for lap in kept),
        "in_flight": list(method.schedule.in_flight),
        "off": error,
    }


def _relative_error(alone: tuple[float, float], results: list[dict[str, Any]], name: str) -> float:
    """Relative error of the loss or of the gradient norm, whichever is larger, against single-process training."""
    loss = next(result["losses"][name] for result in results if result["losses"][name] is not None)
    squares = sum(result["squares"][name] for result in results)
    return max(abs(loss / alone[0] - 1), abs(math.sqrt(squares / alone[1]) - 1))


@dataclass(frozen=True)
class _Calibration:
    """Link rate of a setting, and measured costs in seconds.

    Attributes:
        rate: bytes per second of each link, or as text.
        nominal_costs: sleep times of timed stages.
        costs: measured durations of the stages.
        message: cost of a message that overlaps with computation.
        blocked: cost of a message that both ends wait for. It differs from ``message`` because the receiver does no
            other work when the message arrives.
    """

    rate: float | str
    nominal_costs: list[tuple[float, ...]]
    costs: list[tuple[float, ...]]
    message: float
    blocked: float


def _calibrate(setting: TrainingSetting, log: Callable[[str], None]) -> _Calibration:
    """Measure the stages without communication. Choose sleep times or the link rate to match the setting's ratio."""
    meshes = setting.workload.meshes()

    def transfer_seconds(rate: float | str) -> float:
        topology = nominal(make_topology(setting, rate))
        return busiest_seconds([price_edge(edge, topology) for edge in setting.workload.edges()])

    log(f"{setting.title}: measuring stages")
    forward = transfer_seconds(setting.rate) / setting.ratio if setting.is_timed else 1.0
    nominal_costs: list[tuple[float, ...]] = [(forward, forward, forward)] * setting.workload.pp
    topology = make_topology(setting, setting.rate)
    pipeline = make_pipeline(setting, nominal_costs, topology, None, topology)
    training = Training(pipeline, (), topology, None if setting.is_timed else setting.workload, 1)
    with EmulatedCluster(topology) as cluster:
        measured = cluster.run(measure_stages, training, NUM_MICROBATCHES // 2, timeout_seconds=600.0)
    costs: list[tuple[float, ...]] = []
    for mesh in meshes:
        every = [measured[rank]["stage"] for rank in mesh.ranks]
        costs.append(tuple(max(times) for times in zip(*every, strict=True)))
    rate: float | str = setting.rate
    if not setting.is_timed:
        rate = 1.25e8
        for _ in range(_BALANCING_STEPS):  # iterate: a transfer starts with a burst of fixed size
            rate *= transfer_seconds(rate) / (setting.ratio * max(cost[0] for cost in costs))
    return _Calibration(rate, nominal_costs, costs, measured[0]["transfer"], measured[0]["blocked"])


def format_setting(record: dict[str, Any]) -> str:
    """Format the record of a setting as a text table.

    Columns: seconds; measured and predicted speed-up over the baseline; fraction of the signal-only throughput;
    predicted divided by measured seconds; CPU use; steal time; error of loss and gradients; microbatches in flight.
    """
    rows = {row["method"]: row for row in record["rows"]}
    base, signal = rows[BASELINE], rows[SIGNAL]
    costs = ", ".join("/".join(f"{1e3 * s:.1f}" for s in stage) for stage in record["stage_seconds"])
    transfers = ", ".join(f"{edge} {1e3 * s:.1f}" for edge, s in record["transfer_seconds"].items())
    lines = [
        f"{record['title']}",
        f"ms per microbatch: forward/input grad/weight grad/whole backward {costs}; forward transfers {transfers}, "
        f"including {1e3 * record['message_seconds']:.1f} per message ({1e3 * record['blocked_seconds']:.1f} blocking)",
        f"{'method':28}{'median s':>10}{'min':>9}{'max':>9}{'gain':>7}{'predicted':>10}{'of signal':>10}"
        f"{'pred/meas':>10}{'busy':>6}{'steal':>6}{'error':>9}  in flight",
    ]
    for row in record["rows"]:
        median = row["median_seconds"]
        lines.append(
            f"{row['method']:28}{median:10.3f}{min(row['seconds']):9.3f}{max(row['seconds']):9.3f}"
            f"{base['median_seconds'] / median:7.3f}{base['predicted_seconds'] / row['predicted_seconds']:10.3f}"
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
        f"{kept} iterations, of which {disturbed} were disturbed by steal time; {repeated} more were discarded for it"
    )
    if not record["valid"]:
        lines.append("NOT VALID: link rates changed during the run")
    return "\n".join(lines)


def write_traces(folder: Path, name: str, timelines: dict[str, tuple[Any, Any]]) -> None:
    """Write the measured and the predicted timeline of each method as Chrome traces."""
    folder.mkdir(parents=True, exist_ok=True)
    for method, both in timelines.items():
        for kind, timeline in zip(("measured", "predicted"), both, strict=True):
            file = "".join(c if c.isalnum() else "-" for c in f"{name} {method} {kind}") + ".json"
            (folder / file).write_text(to_chrome_trace(timeline))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=sorted(RATIOS), help="model to train")
    parser.add_argument("--setting", action="append", help="timed 2, timed 4 or real 2; may be repeated (default: all)")
    add_number(parser, "--repeats", 5, "timed iterations of each method")
    parser.add_argument("--out", type=Path, help="write JSON lines to this file")
    parser.add_argument("--trace", type=Path, help="write measured and predicted Chrome traces to this folder")


def run(options: argparse.Namespace) -> int:
    """Run the settings of a model and print a table for each; returns 1 if link rates changed."""
    known = settings(options.model)
    records: list[dict[str, Any]] = [describe_machine(options.words)]
    for name in track(select(known, options.setting), "settings"):
        record = run_setting(known[name], options.repeats, stderr)
        record["setting"] = name
        timelines = record.pop("timelines")
        if options.trace:
            write_traces(options.trace, f"{options.model} {name}", timelines)
        records.append(record)
        print_line(format_setting(record) + "\n")
    write_records(options.out, records)
    return 0 if all(record.get("valid", True) for record in records) else 1
