"""The version, the one place that holds it."""

__version__ = "0.1.0"
