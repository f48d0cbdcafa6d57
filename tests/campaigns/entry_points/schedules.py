"""Calls with pipelines, their schedules and their engine."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from torch import nn

from reshard import TensorSpec, Topology, scheduler
from tests.campaigns.entry_points.samples import Chain, fields_of, plans


@functools.cache
def _scheduled():
    pipeline = scheduler.Pipeline.of_costs([1.0] * 4, [2.0] * 4, [0.5] * 3)
    schedule = scheduler.one_f_one_b(pipeline, 3)
    return pipeline, schedule, scheduler.simulate_schedule(schedule, pipeline)


def of_schedules():
    pipeline, schedule, timeline = _scheduled()
    rows, columns, plan = plans()
    profile = scheduler.StageProfile(
        4, tuple(scheduler.model_stages.profile.StageTimes(1.0, 1.0, 1.0, 2.0, 8) for _ in range(4))
    )
    folder = tempfile.mkdtemp()
    built = {"pipeline": pipeline, "num_microbatches": 3}
    looped = built | {"num_microbatches": 4, "num_pp_ranks": 2}
    chain, example = Chain(), {"x": torch.ones(4, 4)}
    pipe = scheduler.Pipe(chain, ["layers.2"], stages="1x1,1x1")
    alone = scheduler.Pipe(Chain(), [], stages="1x1")
    tensors = [TensorSpec((6, 4), "float32", rows, columns, "w")]
    profile_of_two = scheduler.StageProfile(2, profile.stages[:2])
    engine = alone.compile(example, 2, schedule=scheduler.gpipe, profile=scheduler.StageProfile(2, profile.stages[:1]))
    saved = Path(folder) / "checkpoint"
    engine.save(saved)
    profile.save(f"{folder}/read.json")
    return {
        "Stage": (scheduler.Stage, fields_of(pipeline.stages[0])),
        "Edge": (scheduler.Edge, fields_of(pipeline.edges[0])),
        "Pipeline": (scheduler.Pipeline, fields_of(pipeline)),
        "Pipeline.of_costs": (
            scheduler.Pipeline.of_costs,
            {"forward": [1.0, 1.0], "backward": [2.0, 2.0], "communication": [0.5], "weight_grad_part": 0.5},
        ),
        "Pipeline.ideal_seconds": (pipeline.ideal_seconds, {"num_microbatches": 3}),
        "plan_edge": (
            scheduler.plan_edge,
            {"src": 0, "dst": 1, "tensors": tensors, "topology": plan.topology, "strategy": None}
            | {"without_gradient": ["w"]},
        ),
        "Schedule": (scheduler.Schedule, fields_of(schedule)),
        "Schedule.first": (schedule.first, {"num_microbatches": 2}),
        "Schedule.peak_bytes": (schedule.peak_bytes, {"pipeline": pipeline}),
        "Schedule.to_networkx": (schedule.to_networkx, {"pipeline": pipeline}),
        "parse_schedule": (scheduler.parse_schedule, {"text": str(schedule)}),
        "from_torch_csv": (
            scheduler.from_torch_csv,
            {"text": scheduler.to_torch_csv(schedule), "pipeline": pipeline, "name": "x"},
        ),
        "to_torch_csv": (scheduler.to_torch_csv, {"schedule": schedule, "transfers": False}),
        "overlap_transfers": (scheduler.overlap_transfers, {"schedule": schedule, "pipeline": pipeline}),
        "auto_schedule": (
            scheduler.auto_schedule,
            built | {"activation_limit_bytes": 100, "pp_rank_of_stage": [0, 1, 2, 3], "can_split": True},
        ),
        "eager_1f1b": (scheduler.eager_1f1b, built),
        "gpipe": (scheduler.gpipe, built),
        "one_f_one_b": (scheduler.one_f_one_b, built),
        "zb_h1": (scheduler.zb_h1, built),
        "zb_h2": (scheduler.zb_h2, built),
        "zb_v": (scheduler.zb_v, built),
        "dualpipe_v": (scheduler.dualpipe_v, built),
        "interleaved_1f1b": (scheduler.interleaved_1f1b, looped),
        "interleaved_zero_bubble": (scheduler.interleaved_zero_bubble, looped),
        "looped_bfs": (scheduler.looped_bfs, looped),
        "find_lower_bound": (
            scheduler.find_lower_bound,
            built | {"activation_limit_bytes": [100] * 4, "pp_rank_of_stage": [0, 1, 2, 3], "can_split": True},
        ),
        "critical_path": (scheduler.critical_path, {"schedule": schedule, "pipeline": pipeline}),
        "simulate_schedule": (scheduler.simulate_schedule, {"schedule": schedule, "pipeline": pipeline}),
        "check_schedule": (
            scheduler.check_schedule,
            {"schedule": schedule, "pipeline": pipeline, "activation_limit_bytes": 100},
        ),
        "to_chrome_trace": (scheduler.to_chrome_trace, {"timeline": timeline}),
        "to_html": (scheduler.to_html, {"schedule": schedule, "timeline": timeline}),
        "to_svg": (scheduler.to_svg, {"schedule": schedule, "timeline": timeline}),
        "StageProfile": (scheduler.StageProfile, fields_of(profile)),
        "StageTimes": (scheduler.model_stages.profile.StageTimes, fields_of(profile.stages[0])),
        "StageProfile.apply": (profile.apply, {"pipeline": pipeline, "num_samples": 8}),
        "StageProfile.save": (profile.save, {"path": f"{folder}/profile.json"}),
        "StageProfile.load": (scheduler.StageProfile.load, {"path": f"{folder}/read.json"}),
        "Placement": (
            scheduler.Placement,
            {"dp": 1, "tp": 2, "grid": None, "tp_plan": {}, "wrap": None, "prepare": None, "ranks": (0, 1)}
            | {"keep_inputs": False},
        ),
        "Placement on a grid": (scheduler.Placement, {"grid": (1, 2, 1), "ranks": (0, 1), "keep_inputs": True}),
        "Block": (
            scheduler.Block,
            {"path": "layers.0", "run": nn.Identity(), "modules": ("layers.0",), "recomputed": ()},
        ),
        "Pipe": (
            scheduler.Pipe,
            {"model": chain, "cut_before": ["layers.2"], "stages": [scheduler.Placement(), scheduler.Placement()]}
            | {"training_plan": None, "init": None, "autocast": torch.bfloat16, "tp_plan": None, "loss": None},
        ),
        "Pipe.cut": (pipe.cut, {"inputs": ["x"]}),
        "Pipe.pipeline": (
            pipe.pipeline,
            {"example": example, "num_microbatches": 2, "profile": profile_of_two, "topology": Topology((0, 1))},
        ),
        "Pipe.compile": (
            lambda **options: alone.compile(**options).close(),
            {"example": example, "num_microbatches": 2, "schedule": scheduler.gpipe, "device": "cpu", "group": None}
            | {"profile": scheduler.StageProfile(2, profile.stages[:1]), "topology": Topology((0,))}
            | {"activation_limit_bytes": 10**9, "compression": None, "timeout_seconds": 10.0},
        ),
        "step": (
            engine.step,
            {"batch": example, "accumulate": 1, "local_batch": False, "timeline": False},
        ),
        "evaluate": (engine.evaluate, {"batch": example, "local_batch": False}),
        "local_samples": (engine.local_samples, {"num_samples": 4, "accumulate": 1}),
        "clip_grad_norm_": (engine.clip_grad_norm_, {"max_norm": 1.0, "norm_type": 2.0}),
        "measure": (engine.measure, {"batch": example}),
        "save": (
            engine.save,
            {"path": saved, "optimizer": None, "lr_scheduler": None, "loader": None, "step": 1, "keep": 2},
        ),
        "load": (
            engine.load,
            {"path": saved, "optimizer": None, "lr_scheduler": None, "loader": None, "step": None}
            | {"missing_ok": False, "trust_pickle": False},
        ),
    }
