"""Runs a schedule on processes: one row's actions in order, transfers between stages behind them.

A rank belongs to one row, and does what every other rank of that row does. Stages are ordinary modules; what is
parallel inside one is torch's affair. Only this module and those that it imports need torch.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.coordination.communicator import find_channel
from reshard.coordination.decide import Request, describe_error, resolve
from reshard.coordination.liveness.call_sequence import report_error
from reshard.coordination.process_group import check_inside, find_group
from reshard.errors import ArgumentError, RemoteError, ReshardError
from reshard.formatting import format_ranks
from reshard.planner.strategies.problem import Strategy
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology.files import topology_to_json
from reshard.topology.model import Topology

from ..graph import Pipeline
from ..ir.schedule import Kind, Schedule
from ..ir.text import format_schedule
from ..simulation.replay import PipelineTimeline
from ..simulation.validate import check_schedule, has_one_order
from .data_parallel import LossShards, check_loss_shards, warn_of_drift
from .executor import Iteration, Parts, Step
from .grad_sync import ReplicaSync, find_replicas
from .p2p import StageTransfers, find_device_type, make_channel_movers
from .stage import StageRun
from .tied_params import TiedParameter, TiedParameters, check_ties
from .timeline_gather import gather

#: ``{stage: [{name: tensor} of each microbatch]}``
Feed = Mapping[int, Sequence[Mapping[str, Any]]]


class Engine:
    """Runs a schedule, iteration after iteration. Every rank of the pipeline makes one, and calls it equally often.

    Gradients add up in the parameters' ``.grad``, as those of the total loss: the weighted sum over microbatches, and
    over ranks of the losses of replicas that see different data. What to do with them is the caller's affair.

    Args:
        schedule: what to run. pipeline: what it is made for; every stage with a mesh, every edge with tensors.
        modules: of each stage of this rank. A module is called with named tensors, those that edges bring and those
            that it is fed, each this rank's shard; it returns ``{name: tensor}``, shards or DTensors (pending sums are
            reduced), with the tensors that edges take and, to start a backward from, a scalar "loss".
        group: whose ranks the meshes name; omitted, the world.
        topology, strategy: how tensors move; omitted, by host names and by default.
        last_pipeline: the same pipeline with the tensors of the last microbatch, where that is smaller than the others;
            its loss weighs as much less.
        ties: parameters that several stages have; the first stage's values are taken by the others now. A stage whose
            ranks see different data needs DDP or FSDP there.
        num_loss_shards: how many replicas of the stage with the loss see different data; the total is their mean. Where
            several stages give a loss, ``{stage: number}``, 1 for those left out.
        signal_only: move one element in place of each tensor, and compute on zeros; shows what communication costs.
        timeout_seconds: how long ranks may take to agree, and each transfer to finish, including the wait for whoever
            has yet to compute what it brings. A rank that is alive but silent is named after 30 s; with less than that
            the error may name one that waits for it itself.

    Raises:
        ScheduleError: the schedule does not fit the pipeline. ArgumentError: modules or meshes do not fit.
        DisagreementError: ranks pass different schedules or pipelines.
    """

    def __init__(
        self,
        schedule: Schedule,
        pipeline: Pipeline,
        modules: Mapping[int, torch.nn.Module],
        *,
        group: Any = None,
        topology: Topology | None = None,
        strategy: str | Strategy | None = None,
        last_pipeline: Pipeline | None = None,
        ties: Sequence[TiedParameter] = (),
        num_loss_shards: LossShards = 1,
        signal_only: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        self._group = find_group(group)
        self._broken: BaseException | None = None
        self._closed = False
        self._stepping = threading.Lock()
        self._stages: dict[int, StageRun] = {}
        try:
            _check_types(schedule, pipeline, last_pipeline, ties)
            ranks = _find_ranks(pipeline)
            check_inside(self._group, ranks)
        except ReshardError as error:
            report_error(self._group, error)
            raise
        channel = self._channel = find_channel(self._group, ranks)
        request = Request(self._group.rank, hostname=self._group.hostname)
        agreeing_seconds = DEFAULT_TIMEOUT_SECONDS
        try:
            agreeing_seconds = timeout_seconds = self._timeout_seconds = check_timeout(timeout_seconds)
            if topology is not None and not isinstance(topology, Topology):
                raise ArgumentError(f"topology must be a Topology, not {type(topology).__name__}")
            check_schedule(schedule, pipeline)
            rows = _find_rows(schedule, pipeline)
            self.row = next(row for row, its in enumerate(rows) if self._group.rank in its)
            _check_last(pipeline, last_pipeline)
            self._last_weight = _weigh_last(pipeline, last_pipeline)
            check_loss_shards(num_loss_shards, pipeline)
            self._stages = self._make_stages(modules)
            if self._group.process_group is not None:
                self._find_replicas()  # are they ranks of their stage?
            check_ties(ties, pipeline, modules, self._group.rank)
            request.arguments = _describe(schedule, pipeline, last_pipeline, strategy, topology)
            request.arguments.append(("the number of ties", str(len(ties))))
            request.arguments += [(f"tie {number}", str(tie)) for number, tie in enumerate(ties)]
            request.arguments += [("num_loss_shards", _sorted_text(num_loss_shards)), ("signal_only", str(signal_only))]
            device = find_device_type(modules)
            request.arguments.append(("the type of device", device))
        except Exception as error:  # whatever is wrong on this rank, the others must hear of it
            request.error, device = describe_error(error), "cpu"
        _, decision = channel.agree(request, lambda requests: resolve(requests, {}), agreeing_seconds)
        if topology is None:
            topology = Topology.from_hostnames([decision.hostnames.get(rank, "") for rank in range(ranks[-1] + 1)])
        pipelines = tuple(one for one in (pipeline, last_pipeline) if one is not None)
        transfers = []
        for one in pipelines:
            ways = make_channel_movers(one, schedule.row_of_stage, topology, strategy, signal_only=signal_only)
            options = {"signal_only": signal_only, "apart": not has_one_order(schedule)}
            transfers.append(StageTransfers(ways, self._group, timeout_seconds, device=device, **options))
        for stage, run in self._stages.items():
            warn_of_drift(pipeline, stage, run.module)
        try:
            replicas = [
                ReplicaSync(stage, self._stages[stage].module, self._group, its, device, timeout_seconds)
                for stage, its in self._find_replicas().items()
            ]
        except ReshardError as error:
            for each in transfers:  # ranks of other stages begin a step meanwhile
                each.fail(error)
            raise
        joined = TiedParameters(ties, pipeline, modules, self._group, topology, strategy, timeout_seconds, device)
        joined.share_values()
        self._parts = Parts(
            schedule, self.row, self._stages, pipelines, tuple(transfers), tuple(replicas), joined, num_loss_shards
        )
        self._iteration: Iteration | None = None

    def _make_stages(self, modules: Mapping[int, torch.nn.Module]) -> dict[int, StageRun]:
        ours = [stage for stage, row in enumerate(self.schedule.row_of_stage) if row == self.row]
        if not isinstance(modules, Mapping):
            raise ArgumentError(f"modules are {{stage: module}}, not {type(modules).__name__}")
        if set(modules) != set(ours):
            raise ArgumentError(f"rank {self._group.rank} computes stages {ours}, but has modules for {[*modules]}")
        halves: dict[int, set[int]] = {stage: set() for stage in ours}
        for action in self.schedule.rows[self.row]:
            if action.kind is Kind.W:
                halves[action.stage].add(action.microbatch)
        return {
            stage: StageRun(stage, modules[stage], self.pipeline, self._group.rank, halves[stage]) for stage in ours
        }

    def _find_replicas(self) -> dict[int, tuple[int, ...]]:
        """Of each stage of this rank that is under DDP the ranks that DDP joins."""
        found = {}
        for stage, run in self._stages.items():
            mesh = self.pipeline.stages[stage].mesh
            assert mesh is not None
            found[stage] = find_replicas(self._group, stage, run.module, mesh)
        return {stage: ranks for stage, ranks in found.items() if ranks}

    def step(self, feed: Feed | None = None, *, loss_weights: Sequence[float] | None = None) -> Step:
        """One iteration: forward and backward of every microbatch, and sums over replicas.

        Args:
            feed: what stages of this rank get from outside, ``{stage: [{name: tensor} of each microbatch]}``; stages of
                other ranks are passed over.
            loss_weights: of each microbatch's loss in the total, equal on all ranks; omitted, all alike, a smaller last
                one as much less as its tensors are smaller.

        Raises:
            ReshardError: this rank or another failed; the same on all ranks in time. The engine cannot go on then.
        """
        self._group.check_usable()
        if self._closed:
            raise ArgumentError("this engine is closed")
        if self._broken is not None:
            raise ArgumentError(f"this engine cannot go on after an error: {self._broken}") from self._broken
        if not self._stepping.acquire(blocking=False):
            raise ArgumentError("this engine is in a step already, of another thread or of a module that it calls")
        try:
            fed = self._check_feed({} if feed is None else feed)
            self._iteration = Iteration(self._parts, fed, self._check_weights(loss_weights))
            return self._iteration.run()
        except BaseException as error:
            self._broken = error
            error = self._place(error)
            for stage in self._stages.values():
                stage.forget()
            for transfers in self._parts.transfers:
                transfers.fail(error)
            for replicas in self._parts.replicas:
                replicas.fail(error)
            self._parts.ties.fail(error)
            raise
        finally:
            self._stepping.release()

    def _place(self, error: BaseException) -> BaseException:
        """An error of this rank's own code as others are told of it, with what it was doing."""
        doing = None if self._iteration is None else self._iteration.doing
        if doing is None:
            return error
        where = f"in {doing}, microbatch {doing.microbatch} of stage {doing.stage}"
        error.add_note(f"{where} of the schedule {self.schedule.name!r}")
        if isinstance(error, ReshardError):
            return error
        if doing.kind is Kind.I:
            error.add_note(
                "This backward is made in two halves. A module that asks for gradients in its forward "
                "needs whole ones: auto_schedule(..., can_split=False)"
            )
        return RemoteError(f"rank {self._group.rank} {where}: {type(error).__name__}: {error}")

    def timeline(self) -> PipelineTimeline:
        """When everything of the last step happened, on all ranks; every rank of the pipeline calls.

        Raises:
            ArgumentError: no step has been done yet. TransferTimeoutError: another rank does not call.
        """
        if self._iteration is None:
            raise ArgumentError("no step has been done yet, so there is no timeline")
        return gather(self._iteration.measured, self._channel, self._timeout_seconds)

    def close(self) -> None:
        """End the threads that move tensors."""
        self._closed = True
        for transfers in self._parts.transfers:
            transfers.close()
        self._parts.ties.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_feed(self, feed: Feed) -> dict[int, Sequence[Mapping[str, Any]]]:
        num = self.schedule.num_microbatches
        if not isinstance(feed, Mapping):
            raise ArgumentError(f"feed is {{stage: [{{name: tensor}}, ...]}}, not {type(feed).__name__}")
        for stage, rows in feed.items():
            if not isinstance(rows, Sequence):
                raise ArgumentError(
                    f"stage {stage} is fed {type(rows).__name__}; it needs a list, one for each microbatch"
                )
            if stage not in range(len(self.pipeline.stages)):
                raise ArgumentError(f"stage {stage!r} is fed; there are stages 0 to {len(self.pipeline.stages) - 1}")
            if len(rows) != num or not all(isinstance(row, Mapping) for row in rows):
                raise ArgumentError(
                    f"stage {stage} is fed {len(rows)} microbatches; it needs {num}, each {{name: tensor}}"
                )
        return {stage: feed.get(stage, ({},) * num) for stage in self._stages}

    def _check_weights(self, loss_weights: Sequence[float] | None) -> list[float]:
        num = self.schedule.num_microbatches
        if loss_weights is None:
            parts = [1.0] * (num - 1) + [self._last_weight]
            weights = [part / sum(parts) for part in parts]
        else:
            try:
                if isinstance(loss_weights, str):
                    raise TypeError
                weights = [float(weight) for weight in loss_weights]
            except (TypeError, ValueError):
                raise ArgumentError(f"loss_weights are {num} numbers, not {loss_weights!r}") from None
            if len(weights) != num or not all(map(math.isfinite, weights)):
                raise ArgumentError(f"loss_weights are {num} finite numbers, not {loss_weights!r}")
        return weights


