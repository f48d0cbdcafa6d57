"""Gradients of a training step: weight gradients that a backward defers, and gradients that groups of ranks sum.

Imports :mod:`reshard.runtime` and the packages below it.
"""
