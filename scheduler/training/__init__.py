"""Models that are split into pipeline stages, and the command that trains them."""
