"""Reference implementation of ``native/multicast/circulant_broadcast.h``: chunks from one host to all others, in slots."""

from __future__ import annotations

from reshard.planner.multicast.chunk_workload import ChunkWorkload, Nics, rows_of
from tests.reference.chunk_scheduler import ChunkSends


def send_in_circles(nics: Nics, workload: ChunkWorkload) -> ChunkSends:
    """In slot i, NIC r receives from NIC ``r - skip[i mod q]``: the next new chunk, or the highest one it lacks."""
    holders, receivers = rows_of(workload.host_class_holders), rows_of(workload.host_class_receivers)
    chunks = [chunk for chunk, k in enumerate(workload.host_class_of.tolist()) if receivers[k]]
    sends = ChunkSends()
    if not chunks:
        return sends
    k = int(workload.host_class_of[chunks[0]])
    nic_of = {host: p for p, (host, ranks) in enumerate(zip(nics.host, nics.ranks, strict=True)) if ranks}
    nic = [nic_of[host] for host in (holders[k][0], *receivers[k])]
    skips = [len(nic)]
    while skips[0] > 1:
        skips.insert(0, (skips[0] + 1) // 2)
    q, n = len(skips) - 1, len(chunks)
    have = [set(range(n))] + [set() for _ in nic[1:]]
    source: dict[tuple[int, int], int] = {}
    last_out, last_in = [-1] * len(nic), [-1] * len(nic)
    slot, new = 0, 0
    while any(len(chunks_here) < n for chunks_here in have):
        landed = []
        for r in range(1, len(nic)):
            from_ = (r - skips[(slot + (q - (n - 1 + q) % q) % q) % q]) % len(nic)
            if from_ == 0 and new < n:
                chunk, new = new, new + 1
            else:
                chunk = max(have[from_] - have[r], default=-1)
            if chunk < 0 or chunk in have[r]:
                continue
            sends.chunk.append(chunks[chunk])
            sends.sender.append(nic[from_])
            sends.receiver.append(nic[r])
            sends.source.append(source.get((from_, chunk), -1))
            sends.after.append(list(dict.fromkeys(i for i in (last_out[from_], last_in[r]) if i >= 0)))
            sends.start.append(float(slot))
            sends.end.append(float(slot + 1))
            last_out[from_] = last_in[r] = source[r, chunk] = len(sends.chunk) - 1
            landed.append((r, chunk))
        for r, chunk in landed:
            have[r].add(chunk)
        slot += 1
    return sends
