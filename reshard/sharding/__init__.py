"""Meshes of ranks, layouts of tensors over them, and the regions that each rank holds and needs.

Imports only the modules at the root of :mod:`reshard`.
"""
