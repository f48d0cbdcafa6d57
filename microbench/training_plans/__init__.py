"""Measurements of the strategy search: predicted against measured seconds and bytes, and methods against each other."""
