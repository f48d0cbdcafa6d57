"""Which process is which rank of a joined group. Two processes with one rank are an error on all ranks.

A process claims its rank in the store in its first call, and publishes an error if another process has claimed it.
The other ranks read that error before their first round with a set of ranks, while they wait in a round, and with each
heartbeat. A rank that has read it raises it in all later calls.
"""

from __future__ import annotations

import json
import secrets

from reshard.coordination.process_group import Group
from reshard.errors import ArgumentError

_DUPLICATE = "duplicate"


def check_claims(group: Group) -> None:
    """Claim this process's rank of a joined group, and check that no rank is claimed twice.

    Raises:
        ArgumentError: two processes joined with the same rank; the text names both.
        StoreSilentError: the store has not answered in time; call again later.
    """
    if group.process_group is not None or group.is_destroyed() or group.size == 1:
        return
    if not group.claim:
        claim = json.dumps([group.hostname, group.pid, secrets.token_hex(8)])
        holder = group.store.compare_set(f"claim/{group.rank}", "", claim).decode()
        if holder != claim:
            hostname, pid, _ = json.loads(holder)
            group.store.set(
                _DUPLICATE,
                f"two processes joined the {group} as rank {group.rank}: process {pid} on host {hostname}, then "
                f"process {group.pid} on host {group.hostname}; each process needs its own rank, from 0 to "
                f"{group.size - 1}, and a group that is joined again needs a PrefixStore with another prefix",
            )
        group.claim = claim
    read_claim_error(group)
    if group.claim_error:
        raise ArgumentError(group.claim_error)


def read_claim_error(group: Group) -> None:
    """Set ``group.claim_error`` if two processes have claimed one rank."""
    if group.claim and not group.claim_error and group.store.check([_DUPLICATE]):
        group.claim_error = group.store.get(_DUPLICATE).decode()
