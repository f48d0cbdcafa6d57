"""Which pairs of layouts are measured, and on which clusters."""
