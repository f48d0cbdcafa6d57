"""Search for a training strategy: stages, devices, parallelism inside stages, schedule and microbatches.

``search`` takes a model as a :class:`LayerGraph`, a :class:`Cluster` and a :class:`Profile`, and returns a
:class:`Strategy`, which ``Pipe(model, strategy=strategy)`` trains. Stands on the planner, the schedules, their
simulation and ``Pipe``; only ``modules`` imports torch.
"""

from __future__ import annotations

from .choices import Choice, ChoiceRules, Sharding
from .cluster import Cluster
from .costs import MIXED_PRECISION, StateBytes
from .graph import Layer, LayerGraph, Tensor
from .problem import Candidate, Problem
from .profile import ClassTimes, Profile, Sample
from .searching import search
from .strategy import Alternative, EdgeReport, StagePlan, StageReport, Strategy

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
    "Problem",
    "Profile",
    "Sample",
    "Sharding",
    "StagePlan",
    "StageReport",
    "StateBytes",
    "Strategy",
    "Tensor",
    "search",
]
