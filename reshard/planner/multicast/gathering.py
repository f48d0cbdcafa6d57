"""Ranks that collect regions for others of their host.

Between hosts, each message takes a latency. Where regions are small, latencies decide the time, and there are fewer
messages if one rank of a host first collects the regions that its neighbors hold for the same destinations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reshard.plan import GATHERED, PlanTransfers, num_recv_slots
from reshard.planner.multicast.classes import group_rows
from reshard.planner.multicast.strategy import multicast
from reshard.planner.strategies.chunk_limits import INSIDE_WINDOW
from reshard.planner.strategies.chunking import routes_to_transfers
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.ragged import NO_RANK, distinct_values, ranges
from reshard.sharding import locate_points

#: At most this many ranks put their regions together: the collecting rank stages what the others send.
_MAX_TOGETHER = 8
#: Slots of a collecting rank that are left to other messages if it also forwards messages of other hosts.
_SLOTS_FOR_RELAYS = 2


def gathered_multicast(problem: PlanProblem) -> Routes | PlanTransfers:
    """Like :func:`multicast`, after a rank has collected what ranks of its host hold for the same destinations.

    Steps: one more than :func:`multicast`, inside the sending hosts. Bytes between hosts: unique. Regions that are also
    needed on a host that holds them are sent as by :func:`multicast`, and so are all if a rank would have to stage too
    many messages.
    """
    gathering = Gathering.find(problem)
    gathered = None if gathering is None else gathering.plan()
    return multicast(problem) if gathered is None else gathered


@dataclass(frozen=True, eq=False)
class Gathering:
    """Ranks that collect regions, and the regions of each.

    Attributes:
        problem: the problem.
        collected: the problem in which a rank holds all regions that it collects. It has no local copies.
        holder: ``(tasks,)`` the rank from which a region is collected: the collecting rank itself if it holds the
            region; NO_RANK for a region that is not collected.
    """

    problem: PlanProblem
    collected: PlanProblem
    holder: np.ndarray

    @classmethod
    def find(cls, problem: PlanProblem) -> Gathering | None:
        """Choose a rank for all regions that ranks of one host hold for the same destinations; None if there are none.

        The ranks that hold such regions take turns.
        """
        host, width = problem.topology.host_array, len(problem.topology.host_array)
        tasks = np.flatnonzero((problem.num_receivers > 0) & (problem.nbytes > 0) & ~problem.has_near_holder)
        if not len(tasks):
            return None
        holders, receivers = np.sort(problem.holders[tasks], axis=1), np.sort(problem.receivers[tasks], axis=1)
        itemsize = np.array([spec.itemsize for spec in problem.tensors], dtype=np.int64)[problem.tensor[tasks]]
        needs = np.concatenate([receivers, itemsize[:, None]], axis=1)
        homes = np.where(holders == NO_RANK, -1, host[holders])
        home = homes[:, 0]
        if homes.shape[1] > 1:
            home = _take_turns(homes, group_rows(np.concatenate([np.sort(homes, axis=1), needs], axis=1))[1])
        is_local = homes == home[:, None]
        local = np.where(is_local, holders, NO_RANK)
        nth = _number_in(home, local.max(axis=1)) // _MAX_TOGETHER
        first, group = group_rows(np.concatenate([home[:, None], nth[:, None], needs], axis=1))
        kind = group_rows(np.concatenate([group[:, None], np.sort(local, axis=1)], axis=1))
        num_kinds = np.bincount(group[kind[0]], minlength=len(first))  # different sets of holders
        if not (num_kinds > 1).any():
            return None
        pairs = distinct_values(np.repeat(group, is_local.sum(axis=1)) * width + holders[is_local])
        count = np.bincount(pairs // width, minlength=len(first))
        begin = np.cumsum(count) - count
        collector = pairs[begin + _number_within(home[first]) % count] % width
        own = (local == collector[group][:, None]).any(axis=1)
        lowest = np.where(is_local, holders, width).min(axis=1)
        joins = num_kinds[group] > 1
        holder = np.full(len(problem), NO_RANK)
        holder[tasks[joins]] = np.where(own, collector[group], lowest)[joins]
        held = problem.holders.copy()
        held[tasks[joins]] = NO_RANK
        held[tasks[joins], 0] = collector[group[joins]]
        return cls(problem, replace(problem, holders=held, destinations=problem.receivers), holder)

    def plan(self) -> PlanTransfers | None:
        """The transfers of :func:`multicast` without local copies, and transfers that collect regions.

        Each message that collects regions precedes the first message for which its receiver stages them. None if a rank
        has too few slots to stage them.
        """
        transfers = routes_to_transfers(self.collected, multicast(self.collected))
        if not (np.diff(transfers.edge_offsets) == 1).all():
            return None
        task = self._tasks_of_boxes(transfers)
        receivers, width = self.problem.receivers, len(self.problem.topology.host_array)
        needs = np.sort((np.arange(len(receivers))[:, None] * width + receivers)[receivers != NO_RANK])
        key = task[transfers.first_box] * width + transfers.receiver
        stages = needs[np.minimum(np.searchsorted(needs, key), len(needs) - 1)] != key
        return _Collector(self.problem, transfers, self.holder[task], stages).add()

    def _tasks_of_boxes(self, transfers: PlanTransfers) -> np.ndarray:
        """``(boxes,)`` the task that each box is a part of."""
        problem = self.problem
        start, stop = (
            np.concatenate([problem.tensor[:, None] + nth, side], axis=1)
            for nth, side in enumerate((problem.start, problem.stop))
        )
        point = np.concatenate([transfers.box_tensor[:, None], transfers.box_start], axis=1)
        # most boxes are whole regions, or begin where one does
        first, number = group_rows(np.concatenate([start, point]))
        task = np.where(first < len(start), first, -1)[number[len(start) :]]
        inside = np.flatnonzero(task < 0)
        task[inside] = locate_points(point[inside], start, stop)
        return task


@dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of regions. A part is the boxes that one rank sends to the rank that collects the region.

    Attributes:
        used: ``(regions, 2)`` each region that is collected, and the rank that collects it.
        of_used: ``(parts,)`` the row of ``used``, ascending.
        sender: ``(parts,)`` the rank that sends the part.
        box_offsets: ``(parts + 1,)`` part i has the boxes ``box[box_offsets[i]:box_offsets[i + 1]]``.
        box: ids of boxes.
    """

    used: np.ndarray
    of_used: np.ndarray
    sender: np.ndarray
    box_offsets: np.ndarray
    box: np.ndarray

    @property
    def receiver(self) -> np.ndarray:
        """``(parts,)`` the rank that collects the part."""
        return self.used[self.of_used, 1]


