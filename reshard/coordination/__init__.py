"""How ranks find each other, agree on each call, and detect failures.

Imports :mod:`reshard.runtime` and the packages below it.
"""
