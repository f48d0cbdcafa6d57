"""Search for a training strategy: stages, devices, parallelism inside stages, schedule and microbatches.

``search`` takes a model as a :class:`LayerGraph`, a :class:`Cluster` and a :class:`Profile`, and returns a
:class:`Strategy`, which ``Pipe(model, strategy=strategy)`` trains. Stands on the planner, the schedules, their
simulation and ``Pipe``; only ``modules`` imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .choices import Choice, ChoiceRules, Sharding
from .cluster import Cluster
from .costs import MIXED_PRECISION, StateBytes
from .graph import Layer, LayerGraph, Tensor
from .problem import Candidate, Problem
from .profile import ClassTimes, Profile, Sample
from .result.reports import Alternative, EdgeReport, StageReport, TieReport
from .result.stages import StagePlan
from .result.strategy import Strategy
from .searching import choose_strategy, search
from .tuning import Measurement, Round, Tuned, tune

if TYPE_CHECKING:
    from .modules.profiling import profile_layers
    from .modules.tracing import TracedModel, trace_module

#: Public names whose modules import torch. These modules are imported on first use.
_WITH_TORCH = {"TracedModel": "tracing", "profile_layers": "profiling", "trace_module": "tracing"}

__all__ = [
    "MIXED_PRECISION",
    "Alternative",
    "Candidate",
    "Choice",
    "ChoiceRules",
    "ClassTimes",
    "Cluster",
    "EdgeReport",
    "Layer",
    "LayerGraph",
    "Measurement",
    "Problem",
    "Profile",
    "Round",
    "Sample",
    "Sharding",
    "StagePlan",
    "StageReport",
    "StateBytes",
    "Strategy",
    "Tensor",
    "TieReport",
    "TracedModel",
    "Tuned",
    "choose_strategy",
    "profile_layers",
    "search",
    "trace_module",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'reshard.scheduler.autoparallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.modules.{_WITH_TORCH[name]}"), name)
