"""Who sends what to whom, and when: strategies, the choice among them, and recovery plans.

Imports :mod:`reshard.cost` and what that imports.
"""