def _check_types(schedule: Any, pipeline: Any, last_pipeline: Any, ties: Any) -> None:
    wanted = [("schedule", schedule, Schedule), ("pipeline", pipeline, Pipeline)]
    if last_pipeline is not None:
        wanted.append(("last_pipeline", last_pipeline, Pipeline))
    if not isinstance(ties, Sequence):
        raise ArgumentError(f"ties are a list of TiedParameter, not {type(ties).__name__}")
    for what, value, kind in [*wanted, *(("a tie", tie, TiedParameter) for tie in ties)]:
        if not isinstance(value, kind):
            raise ArgumentError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")


def _weigh_last(pipeline: Pipeline, last: Pipeline | None) -> float:
    """How much smaller the last microbatch is: the part that all its tensors have that are smaller."""
    if last is None:
        return 1.0
    both = [
        (math.prod(b.shape), math.prod(a.shape))
        for edge, its in zip(pipeline.edges, last.edges, strict=True)
        for a, b in zip(edge.tensors, its.tensors, strict=True)
        if a.shape != b.shape
    ]
    parts = {small / whole for small, whole in both if whole}
    if len(parts) > 1:
        raise ArgumentError(
            f"tensors of last_pipeline are {', '.join(f'{part:.3g}' for part in sorted(parts))} of the others in size, "
            "so nothing says what its loss weighs; shapes should differ in the rows of the microbatch alone"
        )
    if 0 in parts:
        raise ArgumentError("tensors of last_pipeline are empty; leave the last microbatch away")
    return parts.pop() if parts else 1.0