class _Collector:
    """Adds the messages that bring regions to the rank that sends them on.

    Args:
        problem: the problem.
        transfers: of one edge each, as if the first senders held all regions.
        holder: ``(boxes,)`` the rank that holds each box, NO_RANK where the first sender does.
        stages: ``(transfers,)`` bool, whether the receiver does not need the region.
    """

    def __init__(self, problem: PlanProblem, transfers: PlanTransfers, holder: np.ndarray, stages: np.ndarray) -> None:
        self._problem, self._holder = problem, holder
        self._transfers, kept = self._without_staging(transfers)
        self._is_relay = np.zeros(len(problem.topology.host_of_rank), dtype=bool)
        self._is_relay[self._transfers.receiver[stages[kept]]] = True

    def _without_staging(self, transfers: PlanTransfers) -> tuple[PlanTransfers, np.ndarray]:
        """The transfers that are left if a rank does not stage regions of its host, because it gathers them.

        Also returns the indices of these transfers among all.
        """
        host = self._problem.topology.host_array
        is_collected = np.minimum.reduceat(self._holder, transfers.box_offsets[:-1])[transfers.region] >= 0
        is_inside = (host[transfers.sender] == host[transfers.receiver]) & (transfers.sender != transfers.receiver)
        dropped, source = np.zeros(len(transfers), dtype=bool), transfers.source
        while (more := is_collected & is_inside & (source < 0) & ~dropped).any():
            dropped |= more
            source = np.where((source >= 0) & dropped[source], -1, source)
        if not dropped.any():
            return transfers, np.arange(len(transfers))
        kept, new_index = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
        later = np.repeat(np.arange(len(transfers)), np.diff(transfers.after_offsets))
        stays = ~dropped[later] & ~dropped[transfers.after]
        count = np.bincount(new_index[later[stays]], minlength=len(kept))
        names = ("sender", "receiver", "splits", "window", "region")
        rest = PlanTransfers.unchecked(
            **{name: getattr(transfers, name) for name in ("box_offsets", "box_tensor", "box_start", "box_stop")},
            **{name: getattr(transfers, name)[kept] for name in names},
            edge_offsets=np.arange(len(kept) + 1),
            after_offsets=np.concatenate([[0], np.cumsum(count)]),
            after=new_index[transfers.after[stays]],
            source=np.where(source[kept] < 0, -1, new_index[source[kept]]),
        )
        return rest, kept

    def add(self) -> PlanTransfers | None:
        """The transfers with these messages; None if a rank cannot stage all regions of a message."""
        sender, gathers = self._choose_senders()
        if not gathers.any():
            return None
        parts = self._find_parts(gathers)
        placed = self._place(gathers, parts)
        return None if placed is None else self._join(sender, gathers, parts, *placed)

    def _choose_senders(self) -> tuple[np.ndarray, np.ndarray]:
        """``(transfers,)`` the sender of each transfer, and whether it gathers boxes. A sole holder sends by itself."""
        transfers, region = self._transfers, self._transfers.region
        low, high = (pick.reduceat(self._holder, transfers.box_offsets[:-1]) for pick in (np.minimum, np.maximum))
        is_first = (transfers.source < 0) & (low[region] >= 0) & (transfers.sender != transfers.receiver)
        alone = is_first & (low == high)[region]
        return np.where(alone, low[region], transfers.sender), is_first & ~alone

    def _find_parts(self, gathers: np.ndarray) -> _Parts:
        """The parts of the regions that these transfers gather."""
        transfers, holder = self._transfers, self._holder
        first, width = transfers.box_offsets[:-1], len(self._problem.topology.host_array)
        keys = distinct_values(transfers.region[gathers] * width + transfers.sender[gathers])
        used = np.stack(np.divmod(keys, width), axis=1)
        count = np.diff(transfers.box_offsets)[used[:, 0]]
        box, of_used = ranges(first[used[:, 0]], count), np.repeat(np.arange(len(used)), count)
        is_other = holder[box] != used[of_used, 1]
        box, of_used = box[is_other], of_used[is_other]
        order = np.lexsort((box, holder[box], of_used))
        box, of_used = box[order], of_used[order]
        begins = np.flatnonzero(np.diff(of_used, prepend=-1) | np.diff(holder[box], prepend=-1))
        return _Parts(used, of_used[begins], holder[box[begins]], np.append(begins, len(box)), box)

    def _count_slots(self, parts: _Parts) -> np.ndarray:
        """``(ranks,)`` the messages that each rank can stage: its slots hold the largest message into it."""
        transfers, num_ranks = self._transfers, len(self._problem.topology.host_of_rank)
        itemsize = np.array([spec.itemsize for spec in self._problem.tensors], dtype=np.int64)
        nbytes = (transfers.box_stop - transfers.box_start).prod(axis=1) * itemsize[transfers.box_tensor]
        largest = np.zeros(num_ranks, dtype=np.int64)
        np.maximum.at(
            largest, transfers.receiver, np.add.reduceat(nbytes, transfers.box_offsets[:-1])[transfers.region]
        )
        np.maximum.at(largest, parts.receiver, np.add.reduceat(nbytes[parts.box], parts.box_offsets[:-1]))
        slots = np.array([num_recv_slots(self._problem.staging_bytes, size) for size in largest.tolist()])
        return slots - _SLOTS_FOR_RELAYS * self._is_relay

    def _join(
        self, sender: np.ndarray, gathers: np.ndarray, parts: _Parts, before: np.ndarray, part: np.ndarray,
        brings_at: np.ndarray, brings: np.ndarray,
    ) -> PlanTransfers:  # fmt: skip
        """The transfers and the parts in one order; see :meth:`_place` for the last four arguments."""
        transfers, num, num_parts = self._transfers, len(self._transfers), len(part)
        at = np.arange(num) + np.searchsorted(before, np.arange(num), side="right")
        at_part = before + np.arange(num_parts)
        order = np.empty(num + num_parts, dtype=np.int64)
        order[at], order[at_part] = np.arange(num), num + np.arange(num_parts)

        def joined(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.concatenate([old, new])[order])

        counts = np.diff(brings_at), np.diff(transfers.after_offsets)
        later = np.concatenate([at[np.repeat(np.arange(num), count)] for count in counts])
        earlier = np.concatenate([at_part[brings], at[transfers.after]])
        source = np.where(gathers, GATHERED, np.where(transfers.source < 0, -1, at[transfers.source]))
        return PlanTransfers.unchecked(
            box_offsets=np.concatenate([transfers.box_offsets[:-1], transfers.box_offsets[-1] + parts.box_offsets]),
            box_tensor=np.concatenate([transfers.box_tensor, transfers.box_tensor[parts.box]]),
            box_start=np.concatenate([transfers.box_start, transfers.box_start[parts.box]]),
            box_stop=np.concatenate([transfers.box_stop, transfers.box_stop[parts.box]]),
            region=joined(transfers.region, len(transfers.box_offsets) - 1 + part),
            edge_offsets=np.arange(num + num_parts + 1),
            sender=joined(sender, parts.sender[part]),
            receiver=joined(transfers.receiver, parts.receiver[part]),
            splits=joined(transfers.splits, np.ones((num_parts, transfers.splits.shape[1]), dtype=np.int64)),
            window=joined(transfers.window, np.full(num_parts, INSIDE_WINDOW)),
            after_offsets=np.concatenate([[0], np.cumsum(np.bincount(later, minlength=num + num_parts))]),
            after=earlier[np.argsort(later, kind="stable")],
            source=joined(source, np.full(num_parts, -1)),
        )

    def _place(
        self, gathers: np.ndarray, parts: _Parts
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """Where parts are sent, so that no rank stages more than it has slots for.

        A rank that needs room drops the parts that it has staged longest. They are sent again if they are needed again.

        Args:
            gathers: ``(transfers,)`` bool, whether a transfer sends a region that is collected.
            parts: the parts of these regions.

        Returns:
            ``(before, part, brings_at, brings)``: part ``part[k]`` is sent right before transfer ``before[k]``, and
            entries ``brings[brings_at[i]:brings_at[i + 1]]`` of both bring the data of transfer i. None if a region has
            more parts than a rank has slots.
        """
        transfers, used, slots = self._transfers, parts.used, self._count_slots(parts)
        width = len(slots)
        part_offsets = np.searchsorted(parts.of_used, np.arange(len(used) + 1))
        num_parts, chosen = np.diff(part_offsets), np.flatnonzero(gathers)
        if (num_parts > slots[used[:, 1]]).any():
            return None
        keys = transfers.region[chosen] * width + transfers.sender[chosen]
        rows = np.searchsorted(used[:, 0] * width + used[:, 1], keys)
        num_brought = np.zeros(len(transfers), dtype=np.int64)
        num_brought[chosen] = num_parts[rows]
        brings_at = np.concatenate([[0], np.cumsum(num_brought)])
        if len(chosen) == len(used):  # a rank sends each region once, so it keeps none
            in_turn = ranges(part_offsets[rows], num_parts[rows])
            return np.repeat(chosen, num_parts[rows]), in_turn, brings_at, np.arange(len(in_turn))
        first, room = part_offsets.tolist(), slots.tolist()
        staged: dict[int, dict[int, list[int]]] = {}  # rank -> row of used -> entries, oldest first
        before: list[int] = []
        part: list[int] = []
        brings: list[int] = []
        for transfer, row, rank in zip(chosen.tolist(), rows.tolist(), used[rows, 1].tolist(), strict=True):
            held = staged.setdefault(rank, {})
            if row not in held:
                pieces = range(first[row], first[row + 1])
                while sum(map(len, held.values())) + len(pieces) > room[rank]:
                    del held[next(iter(held))]
                held[row] = [len(part) + i for i in range(len(pieces))]
                part += pieces
                before += [transfer] * len(pieces)
            brings += held[row]
        columns = [np.array(column, dtype=np.int64) for column in (before, part, brings)]
        return columns[0], columns[1], brings_at, columns[2]


def _number_within(group: np.ndarray) -> np.ndarray:
    """For each entry, how many earlier entries have the same value."""
    order = np.argsort(group, kind="stable")
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    number = np.empty(len(group), dtype=np.int64)
    number[order] = np.arange(len(group)) - np.repeat(begins, np.diff(np.append(begins, len(group))))
    return number


def _number_in(group: np.ndarray, value: np.ndarray) -> np.ndarray:
    """For each entry, how many different smaller values its group has."""
    width = int(value.max(initial=0)) + 1
    distinct = distinct_values(group * width + value)
    return _number_within(distinct // width)[np.searchsorted(distinct, group * width + value)]


def _take_turns(choices: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """``(rows,)`` number ``turn % n`` of the ``n`` distinct numbers in each row; -1 does not count."""
    choices = np.sort(choices, axis=1)
    is_new = choices >= 0
    is_new[:, 1:] &= choices[:, 1:] != choices[:, :-1]
    count = is_new.sum(axis=1)
    nth = is_new.cumsum(axis=1) - 1
    return choices[np.arange(len(choices)), ((nth == (turn % count)[:, None]) & is_new).argmax(axis=1)]
