"""Read and write schedules as text, and as the CSV of torch.distributed.pipelining.

::

    1f1b: 2 microbatches, stages on pp ranks 0 1
    0: 0F0 0SEND_F0>1 0F1 ...
    1: 1RECV_F0<0 1F0 ...
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from reshard.arguments import check_arguments
from reshard.errors import ScheduleError

from ..pipeline import Pipeline, check_pipeline
from .actions import Action, Kind
from .communication import add_transfers
from .schedule import MAX_ACTIONS, Schedule

_HEADER = re.compile(
    r"(?P<name>[^:\n]{1,100}): (?P<num>\d{1,7}) microbatches, stages on pp ranks (?P<pp_ranks>\d{1,5}( \d{1,5})*)",
    re.ASCII,
)
_ACTION = re.compile(
    r"(?P<stage>\d{1,5})(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(?P<microbatch>\d{1,7})"
    r"(?:(?P<arrow>[<>])(?P<other>\d{1,5}))?(?P<blocks>!)?(?P<overlaps>&)?",
    re.ASCII,
)


def format_schedule(schedule: Schedule) -> str:
    """The text of a schedule, which :func:`parse_schedule` reads."""
    return f"{schedule}\n"


@check_arguments()
def parse_schedule(text: str) -> Schedule:
    """Read the text that :func:`format_schedule` writes. Does not check the schedule; see :func:`check_schedule`.

    Raises:
        ScheduleError: a line cannot be read.
    """
    _check_text(text)
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    header = _HEADER.fullmatch(lines[0].strip()) if lines else None
    if header is None:
        raise ScheduleError(
            f"line 1: {lines[0][:80] if lines else ''!r} is not a header; "
            "expected one such as '1f1b: 8 microbatches, stages on pp ranks 0 1'"
        )
    pp_rank_of_stage = tuple(map(int, header["pp_ranks"].split()))
    num = int(header["num"])
    if not 1 <= num * len(pp_rank_of_stage) <= MAX_ACTIONS:
        raise ScheduleError(
            f"line 1: {num:,} microbatches on {len(pp_rank_of_stage)} stages; microbatches times stages must be from 1 "
            f"to {MAX_ACTIONS:,}"
        )
    rank_actions = []
    total = 0
    for number, line in enumerate(lines[1:]):
        pp_rank, _, rest = line.partition(":")
        if pp_rank.strip() != str(number):
            raise ScheduleError(f"line {number + 2}: expected pp rank {number}, not {pp_rank[:40]!r}")
        words = rest.split()
        total += len(words)
        if total > MAX_ACTIONS:
            raise ScheduleError(f"the text has more than {MAX_ACTIONS:,} actions")
        try:
            rank_actions.append(tuple(parse_action(word) for word in words))
        except ScheduleError as error:
            raise ScheduleError(f"line {number + 2}: {error}") from None
    return Schedule(header["name"], tuple(rank_actions), pp_rank_of_stage, num)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ScheduleError(f"a schedule is parsed from a string, not from {type(text).__name__}")


def parse_action(word: str) -> Action:
    """Read one action as ``str(action)`` prints it.

    Raises:
        ScheduleError: the word is not an action.
    """
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ScheduleError(f"{word[:40]!r} is not an action such as 0F3, 0SEND_F3>1 or 1RECV_F3<0")
    kind = Kind(match["kind"])
    if kind.is_transfer != (match["other"] is not None) or (match["blocks"] and not kind.is_transfer):
        raise ScheduleError(
            f"{word!r}: a transfer must name another stage; a computation can neither name one nor block"
        )
    if kind.is_transfer and (match["arrow"] == ">") != kind.is_send:
        raise ScheduleError(f"{word!r}: a send takes '>' before the other stage, a receive '<'")
    if match["overlaps"] and kind is not Kind.F:
        raise ScheduleError(f"{word!r}: only a forward can overlap the computation after it")
    other = None if match["other"] is None else int(match["other"])
    return Action(
        kind, int(match["stage"]), int(match["microbatch"]), other, bool(match["blocks"]), bool(match["overlaps"])
    )


@check_arguments()
def to_torch_csv(schedule: Schedule, *, transfers: bool = False) -> str:
    """The CSV that torch's pipeline runtime loads: one line per pp rank. Transfers do not name the stage at the other
    end.

    Args:
        schedule: transfers must join neighbouring stages.
        transfers: whether to write transfers. Load a CSV without transfers in torch ("compute_only"): torch then adds
            its own transfers and divides gradients by the number of microbatches. With "compute_comms", torch does not
            divide. With transfers, each receive is written right before its consumer, because torch's dry run refuses a
            receive that comes before its send.

    Raises:
        ScheduleError: a transfer joins stages that are not neighbours, or blocks; torch supports neither.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for actions in schedule.rank_actions:
        written: list[Action] = []
        #: receives not yet written: (is forward, receiver) -> sender -> receives in order
        pending: dict[tuple[bool, int], dict[int | None, deque[Action]]] = {}
        for action in actions:
            if action.kind.is_transfer:
                if abs(action.stage - (action.other or 0)) != 1 or (transfers and action.blocks):
                    raise ScheduleError(
                        f"{action}: torch's CSV supports transfers between neighbours only, and none that block"
                    )
                if not transfers:
                    continue
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                channels = pending.setdefault((action.kind is Kind.RECV_F, action.stage), {})
                channels.setdefault(action.other, deque()).append(action)
                continue
            if action.kind in (Kind.F, Kind.B, Kind.I):
                for recvs in pending.get((action.kind is Kind.F, action.stage), {}).values():
                    if any(recv.microbatch == action.microbatch for recv in recvs):
                        while recvs[0].microbatch != action.microbatch:
                            written.append(recvs.popleft())
                        written.append(recvs.popleft())
            written.append(action)
        writer.writerow(_torch_cells(written))
    return out.getvalue()


