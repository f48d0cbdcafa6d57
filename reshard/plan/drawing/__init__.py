"""The drawing of a plan: boxes of hosts, and arrows between them. It imports :mod:`reshard.plan.value`."""
