"""One fixed hypothesis profile, so that a run is the same everywhere."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
#: Where it only counts whether a test fails, not what the smallest case is that makes it fail.
settings.register_profile("unshrunk", settings.get_profile("fixed"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("fixed")
