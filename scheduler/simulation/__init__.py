"""Simulation, checking and visualization of schedules."""
