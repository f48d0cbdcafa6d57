"""One fixed hypothesis profile, so that a run is the same everywhere, and what several test files use."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.nccl_standin import build_standin

settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
#: Where it only counts whether a test fails, not what the smallest case is that makes it fail.
settings.register_profile("unshrunk", settings.get_profile("fixed"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """The path of a library with the C interface of NCCL, on host memory."""
    return build_standin(tmp_path_factory.mktemp("nccl"))
