"""Search methods: functions from a problem to candidates. ``METHODS`` of ``auto_method.py`` names all but ``auto``.

A method returns its own choice first. The simulator decides among all candidates that a method returns.
"""
