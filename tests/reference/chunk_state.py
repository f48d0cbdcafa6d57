"""Which hosts have and lack which chunks, and how much each place has left to do."""

from __future__ import annotations

from reshard.planner.multicast.workload import Ports, Workload, rows_of


class ChunkState:
    """Sets of chunks are bits of integers; what is left is counted in the units of chunks' sizes.

    Attributes:
        have, miss: chunks of each host that have arrived, and that are not even on the way. in_pod: chunks of each pod
            that have arrived or are on the way.
        to_get: what has not arrived at each host. to_give: what each host holds and no host but its holders has.
        to_enter: what each pod lacks. to_leave: what only this pod can give to others, once for each that lacks it.
        source: by (chunk, host) the deal that brought it.
    """

    def __init__(self, ports: Ports, workload: Workload) -> None:
        self.ports, self.near_first = ports, workload.near_first
        num_hosts, num_pods, num_chunks = max(ports.host) + 1, len(ports.up), len(workload.host_class_of)
        self.size = workload.host_class_size[workload.host_class_of].tolist()
        self.have = [0] * num_hosts
        self.miss = [0] * num_hosts
        self.in_pod = [0] * num_pods
        self.level = [0] * (num_hosts + 1)  # chunks by how many hosts have them
        self.copies = [0] * num_chunks
        self.fresh = 0  # chunks that no host but their holders has
        self.to_get = [0] * num_hosts
        self.to_give = [0] * num_hosts
        self.to_enter = [0] * num_pods
        self.to_leave = [0] * num_pods
        self.holders = rows_of(workload.host_class_holders)
        self.host_class_of = workload.host_class_of.tolist()
        self.pods_with: list[set[int]] = [set() for _ in range(num_chunks)]  # and without
        self.pods_without: list[set[int]] = [set() for _ in range(num_chunks)]
        self.near_out = [0] * len(ports.host)  # chunks that a rank at the port holds or got from afar, or needs
        self.near_in = [0] * len(ports.host)
        self.source: dict[tuple[int, int], int] = {}
        destinations = rows_of(workload.host_class_receivers)
        for chunk, host_class in enumerate(self.host_class_of):
            if destinations[host_class]:
                self._place(chunk, self.holders[host_class], destinations[host_class])
        if ports.are_shared:
            self._place_ranks(workload)

    def _place(self, chunk: int, holders: list[int], destinations: list[int]) -> None:
        bit, size = 1 << chunk, self.size[chunk]
        for host in destinations:
            self.miss[host] |= bit
            self.to_get[host] += size
        for host in holders:
            self.have[host] |= bit
            self.to_give[host] += size
        self.copies[chunk] = len(holders)
        self.level[len(holders)] |= bit
        self.fresh |= bit
        pod = self.ports.pod
        if not pod:
            return
        having = self.pods_with[chunk] = {pod[host] for host in holders}
        lacking = self.pods_without[chunk] = {pod[host] for host in destinations} - having
        for q in having:
            self.in_pod[q] |= bit
        for q in lacking:
            self.to_enter[q] += size
        if len(having) == 1:
            self.to_leave[min(having)] += size * len(lacking)

    def _place_ranks(self, workload: Workload) -> None:
        of_rank = self.ports.of_rank
        having, needing = rows_of(workload.class_holders), rows_of(workload.class_receivers)
        for chunk, k in enumerate(workload.piece_class[workload.piece_at[:-1]].tolist()):
            for rank in having[k]:
                self.near_out[of_rank[rank]] |= 1 << chunk
            for rank in needing[k]:
                self.near_in[of_rank[rank]] |= 1 << chunk

    def candidates(self, s: int, r: int, may_enter_again: bool = False) -> int:
        """The chunks that one port's host can send to another's; each pod is entered once."""
        a, b = self.ports.host[s], self.ports.host[r]
        found = self.have[a] & self.miss[b]
        pod = self.ports.pod
        if pod and pod[a] != pod[b] and not may_enter_again:
            found &= ~self.in_pod[pod[b]]
        return found

    def choose(self, s: int, r: int, may_enter_again: bool = False) -> int:
        """The rarest chunk for two ports, -1 for none; of those one that ranks at the ports have and need.

        Where near ones come first it is the other way round.
        """
        found = self.candidates(s, r, may_enter_again)
        if not found:
            return -1
        if self.near_first:
            found = self.near(found, s, r)
        for level in self.level:
            if found & level:
                found &= level
                break
        found = self.near(found, s, r)
        return (found & -found).bit_length() - 1

    def near(self, found: int, s: int, r: int) -> int:
        """Those of some chunks that ranks at one port have, and of those what ranks at the other need."""
        if self.ports.are_shared:
            found = found & self.near_out[s] or found
            found = found & self.near_in[r] or found
        return found

    def start(self, chunk: int, host: int) -> None:
        """A chunk is on the way to a host."""
        bit, size = 1 << chunk, self.size[chunk]
        self.miss[host] &= ~bit
        self.level[self.copies[chunk]] &= ~bit
        self.copies[chunk] += 1
        self.level[self.copies[chunk]] |= bit
        if self.fresh & bit:
            self.fresh &= ~bit
            for holder in self.holders[self.host_class_of[chunk]]:
                self.to_give[holder] -= size
        if self.ports.pod and not self.in_pod[self.ports.pod[host]] & bit:
            q = self.ports.pod[host]
            having, lacking = self.pods_with[chunk], self.pods_without[chunk]
            if len(having) == 1:
                self.to_leave[min(having)] -= size * len(lacking)
            self.to_enter[q] -= size
            lacking.discard(q)
            having.add(q)
            self.in_pod[q] |= bit

    def land(self, chunk: int, port: int, chunk_send: int) -> None:
        """A chunk has arrived at a port."""
        host, bit = self.ports.host[port], 1 << chunk
        self.have[host] |= bit
        self.to_get[host] -= self.size[chunk]
        self.source[chunk, host] = chunk_send
        if self.ports.are_shared:
            self.near_out[port] |= bit
