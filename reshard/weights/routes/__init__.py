"""The ways of versions from a source model to others: plans and connections, lossless formats and their choice.

Imports :mod:`reshard.weights.membership` and :mod:`reshard.weights.model`, but no module of the package above.
"""
