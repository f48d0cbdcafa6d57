"""Schedules as values: actions, text formats, and where transfers are placed."""
