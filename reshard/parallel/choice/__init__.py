"""The choice of a grid for a model: costs of collectives and layers on each grid, without torch.

Imports :mod:`reshard.parallel.grid` and :mod:`reshard.parallel.products`, but no module of the package above.
"""
