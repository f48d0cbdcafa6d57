"""Lower bounds on the simulated makespans of strategies, computed without simulating."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard import _native
from reshard.arguments import check_arguments, check_fields
from reshard.plan import PlanTransfers
from reshard.planner.multicast.classes import Classes
from reshard.planner.multicast.host_classes import HostClasses, busiest_port_seconds
from reshard.planner.strategies.chunk_limits import (
    SMALL_REGION_BYTES,
    STAGING_PARTS,
    TREE_CHUNK_BYTES,
    UNPACKED_CHUNK_BYTES,
)
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.sends_and_all_gathers import global_cuts, local_cuts
from reshard.ragged import NO_RANK, distinct_values, ranges
from reshard.topology import MAX_NICS, Topology

#: Relative error of sums that are added in another order.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class StrategyBounds:
    """Lower bounds, in seconds, on the time that :func:`~reshard.cost.simulator.simulate` predicts for any plan.

    There is one bound for each kind of strategy. The bounds are known before a plan is made.
    """

    problem: PlanProblem

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def host_classes(self) -> HostClasses:
        """The problem's classes, grouped by hosts."""
        return HostClasses.of(Classes.of(self.problem), self.problem.topology)

    @cached_property
    def of_ungathered(self) -> float:
        """Lower bound of strategies that do not gather: busiest port, and messages of regions with one holder."""
        return self._add_start(max(self._port_seconds, self._single_holder_seconds, self._inside_seconds))

    @property
    def of_merged(self) -> float:
        """Lower bound of all strategies, also of strategies that gather regions of several holders in one message."""
        return self._add_start(max(self._port_seconds, self._inside_seconds))

    @property
    def latency_of_classes(self) -> float:
        """Latencies at the busiest host if holders send each class once to each host that lacks it: no lower bound."""
        topology, host_classes = self.problem.topology, self.host_classes
        (at, holders), arrivals = host_classes.holders, np.diff(host_classes.destinations[0])
        num_holders = np.diff(at)
        num_classes = np.bincount(host_classes.host_class, minlength=len(arrivals))
        messages = np.bincount(holders, weights=np.repeat(num_classes * arrivals / num_holders, num_holders))
        num_nics = np.array([len(topology.host(h).nics) for h in range(len(messages))])
        return float((messages / num_nics).max(initial=0.0)) * topology.latency_seconds

    @cached_property
    def of_direct(self) -> float:
        """Lower bound of ``send_recv``, if all regions have a single holder; otherwise that of every strategy."""
        problem, topology = self.problem, self.problem.topology
        if problem.holders.shape[1] > 1:
            return self.of_ungathered
        num_hosts, nic = topology.num_hosts, topology.host_array * MAX_NICS + topology.nic_array
        sent, received, pairs = (np.zeros(num_hosts * MAX_NICS) for _ in range(3))  # small regions may share a message
        receivers = np.ascontiguousarray(problem.receivers)
        arrays = np.ascontiguousarray(problem.holders[:, 0]), receivers, problem.nbytes, topology.host_array, nic
        _native.add_direct_loads(*arrays, sent, received, pairs)
        seconds = 0.0
        for passed, rates, extra in ((sent, topology.nic_rates[0], pairs), (received, topology.nic_rates[1], 0.0)):
            rate = np.broadcast_to(rates[:num_hosts], (num_hosts, MAX_NICS)).ravel()
            seconds = max(seconds, float((passed / rate + extra * topology.latency_seconds).max(initial=0.0)))
        return max(self.of_ungathered, self._add_start(seconds) * (1 - _ROUNDING))

    @cached_property
    def of_trees(self) -> float:
        """Lower bound of strategies that send each class of regions separately, once to each host that lacks it."""
        topology, host_classes = self.problem.topology, self.host_classes
        if not host_classes.moves.any():
            return self.of_ungathered
        hosts = np.unique(np.concatenate([host_classes.holders[1], host_classes.destinations[1]])).tolist()
        rates = [nic.egress_bytes_per_second for h in hosts for nic in topology.host(h).nics]
        arrivals = np.diff(host_classes.destinations[0])[host_classes.host_class]
        work = float((arrivals * (host_classes.classes.nbytes + topology.latency_seconds * min(rates))).sum())
        return max(self.of_ungathered, self._add_start(work / sum(rates)))

    @cached_property
    def of_broadcasts(self) -> float:
        """Lower bound of strategies that send along chains of hosts.

        A holder sends a whole region to the first host, and each host sends it to the next. Chunks that travel more
        than one hop have at most 1 MiB.
        """
        topology, host_classes = self.problem.topology, self.host_classes
        if not host_classes.moves.any():
            return self.of_ungathered
        classes, hosts = host_classes.classes, np.diff(host_classes.destinations[0])[host_classes.host_class]
        first = host_classes.destinations[1][host_classes.destinations[0][:-1][host_classes.host_class[hosts > 0]]]
        ranks = classes.receivers[hosts > 0]
        is_chain = hosts > 1
        is_chain[hosts > 0] |= ((topology.host_array[ranks] == first[:, None]) & (ranks != NO_RANK)).sum(axis=1) > 1
        chunk_bytes = np.where(is_chain, TREE_CHUNK_BYTES, UNPACKED_CHUNK_BYTES)
        chunks = -(-classes.nbytes // chunk_bytes)
        leaves_host = hosts > 0
        seconds = [float(hosts.max()) * topology.latency_seconds]
        for members, times in (
            (host_classes.holders[1], leaves_host),
            (host_classes.destinations[1], np.maximum(hosts - 1, 0)),
        ):
            rates = [nic.egress_bytes_per_second for h in np.unique(members).tolist() for nic in topology.host(h).nics]
            work = times * (classes.nbytes + chunks * topology.latency_seconds * min(rates))
            seconds.append(float(work.sum()) / sum(rates))
        # the largest region leaves through a single NIC of its sender
        of_task = np.repeat(np.arange(len(classes)), np.diff(classes.task_offsets))
        nbytes = np.where(leaves_host[of_task], self.problem.nbytes[classes.task], 0)
        fastest = max(nic.egress_bytes_per_second for host in topology.hosts for nic in host.nics)
        messages = -(-nbytes // chunk_bytes[of_task])
        seconds.append(float((nbytes / fastest + messages * topology.latency_seconds).max()))
        return max(self.of_trees, self._add_start(max(*seconds, self._chain_seconds)))

    @property
    def _chain_seconds(self) -> float:
        """Time of the busiest host, counting only regions that are held on a single host, along their chains of hosts.

        The order of a chain follows from its first host, see :func:`~reshard.planner.strategies.trees.along_trees`. Its
        last host sends nothing.
        """
        topology, (holder_offsets, holders), (at, destinations) = (
            self.problem.topology, self.host_classes.holders, self.host_classes.destinations
        )  # fmt: skip
        single = np.flatnonzero((np.diff(holder_offsets) == 1) & (np.diff(at) > 0))
        if not len(single):
            return 0.0
        home, count = holders[holder_offsets[single]], np.diff(at)[single]
        nbytes = self.host_classes.nbytes[single].astype(np.float64)
        messages = nbytes / np.where(count > 1, TREE_CHUNK_BYTES, UNPACKED_CHUNK_BYTES)  # a lower bound
        of, host = np.repeat(np.arange(len(single)), count), destinations[ranges(at[single], count)]
        num_hosts = topology.num_hosts
        place = np.where(host < home[of], num_hosts, 0) + host
        if topology.pods:
            pod = np.array([topology.host(h).pod for h in range(num_hosts)], dtype=np.int64)
            place += (pod[host] - pod[home[of]]) % len(topology.pods) * 2 * num_hosts
        forwards = place < np.maximum.reduceat(place, np.cumsum(count) - count)[of]
        sender, of = np.concatenate([home, host[forwards]]), np.concatenate([np.arange(len(single)), of[forwards]])
        sent, held = (np.bincount(sender, weights=item[of], minlength=num_hosts) for item in (nbytes, messages))
        hosts = [topology.host(h) for h in range(num_hosts)]
        slowest = np.array([min(nic.egress_bytes_per_second for nic in item.nics) for item in hosts])
        rate = np.array([item.egress_bytes_per_second for item in hosts])
        return float(((sent + held * topology.latency_seconds * slowest) / rate).max())

    def of_gathers(self, num_receivers: np.ndarray) -> float:
        """Lower bound of the all-gathers: each receiver of a region forwards one message for each other receiver.

        Args:
            num_receivers: ``(tasks,)`` receivers of each region.
        """
        problem, topology = self.problem, self.problem.topology
        forwards = np.where(problem.has_near_holder, 0, np.maximum(num_receivers - 1, 0))
        task, replica = np.nonzero(problem.receivers != NO_RANK)
        count = np.bincount(problem.receivers[task, replica], weights=forwards[task])
        latency = min(topology.latency_seconds, topology.inside_latency_seconds)
        return max(self.of_ungathered, self._add_start(float(count.max(initial=0.0)) * latency))

    @cached_property
    def of_ring(self) -> float:
        """Lower bound of ``global_all_gather``: the messages by which each receiver forwards parts to the next."""
        problem, cuts = self.problem, global_cuts(self.problem)
        task = np.flatnonzero(cuts >= 0)
        if not len(task):
            return self.of_ungathered
        host, table = problem.topology.host_array, problem.receivers[task]
        width = len(host)
        key = np.where(table == NO_RANK, np.iinfo(np.int64).max, host[table] * width + table)
        ring, k = np.sort(key, axis=1) % width, problem.num_receivers[task]
        size = np.take_along_axis(problem.stop[task] - problem.start[task], cuts[task, None], axis=1)[:, 0]
        row_bytes = problem.nbytes[task] // np.maximum(size, 1)
        row, place = np.nonzero(np.arange(table.shape[1]) < k[:, None])
        following = (place + 1) % k[row]
        # a receiver sends its successor all parts except the one that the successor fetched
        part = size[row] * (following + 1) // k[row] - size[row] * following // k[row]
        smallest = size // k * row_bytes
        small = min(SMALL_REGION_BYTES, problem.staging_bytes // STAGING_PARTS)  # smaller parts may share a message
        return bound_of_messages(
            problem,
            ring[row, place],
            ring[row, following],
            ((size[row] - part) * row_bytes[row]).astype(np.float64),
            np.where(smallest[row] >= small, k[row] - 1, 0).astype(np.float64),
        )

    def of_strategy(self, name: str) -> float:
        """Lower bound of the strategy with this name, a candidate of ``auto``."""
        if name.startswith("multicast"):
            return self.of_trees
        if name.startswith("broadcast_"):
            return self.of_broadcasts
        if name == "gathered_multicast":
            return self.of_merged
        cuts = {"local_all_gather": local_cuts, "global_all_gather": global_cuts}.get(name)
        if cuts is None or (cuts(self.problem) < 0).all():  # such an all-gather sends all regions directly
            return self.of_direct
        gathers = self.of_gathers(self.problem.num_receivers)
        return max(gathers, self.of_ring) if name == "global_all_gather" else gathers

    def _add_start(self, seconds: float) -> float:
        topology = self.problem.topology
        return max(seconds - _burst_seconds(topology), 0.0) + topology.start_seconds

    @property
    def _port_seconds(self) -> float:
        """Time of the busiest port, plus one latency before the first byte flows."""
        if not self.host_classes.moves.any():
            return 0.0
        return busiest_port_seconds(self.problem.topology, self.host_classes) + self.problem.topology.latency_seconds

    @property
    def _inside_seconds(self) -> float:
        """Time in which the ranks of a single host move all bytes that they need; 0 with several hosts."""
        topology, problem = self.problem.topology, self.problem
        if topology.inside_total_bytes_per_second is None or topology.num_hosts > 1:
            return 0.0
        nbytes = float((problem.nbytes * problem.num_receivers).sum())
        return nbytes / topology.inside_total_bytes_per_second * (1 - _ROUNDING)

    @property
    def _single_holder_seconds(self) -> float:
        """Time to send the regions that have a single holder: from its host, or from its rank if nothing leaves a host.

        Regions share a message only if they have the same sender and receivers. So each holder sends at least one
        message for each different last receiver of its regions.
        """
        topology, classes = self.problem.topology, self.host_classes.classes
        single = np.flatnonzero((classes.holders != NO_RANK).sum(axis=1) == 1)
        if not len(single):
            return 0.0
        host = topology.host_array
        holder, receivers = classes.holders[single].max(axis=1), classes.receivers[single]
        if self.host_classes.moves.any():
            receivers = np.where(host[receivers] != host[holder][:, None], receivers, NO_RANK)
            hosts = [topology.host(h) for h in range(topology.num_hosts)]
            sender_of, latency = host, topology.latency_seconds
            rate = np.array([h.egress_bytes_per_second for h in hosts])
            port_part = np.array([min(nic.egress_bytes_per_second for nic in h.nics) for h in hosts]) / rate
        else:
            sender_of, latency = np.arange(len(host)), topology.inside_latency_seconds
            rate = np.full(len(host), topology.inside_bytes_per_second or np.inf)
            port_part = np.ones(len(host))
        last = receivers.max(axis=1)
        is_sent = last != NO_RANK
        nbytes = np.bincount(sender_of[holder[is_sent]], weights=classes.nbytes[single][is_sent], minlength=len(rate))
        pairs = distinct_values(holder[is_sent] * len(host) + last[is_sent])
        count = np.bincount(sender_of[pairs // len(host)], minlength=len(rate))
        return float((nbytes / rate + count * latency * port_part).max())


def _burst_seconds(topology: Topology) -> float:
    """The most seconds that bursts can save: ``burst_bytes`` over the slowest port."""
    return topology.burst_bytes / min(_rates_of_ports(topology)) if topology.burst_bytes else 0.0


@check_arguments()
def bound_of_transfers(problem: PlanProblem, transfers: PlanTransfers) -> float:
    """Lower bound on the simulated makespan of these transfers, in seconds: the time of the busiest port.

    A message occupies its sender's port for its latency and then for its bytes. Nothing arrives before one latency.
    """
    itemsize = np.array([spec.itemsize for spec in problem.tensors], dtype=np.int64)
    box_bytes = (transfers.box_stop - transfers.box_start).prod(axis=1, dtype=np.int64) * itemsize[transfers.box_tensor]
    ends = np.concatenate([[0], np.cumsum(box_bytes)])[transfers.box_offsets]
    of = transfers.transfer_of_edge
    nbytes = np.diff(ends)[transfers.region][of].astype(np.float64)
    count = transfers.num_chunks[of].astype(np.float64)  # all boxes of a chunk form one message
    return bound_of_messages(problem, transfers.sender, transfers.receiver, nbytes, count)


def bound_of_messages(
    problem: PlanProblem, sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray, count: np.ndarray
) -> float:
    """Like :func:`bound_of_transfers`, for ``count[i]`` messages of together ``nbytes[i]`` bytes from each sender."""
    topology = problem.topology
    host, nic = topology.host_array, topology.nic_array
    a, b = host[sender], host[receiver]
    crosses = a != b
    inside = ~crosses & (sender != receiver)
    seconds = [0.0]
    if crosses.any():
        egress, ingress = topology.nic_rates
        latency = topology.latency_seconds
        x, y, part = a[crosses] * MAX_NICS, b[crosses] * MAX_NICS, nbytes[crosses]
        x, y = x + nic[sender[crosses]], y + nic[receiver[crosses]]
        sent, held, received = (
            np.bincount(nic, weights=amount, minlength=topology.num_hosts * MAX_NICS).reshape(-1, MAX_NICS)
            for nic, amount in ((x, part), (x, count[crosses]), (y, part))
        )
        busy = sent / egress[: len(sent)] + held * latency
        seconds += [float(busy.max()), float((received / ingress[: len(received)]).max()) + latency]
        if topology.pods:
            pod = np.array([topology.host(h).pod for h in range(topology.num_hosts)], dtype=np.int64)
            p, q = pod[a[crosses]], pod[b[crosses]]
            apart = p != q
            for pods, rates in (
                (p, [pod.egress_bytes_per_second for pod in topology.pods]),
                (q, [pod.ingress_bytes_per_second for pod in topology.pods]),
            ):
                passed = np.bincount(pods[apart], weights=part[apart], minlength=len(rates)) / np.array(rates)
                seconds.append(float(passed.max()) + latency * bool(apart.any()))
    if inside.any():
        rate, latency = topology.inside_bytes_per_second or np.inf, topology.inside_latency_seconds
        work = nbytes[inside] / rate
        left = np.bincount(sender[inside], weights=work + count[inside] * latency)
        came = np.bincount(receiver[inside], weights=work)
        seconds += [float(left.max()), float(came.max()) + latency]
        if topology.inside_total_bytes_per_second is not None:
            moved = float(np.bincount(a[inside], weights=nbytes[inside]).max())
            seconds.append(moved / topology.inside_total_bytes_per_second * (1 - _ROUNDING))
    return max(max(seconds) - _burst_seconds(topology), 0.0) + topology.start_seconds


def _rates_of_ports(topology: Topology) -> list[float]:
    links = [*(nic for host in topology.hosts for nic in host.nics), *topology.pods]
    return [rate for link in links for rate in (link.egress_bytes_per_second, link.ingress_bytes_per_second)]
