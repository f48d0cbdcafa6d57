"""The engine that runs a schedule on processes. It imports torch."""
