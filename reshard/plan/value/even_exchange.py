"""An exchange between two evenly cut grids in closed form: each rank finds its own messages without the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.plan.value.port_order import PortOrder
from reshard.sharding import TensorSpec, Tiles
from reshard.topology import MAX_NICS, Topology


@dataclass(frozen=True, eq=False)
class OwnMessages:
    """Messages of one tensor that one rank sends or receives. All arrays are int64, with one row per message.

    Attributes:
        key: unique numbers of the messages of a plan, which order them.
        source: key of the message that brings the data to the sender; -1 if the sender holds it.
        sender, receiver: ranks.
        lane: the lane of a message between hosts, see :class:`PortOrder`; -1 inside a host.
        start, stop: ``(messages, ndim)`` the region.
    """

    key: np.ndarray
    source: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True)
class KeyRange:
    """The keys of the messages of a tensor, among those of a plan.

    Attributes:
        first: lower than all of them.
        stride: their distance.
        chain: at least the number of ranks of a host that need one region.
    """

    first: int
    stride: int
    chain: int


@dataclass(frozen=True, eq=False)
class EvenExchange:
    """The exchange of one tensor, if both grids are even and no host both holds and needs data.

    Each region enters each host that needs it once, at ranks of the host in turn, and passes from there along its
    ranks. The holders of a tile send in turn. The NICs of hosts send in rotation, see :class:`PortOrder`.

    Attributes:
        src, dst: the tiles of both layouts.
        holders: ``(source tiles, replicas)`` ranks, the first of each host before the second of any.
        groups: ``(destination tiles, hosts, ranks of a host)`` ranks that need a tile.
        src_number, dst_number: ``(hosts,)`` numbers of hosts among those of the source and of the destination.
        host_of: ``(ranks,)`` hosts.
        nic_of: ``(ranks,)`` NICs, numbered over all hosts.
    """

    src: Tiles
    dst: Tiles
    holders: np.ndarray
    groups: np.ndarray
    src_number: np.ndarray
    dst_number: np.ndarray
    host_of: np.ndarray
    nic_of: np.ndarray

    @classmethod
    def of(cls, spec: TensorSpec, topology: Topology) -> EvenExchange | None:
        """The exchange of a tensor; None if the grids or the hosts are not even, or a host holds and needs data."""
        src, dst = spec.src_tiles, spec.dst_tiles
        if not _are_even(src, dst) or topology.pods:
            return None
        host = topology.host_array
        nic = host * MAX_NICS + np.array(topology.nic_of_rank, dtype=np.int64)
        holders, groups = _divide_by_host(src.ranks, host), _divide_by_host(dst.ranks, host)
        if holders is None or groups is None:
            return None
        numbers: list[np.ndarray] = []
        for ranks in (src.ranks, dst.ranks):
            hosts = np.unique(host[ranks])
            if not _are_alike(topology, nic[ranks], len(hosts)):
                return None
            numbers.append(np.full(topology.num_hosts, -1))
            numbers[-1][hosts] = np.arange(len(hosts))
        if ((numbers[0] >= 0) & (numbers[1] >= 0)).any():
            return None
        turns = holders.transpose(0, 2, 1).reshape(len(holders), -1)
        exchange = cls(src, dst, turns, groups, numbers[0], numbers[1], host, nic)
        num_nics = [len(nics) for nics in exchange.used_nics]
        num_sends = exchange.num_overlaps[0] * groups.shape[1]
        if num_sends % (turns.shape[1] if num_nics[0] > exchange.num_hosts[0] else holders.shape[1]):
            return None
        if num_nics[1] > exchange.num_hosts[1] and exchange.num_overlaps[1] % groups.shape[2]:
            return None
        return exchange

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """``(ndim,)`` numbers of parts of each dim, of the source and of the destination."""
        assert self.src.cuts is not None
        assert self.dst.cuts is not None
        p, q = ([len(cut.lo) for cut in cuts] or [1] for cuts in (self.src.cuts, self.dst.cuts))  # 1 without dims
        return np.array(p), np.array(q)

    @cached_property
    def num_overlaps(self) -> tuple[int, int]:
        """The number of destination tiles that overlap a source tile, and the reverse number."""
        p, q = self.parts
        return math.prod(np.maximum(q // p, 1).tolist()), math.prod(np.maximum(p // q, 1).tolist())

    @cached_property
    def used_nics(self) -> tuple[np.ndarray, np.ndarray]:
        """The NICs that ranks of the source and of the destination use."""
        return np.unique(self.nic_of[self.holders]), np.unique(self.nic_of[self.groups])

    @property
    def num_hosts(self) -> tuple[int, int]:
        """The numbers of hosts of the source and of the destination."""
        return int(self.src_number.max()) + 1, int(self.dst_number.max()) + 1

    @cached_property
    def place(self) -> np.ndarray:
        """``(ranks,)`` the number of each rank among those of its host."""
        order = np.argsort(self.host_of, kind="stable")
        first = np.searchsorted(self.host_of[order], self.host_of[order])
        place = np.empty_like(order)
        place[order] = np.arange(len(order)) - first
        return place

    @cached_property
    def num_places(self) -> int:
        """The largest number of ranks of a host."""
        return int(self.place.max()) + 1

    @cached_property
    def order(self) -> PortOrder:
        """The order of the ports.

        The tiles of both sides form blocks: each tile of the source overlaps all tiles of the destination in its block,
        and no others. The holder whose turn it is sends to the ranks that the regions enter.
        """
        (src_block, src_place), (dst_block, dst_place) = self._blocks(0), self._blocks(1)
        turns, (_, hosts, ranks) = self.holders.shape[1], self.groups.shape
        sends = (src_block[:, None] * turns + np.arange(turns)) * ranks + src_place[:, None] % ranks
        turn = (dst_place[:, None] * hosts + np.arange(hosts)) % turns
        receives = ((dst_block[:, None] * turns + turn) * ranks)[..., None] + np.arange(ranks)
        pairs = (self.holders, sends), (self.groups, receives)
        first, second = ((self.nic_of[on].ravel(), labels.ravel()) for on, labels in pairs)
        return PortOrder.of(first, second, int(self.nic_of.max()) + 1)

    def _blocks(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """``(tiles,)`` the block of each tile of a side, and its number in the block."""
        mine, other = self.parts[side], self.parts[1 - side]
        inside = np.maximum(mine // other, 1)
        place = np.stack(np.unravel_index(np.arange(math.prod(mine.tolist())), mine))
        block, number = place // inside[:, None], place % inside[:, None]
        return np.ravel_multi_index(tuple(block), tuple(mine // inside)), np.ravel_multi_index(
            tuple(number), tuple(inside)
        )

    @property
    def num_regions(self) -> int:
        """The number of regions that move: pairs of a source tile and a destination tile that overlap."""
        return len(self.holders) * self.num_overlaps[0]

    @property
    def num_messages(self) -> int:
        """The number of messages of all ranks: each rank receives each of its regions once."""
        return self.num_regions * self.groups.shape[1] * self.groups.shape[2]

    def num_keys(self, chain: int) -> int:
        """More than the largest key of a range with stride 1 that starts at 0."""
        slots = int(self.order.num_receivers.max())
        return 2 * (slots + chain) * chain * self.num_places**2 * self.num_hosts[0]

    def own_messages(self, rank: int, keys: KeyRange) -> OwnMessages:
        """The messages of a rank of either layout."""
        parts = [self._sends(tile, turn, keys) for tile, turn in np.argwhere(self.holders == rank).tolist()]
        for tile, place, position in np.argwhere(self.groups == rank).tolist():
            parts.append(self._receives(tile, place, position, keys))
        if not parts:
            none, boxes = np.zeros(0, dtype=np.int64), np.zeros((0, len(self.src.shape)), dtype=np.int64)
            return OwnMessages(none, none, none, none, none, boxes, boxes)
        names = OwnMessages.__dataclass_fields__
        return OwnMessages(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def _sends(self, tile: int, turn: int, keys: KeyRange) -> OwnMessages:
        """The messages that a holder of a source tile sends in its turns."""
        num_hosts = self.groups.shape[1]
        others, order = self._overlaps(tile, 0)
        number = np.arange(len(others))[:, None] * num_hosts + np.arange(num_hosts)
        which, place = np.nonzero(number % self.holders.shape[1] == turn)
        group = self.groups[others[which], place]
        receiver = group[np.arange(len(which)), order[which] % group.shape[1]]
        sender = np.full(len(which), self.holders[tile, turn])
        key = self._keys(sender, receiver, np.zeros(len(which), dtype=np.int64), keys)
        lane = self.order.lane[self.nic_of[sender]]
        tiles = np.full(len(which), tile)
        return self._messages(key, np.full(len(key), -1), sender, receiver, lane, tiles, others[which])

    def _receives(self, tile: int, place: int, position: int, keys: KeyRange) -> OwnMessages:
        """The messages that a rank receives for its destination tile, and forwards to the next rank of its host."""
        group = self.groups[tile, place]
        others, order = self._overlaps(tile, 1)
        step = (np.arange(len(others)) - position) % len(group)
        number = order * self.groups.shape[1] + place
        holder = self.holders[others, number % self.holders.shape[1]]
        rank = np.full(len(others), group[position])
        entry = group[np.arange(len(others)) % len(group)]
        enters, passes = step == 0, step < len(group) - 1
        arrives = self._messages(
            self._keys(holder, entry, step, keys),
            np.where(enters, -1, self._keys(holder, entry, step - 1, keys)),
            np.where(enters, holder, group[(position + 1) % len(group)]),
            rank,
            np.where(enters, self.order.lane[self.nic_of[holder]], -1),
            others,
            np.full(len(others), tile),
        )
        holder, entry, step, others = holder[passes], entry[passes], step[passes], others[passes]
        passed = self._messages(
            self._keys(holder, entry, step + 1, keys),
            self._keys(holder, entry, step, keys),
            rank[passes],
            np.full(len(others), group[position - 1]),
            np.full(len(others), -1),
            others,
            np.full(len(others), tile),
        )
        return OwnMessages(
            *(
                np.concatenate([getattr(arrives, name), getattr(passed, name)])
                for name in OwnMessages.__dataclass_fields__
            )
        )

    def _overlaps(self, tile: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of the other side that a tile overlaps, and its position among the tiles that each overlaps."""
        mine, other = self.parts[side], self.parts[1 - side]
        place = np.array(np.unravel_index(tile, mine), dtype=np.int64)
        counts = np.maximum(other // mine, 1)
        within = np.indices(counts).reshape(len(counts), -1)
        coordinates = (place * other // mine)[:, None] + within
        back = np.maximum(mine // other, 1)
        position = place[:, None] - coordinates * mine[:, None] // other[:, None]
        return (
            np.ravel_multi_index(tuple(coordinates), tuple(other)),
            np.ravel_multi_index(tuple(np.broadcast_to(position, coordinates.shape)), tuple(back)),
        )

    def _keys(self, holder: np.ndarray, entry: np.ndarray, step: np.ndarray, keys: KeyRange) -> np.ndarray:
        """Numbers of messages with the region that ``holder`` sends to ``entry``, in order.

        Args:
            step: number of ranks of its host that the region has passed: 0 between hosts.

        Messages between hosts are ordered by slot, place of the holder in its host, place of the receiver, and host of
        the holder. So messages of several lanes to one rank alternate. Forwards inside the host come after the messages
        of the next slot in the order. They pass while these messages flow.
        """
        slot = self.order.slot(self.nic_of[holder], self.nic_of[entry])
        phase = np.where(step > 0, 2 * (slot + step) + 1, 2 * slot)
        places = (phase * keys.chain + step) * self.num_places + self.place[holder]
        places = places * self.num_places + self.place[entry]
        return (places * self.num_hosts[0] + self.src_number[self.host_of[holder]]) * keys.stride + keys.first

    def _messages(
        self,
        key: np.ndarray,
        source: np.ndarray,
        sender: np.ndarray,
        receiver: np.ndarray,
        lane: np.ndarray,
        src_tile: np.ndarray,
        dst_tile: np.ndarray,
    ) -> OwnMessages:
        start = np.maximum(self.src.start[src_tile], self.dst.start[dst_tile])
        stop = np.minimum(self.src.stop[src_tile], self.dst.stop[dst_tile])
        return OwnMessages(key, source, sender, receiver, lane, start, stop)


def _are_even(src: Tiles, dst: Tiles) -> bool:
    """Whether each dim is cut into equal parts on both sides, and the parts of one side divide those of the other."""
    if src.cuts is None or dst.cuts is None or 0 in src.shape:
        return False
    for a, b in zip(src.cuts, dst.cuts, strict=True):
        p, q = len(a.lo), len(b.lo)
        if p != len(a.local_size) or q != len(b.local_size) or (p % q and q % p):
            return False
        if any((cut.hi - cut.lo != cut.hi[0] - cut.lo[0]).any() for cut in (a, b)):
            return False
    return True


def _are_alike(topology: Topology, nics: np.ndarray, num_hosts: int) -> bool:
    """Whether all hosts use equally many NICs of equal rates, and equally many ranks use each NIC."""
    used, counts = np.unique(nics, return_counts=True)
    per_host = np.unique(used // MAX_NICS, return_counts=True)[1]
    kinds = {topology.host(nic // MAX_NICS).nics[nic % MAX_NICS] for nic in used.tolist()}
    return bool((counts == counts[0]).all() and (per_host == per_host[0]).all()) and len(kinds) == 1


def _divide_by_host(ranks: np.ndarray, host_of: np.ndarray) -> np.ndarray | None:
    """``(tiles, hosts, ranks of a host)``; None unless the ranks of each tile are divided evenly among its hosts."""
    order = np.lexsort((ranks, host_of[ranks]), axis=-1) if ranks.shape[1] > 1 else np.zeros(ranks.shape, dtype=int)
    ranks = np.take_along_axis(ranks, order, axis=1)
    hosts = host_of[ranks]
    num = int((np.diff(hosts[0]) != 0).sum()) + 1
    if ranks.shape[1] % num:
        return None
    groups = hosts.reshape(len(ranks), num, -1)
    if (groups != groups[:, :, :1]).any() or (np.diff(groups[:, :, 0], axis=1) == 0).any():
        return None
    return ranks.reshape(groups.shape)
