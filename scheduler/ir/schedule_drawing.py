"""Drawings of schedules: one row per pp rank over time, actions coloured by kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from reshard.drawing import draw, draw_fragment, draw_keys
from reshard.formatting import count_of

from .actions import Action, Kind
from .schedule import Schedule

#: Largest number of actions and pp ranks that are drawn; of longer schedules, the first microbatches and pp ranks are.
MAX_ACTIONS, MAX_PP_RANKS = 1000, 64
#: Lengths of actions where no costs are known: a whole backward takes as long as its two passes.
_UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
_COLOURS = {Kind.F: "var(--src)", Kind.B: "var(--warm)", Kind.I: "var(--pale)", Kind.W: "var(--dst)"}
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward of inputs",
    Kind.W: "backward of weights",
}
STYLE = """
.reshard .row { display: grid; grid-template-columns: 3.6em minmax(0, 1fr) 7em; gap: 8px; margin: 2px 0;
  font-size: 12px; align-items: center; }
.reshard .row > b { font-weight: 400; text-align: right; white-space: nowrap; }
.reshard .row > div { position: relative; height: 20px; background: var(--panel); overflow: hidden; }
.reshard .row i { position: absolute; top: 0; bottom: 0; font-style: normal; font-size: 11px; line-height: 20px;
  text-align: center; overflow: hidden; color: #000; box-shadow: inset 0 0 0 0.5px var(--bg); }
.reshard .row u { text-decoration: none; line-height: 1.1; }
@media (max-width: 600px) {
  .reshard .row { grid-template-columns: 2.6em minmax(0, 1fr) 5em; font-size: 11px; }
  .reshard .row i { box-shadow: none; }  /* the lines between actions would hide the short ones */
}
"""


@dataclass(frozen=True)
class DrawnSpan:
    """A part of a row: an action, or a wait if ``action`` is None. ``text`` describes it."""

    pp_rank: int
    start: float
    end: float
    action: Action | None
    text: str


@draw.register(Schedule)
def draw_schedule(schedule: Schedule) -> str:
    """A schedule for a notebook, without costs: a forward takes one unit of time, a whole backward two.

    Returns:
        HTML of at most 200 kB that needs no other file.
    """
    ranks = count_of(len(schedule.rank_actions), "pp rank")
    head = f"{count_of(schedule.num_stages, 'stage')} on {ranks}, {count_of(schedule.num_microbatches, 'microbatch')}"
    body = f"<p><b>{escape(schedule.name)}</b>: {head}</p>{draw_in_units(schedule)}"
    return draw_fragment(body, STYLE)


def draw_in_units(schedule: Schedule) -> str:
    """The rows of a schedule without costs, the largest numbers of microbatches in flight, and a legend of colours."""
    part = first_microbatches(schedule)
    pieces = list(_place_in_units(part))
    end = max((piece.end for piece in pieces), default=1.0)
    flights: list[list[int]] = [[] for _ in schedule.rank_actions]
    for pp_rank, in_flight in zip(schedule.pp_rank_of_stage, schedule.in_flight, strict=True):
        flights[pp_rank].append(in_flight)
    beside = [f"{'+'.join(map(str, in_flight)) or 0} in flight" for in_flight in flights]
    cut = describe_cut(schedule, part)
    return (
        f"{draw_rows(pieces, len(part.rank_actions), end, beside)}{draw_kinds(pieces)}<p>A forward is drawn as one "
        f"unit of time and a whole backward as two. Each row is a pp rank, and numbers are microbatches. On the right "
        f"are the most microbatches of each stage in flight.{cut}</p>"
    )


def first_microbatches(schedule: Schedule) -> Schedule:
    """The schedule, or its first microbatches if it has more actions than are drawn."""
    count = sum(not action.kind.is_transfer for _, action in schedule)
    if count <= MAX_ACTIONS or schedule.num_microbatches < 2:
        return schedule
    return schedule.first(max(1, schedule.num_microbatches * MAX_ACTIONS // count))


def describe_cut(schedule: Schedule, part: Schedule) -> str:
    """A sentence that names the parts of ``schedule`` that a drawing of ``part`` leaves out; "" if there are none."""
    cut = []
    if part.num_microbatches < schedule.num_microbatches:
        cut.append(f"the first {part.num_microbatches} of {schedule.num_microbatches} microbatches")
    if len(part.rank_actions) > MAX_PP_RANKS:
        cut.append(f"the first {MAX_PP_RANKS} of {len(part.rank_actions)} pp ranks")
    return f" Drawn are {' and '.join(cut)}." if cut else ""


def draw_rows(pieces: Sequence[DrawnSpan], num_rows: int, end: float, beside: Sequence[str] = ()) -> str:
    """One row per pp rank. ``beside`` is HTML at the right of each row."""
    rows: list[list[str]] = [[] for _ in range(num_rows)]
    for piece in pieces:
        width = 100 * (piece.end - piece.start) / end
        colour = _COLOURS.get(piece.action.kind, "var(--wait)") if piece.action else "var(--wait)"
        label = piece.action.microbatch if piece.action and width > 0.8 else ""
        rows[piece.pp_rank].append(
            f"<i style='left: {100 * piece.start / end:.2f}%; width: {width:.2f}%; background: {colour}' "
            f"title='{escape(piece.text, quote=True)}'>{label}</i>"
        )
    lines = [
        f"<div class='row'><b>{number}</b><div>{''.join(row)}</div><u>{beside[number] if beside else ''}</u></div>"
        for number, row in enumerate(rows[:MAX_PP_RANKS])
    ]
    return "".join(lines)


def draw_kinds(pieces: Sequence[DrawnSpan]) -> str:
    """The legend of the kinds of action that occur, and of waits."""
    used = {piece.action.kind for piece in pieces if piece.action}
    keys = {name: _COLOURS[kind] for kind, name in _NAMES.items() if kind in used}
    if any(piece.action is None for piece in pieces):
        keys["waits for a transfer"] = "var(--wait)"
    return draw_keys(keys)


def _place_in_units(schedule: Schedule) -> Iterator[DrawnSpan]:
    """Each computation as early as its pp rank and inputs allow. Computations that a deadlock blocks are left out."""
    inputs = _inputs(schedule)
    done: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch) -> end
    computations = [[a for a in actions if not a.kind.is_transfer] for actions in schedule.rank_actions]
    at, now = [0] * len(computations), [0.0] * len(computations)
    moved = True
    while moved:
        moved = False
        for pp_rank, actions in enumerate(computations):
            while at[pp_rank] < len(actions):
                action = actions[at[pp_rank]]
                key = (action.kind is Kind.F, action.stage, action.microbatch)
                needed = [] if action.kind is Kind.W else inputs.get(key, [])
                if any(other not in done for other in needed):
                    break
                start = max(now[pp_rank], *(done[other] for other in needed), 0.0)
                now[pp_rank] = start + _UNITS[action.kind]
                if action.kind is not Kind.W:
                    done[key] = now[pp_rank]
                yield DrawnSpan(pp_rank, start, now[pp_rank], action, str(action))
                at[pp_rank] += 1
                moved = True


def _inputs(schedule: Schedule) -> dict[tuple[bool, int, int], list[tuple[bool, int, int]]]:
    """The computations that each computation waits for, by the transfers; without any, stages form a chain."""
    inputs: dict[tuple[bool, int, int], list[tuple[bool, int, int]]] = {}
    transfers = [action for _, action in schedule if action.kind in (Kind.RECV_F, Kind.RECV_B)]
    for action in transfers:
        is_forward = action.kind is Kind.RECV_F
        other = action.stage if action.other is None else action.other
        key = (is_forward, action.stage, action.microbatch)
        inputs.setdefault(key, []).append((is_forward, other, action.microbatch))
    if transfers:
        return inputs
    made = {(a.kind is Kind.F, a.stage, a.microbatch) for _, a in schedule if a.kind is not Kind.W}
    for is_forward, stage, microbatch in made:
        before = (is_forward, stage - 1 if is_forward else stage + 1, microbatch)
        inputs[is_forward, stage, microbatch] = [before] * (before in made)
    return inputs
