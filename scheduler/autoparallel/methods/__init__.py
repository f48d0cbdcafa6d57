"""Search methods: functions from a problem to candidates. ``METHODS`` names them.

Each returns its own choice first. The simulator decides among all that it returns.
"""
