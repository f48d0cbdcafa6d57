"""What the network is: hosts, their NICs and pods, how fast links are, and presets of common machines.

Imports the root and :mod:`reshard.sharding`.
"""
