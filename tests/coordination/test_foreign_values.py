"""Values that another program writes under keys of a group: errors that name the key, and no wrong data."""

from __future__ import annotations

import hashlib
import json
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.coordination.groups.agreement_messages import RankStatus, read_json
from reshard.testing import run_processes
from tests.support.tensors import result_or_error

ROWS, COLUMNS = Layout(Mesh.of("3"), "S0 R"), Layout(Mesh.of("3"), "R S0")
MEMBERS = hashlib.sha256(repr((0, 1, 2)).encode()).hexdigest()[:20]


def _call_among_strangers(rank, port, key, value, is_early):
    """Outcomes of four calls. The value is written before the ranks join, or by rank 1 after the first call."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    foreign = dist.PrefixStore("group/reshard/join", store)
    if rank == 0 and is_early:
        foreign.set(key, value)
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{each}" for each in range(3)])
    outcomes = []
    with reshard.join(dist.PrefixStore("group", store), rank, 3) as group:
        for step in range(4):
            if step == 1 and rank == 1 and not is_early:
                foreign.set(key, value)
            if step == 1 - is_early and rank == 0:
                time.sleep(0.7)  # the other ranks read the store while they wait
            source = torch.full((1, 3), float(rank + step))
            outcomes.append(
                result_or_error(
                    lambda source=source: (
                        reshard.reshard(source, ROWS, COLUMNS, group=group, timeout_seconds=10).flatten().tolist()
                    )
                )
            )
        store.set(f"done/{rank}", "")
        store.wait([f"done/{each}" for each in range(3)])
    return outcomes


@pytest.mark.parametrize(
    ("key", "value", "is_early"),
    [
        (f"u/{MEMBERS}/hub", "nonsense", True),
        (f"u/{MEMBERS}/hub", json.dumps(["127.0.0.1", 2**20, "", ""]), True),
        ("claim/1", "\x00", True),
        ("lost/1", json.dumps({"lost": ["x"], "by": 0, "attempt": 1, "decision": None}), False),
        ("lost/1", json.dumps({"lost": [7], "by": 0, "attempt": 1, "decision": None}), False),
        ("status/0", '{"by": 0}', False),
    ],
)
def test_foreign_values_are_named_and_no_call_mixes_data(key, value, is_early):
    results = run_processes(_call_among_strangers, 3, key, value, is_early, init_group=False)
    texts = [text for row in results for text in row if isinstance(text, str)]
    assert any(f"{key}'" in text for text in texts)
    assert all(isinstance(row[-1], str) for row in results)
    for row in results:
        for step, outcome in enumerate(row):
            assert isinstance(outcome, str) or outcome == [float(each + step) for each in range(3)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("waiting", 3), ("waiting", {"members": [0]}), ("abandoned", []), ("errors", True), ("error", ["x"]), ("new", 1)],
)
def test_status_of_another_form_is_refused(field, value):
    content = json.loads(RankStatus(waiting={"members": [0, 1], "attempt": 1}, error=("RemoteError", "x")).to_json())
    assert RankStatus.from_json(json.dumps(content)).error == ("RemoteError", "x")
    with pytest.raises(ValueError, match="form"):
        RankStatus.from_json(json.dumps(content | {field: value}))


def test_patterns_of_json():
    assert read_json('{"a": [[1, "x"]]}', {"a": [(int, str)]}) == {"a": [[1, "x"]]}
    for text, pattern in (("[1, 2]", (int,)), ("[true]", [int]), ('{"b": 1}', {"a": int}), ("[]", {str: int})):
        with pytest.raises(ValueError, match="form"):
            read_json(text, pattern)
