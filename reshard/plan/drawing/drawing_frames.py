"""The frame of a drawing of a plan: places of its boxes, in two columns or a ring, and curves of its arrows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.plan.drawing.drawn_hosts import HostBox, HostBoxes, Traffic

#: Width of a drawing in SVG units. A phone shows it at 0.75 times this size, a screen at 1.5 times.
WIDTH = 460
#: Width of a label that has its cells beside it.
FLAT_LABEL = 100
#: Space for the arrows between boxes of one column, and around a pod.
_SIDE, _POD = 46, 8
#: Limits on the width of an arrow.
_THINNEST, _WIDEST = 0.7, 15.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """A rectangle of the drawing, and how its text is laid out: ``is_flat`` if the cells are beside the label."""

    x: float
    y: float
    width: float
    height: float
    is_flat: bool = False

    @property
    def centre(self) -> Point:
        """The point in the middle."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Placing:
    """The frames of boxes and pods, and the curves of arrows.

    Attributes:
        height: height of the drawing.
        frames: one per box.
        pods: frames of pods in columns, by number.
        pod_arcs: for a ring, the number of a pod and the angles at which its boxes begin and end.
        curves: one per arrow: the four control points of a cubic curve.
        widths: widths of the arrows.
    """

    height: float
    frames: tuple[Frame, ...]
    pods: tuple[tuple[int, Frame], ...]
    pod_arcs: tuple[tuple[int, float, float], ...]
    curves: tuple[tuple[Point, Point, Point, Point], ...]
    widths: tuple[float, ...]


def place_boxes(boxes: HostBoxes, traffic: Traffic) -> Placing:
    """Two columns if sources and destinations share no host; otherwise a ring."""
    if boxes.dst:
        return _place_columns(boxes, traffic)
    return _place_ring(boxes, traffic)


def _place_columns(boxes: HostBoxes, traffic: Traffic) -> Placing:
    is_src = np.arange(len(boxes.all)) < len(boxes.src)
    apart = traffic.sender != traffic.receiver
    same = apart & (is_src[traffic.sender] == is_src[traffic.receiver])
    margins = [_SIDE if same[is_src[traffic.sender] == side].any() else 6 for side in (True, False)]
    in_pods = any(box.is_host and box.pod is not None for box in boxes.all)
    margins = [margin + _POD * in_pods for margin in margins]
    is_flat = max(len(boxes.src), len(boxes.dst)) > 8
    width, height = (168, 24) if is_flat else (132, 46)
    frames: list[Frame] = []
    pods: list[tuple[int, Frame]] = []
    columns = ((boxes.src, float(margins[0])), (boxes.dst, float(WIDTH - margins[1] - width)))
    ends = []
    for column, x in columns:
        y = 24.0
        for number, box in enumerate(column):
            is_new = in_pods and (number == 0 or box.pod != column[number - 1].pod)
            if is_new:
                y += 6.0 + 12 * (number > 0)
                count = sum(other.pod == box.pod for other in column)
                size = count * (height + 6.0) - 6 + 2 * _POD + 12
                pods.append((box.pod or 0, Frame(x - _POD, y - 4, width + 2 * _POD, size)))
                y += 16.0
            frames.append(Frame(x, y, width, height, is_flat))
            y += height + 6
        ends.append(y + _POD * in_pods)
    tall = max(ends)
    frames, pods = _centre_columns(boxes, frames, pods, ends, tall)
    curves, widths = _join_columns(frames, is_src, traffic)
    return Placing(tall + 2, tuple(frames), tuple(pods), (), curves, widths)


def _centre_columns(
    boxes: HostBoxes, frames: list[Frame], pods: list[tuple[int, Frame]], ends: Sequence[float], tall: float
) -> tuple[list[Frame], list[tuple[int, Frame]]]:
    """The same frames, with the shorter column in the middle of the height."""
    down = [(tall - end) / 2 for end in ends]

    def moved(frame: Frame) -> Frame:
        y = frame.y + down[frame.x > WIDTH / 2]
        return Frame(frame.x, y, frame.width, frame.height, frame.is_flat)

    return [moved(frame) for frame in frames], [(pod, moved(frame)) for pod, frame in pods]


