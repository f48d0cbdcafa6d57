"""The choice of the directions of edges to encode, by the time of the simulated iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..ir.actions import StageChannel
from ..ir.schedule import Schedule
from ..pipeline import Edge, Pipeline
from ..simulation.replay import simulate_schedule

#: Codecs pay only if the iteration becomes shorter by at least this share.
MIN_GAIN = 0.01
#: A channel stays encoded only if coding it saves at least this share of the iteration.
MIN_SHARE = 0.001

#: The codec of each encoded channel.
ChannelCodecs = Mapping[StageChannel, str]


@dataclass(frozen=True)
class EdgeCodecs:
    """The codecs of a pipeline's edges, and why.

    Attributes:
        codecs: codecs of the encoded channels.
        schedule: built for the pipeline with these codecs.
        raw_seconds, seconds: simulated iteration without and with the codecs.
        gains: for each channel that was tried, the seconds that coding it saves in the end.
    """

    codecs: ChannelCodecs
    schedule: Schedule
    raw_seconds: float
    seconds: float
    gains: Mapping[StageChannel, float]

    def __str__(self) -> str:
        lines = [f"iteration {self.seconds:.4g} s with codecs between stages, {self.raw_seconds:.4g} s without"]
        for channel, gain in self.gains.items():
            what = f"{channel.sender} -> {channel.receiver} {'activations' if channel.is_forward else 'gradients'}"
            codec = self.codecs.get(channel)
            does = "raw, because coding would save" if codec is None else f"{codec}, saves"
            lines.append(f"  {what}: {does} {gain:.3g} s")
        return "\n".join(lines)


def compress_edges(pipeline: Pipeline, codecs: ChannelCodecs) -> Pipeline:
    """The pipeline whose edges have these codecs, and no others. Costs stay as they are."""

    def code(edge: Edge) -> Edge:
        ahead, back = (StageChannel(edge.src, edge.dst, True), StageChannel(edge.dst, edge.src, False))
        return replace(edge, forward_codec=codecs.get(ahead), backward_codec=codecs.get(back))

    return replace(pipeline, edges=tuple(map(code, pipeline.edges)))


def choose_codecs(
    pipeline: Pipeline,
    build: Callable[[Pipeline], Schedule],
    price: Callable[[Edge], Edge],
    codecs: tuple[str | None, str | None],
    *,
    is_forced: bool = False,
) -> EdgeCodecs:
    """Code the channels that make the iteration shorter.

    Starts with all channels encoded, since several may share the critical path, and removes those whose codec saves
    less than :data:`MIN_SHARE` of the iteration, the least useful first.

    Args:
        pipeline: pipeline with the costs of stages. Costs of edges are not used.
        build: the schedule of a pipeline with costs.
        price: an edge with the costs of its codecs.
        codecs: codecs of activations, and of their gradients; None: leave them raw.
        is_forced: code every channel.
    """
    wanted: dict[StageChannel, str] = {}
    forward_codec, backward_codec = codecs
    for edge in pipeline.edges:
        if forward_codec is not None:
            wanted[StageChannel(edge.src, edge.dst, True)] = forward_codec
        if backward_codec is not None and edge.gradients:
            wanted[StageChannel(edge.dst, edge.src, False)] = backward_codec
    priced: dict[Edge, Edge] = {}

    def with_costs(codecs: ChannelCodecs) -> Pipeline:
        encoded = compress_edges(pipeline, codecs)
        for edge in encoded.edges:
            if edge not in priced:
                priced[edge] = price(edge)
        return replace(encoded, edges=tuple(priced[edge] for edge in encoded.edges))

    def seconds(codecs: ChannelCodecs, schedule: Schedule) -> float:
        return simulate_schedule(schedule, with_costs(codecs)).makespan_seconds

    def without(codecs: ChannelCodecs, channel: StageChannel) -> ChannelCodecs:
        return {item: codec for item, codec in codecs.items() if item != channel}

    raw_schedule = build(with_costs({}))
    raw_seconds = seconds({}, raw_schedule)
    chosen, schedule = dict(wanted), build(with_costs(wanted))
    step_seconds = seconds(chosen, schedule)
    gains: dict[StageChannel, float] = {}
    while chosen:
        left = {channel: seconds(without(chosen, channel), schedule) - step_seconds for channel in chosen}
        gains |= left
        worst = min(left, key=lambda channel: left[channel])
        if is_forced or left[worst] >= MIN_SHARE * raw_seconds:
            break
        del chosen[worst]
        step_seconds = seconds(chosen, schedule)
    if chosen and len(chosen) < len(wanted):
        schedule = build(with_costs(chosen))
        step_seconds = seconds(chosen, schedule)
    if not is_forced and step_seconds > (1 - MIN_GAIN) * raw_seconds:
        chosen, schedule, step_seconds = {}, raw_schedule, raw_seconds
    return EdgeCodecs(chosen, schedule, raw_seconds, step_seconds, gains)
