"""The calls that users make, with tensors. Users import them from :mod:`reshard`.

Imports every package but :mod:`reshard.testing` and the front ends.
"""
