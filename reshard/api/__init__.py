"""The calls that users make with tensors; users import them from :mod:`reshard`.

May import every package except :mod:`reshard.testing` and the front ends.
"""