def _join_columns(
    frames: Sequence[Frame], is_src: np.ndarray, traffic: Traffic
) -> tuple[tuple[tuple[Point, Point, Point, Point], ...], tuple[float, ...]]:
    """Curves whose ends lie side by side on the edges of the boxes."""
    senders, receivers = traffic.sender.tolist(), traffic.receiver.tolist()
    sides: dict[tuple[int, int], list[tuple[float, int, int]]] = {}  # (box, -1 left or 1 right) -> ends there
    out: list[tuple[int, int]] = []
    for arrow, (a, b) in enumerate(zip(senders, receivers, strict=True)):
        crosses = is_src[a] != is_src[b]
        side = [1 if bool(is_src[box]) == crosses else -1 for box in (a, b)]
        out.append((side[0], side[1]))
        sides.setdefault((a, side[0]), []).append((frames[b].centre[1], arrow, 0))
        sides.setdefault((b, side[1]), []).append((frames[a].centre[1] + (0.1 if a == b else 0), arrow, 1))
    nbytes = traffic.nbytes.astype(float)
    max_bytes = max((sum(nbytes[arrow] for _, arrow, _ in ends) for ends in sides.values()), default=1.0)
    scale = min((frames[0].height - 6) / max_bytes, _WIDEST / max(nbytes.max(initial=1.0), 1.0))
    widths = [max(float(value) * scale, _THINNEST) for value in nbytes]
    at: dict[tuple[int, int], float] = {}
    for (box, _), ends in sides.items():
        total = sum(widths[arrow] for _, arrow, _ in ends)
        room = max(frames[box].height - 6, 1.0)
        gap = max(min((room - total) / len(ends), 6.0), (room - total) / len(ends) if total > room else 0.0)
        y = frames[box].centre[1] - (total + gap * len(ends)) / 2
        for _, arrow, end in sorted(ends):
            at[arrow, end] = y + (widths[arrow] + gap) / 2
            y += widths[arrow] + gap
    curves = []
    for arrow, (a, b) in enumerate(zip(senders, receivers, strict=True)):
        points = []
        for end, (number, side_of_end) in enumerate(zip((a, b), out[arrow], strict=True)):
            frame = frames[number]
            points.append((frame.x + (frame.width if side_of_end > 0 else 0), at[arrow, end]))
        (x0, y0), (x1, y1) = points
        if is_src[a] == is_src[b]:
            bulge = min(14 + abs(y1 - y0) * 0.25, _SIDE + 8.0)
            reach = [side * bulge for side in out[arrow]]
        else:
            reach = [side * abs(x1 - x0) * 0.45 for side in out[arrow]]
        curves.append(((x0, y0), (x0 + reach[0], y0), (x1 + reach[1], y1), (x1, y1)))
    return tuple(curves), tuple(widths)


def _place_ring(boxes: HostBoxes, traffic: Traffic) -> Placing:
    num_boxes = len(boxes.all)
    is_small = num_boxes > 8
    width, height = (64.0, 34.0) if is_small else (88.0, 46.0)
    order = sorted(range(num_boxes), key=lambda number: (boxes.all[number].pod or 0, number))
    in_pods = any(box.is_host and box.pod is not None for box in boxes.all)
    radius = WIDTH / 2 - width / 2 - (22 if in_pods else 4)
    centre = WIDTH / 2
    tall = 2 * radius + height + (60 if in_pods else 20) if num_boxes > 2 else 130.0
    first = -math.pi / 2 if num_boxes > 2 else math.pi
    angle = {number: first + 2 * math.pi * place / num_boxes for place, number in enumerate(order)}
    frames = []
    for number in range(num_boxes):
        x, y = centre + radius * math.cos(angle[number]), tall / 2 + radius * math.sin(angle[number])
        frames.append(Frame(x - width / 2, y - height / 2, width, height))
    arcs = []
    if in_pods:
        half = math.pi / num_boxes * 0.86
        for pod in sorted({box.pod or 0 for box in boxes.all}):
            of_pod = [angle[number] for number in order if (boxes.all[number].pod or 0) == pod]
            arcs.append((pod, min(of_pod) - half, max(of_pod) + half))
    curves, widths = _join_ring(frames, angle, (centre, tall / 2), traffic)
    return Placing(tall, tuple(frames), (), tuple(arcs), curves, widths)


