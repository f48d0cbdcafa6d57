"""compression="auto": the choice follows the predicted times, and the plan says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

import reshard
from reshard import Layout, Mesh, Topology, make_plan
from reshard.cost import predict_makespan
from reshard.errors import ArgumentError, TopologyError
from reshard.planner import predict
from reshard.topology import CodecRate, topology_to_json

SRC, DST, SHAPE = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2), "R S0"), (2048, 4096)
INT8, INT4 = CodecRate("int8x128", 6e9, 8e9), CodecRate("int4x128", 5e9, 8e9)


def _topology(gbit, *rates):
    return replace(Topology.uniform((0, 0, 1, 1), gbit / 8 * 1e9), codec_rates=rates)


def _choose(gbit, *rates, max_error=0.2):
    plan = make_plan(
        SRC, DST, SHAPE, "float32", topology=_topology(gbit, *rates), compression="auto", max_error=max_error
    )
    return plan.tensors[0]


def test_auto_codes_on_slow_links_only_and_says_why():
    chosen = _choose(1, INT8, INT4)
    assert chosen.dtype == "int4x128" and chosen.encoded_because.startswith("auto predicts raw 0.269 s")
    plan = make_plan(SRC, DST, SHAPE, "float32", topology=_topology(1, INT8), compression="auto", max_error=0.1)
    assert f"# tensor 0 is encoded: {plan.tensors[0].encoded_because}" in str(plan)
    assert reshard.parse_plan(str(plan)) == plan
    assert _choose(1, INT8, INT4, max_error=0.02).dtype == "int8x128"
    fast = _choose(100, INT8, INT4)
    assert fast.dtype == "float32"
    assert fast.raw_because.startswith("auto predicts raw 0.00") and ", int8x128 " in fast.raw_because
    slow_codec = _choose(1, CodecRate("int8x128", 6e7, 8e7))  # a hundred times slower
    assert slow_codec.dtype == "float32"


def test_auto_decides_for_tensors_of_each_layout_and_dtype():
    """The links between hosts are slow, and those inside hosts are faster than any codec."""
    topology = replace(_topology(1, INT8), inside_bytes_per_second=100e9)
    inside = Layout(Mesh.of("1")), Layout(Mesh.of("1", first_rank=1))
    src, dst = ({"across": item, "inside": own, "ids": item} for item, own in zip((SRC, DST), inside, strict=True))
    dtypes = {"across": "float32", "inside": "float32", "ids": "int64"}
    plan = make_plan(src, dst, dict.fromkeys(src, SHAPE), dtypes, topology=topology, compression="auto", max_error=0.1)
    chosen = {spec.name: spec for spec in plan.tensors}
    assert {name: spec.codec is not None for name, spec in chosen.items()} == {
        "across": True,
        "inside": False,
        "ids": False,
    }
    assert "a choice per layout and dtype" in chosen["inside"].raw_because
    assert "not int64" in chosen["ids"].raw_because
    uniform = make_plan(src, dst, dict.fromkeys(src, SHAPE), dtypes, topology=topology, compression="int8x128")
    rates = [INT8 if spec.codec is not None else None for spec in plan.tensors]
    assert predict(plan, rates).seconds <= predict(uniform, INT8).seconds


def test_an_encoded_tensor_is_not_encoded_again():
    rows, columns = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
    plan = make_plan(rows, columns, (64, 4096), "int8x128", compression="int8x128")
    assert plan.tensors[0].raw_because.endswith("not int8x128")


def test_auto_uses_no_lossy_codec_unless_asked_for_an_error():
    assert "only if max_error is given" in _choose(0.1, INT8, max_error=None).raw_because
    assert "usual error of every codec is above 0.001" in _choose(0.1, INT8, max_error=0.001).raw_because
    with pytest.raises(ArgumentError, match="needs the rates of codecs"):
        make_plan(SRC, DST, SHAPE, "float32", topology=_topology(1), compression="auto", max_error=0.1)


def test_the_prediction_adds_the_slowest_encoder_and_decoder():
    topology = _topology(1, INT8)
    plan = make_plan(SRC, DST, SHAPE, "float32", topology=topology, compression="int8x128")
    shard = 2048 * 4096 * 4 / 2
    wanted = reshard.simulate(plan).makespan_seconds + shard / 6e9 + shard / 8e9
    assert predict(plan, INT8).seconds == pytest.approx(wanted)


@pytest.mark.parametrize("rates", [(6e9, 8e9), (1e9, 8e9), (8e9, 1e9)])
def test_coding_overlaps_the_transfer_message_by_message(rates):
    source, target, rate = Layout(Mesh.of("1")), Layout(Mesh.of("1", first_rank=2)), CodecRate("int8x128", *rates)
    plan = make_plan(source, target, SHAPE, "float32", topology=_topology(10, rate), compression="int8x128")
    timeline = reshard.simulate(plan)
    count, size = len(timeline.messages), 2048 * 4096 * 4
    assert count > 1 and len(set(timeline.messages.nbytes.tolist())) == 1
    encode, decode = size / count / rates[0], size / count / rates[1]
    # messages pass the encoder, the link and the decoder one after another, as on an assembly line
    late = max((number + 1) * encode - start for number, start in enumerate(timeline.start.tolist()))
    decoded = 0.0
    for finish in timeline.finish.tolist():
        decoded = max(decoded, finish + late) + decode
    assert predict(plan, rate).seconds == pytest.approx(decoded)
    serial = timeline.makespan_seconds + size / rates[0] + size / rates[1]
    assert predict(plan, rate).seconds < predict(plan, rate, encodes_first=True).seconds < serial


def test_relays_do_not_code_and_rows_of_several_receivers_are_encoded_once():
    replicas = Layout(Mesh.of("6", first_rank=2))
    topology = replace(Topology.uniform((0, 0, 1, 1, 2, 2, 3, 3), 1.25e9), codec_rates=(INT8,))
    plan = make_plan(SRC, replicas, SHAPE, "float32", topology=topology, compression="int8x128")
    assert any(plan.transfers.sender >= 2)  # some receiver relays
    size = 2048 * 4096 * 4
    first = predict(plan, INT8, encodes_first=True).seconds - reshard.simulate(plan).makespan_seconds
    assert size / 2 / 6e9 < first < size / 2 / 6e9 + size / 8e9
    instant = CodecRate("int8x128", 1e18, 1e18)
    assert predict(plan, instant).seconds == pytest.approx(reshard.simulate(plan).makespan_seconds)


def test_topologies_keep_their_codec_rates():
    topology = _topology(1, INT8, INT4)
    assert reshard.topology_from_json(topology_to_json(topology)) == topology
    plan = make_plan(SRC, DST, SHAPE, "float32", topology=topology)
    assert reshard.parse_plan(str(plan)) == plan
    with pytest.raises(TopologyError, match="there is no block codec 'zfp'"):
        CodecRate("zfp", 1.0, 1.0)
    with pytest.raises(TopologyError, match="several entries"):
        _topology(1, INT8, INT8)


def test_a_plan_that_is_too_large_to_simulate_is_estimated(monkeypatch):
    plan = make_plan(SRC, DST, SHAPE, "float32", topology=_topology(100), strategy="multicast")
    monkeypatch.setattr("reshard.cost.prediction.MAX_IN_ORDER", 1)
    monkeypatch.setattr("reshard.planner.tensor_codecs.simulate", None)
    estimate = predict_makespan(plan)
    assert estimate.is_estimate and predict(plan).seconds == estimate.seconds
