"""Functions from a pipeline to a schedule."""
