"""A plan as a value: transfers, messages, their order; its checker and its text and JSON formats.

Imports the root, :mod:`reshard.sharding` and :mod:`reshard.topology.model`. It solves and simulates nothing.
"""