def _join_ring(
    frames: Sequence[Frame], angle: dict[int, float], centre: Point, traffic: Traffic
) -> tuple[tuple[tuple[Point, Point, Point, Point], ...], tuple[float, ...]]:
    """Curves that bend toward the centre; out of one half of a box, into the other."""
    nbytes = traffic.nbytes.astype(float)
    through: dict[tuple[int, bool], float] = {}
    for arrow, ends in enumerate(zip(traffic.sender.tolist(), traffic.receiver.tolist(), strict=True)):
        for end, is_in in zip(ends, (False, True), strict=True):
            through[end, is_in] = through.get((end, is_in), 0.0) + nbytes[arrow]
    scale = min(24 / max(through.values(), default=1.0), _WIDEST / max(nbytes.max(initial=1.0), 1.0))
    widths = [max(float(value) * scale, _THINNEST) for value in nbytes]
    curves = []
    for a, b in zip(traffic.sender.tolist(), traffic.receiver.tolist(), strict=True):
        if a == b:
            curves.append(_loop(frames[a], angle[a]))
            continue
        start, end = (_edge_of(frames[box], angle[box], centre, shift) for box, shift in ((a, 7.0), (b, -7.0)))
        bend = 0.45
        first, second = ((x + bend * (centre[0] - x), y + bend * (centre[1] - y)) for x, y in (start, end))
        curves.append((start, first, second, end))
    return tuple(curves), tuple(widths)


def _edge_of(frame: Frame, angle: float, centre: Point, shift: float) -> Point:
    """The point where the line from the centre of the ring meets a box, ``shift`` units around the ring."""
    x, y = frame.centre
    inward = (-math.cos(angle), -math.sin(angle))
    reach = min((frame.width / 2 + 2) / max(abs(inward[0]), 1e-9), (frame.height / 2 + 2) / max(abs(inward[1]), 1e-9))
    return x + inward[0] * reach - math.sin(angle) * shift, y + inward[1] * reach + math.cos(angle) * shift


def _loop(frame: Frame, angle: float) -> tuple[Point, Point, Point, Point]:
    """A small loop at the inner side of a box: traffic between its hosts."""
    x, y = _edge_of(frame, angle, (0.0, 0.0), 0.0)
    inward, along = (-math.cos(angle), -math.sin(angle)), (-math.sin(angle), math.cos(angle))
    points = [
        (x + 26 * depth * inward[0] + 9 * side * along[0], y + 26 * depth * inward[1] + 9 * side * along[1])
        for depth, side in ((0, 1), (1, 2.2), (1, -2.2), (0, -1))
    ]
    return points[0], points[1], points[2], points[3]


def cell_size(box: HostBox, frame: Frame) -> tuple[int, float]:
    """The cells in a row, and the side of a cell with its gap; 0 cells if they would be too small to see."""
    room = frame.width - FLAT_LABEL - 6 if frame.is_flat else frame.width - 12
    tall = frame.height - (8 if frame.is_flat else 24)
    for rows in range(1, 5) if box.cells else ():
        columns = -(-len(box.cells) // rows)
        side = min(room / columns, tall / rows, 13.0)
        if side >= 5 or (rows == 4 and side >= 3):
            return columns, side
    return 0, 0.0
