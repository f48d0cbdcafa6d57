"""Search methods: functions from a problem to candidates. ``METHODS`` names them.

A method returns its own choice first. The simulator decides among all candidates that a method returns.
"""
