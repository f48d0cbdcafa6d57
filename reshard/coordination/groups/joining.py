"""Claims of ranks in a joined group by processes. Two processes that claim one rank are an error on all ranks.

A process claims its rank in the store when it joins, or in its first call if the store is slow, and publishes an error
if another process has claimed it. The other ranks look for such an error before their first two rounds with a set of
ranks, while they wait in a round, and with each heartbeat. A rank that has read it raises it in all later calls.

If two jobs join as one group by mistake, one rank of each may call before the others claim theirs. The variables of
their launchers tell: each job has as many ranks as the group, and each process joined as its own rank in its job.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from reshard.coordination.groups.agreement_messages import Decision, RoundRequest, read_json
from reshard.coordination.groups.process_group import Group, own_client
from reshard.coordination.groups.store import ForeignValueError, StoreSilentError
from reshard.errors import ArgumentError
from reshard.formatting import brief, describe_ranks
from reshard.sharding import MAX_RANK, check_integer

_DUPLICATE = "duplicate"


def join(store: Any, rank: int, world_size: int) -> Group:
    """One group of processes from several jobs, for example a trainer and a server.

    Every process passes the same store (for example ``torch.distributed.TCPStore``) and its own rank. No data is
    exchanged yet: ranks connect in their first call. A group leaves keys in the store. For another group, for example
    after a restart, pass a ``PrefixStore`` with another prefix.

    Args:
        store: a ``torch.distributed`` store that all processes reach.
        rank: this process's rank in the new group, 0 to ``world_size - 1``.
        world_size: number of ranks.

    Returns:
        A group to pass as ``group=``; layouts then use its ranks. Its threads and connections end with
        ``group.close()``, at the end of a ``with`` block, or when nothing refers to it any more.

    Raises:
        ArgumentError: the rank is outside the group, or ``store`` is not a store. The first call with the group raises
            it too, on all ranks, if two processes joined with the same rank.
    """
    if not isinstance(store, dist.Store):
        raise ArgumentError(f"store must be a torch.distributed store, not {type(store).__name__}")
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except Exception:  # such as a tensor's
        raise ArgumentError(f"rank {brief(rank)} and world_size {brief(world_size)} must be integers") from None
    check_integer(world_size, "world_size", 0, MAX_RANK + 1)
    group = Group(dist.PrefixStore("reshard/join", own_client(store)), rank, world_size)
    # The first call tries again, or raises the error.
    with contextlib.suppress(StoreSilentError, ForeignValueError, ArgumentError):
        check_claims(group)
    return group


def check_claims(group: Group) -> None:
    """Claim this process's rank of a joined group, and check that no rank is claimed twice.

    Raises:
        ArgumentError: two processes joined with the same rank; the text names both.
        StoreSilentError: the store has not answered in time; call again later.
    """
    if group.process_group is not None or group.is_destroyed() or group.size == 1:
        return
    if not group.is_claimed:
        claim = json.dumps([group.hostname, group.pid, group.claim_token])  # the same if an answer is late
        key = f"claim/{group.rank}"
        holder = group.store.compare_set(key, "", claim)
        if holder != claim.encode():
            group.store.set(_DUPLICATE, _describe_holder(group, key, holder))
        group.is_claimed = True
    read_claim_error(group)
    if group.claim_error:
        raise ArgumentError(group.claim_error)


def name_job(group: Group) -> str:
    """A name of the job that a launcher such as torchrun started, if it should be the whole joined group; else "".

    The name is the same on all ranks of a job. Other jobs have other names if they run at the same time on one host, or
    if their launcher gives them an id.
    """
    variables = os.environ
    if group.process_group is not None or "MASTER_PORT" not in variables:
        return ""
    if [variables.get("RANK"), variables.get("WORLD_SIZE")] != [str(group.rank), str(group.size)]:
        return ""
    hostname = socket.gethostname() if variables.get("LOCAL_WORLD_SIZE") == str(group.size) else ""
    return f"{variables.get('TORCHELASTIC_RUN_ID', '')} {variables['MASTER_PORT']} {hostname}"


def find_two_jobs(group: Group, requests: Sequence[RoundRequest]) -> Decision | None:
    """An error decision, which is also published, if the ranks of a round are of jobs of which each is the whole group.

    None if they are of one job, or if a rank does not know that its job should be the whole group.
    """
    ranks: dict[str, list[int]] = {}
    for request in requests:
        ranks.setdefault(request.job, []).append(request.rank)
    if "" in ranks or len(ranks) < 2:
        return None
    jobs = " and ".join(describe_ranks(item) for item in ranks.values())
    text = (
        f"{len(ranks)} jobs joined one {group}: {jobs} are of different jobs, and each job has {group.size} ranks; "
        "each job needs a PrefixStore with its own prefix, and a group of two jobs the world_size of both together"
    )
    with contextlib.suppress(StoreSilentError):  # ranks that join later would not learn of it
        group.store.set(_DUPLICATE, text)
    return Decision(error=(ArgumentError.__name__, text))


def _describe_holder(group: Group, key: str, holder: bytes) -> str:
    """The error after another process has claimed the rank of this one."""
    try:
        hostname, pid, _ = group.store.parse(key, holder, lambda text: read_json(text, (str, int, str)))
    except ForeignValueError as error:
        return str(error)
    return (
        f"two processes joined the {group} as rank {group.rank}: process {pid} on host {hostname}, then "
        f"process {group.pid} on host {group.hostname}; each process needs its own rank, from 0 to "
        f"{group.size - 1}, and a group that is joined again needs a PrefixStore with another prefix"
    )


def read_claim_error(group: Group) -> None:
    """Set ``group.claim_error`` if two processes have claimed one rank."""
    if group.is_claimed and not group.claim_error and group.store.check([_DUPLICATE]):
        group.claim_error = group.store.read(_DUPLICATE, bytes.decode)
