"""A plan as a value: its transfers, messages and their order; its checker; its text and JSON formats.

Imports the root, :mod:`reshard.sharding` and :mod:`reshard.topology.model`. It neither solves nor simulates.
"""
