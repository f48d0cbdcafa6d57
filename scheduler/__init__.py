"""Pipeline schedules that know what resharding costs; installed as ``reshard.scheduler``.

Nothing in ``reshard`` imports this package: schedules stand above the transfers that they interleave.
"""
