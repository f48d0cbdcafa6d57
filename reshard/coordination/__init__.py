"""How ranks find each other, agree on a call, and learn that one of them failed.

Imports :mod:`reshard.runtime` and what that imports.
"""
