"""The command ``reshard``."""
