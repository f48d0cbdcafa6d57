"""Strategies that send whole regions: direct sends, all-gathers and broadcasts."""
