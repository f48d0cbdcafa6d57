"""Lower bounds on the step time of a candidate under any schedule: without plans of edges, then tighter ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..inputs.layer_graph import Tensor
from .edge_costs import End
from .layer_costs import StageCost
from .search_problem import Candidate, SearchProblem, end_of, stage_edges

#: Relative tolerance of lower bounds, because the simulator adds numbers in another order.
BOUND_TOLERANCE = 1e-8
#: Seconds forward and backward of edges between stages that follow each other, by the number of the first stage.
_EdgeSeconds = Mapping[int, tuple[float, float]]
#: Tensors that cross an edge, samples of a microbatch, and both ends.
_Moved = tuple[tuple[Tensor, ...], int, End, End]


def step_bound(problem: SearchProblem, candidate: Candidate) -> float:
    """A lower bound, in seconds, on the step time of a candidate under any schedule, if edges take no time.

    Each stage waits for one forward of every stage before it, computes all microbatches, and then sums its gradients.
    On a pp rank, only the stage that ends last sums all its gradients after the last computation.
    """
    costs, _ = problem.costs(candidate.stages, candidate.num_microbatches)
    return _bound(problem, candidate, costs, {})


def may_be_faster(problem: SearchProblem, candidate: Candidate, below_seconds: float) -> bool:
    """Whether lower bounds allow a step of a candidate that is shorter than a limit.

    At first, edges take the time in which their bytes leave and enter hosts. Then the planner computes the time of one
    edge after the other, the longest first, and of the sums over stages, until the bound exceeds the limit. So slow
    candidates need few plans.
    """
    limit = below_seconds / (1 - BOUND_TOLERANCE)
    costs: Sequence[StageCost] = [
        replace(cost, tie_seconds=0.0) if cost.tie_seconds else cost
        for cost in (problem.stage_cost(stage, candidate.num_microbatches) for stage in candidate.stages)
    ]
    if _bound(problem, candidate, costs, {}) >= limit:
        return False
    stages, num_samples = candidate.stages, problem.num_samples // candidate.num_microbatches
    moved = {
        (src, dst): (tensors, num_samples, end_of(stages[src], -1), end_of(stages[dst], 0))
        for src, dst, tensors in stage_edges(problem.graph, stages)
        if candidate.pp_ranks[src] != candidate.pp_ranks[dst]
    }
    if candidate.num_microbatches * _port_seconds(problem, moved.values()) >= limit:
        return False
    edges: dict[int, tuple[float, float]] = {}
    if problem.graph.is_sequential:
        edges = {src: problem.edge_costs.bound_seconds(*edge) for (src, dst), edge in moved.items() if dst == src + 1}
    for src in sorted(edges, key=lambda src: (-sum(edges[src]), src)):
        if _bound(problem, candidate, costs, edges) >= limit:
            return False
        cost = problem.edge_costs.price(*moved[src, src + 1])
        edges[src] = (cost.forward_seconds, cost.backward_seconds)
    if _bound(problem, candidate, costs, edges) >= limit:
        return False
    costs, _ = problem.costs(candidate.stages, candidate.num_microbatches)
    return _bound(problem, candidate, costs, edges) < limit


def _bound(problem: SearchProblem, candidate: Candidate, costs: Sequence[StageCost], edges: _EdgeSeconds) -> float:
    """A lower bound, in seconds, on a step under any schedule; tighter with the seconds of edges.

    Before a pp rank computes its microbatches, each stage before its first one computes a forward. Two things
    follow its microbatches: the sum of its gradients, and in each of these stages a backward without weight gradients.
    The same holds for the transfers of an edge. A pp rank with several stages may have made its early sums by then,
    except those of its last stage. No sum of a stage starts before the stage has computed all microbatches.
    """
    pp_ranks, count, is_sequential = candidate.pp_ranks, candidate.num_microbatches, problem.graph.is_sequential
    there, back, best = 0.0, 0.0, 0.0
    for number, cost in enumerate(costs):
        if pp_ranks[number] not in pp_ranks[:number]:
            own = [item for item, pp_rank in zip(costs, pp_ranks, strict=True) if pp_rank == pp_ranks[number]]
            worked, deferred = (
                count * sum(v) for v in zip(*((c.seconds, c.weight_grad_seconds) for c in own), strict=True)
            )
            sums, early = sum(item.sync_seconds for item in own), [item.early_sync_seconds for item in own]
            exposed = sums - (sum(early) - min(early))
            first = count * min(item.seconds for item in own)
            ending = max(worked + exposed, first + sums) + max(item.tie_seconds for item in own)
            best = max(best, there + ending, there + back + worked - deferred)
        if is_sequential:
            there += cost.forward_seconds
            back += cost.backward_seconds - cost.weight_grad_seconds
            if number in edges:
                forward, backward = edges[number]
                best = max(best, there + back + count * max(forward, backward))
                there, back = there + forward, back + backward
    return best


def _port_seconds(problem: SearchProblem, moved: Iterable[_Moved]) -> float:
    """The least seconds of the busiest port for the transfers of one microbatch: bytes over the rate of a host.

    The tensors of an edge leave the host of one end, and enter the host of the other end, at least once.
    """
    busy: dict[tuple[bool, int], float] = {}
    for tensors, num_samples, src, dst in moved:
        hosts = [{host for host, _, _ in problem.cluster.hosts_of(*end[:2])} for end in (src, dst)]
        if hosts[0] & hosts[1]:
            continue
        for is_backward in (False, True):
            carried = (tensor for tensor in tensors if tensor.has_gradient or not is_backward)
            nbytes = sum(tensor.sample_bytes for tensor in carried) * num_samples * problem.edge_costs.min_ratio
            for is_end, ends in enumerate(hosts):
                if len(ends) == 1:
                    (host,) = ends
                    port = (bool(is_end) != is_backward, host)
                    links = problem.cluster.topology.host(host)
                    rate = links.ingress_bytes_per_second if port[0] else links.egress_bytes_per_second
                    busy[port] = busy.get(port, 0.0) + nbytes / rate
    return max(busy.values(), default=0.0)
