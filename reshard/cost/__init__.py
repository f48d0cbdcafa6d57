"""The time of a plan: the lower bound of its problem, its simulation, and the load of each port.

Imports :mod:`reshard.plan` and the layers below it.
"""
