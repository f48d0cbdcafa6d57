"""Schedule builders: functions from a pipeline to a schedule."""
