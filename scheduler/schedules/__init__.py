"""Schedule builders: functions from a pipeline to a schedule.

May import ``passes`` and the packages below it.
"""
