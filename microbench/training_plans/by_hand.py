"""Training plans made by hand, for measurements that need many of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import Cluster, LayerChoice, TrainingPlan
from reshard.scheduler.autoparallel.costs.iteration import evaluate
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.plan_making import make_training_plan
from reshard.scheduler.training.models.model_presets import GPTConfig, Preset, UTransformerConfig

#: Small models that train on CPU processes.
_UNTIED = GPTConfig(6, 4, 16, sequence=64, vocabulary=512, is_tied=False)
GPT = Preset(_UNTIED, 16, 3e-3, num_microbatches=4)
TIED_GPT = Preset(replace(_UNTIED, is_tied=True), 16, 3e-3, num_microbatches=4)
U_TRANSFORMER = Preset(UTransformerConfig(16, side=16, num_heads=4, groups=4), 16, 3e-3, num_microbatches=4)


def parse_stages(text: str) -> tuple[StagePlan, ...]:
    """Stages from a text such as ``"3:1 recompute, 5:2 zero"``: layers, a colon, ranks and words.

    ``tp`` divides the layers over all ranks of a stage, ``2x2x1`` puts them on a grid, ``zero`` shards states,
    ``recompute`` recomputes all layers, and ``half`` the first half of them. ``2@0`` are two layers on the ranks of
    stage 0.
    """
    stages: list[StagePlan] = []
    layer, following = 0, 0
    for part in text.split(","):
        sizes, *words = part.split()
        rank = following
        if "@" in sizes:
            count, other = map(int, sizes.split("@"))
            rank, ranks = stages[other].first_rank, stages[other].num_ranks
        else:
            count, ranks = map(int, sizes.split(":"))
            following += ranks
        again = count if "recompute" in words else (count + 1) // 2 if "half" in words else 0
        plain = LayerChoice(ranks if "tp" in words else 1, 3 if "zero" in words else 0)
        for word in words:
            if "x" in word:
                plain = LayerChoice.on_grid(*map(int, word.split("x")), zero=plain.zero)
        choices = (replace(plain, recompute=True),) * again + (plain,) * (count - again)
        stages.append(StagePlan(layer, layer + count, rank, rank + ranks, choices))
        layer += count
    return tuple(stages)


def make_by_hand(
    problem: SearchProblem,
    cluster: Cluster,
    stages: Sequence[StagePlan],
    num_microbatches: int,
    *,
    thorough: bool = False,
) -> tuple[SearchProblem, TrainingPlan]:
    """The training plan of these stages under its fastest schedule, with all predictions, and its problem.

    ``thorough``: ``auto_schedule`` may be its schedule, too.
    """
    changed = problem.changed(cluster=cluster, microbatch_counts=(num_microbatches,))
    evaluation = evaluate(changed, Candidate("by hand", tuple(stages), num_microbatches), thorough=thorough)
    if evaluation is None:
        raise ArgumentError(f"no schedule runs {stages}")
    return changed, make_training_plan(changed, evaluation, [])
