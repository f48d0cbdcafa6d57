"""Schedules as values: their actions, their text, and the check that one is complete and ends."""
