"""The plan checker: it replays a plan and refuses one that is wrong. It imports :mod:`reshard.plan.value`."""
