"""Functions from schedule to schedule."""
