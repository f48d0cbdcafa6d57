"""The network topology: hosts, NICs, pods and link rates; topology files; presets of common machines.

Imports the root and :mod:`reshard.sharding`.
"""
