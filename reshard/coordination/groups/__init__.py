"""The group of a user: its members, its store, and the messages that its ranks exchange.

Imports :mod:`reshard.runtime.transport` and the root. Nothing here imports another module of ``coordination``.
"""
