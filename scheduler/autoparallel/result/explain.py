"""A training plan as text: where time and memory go, and why other candidates are slower or do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.formatting import count_of, describe_ranks, format_bytes, format_ranks

from ..inputs.stages import StagePlan
from .record import TrainingPlanRecord
from .reports import Alternative, EdgeReport, StageReport, TieReport


def explain_training_plan(training_plan: TrainingPlanRecord) -> str:
    """The text of :meth:`reshard.scheduler.autoparallel.TrainingPlan.explain`."""
    lines = _summary_lines(training_plan)
    for number, (stage, report) in enumerate(zip(training_plan.stages, training_plan.reports, strict=True)):
        lines += _layer_lines(number, stage, training_plan.layer_names[number])
        lines.append(_microbatch_line(report))
        own = [n for n, pp_rank in enumerate(training_plan.pp_ranks) if pp_rank == training_plan.pp_ranks[number]]
        if number == own[-1]:
            lines += _step_lines(training_plan, own)
        else:
            lines.append(f"  step and memory: with stage {own[-1]}, on the same ranks")
    lines += map(_edge_line, training_plan.edges)
    lines += map(_tie_line, training_plan.ties)
    if training_plan.compression_text:
        lines.append(f"codecs: {training_plan.compression_text}; values that they code are rounded")
    for name, reason in training_plan.grid_refusals:
        lines.append(f"layer {name!r} cannot be on a grid: {reason}")
    lines += _improvement_lines(training_plan)
    if training_plan.alternatives:
        lines.append("other candidates, fastest first; in brackets, the seconds of the stage that ends last:")
    lines += [_alternative_line(other, training_plan.seconds) for other in training_plan.alternatives]
    return "\n".join(lines)


def _summary_lines(training_plan: TrainingPlanRecord) -> list[str]:
    """Seconds, method and schedule; the bound; the balance over stages."""
    lines = [
        f"{training_plan.seconds:.4g} s for {count_of(training_plan.num_samples, 'sample')} in "
        f"{count_of(training_plan.num_microbatches, 'microbatch')}, found by {training_plan.method}, "
        f"schedule {training_plan.schedule.name}"
    ]
    names = [name for stage in training_plan.layer_names for name in stage]
    if len(names) > 1:
        lines.append(f"layers 0 to {len(names) - 1} are {_list_of(names)}")
    lines += _device_lines(training_plan)
    if training_plan.is_guess:
        lines.append("all seconds are a GUESS: the profile is an estimate; measure one with profile_layers()")
    where = (
        "on all ranks or any part that the search considers"
        if training_plan.is_bound_of_parts
        else "that uses all ranks"
    )
    lines.append(
        f"no plan of this model {where} takes less than {training_plan.bound_seconds:.4g} s, which is "
        f"{training_plan.bound_seconds / (training_plan.seconds or 1.0):.0%} of this one's time"
    )
    num_pp_ranks = len(set(training_plan.pp_ranks))
    if num_pp_ranks > 1:
        time, memory = training_plan.balance
        equal = 1 - 1 / num_pp_ranks
        lines.append(f"balance of time {time:.3f} and of memory {memory:.3f}; equal stages would have {equal:.3f}")
    return lines


def _device_lines(training_plan: TrainingPlanRecord) -> list[str]:
    """The devices that work, and the time of a step on all devices."""
    if not training_plan.ranks:
        return []
    idle, count, seconds = training_plan.idle_ranks, training_plan.num_cluster_ranks, training_plan.on_all_seconds
    takes = "with one stage on each rank takes at least" if training_plan.is_on_all_bound else "takes"
    on_all = f"on all {count} ranks in their order, a step {takes} {seconds:.4g} s"
    hosts = ", ".join(f"{end - first} of host {host}" for host, first, end in training_plan.hosts)
    what = f"{describe_ranks(idle)} of the cluster {'stay' if len(idle) > 1 else 'stays'} idle"
    return [
        f"{what if idle else 'the ranks work in another order'}: ranks work as {hosts}; "
        f"{on_all if seconds else 'nothing fits on all ranks in their order'}",
        f"ranks of the cluster, in the order of the plan: {format_ranks(training_plan.ranks)}",
    ]


def _layer_lines(number: int, stage: StagePlan, names: Sequence[str]) -> list[str]:
    """The ranks of a stage, how they share its layers, and the names of these layers."""
    first, last = stage.first_rank, stage.end_rank - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return [f"stage {number}, {ranks}: {stage}", f"  modules: {_list_of(names)}"]


def _microbatch_line(report: StageReport) -> str:
    return (
        f"  one microbatch: {report.compute_seconds:.3g} s computation, {report.tp_collective_seconds:.3g} s "
        f"tensor-parallel collectives, {report.all_gather_seconds:.3g} s ZeRO all-gathers that no computation hides"
    )


def _step_lines(training_plan: TrainingPlanRecord, stages: Sequence[int]) -> list[str]:
    """Seconds and memory of a device that has some stages."""
    reports = [training_plan.reports[stage] for stage in stages]
    report = reports[-1]
    busy, sums = sum(item.busy_seconds for item in reports), sum(item.gradient_sync_seconds for item in reports)
    ties = sum(tie.seconds for tie in training_plan.ties if set(stages) & set(tie.stages))
    idle = training_plan.seconds - busy - sums - ties - report.exposed_seconds
    if idle < 1e-9 * training_plan.seconds:  # a rounding error
        idle = 0.0
    shared = f" of stages {_list_of(list(map(str, stages)))}" if len(stages) > 1 else ""
    in_flight = " and ".join(count_of(item.in_flight, "microbatch") for item in reports)
    holds_whole = training_plan.num_microbatches > 1 and any(
        choice.zero == 3 for stage in stages for choice in training_plan.stages[stage].choices
    )
    states = f"states {format_bytes(round(report.state_bytes))}{' with whole gradients' if holds_whole else ''}"
    lines = [
        f"  step{shared}: {busy:.3g} s busy, {report.exposed_seconds:.3g} s waiting for transfers, "
        f"{idle:.3g} s otherwise idle, {sums:.3g} s gradient "
        f"sums{f' over replicas and {ties:.3g} s over stages' if ties else ''}",
        f"  memory: {format_bytes(round(report.memory_bytes))} of {format_bytes(round(report.limit_bytes))}: "
        f"{states}, {in_flight} in "
        f"flight {format_bytes(round(report.activation_bytes))}, "
        f"working {format_bytes(round(report.working_bytes))}, buffers {format_bytes(round(report.buffer_bytes))}",
    ]
    ending = max(item.ending_bytes for item in reports)
    if ending:
        text = format_bytes(round(ending))
        lines.append(f"  end of a step: {text}, while it adds the gradients of parameters that stages share")
    return lines


def _edge_line(edge: EdgeReport) -> str:
    port = f", busiest {edge.busiest_port} ({edge.port_seconds:.3g} s)" if edge.busiest_port else ""
    return (
        f"edge {edge.src} -> {edge.dst}: {format_bytes(edge.nbytes)}, {edge.forward_seconds:.3g} s forward, "
        f"{edge.backward_seconds:.3g} s backward{port}{_codecs_of(edge)}"
    )


def _tie_line(tie: TieReport) -> str:
    names, stages = (_list_of(list(map(str, values))) for values in (tie.layer_names, tie.stages))
    return (
        f"layers {names} share parameters: stages {stages} add their gradients of "
        f"{format_bytes(round(tie.nbytes))} once in a step, {tie.seconds:.3g} s"
        + (f", encoded as {tie.codec}" if tie.codec else "")
    )


def _improvement_lines(training_plan: TrainingPlanRecord) -> list[str]:
    """The gains of faster links and of more memory, a line each."""
    gain = training_plan.seconds - training_plan.wider_links_seconds
    lines = [f"links 10 % faster would gain {max(0.0, gain):.3g} s"]
    short = [
        other for other in training_plan.alternatives if other.short_bytes and other.seconds < training_plan.seconds
    ]
    if short:
        nearest = min(short, key=lambda other: other.short_bytes)
        lines.append(
            f"{format_bytes(round(nearest.short_bytes))} more memory would allow {nearest.seconds:.4g} s: "
            f"{nearest.text}"
        )
    return lines


def _alternative_line(other: Alternative, chosen_seconds: float) -> str:
    lacks = f"{other.seconds - chosen_seconds:+.3g} s"
    fits = f", does not fit by {format_bytes(round(other.short_bytes))}" if other.short_bytes else ""
    return (
        f"{other.method} {other.seconds:.4g} s ({lacks}{fits}; {other.busy_seconds:.3g} busy, "
        f"{other.exposed_seconds:.3g} transfers, {other.bubble_seconds:.3g} idle, {other.sync_seconds:.3g} sums): "
        f"{other.text}"
    )


def _list_of(words: Sequence[str]) -> str:
    """``a, b and c``; of more than six words, those at both ends."""
    if len(words) == 1:
        return words[0]
    if len(words) > 6:
        words = [*words[:3], "...", words[-1]]
    return ", ".join(words[:-1]) + " and " + words[-1]


def _codecs_of(edge: EdgeReport) -> str:
    codecs = (edge.forward_codec, edge.backward_codec)
    return f", encoded as {' and '.join(codec or 'raw' for codec in codecs)}" if any(codecs) else ""
