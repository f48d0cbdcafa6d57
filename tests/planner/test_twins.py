"""What is native and its twin in Python make the same schedule, on problems of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.planner.multicast.native_schedule import make_schedule
from reshard.planner.multicast.strategy import make_workload, ports_of
from reshard.planner.strategies.problem import Problem
from reshard.sharding.tensor_spec import TensorSpec
from tests.reference.schedule import schedule_python
from tests.support.random_problems import random_problem

#: Seeds where a transfer may be late though a faster port could take it, the first message goes to a relay, or what a
#: rank stages changes the order.
RARE = (105, 199, 285, 561, 872, 1045)


@pytest.mark.parametrize("seed", [*range(60), *RARE])
def test_schedules_are_the_same(seed):
    src, dst, shape, topology = random_problem(seed)
    problem = Problem.of([TensorSpec(shape, "float32", src, dst)], topology, staging_bytes=2**16 << seed % 5)
    workload = replace(make_workload(problem)[0], near_first=seed % 3 == 1, keeps_partners=seed % 3 == 2)
    ports = ports_of(problem)
    native, twin = make_schedule(ports, workload), schedule_python(ports, workload)
    for name in native.__dataclass_fields__:
        assert (getattr(native, name) == getattr(twin, name)).all(), name
    assert (native.source >= -1).all()
