"""Inputs and results of strategies, and strategies that send whole regions: direct sends, all-gathers, broadcasts."""
