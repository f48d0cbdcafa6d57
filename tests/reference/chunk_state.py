"""The reference implementation of ``native/multicast/chunk_state.h``: the chunks of each host, and the work left at each host."""

from __future__ import annotations

from reshard.planner.multicast.chunk_workload import ChunkWorkload, Nics, rows_of


class ChunkState:
    """State of all chunks. Sets of chunks are integer bit sets; amounts of work are in chunk size units.

    Attributes:
        have, miss: per host, the chunks that have arrived, and the needed chunks that have not been sent yet.
        in_pod: per pod, the chunks that have arrived or are being sent.
        to_get: per host, the size of needed chunks that have not arrived.
        to_give: per host, the size of held chunks that have not been sent to any destination.
        to_enter: per pod, the size of needed chunks that have not been sent to it.
        to_leave: per pod, the size of chunks that no other pod has, once for each pod that lacks them.
        source: the send that brought the chunk, by (chunk, host).
    """

    def __init__(self, nics: Nics, workload: ChunkWorkload) -> None:
        self.nics, self.near_first = nics, workload.near_first
        num_hosts, num_pods, num_chunks = max(nics.host) + 1, len(nics.up), len(workload.host_class_of)
        self.size = workload.host_class_size[workload.host_class_of].tolist()
        self.have = [0] * num_hosts
        self.miss = [0] * num_hosts
        self.in_pod = [0] * num_pods
        self.level = [0] * (num_hosts + 1)  # chunks by number of hosts that have them
        self.copies = [0] * num_chunks
        self.fresh = 0  # chunks that have not been sent to any destination
        self.to_get = [0] * num_hosts
        self.to_give = [0] * num_hosts
        self.to_enter = [0] * num_pods
        self.to_leave = [0] * num_pods
        self.holders = rows_of(workload.host_class_holders)
        self.host_class_of = workload.host_class_of.tolist()
        self.pods_with: list[set[int]] = [set() for _ in range(num_chunks)]  # by chunk
        self.pods_without: list[set[int]] = [set() for _ in range(num_chunks)]
        self.near_out = [0] * len(nics.host)  # by NIC, chunks that its ranks hold or received
        self.near_in = [0] * len(nics.host)  # by NIC, chunks that its ranks need
        self.source: dict[tuple[int, int], int] = {}
        destinations = rows_of(workload.host_class_receivers)
        for chunk, host_class in enumerate(self.host_class_of):
            if destinations[host_class]:
                self._place(chunk, self.holders[host_class], destinations[host_class])
        if nics.have_multi_nic_hosts:
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
        pod = self.nics.pod
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

    def _place_ranks(self, workload: ChunkWorkload) -> None:
        of_rank = self.nics.of_rank
        having, needing = rows_of(workload.class_holders), rows_of(workload.class_receivers)
        for chunk, k in enumerate(workload.piece_class[workload.piece_offsets[:-1]].tolist()):
            for rank in having[k]:
                self.near_out[of_rank[rank]] |= 1 << chunk
            for rank in needing[k]:
                self.near_in[of_rank[rank]] |= 1 << chunk

    def candidates(self, s: int, r: int, may_enter_again: bool = False) -> int:
        """The chunks that the host of NIC ``s`` can send to the host of NIC ``r``; a chunk enters each pod once."""
        a, b = self.nics.host[s], self.nics.host[r]
        found = self.have[a] & self.miss[b]
        pod = self.nics.pod
        if pod and pod[a] != pod[b] and not may_enter_again:
            found &= ~self.in_pod[pod[b]]
        return found

    def choose(self, s: int, r: int, may_enter_again: bool = False) -> int:
        """The best chunk to send from NIC ``s`` to NIC ``r``, -1 if there is none.

        The rarest chunk comes first, then a chunk that ranks at both NICs hold and need. With ``near_first`` the order
        of these rules is reversed.
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
        """Narrow the chunks to those that ranks at NIC ``s`` have, then to those that ranks at NIC ``r`` need."""
        if self.nics.have_multi_nic_hosts:
            found = found & self.near_out[s] or found
            found = found & self.near_in[r] or found
        return found

    def start(self, chunk: int, host: int) -> None:
        """Record that a chunk is being sent to a host."""
        bit, size = 1 << chunk, self.size[chunk]
        self.miss[host] &= ~bit
        self.level[self.copies[chunk]] &= ~bit
        self.copies[chunk] += 1
        self.level[self.copies[chunk]] |= bit
        if self.fresh & bit:
            self.fresh &= ~bit
            for holder in self.holders[self.host_class_of[chunk]]:
                self.to_give[holder] -= size
        if self.nics.pod and not self.in_pod[self.nics.pod[host]] & bit:
            q = self.nics.pod[host]
            having, lacking = self.pods_with[chunk], self.pods_without[chunk]
            if len(having) == 1:
                self.to_leave[min(having)] -= size * len(lacking)
            self.to_enter[q] -= size
            lacking.discard(q)
            having.add(q)
            self.in_pod[q] |= bit

    def land(self, chunk: int, nic: int, chunk_send: int) -> None:
        """Record that a chunk has arrived at a NIC."""
        host, bit = self.nics.host[nic], 1 << chunk
        self.have[host] |= bit
        self.to_get[host] -= self.size[chunk]
        self.source[chunk, host] = chunk_send
        if self.nics.have_multi_nic_hosts:
            self.near_out[nic] |= bit
