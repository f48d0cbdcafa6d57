"""Requests, their JSON form, and the decision that follows from them."""

from __future__ import annotations

import json

import pytest

from reshard import Layout, Mesh, Topology, make_plan
from reshard.coordination.decide import gather_reports, plan_arguments, resolve
from reshard.coordination.groups.agreement_messages import RoundRequest, TensorRequest

LAYOUTS = {"w": (Layout(Mesh([0]), "R"), Layout(Mesh([1]), "R"))}


def test_request_survives_a_json_round_trip():
    request = RoundRequest(
        2, arguments=[("strategy", "auto")], tensors={"w": TensorRequest([4], "float32", local=([4], "float32"))},
        error=("ArgumentError", "no"), left=[0, 1], why_left=("RemoteError", "gone"), other_calls={"a": 2},
    )  # fmt: skip
    back = RoundRequest.from_json(json.loads(json.dumps(request.to_json())))
    assert back.error == request.error and back.why_left == request.why_left
    assert back.tensors["w"].shape == [4]
    assert list(back.tensors["w"].local) == [[4], "float32"]


def _resolve_two(**second):
    first = TensorRequest([4], "float32", local=([4], "float32"), devices=["cpu"])
    return resolve(
        [RoundRequest(0, tensors={"w": first}), RoundRequest(1, tensors={"w": TensorRequest(**second)})], LAYOUTS
    )


def test_ranks_agree_on_shape_dtype_and_device():
    decision = _resolve_two(devices=["cpu"])
    assert decision.error is None
    assert (decision.shapes, decision.dtypes, decision.device_type) == ({"w": [4]}, {"w": "float32"}, "cpu")


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"shape": [5]}, "ranks disagree on the global shape: rank 0 passes shape [4], rank 1 passes shape [5]"),
        ({"dtype": "int8"}, "ranks disagree on the dtype: rank 0 passes dtype float32, rank 1 passes dtype int8"),
        (
            {"devices": ["cuda"]},
            "tensors must be on one device type: rank 0 passes 'w' on cpu, rank 1 passes 'w' on cuda",
        ),
        ({"out": ([4], "int8")}, "rank 1 passes out= with int8 [4], but its shard is float32 [4]"),
    ],
)
def test_disagreement_names_both_values(second, text):
    decision = _resolve_two(**second)
    assert decision.error is not None
    assert text in decision.error[1]


def test_plan_arguments_show_the_option_that_differs():
    src, dst = Layout(Mesh([0]), "R"), Layout(Mesh([1]), "R")

    def arguments(**options):
        plan = make_plan(src, dst, (4,), "float32", **{"topology": Topology((0, 1)), "strategy": "send_recv"} | options)
        return dict(plan_arguments(plan))

    same = arguments()
    for options, name in (
        ({"topology": Topology((0, 1), latency_seconds=1e-3)}, "topology"),
        ({"staging_bytes": 2**25}, "staging_bytes"),
        ({"strategy": "multicast"}, "strategy"),
    ):
        other = arguments(**options)
        assert [key for key in same if same[key] != other[key]] == [name, "plan hash"]


def test_plan_arguments_show_the_tensor_that_differs():
    src, dst = Layout(Mesh([0]), "R"), Layout(Mesh([1]), "R")
    one, other = (dict(plan_arguments(make_plan(src, dst, {"a": (4,), "b": size}, "int8"))) for size in ((4,), (5,)))
    assert next(key for key in one if one[key] != other[key]) == "tensor b" and one["tensor a"] == other["tensor a"]
    assert "the tensor" in dict(plan_arguments(make_plan(src, dst, (4,), "int8")))


@pytest.mark.parametrize(
    ("came", "dead", "lost"),
    [
        ({0: False, 1: False, 2: False}, [], []),
        ({0: False, 1: False, 2: False}, [2], []),  # rank 2 died after all ranks had succeeded
        ({0: False, 1: True, 2: False}, [2], [2]),
        ({0: False, 1: False}, [], [2]),
        ({0: False, 1: False}, [1], [1, 2]),
    ],
)
def test_lost_ranks_follow_from_requests_and_deaths(came, dead, lost):
    requests = [RoundRequest(rank, generation=rank, payload={"failed": failed}) for rank, failed in came.items()]
    decision = gather_reports(requests, [0, 1, 2], dead)
    assert decision.lost == lost
    assert sorted(decision.payloads) == [rank for rank in came if rank not in lost]
    assert decision.generation == max(came)
