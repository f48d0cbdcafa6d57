"""A Ray cluster of emulated hosts, which the tests of this folder share."""

import pytest


@pytest.fixture(scope="session")
def drive():
    from microbench.emulation.ray import ray_cluster

    with ray_cluster(3, num_cpus=4) as drive:
        yield drive
