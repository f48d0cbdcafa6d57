"""Quality and speed of plans, without moving a byte."""
