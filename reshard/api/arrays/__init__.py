"""The arrays of a transfer, below every call: what may be moved, what is in use, casts, and layouts of DTensors.

Imports no other module of :mod:`reshard.api`.
"""
