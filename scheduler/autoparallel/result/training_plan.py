"""The result of a search: the ranks and the choices of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inputs.text_files import read_value, write_text
from .explain import explain_training_plan
from .record import TrainingPlanRecord
from .training_plan_drawing import draw_training_plan
from .training_plan_page import draw_stages, training_plan_to_html


@dataclass(frozen=True)
class TrainingPlan(TrainingPlanRecord):
    """Stages, schedule and microbatches of a training, with their predicted time and memory.

    ``Pipe(model, training_plan=found)`` trains it. It is the same on every rank and from run to run.

    Attributes:
        method: the method that found it.
        stages: the stages, in order.
        layer_names: for each stage, the names of its layers.
        num_microbatches, num_samples: numbers of microbatches and of samples of a step.
        schedule_text: the schedule, as :func:`reshard.scheduler.parse_schedule` reads it.
        seconds: predicted seconds of a step, with the sums of gradients.
        bound_seconds: lower bound of the seconds of all plans of this model and profile on all devices. With
            ``is_bound_of_parts``, it also bounds the plans on each part of the devices that ``auto`` considers.
        is_guess: whether the profile is an estimate.
        graph_hash, profile_hash, cluster_hash: hashes of the inputs of the search.
        reports, edges: details of each stage and edge.
        alternatives: other candidates, fastest first.
        wider_links_seconds: predicted seconds with the same schedule if links were 10 % faster.
        hosts: host, first rank and end of each host.
        grid_refusals: layers that cannot be on a grid of :mod:`reshard.parallel`, and why: the first of each class.
        ties: sums over stages of the gradients of parameters that they share.
        ranks: for each rank of the plan, its rank in the cluster. Empty: all ranks in their order. Start the training
            on these ranks, or pass their process group to ``Pipe``.
        num_cluster_ranks: ranks of the cluster, if ``ranks`` is not empty.
        on_all_seconds: predicted seconds of the best plan on all ranks in their order; 0: none fits.
        is_on_all_bound: whether ``on_all_seconds`` is a lower bound of plans with one stage on each rank, because none
            was searched on all ranks.
        compression_text: the codecs, as :func:`reshard.compression.parse_policy` reads them.
    """

    def explain(self) -> str:
        """An explanation: where time and memory go, costs of edges, distance from the bound, and other candidates."""
        return explain_training_plan(self)

    def to_svg(self) -> str:
        """A drawing of the stages on their hosts, with the seconds and the busiest link of each edge."""
        return draw_training_plan(self)

    def to_html(self) -> str:
        """A self-contained HTML page: a bar of time and of memory for each stage, the schedule, and all figures."""
        return training_plan_to_html(self)

    def _repr_html_(self) -> str:
        return draw_stages(self)

    def placements(self) -> list[Any]:
        """A :class:`reshard.scheduler.Placement` for each stage. Imports torch.

        Raises:
            ArgumentError: ``Pipe`` cannot run the training plan.
        """
        from ..modules.apply import make_placements

        return make_placements(self.stages, self.layer_names)

    def save(self, path: str | Path) -> None:
        """Write the training plan as JSON."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def read(cls, path: str | Path) -> TrainingPlan:
        """Read what :meth:`save` wrote.

        Raises:
            ArgumentError: the file cannot be read, or does not hold a training plan of this version.
        """
        return read_value(path, cls.from_json)
