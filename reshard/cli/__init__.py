"""The ``reshard`` command: plans, reports, demo and doctor.

May import every package of ``reshard``. Its commands, and those of other packages, are entry points.
"""
