"""Planning: strategies, the choice among them, and recovery plans.

May import :mod:`reshard.cost` and the layers below it.
"""
