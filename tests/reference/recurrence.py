"""Reference implementation of ``native/autoparallel/recurrence.cpp``: the same floating point operations."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A suffix of stages: its round trip, its excess of gradient sums, its first stage, and the suffix after this one."""

    trip: float
    excess: float
    end: int
    option: int
    next: Point | None
    next_class: int


def add(front, point):
    """Add a point to a front unless another point is as good. The front ascends by trip. Earlier points win ties.

    A point is as good if neither its trip, nor its trip plus its excess, is longer. This comparison suffices, because
    the excess at the end of a whole plan differs by no more than that of a suffix.
    """

    def beats(one, other):
        return one.trip <= other.trip and one.trip + one.excess <= other.trip + other.excess

    if any(beats(other, point) for other in front):
        return
    front[:] = [other for other in front if not beats(point, other)]
    front.append(point)
    front.sort(key=lambda other: other.trip)


def best_stages(
    num_layers, is_chain, option_class, forward, backward, activation, fixed, sync, ending, allowed, next_at, port_in, port_out,
    memory, received, sent, cut_bytes, factor, latency, priced_at, priced_forward, priced_backward, microbatches,
    bottleneck_seconds,
):  # fmt: skip
    """The best stages for one bottleneck time, as ``(trip, excess, [(first, end, index of devices left, option), ...])``.

    ``cut_bytes * factor + latency`` is the price of an edge in each direction, 0 without bytes, unless ``priced_at`` has its index. The excess is
    that of gradient sums over the last backward of the first stage. Returns infinity and no stages if none fit.
    """
    num_classes, num_ends = next_at.shape
    size = num_layers + 1
    prices = {
        int(position): (float(f), float(b))
        for position, f, b in zip(priced_at, priced_forward, priced_backward, strict=True)
    }
    fronts = {}  # (first, end or 0, at, class) -> front
    merged = {}

    def price(first, cut, end, c, at, d):
        if is_chain:
            first = end = 0
        index = ((((first * size + cut) * size + end) * num_classes + c) * num_ends + at) * num_classes + d
        if index in prices:
            return prices[index]
        nbytes = cut_bytes[first, cut, end]
        seconds = nbytes * factor[c, at, d] + latency[c, at, d] if nbytes > 0 else 0.0
        return seconds, seconds

    def behind(first, cut, c, at):
        """The front of what follows a stage: (round trip with the edge, excess less the edge, point, its class)."""
        key = (0 if is_chain else first, cut, c, at)
        if key in merged:
            return merged[key]
        front = []
        rest = next_at[c, at]
        for end in [0] if is_chain else range(cut + 1, size):
            for d in range(num_classes):
                if next_at[d, rest] < 0:
                    continue
                there, back = price(first, cut, end, c, at, d)
                if max(there, back) > bottleneck_seconds:
                    continue
                for point in fronts.get((cut, end, rest, d), ()):
                    add(front, Point(there + back + point.trip, point.excess - back, 0, 0, point, d))
        merged[key] = front
        return front

    none = [Point(0.0, -math.inf, 0, 0, None, -1)]
    for first in reversed(range(num_layers)):
        for position in range(1, num_ends):
            for c in range(num_classes):
                rest = next_at[c, position]
                if rest < 0:
                    continue
                options = [o for o in range(len(option_class)) if option_class[o] == c and allowed[o, position]]
                for end in range(first + 1, size):
                    is_last = end == num_layers
                    if is_last != (rest == 0):
                        continue
                    ports = received[first, end] * port_in[c, position] + sent[first, end] * port_out[c, position]
                    if ports > bottleneck_seconds:
                        continue
                    front = fronts.setdefault((first, 0 if is_chain else end, position, c), [])
                    for o in options:
                        seconds = forward[o, first, end] + backward[o, first, end]
                        if seconds > bottleneck_seconds:
                            continue
                        for tail in none if is_last else behind(first, end, c, position):
                            trip = seconds + tail.trip
                            held = min(microbatches, max(1, math.ceil(trip / bottleneck_seconds)))
                            kept = fixed[o, first, end] + held * activation[o, first, end]
                            if max(kept, ending[o, first, end]) > memory[c, position]:
                                continue
                            excess = max(sync[o, first, end], tail.excess - backward[o, first, end])
                            add(front, Point(trip, excess, end, o, tail.next, tail.next_class))
    best, best_class = None, -1
    for c in range(num_classes):
        for end in [0] if is_chain else range(1, size):
            for point in fronts.get((0, end, num_ends - 1, c), ()):
                if best is None or point.trip + point.excess < best.trip + best.excess:
                    best, best_class = point, c
    if best is None:
        return math.inf, math.inf, []
    stages, first, at, point, c = [], 0, num_ends - 1, best, best_class
    while point is not None:
        stages.append((first, point.end, at, point.option))
        first, at, c, point = point.end, int(next_at[c, at]), point.next_class, point.next
    return best.trip, best.excess, stages
