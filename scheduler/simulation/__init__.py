"""Simulation, checking and visualization of schedules.

May import ``ir`` and the packages below it.
"""