def _torch_cells(actions: Sequence[Action]) -> list[str]:
    """The cells of a pp rank: a forward and the backward that it overlaps are one cell, ``(0F3;1B2)OVERLAP_F_B``.

    Transfers between the two leave the cell. Receives come before it, because the backward may wait for them. Sends
    come after it, because they may send what the forward computes.
    """
    cells: list[str] = []
    sends: list[str] = []
    forward: Action | None = None  # it overlaps the next computation
    for action in actions:
        cell = _torch_cell(action)
        if forward is not None and action.kind.is_transfer:
            (sends if action.kind.is_send else cells).append(cell)
            continue
        joins = forward is not None and action.kind in (Kind.B, Kind.I)
        if forward is not None:
            first = _torch_cell(forward)
            cells += [f"({first};{cell})OVERLAP_F_B" if joins else first, *sends]
            sends, forward = [], None
        if action.overlaps:
            forward = action
        elif not joins:
            cells.append(cell)
    return cells if forward is None else [*cells, _torch_cell(forward), *sends]


def _torch_cell(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.microbatch}"


@check_arguments()
def from_torch_csv(text: str, pipeline: Pipeline, name: str = "torch") -> Schedule:
    """Read a schedule from torch's CSV.

    If the CSV has no transfers, those of the pipeline's edges are added. FSDP actions (``0UNSHARD``, ``0RESHARD``,
    ``0REDUCE_GRAD``, ``0WAIT_REDUCE_GRAD``) and the waits for sends of torch 2.15 (``0WAIT_SEND_F3``) are skipped.

    Raises:
        ScheduleError: a cell is not an action, a pp rank has no stage, or the stages are not those of the pipeline.
    """
    _check_text(text)
    check_pipeline(pipeline)
    rank_actions: list[list[Action]] = []
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"the text is not valid CSV: {error}") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    for pp_rank, cells in enumerate(lines):
        words = [cell.strip() for cell in cells]
        if not any(words):
            raise ScheduleError(f"pp rank {pp_rank} is empty; each pp rank must compute a stage")
        rank_actions.append(
            [action for word in words if word and not _TORCH_SKIPPED.fullmatch(word) for action in _from_torch(word)]
        )
        if not rank_actions[-1]:
            raise ScheduleError(f"pp rank {pp_rank} has no computation or transfer of a stage")
        if sum(map(len, rank_actions)) > MAX_ACTIONS:
            raise ScheduleError(f"the text has more than {MAX_ACTIONS:,} actions")
    pp_rank_of: dict[int, int] = {}
    for pp_rank, actions in enumerate(rank_actions):
        for action in actions:
            if pp_rank_of.setdefault(action.stage, pp_rank) != pp_rank:
                raise ScheduleError(f"stage {action.stage} is on pp ranks {pp_rank_of[action.stage]} and {pp_rank}")
    if sorted(pp_rank_of) != list(range(len(pipeline.stages))):
        raise ScheduleError(
            f"the CSV has stages {sorted(pp_rank_of)}; the pipeline has 0 to {len(pipeline.stages) - 1}"
        )
    pp_rank_of_stage = tuple(pp_rank_of[stage] for stage in range(len(pp_rank_of)))
    num = 1 + max(action.microbatch for actions in rank_actions for action in actions)
    if num * len(pp_rank_of_stage) > MAX_ACTIONS:
        raise ScheduleError(
            f"{num:,} microbatches on {len(pp_rank_of_stage)} stages; microbatches times stages must be at most "
            f"{MAX_ACTIONS:,}"
        )
    if any(action.kind.is_transfer for actions in rank_actions for action in actions):
        return Schedule(name, tuple(map(tuple, rank_actions)), pp_rank_of_stage, num)
    return add_transfers(name, rank_actions, pipeline, pp_rank_of_stage, num)


#: Offset from a stage to the stage at the other end of torch's transfer.
_TORCH_OFFSET = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_TORCH_SKIPPED = re.compile(r"\d{1,5}(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB]\d{1,7})")
_TORCH = re.compile(r"(\d{1,5})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,7})")


_TORCH_OVERLAP = re.compile(r"\((\d{1,5}F\d{1,7});(\d{1,5}[BI]\d{1,7})\)OVERLAP_F_B")


def _from_torch(cell: str) -> list[Action]:
    """The actions of a cell: two if it is a forward that overlaps a backward."""
    overlap = _TORCH_OVERLAP.fullmatch(cell)
    if overlap is not None:
        forward, backward = (_one_from_torch(part) for part in overlap.groups())
        return [replace(forward, overlaps=True), backward]
    return [_one_from_torch(cell)]


def _one_from_torch(cell: str) -> Action:
    match = _TORCH.fullmatch(cell)
    if match is None:
        raise ScheduleError(f"{cell[:40]!r} is not a supported action of torch's CSV, such as 0F3, 1SEND_B2 or 1W4")
    kind, stage = Kind(match[2]), int(match[1])
    other = stage + _TORCH_OFFSET[kind] if kind.is_transfer else None
    return Action(kind, stage, int(match[3]), other)
