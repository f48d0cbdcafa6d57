"""What strategies take and return, and strategies that send whole regions: direct sends, all-gathers, broadcasts."""