def _find_ranks(pipeline: Pipeline) -> tuple[int, ...]:
    """All ranks, ascending."""
    ranks: set[int] = set()
    for stage, each in enumerate(pipeline.stages):
        if each.mesh is None:
            raise ArgumentError(f"stage {stage} has no mesh; to run a pipeline each needs one")
        ranks.update(each.mesh.ranks)
    return tuple(sorted(ranks))


def _find_rows(schedule: Schedule, pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The ranks of each row, ascending."""
    rows: list[tuple[int, ...] | None] = [None] * len(schedule.rows)
    for stage, row in enumerate(schedule.row_of_stage):
        mesh = pipeline.stages[stage].mesh
        assert mesh is not None
        ranks = tuple(sorted(mesh.ranks))
        if rows[row] is None:
            rows[row] = ranks
        elif rows[row] != ranks:
            raise ArgumentError(
                f"row {row} has stages on ranks {format_ranks(rows[row] or ())} and on {format_ranks(ranks)}; "
                "those of one row need the same"
            )
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        raise ArgumentError(f"row {rows.index(None)} has no stage")
    owner: dict[int, int] = {}
    for row, ranks in enumerate(found):
        for rank in ranks:
            if owner.setdefault(rank, row) != row:
                raise ArgumentError(f"rank {rank} is on rows {owner[rank]} and {row}; it can be on one")
    for edge in pipeline.edges:
        if not edge.tensors:
            raise ArgumentError(f"edge {edge.src} -> {edge.dst} has no tensors; to run a pipeline it needs them")
    return found


def _check_last(pipeline: Pipeline, last: Pipeline | None) -> None:
    if last is None:
        return

    def outline(one: Pipeline) -> list[Any]:
        return [
            (
                edge.src,
                edge.dst,
                edge.without_gradient,
                [(t.name, t.dtype, t.src.ranks, t.dst.ranks) for t in edge.tensors],
            )
            for edge in one.edges
        ]

    if outline(pipeline) != outline(last) or len(pipeline.stages) != len(last.stages):
        raise ArgumentError(
            "last_pipeline must have the stages and edges of the pipeline, and on each the same tensors but for shape"
        )


def _sorted_text(given: LossShards) -> str:
    return str(dict(sorted(given.items())) if isinstance(given, Mapping) else given)


def _describe(
    schedule: Schedule, pipeline: Pipeline, last: Pipeline | None, strategy: Any, topology: Topology | None
) -> list[tuple[str, str]]:
    """What ranks compare."""
    text = format_schedule(schedule)
    said = [
        ("the schedule", schedule.name),
        ("the number of microbatches", str(schedule.num_microbatches)),
        ("the schedule's actions", hashlib.sha256(text.encode()).hexdigest()[:16]),
    ]
    for name, one in (("pipeline", pipeline), ("last_pipeline", last)):
        for edge in one.edges if one is not None else ():
            tensors = "; ".join(map(str, edge.tensors))
            said.append((f"edge {edge.src} -> {edge.dst} of {name}", f"{tensors} {sorted(edge.without_gradient)}"))
    said.append(("strategy", getattr(strategy, "__name__", str(strategy))))
    said.append(("topology", "by host names" if topology is None else str(topology_to_json(topology))))
    return said
