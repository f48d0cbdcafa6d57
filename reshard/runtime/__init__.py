"""One rank's part of a plan, and what runs it: on the CPU, on a GPU, or in rounds of grouped messages.

Imports :mod:`reshard.plan.model` and what that imports. Modules in this folder do not import torch.
"""
