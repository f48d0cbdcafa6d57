"""Passes: functions from a schedule to a schedule."""
