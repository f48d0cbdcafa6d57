"""One fixed hypothesis profile, so that a run is the same everywhere."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")
