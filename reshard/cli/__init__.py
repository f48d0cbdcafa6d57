"""The ``reshard`` command: plans, reports, demo and doctor.

May import every package of ``reshard``. Other packages register their subcommands as entry points.
"""
