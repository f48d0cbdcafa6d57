"""The engine that runs a schedule on processes.

Only this package and :mod:`reshard.scheduler.training` import torch.
"""
