"""The ``reshard`` command: plans, reports, demo and doctor."""
