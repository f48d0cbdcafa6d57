"""How long a plan takes: the lower bound of a problem, the simulator of plans, and the load of each port.

Imports :mod:`reshard.plan.model` and what that imports.
"""
