"""What torch caches once per process, so that the forked ranks of this folder inherit it."""

import pytest
import torch

import reshard.scheduler as rs
from tests.scheduler.model_stages.test_pipe import make_batch, make_chain
from tests.support.whole_models import find_shapes


@pytest.fixture(scope="session", autouse=True)
def cached():
    torch.overrides.get_overridable_functions()
    for num_samples, length in ((8, 5), (7, 6), (3, 4)):
        find_shapes(rs.Pipe(make_chain(), ["layers.2"], stages="1x1,1x1"), make_batch(0, num_samples, length))
