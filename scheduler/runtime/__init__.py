"""Run a schedule on processes: modules, meshes and costs are given. It imports torch.

``ScheduleEngine`` runs the actions of each rank, the transfers between stages and the sums of gradients. It knows no
model and no batch: :mod:`reshard.scheduler.model_stages`, the layer above, cuts both and makes a ``ScheduleEngine``.
"""
