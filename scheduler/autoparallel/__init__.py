"""Search for a training plan: stages, devices, parallelism inside stages, schedule and microbatches.

``search`` takes a model as a :class:`LayerGraph`, a :class:`Cluster` and a :class:`Profile`, and returns a
:class:`TrainingPlan`, which ``Pipe(model, training_plan=found)`` trains. Stands on the planner, the schedules, their
simulation and ``Pipe``; only ``modules`` imports torch.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
