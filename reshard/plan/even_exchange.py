"""An exchange between two evenly cut grids in closed form: each rank finds its own messages without the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.sharding import Shards, TensorSpec
from reshard.topology import Topology


@dataclass(frozen=True, eq=False)
class OwnMessages:
    """Messages of one tensor that one rank sends or receives. All arrays are int64, with one row per message.

    Attributes:
        key: unique numbers of the messages of a plan, which order them.
        source: key of the message that brings the data to the sender; -1 if the sender holds it.
        sender, receiver: ranks.
        start, stop: ``(messages, ndim)`` the region.
    """

    key: np.ndarray
    source: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True, eq=False)
class EvenExchange:
    """Where the regions of one tensor go if both grids are even, and no host both holds and needs data.

    Each region enters each host that needs it once, at ranks of the host in turn, and passes from there along its
    ranks. The holders of a tile send in turn. In slot t, host a of the source sends to host a + t of the destination,
    modulo their number. With more hosts in the source, each receives from several at once, which are its lanes.

    Attributes:
        src, dst: the tiles of both layouts.
        holders: ``(source tiles, replicas)`` ranks, the first of each host before the second of any.
        groups: ``(destination tiles, hosts, ranks of a host)`` ranks that need a tile.
        src_number, dst_number: ``(hosts,)`` numbers of hosts among those of the source and of the destination.
        host_of: ``(ranks,)`` hosts.
    """

    src: Shards
    dst: Shards
    holders: np.ndarray
    groups: np.ndarray
    src_number: np.ndarray
    dst_number: np.ndarray
    host_of: np.ndarray

    @classmethod
    def of(cls, spec: TensorSpec, topology: Topology) -> EvenExchange | None:
        """The exchange of a tensor; None if the grids or the hosts are not even, or a host holds and needs data."""
        src, dst = spec.src_shards, spec.dst_shards
        if not _are_even(src, dst) or topology.pods:
            return None
        host = topology.host_by_rank
        holders, groups = _divide_by_host(src.ranks, host), _divide_by_host(dst.ranks, host)
        if holders is None or groups is None:
            return None
        numbers: list[np.ndarray] = []
        for ranks in (src.ranks, dst.ranks):
            found, counts = np.unique(host[ranks], return_counts=True)
            if (counts != counts[0]).any() or len({topology.host(h) for h in found.tolist()}) > 1:
                return None
            numbers.append(np.full(topology.num_hosts, -1))
            numbers[-1][found] = np.arange(len(found))
        if ((numbers[0] >= 0) & (numbers[1] >= 0)).any():
            return None
        one = topology.host(int(host[src.ranks[0, 0]])), topology.host(int(host[dst.ranks[0, 0]]))
        turns = holders.transpose(0, 2, 1).reshape(len(holders), -1)
        exchange = cls(src, dst, turns, groups, numbers[0], numbers[1], host)
        num_sends = exchange.num_overlaps[0] * groups.shape[1]
        if num_sends % (turns.shape[1] if len(one[0].nics) > 1 else holders.shape[1]):
            return None
        return None if len(one[1].nics) > 1 and exchange.num_overlaps[1] % groups.shape[2] else exchange

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """``(ndim,)`` numbers of parts of each dim, of the source and of the destination."""
        assert self.src.cuts is not None
        assert self.dst.cuts is not None
        return np.array([len(cut.lo) for cut in self.src.cuts]), np.array([len(cut.lo) for cut in self.dst.cuts])

    @cached_property
    def num_overlaps(self) -> tuple[int, int]:
        """How many destination tiles a source tile overlaps, and how many source tiles a destination tile overlaps."""
        p, q = self.parts
        return math.prod(np.maximum(q // p, 1).tolist()), math.prod(np.maximum(p // q, 1).tolist())

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
    def lane_of(self) -> np.ndarray:
        """``(hosts,)`` the lane in which each host of the source sends."""
        return self.src_number // self.num_hosts[1]

    @property
    def num_regions(self) -> int:
        """The number of regions that move: pairs of a source tile and a destination tile that overlap."""
        return len(self.holders) * self.num_overlaps[0]

    @property
    def num_messages(self) -> int:
        """The number of messages of all ranks: each rank receives each of its regions once."""
        return self.num_regions * self.groups.shape[1] * self.groups.shape[2]

    @property
    def num_keys(self) -> int:
        """More than the largest number that :meth:`own_messages` adds to ``first_key`` times its ``stride``."""
        return len(self.holders) * len(self.groups)

    def own_messages(self, rank: int, first: int, total: int, chain: int) -> OwnMessages:
        """The messages of a rank.

        Args:
            rank: of either layout.
            first, total: number of keys of the tensors before this one, and of all tensors.
            chain: at least the number of ranks of a host that need one region.
        """
        keys = first, total, chain
        parts = [self._sends(tile, turn, *keys) for tile, turn in np.argwhere(self.holders == rank).tolist()]
        for tile, place, position in np.argwhere(self.groups == rank).tolist():
            parts.append(self._receives(tile, place, position, *keys))
        if not parts:
            none, boxes = np.zeros(0, dtype=np.int64), np.zeros((0, len(self.src.shape)), dtype=np.int64)
            return OwnMessages(none, none, none, none, boxes, boxes)
        names = OwnMessages.__dataclass_fields__
        return OwnMessages(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def _sends(self, tile: int, turn: int, first: int, total: int, chain: int) -> OwnMessages:
        """What a holder of a source tile sends in its turns."""
        num_hosts = self.groups.shape[1]
        others, order = self._overlaps(tile, 0)
        number = np.arange(len(others))[:, None] * num_hosts + np.arange(num_hosts)
        which, place = np.nonzero(number % self.holders.shape[1] == turn)
        group = self.groups[others[which], place]
        receiver = group[np.arange(len(which)), order[which] % group.shape[1]]
        sender = np.full(len(which), self.holders[tile, turn])
        key = self._keys(sender, receiver, tile * len(self.groups) + others[which], first, total) * chain
        return self._messages(key, np.full(len(key), -1), sender, receiver, np.full(len(key), tile), others[which])

    def _receives(self, tile: int, place: int, position: int, first: int, total: int, chain: int) -> OwnMessages:
        """What a rank that needs a destination tile receives, and passes on to the next rank of its host."""
        group = self.groups[tile, place]
        others, order = self._overlaps(tile, 1)
        step = (position - np.arange(len(others))) % len(group)
        number = order * self.groups.shape[1] + place
        holder = self.holders[others, number % self.holders.shape[1]]
        rank = np.full(len(others), group[position])
        entry = group[np.arange(len(others)) % len(group)]
        key = self._keys(holder, entry, others * len(self.groups) + tile, first, total) * chain + step
        tiles = np.full(len(others), tile)
        arrives = self._messages(
            key,
            np.where(step == 0, -1, key - 1),
            np.where(step == 0, holder, group[position - 1]),
            rank,
            others,
            tiles,
        )
        on = step < len(group) - 1
        following = np.full(int(on.sum()), group[(position + 1) % len(group)])
        passed = self._messages(key[on] + 1, key[on], rank[on], following, others[on], tiles[on])
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
        found = (place * other // mine)[:, None] + within
        back = np.maximum(mine // other, 1)
        position = place[:, None] - found * mine[:, None] // other[:, None]
        return (
            np.ravel_multi_index(tuple(found), tuple(other)),
            np.ravel_multi_index(tuple(np.broadcast_to(position, found.shape)), tuple(back)),
        )

    def _keys(self, holder: np.ndarray, receiver: np.ndarray, region: np.ndarray, first: int, total: int) -> np.ndarray:
        """Numbers of regions on their way between two hosts, in order.

        The order is by slot, place of the holder in its host, place of the receiver, host of the holder, and region. So
        messages of several lanes to one rank alternate.
        """
        a, b = self.src_number[self.host_of[holder]], self.dst_number[self.host_of[receiver]]
        num_src, num_dst = self.num_hosts
        places = ((b - a) % num_dst * self.num_places + self.place[holder]) * self.num_places + self.place[receiver]
        return (places * num_src + a) * total + first + region

    def _messages(
        self,
        key: np.ndarray,
        source: np.ndarray,
        sender: np.ndarray,
        receiver: np.ndarray,
        src_tile: np.ndarray,
        dst_tile: np.ndarray,
    ) -> OwnMessages:
        start = np.maximum(self.src.start[src_tile], self.dst.start[dst_tile])
        stop = np.minimum(self.src.stop[src_tile], self.dst.stop[dst_tile])
        return OwnMessages(key, source, sender, receiver, start, stop)


def _are_even(src: Shards, dst: Shards) -> bool:
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
