"""Plans read from text, and read from and written as JSON. It imports :mod:`reshard.plan.value`."""
