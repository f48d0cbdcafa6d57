"""Passes: functions from a schedule to a schedule.

May import ``simulation`` and the packages below it.
"""
