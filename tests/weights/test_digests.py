"""Digests: the loops for CPUs and devices agree, parts add up, and arrays may change their memory between two calls."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from reshard.errors import ArgumentError
from reshard.weights.model import region_digests
from reshard.weights.model.holdings import StateReader, read_state
from reshard.weights.model.manifest import Manifest, merge_states, state_of_rank
from reshard.weights.model.pieces import match
from reshard.weights.model.region_digests import LocatedRegions
from reshard.weights.model.verify import Checker
from tests.reference.digest import digest_region


def test_one_call_digests_regions_of_every_word_size_and_stride_as_the_reference(monkeypatch):
    monkeypatch.setattr(region_digests, "_CHUNK_ELEMENTS", 40)  # the loop for devices takes several rows at a time
    whole = torch.arange(-60, 60, dtype=torch.float32).reshape(8, 15)
    arrays = [
        whole,
        whole.t(),
        whole[1::2, 3:9],
        whole[:, :0],
        whole.to(torch.bfloat16)[2:5],
        whole.to(torch.int8)[:, ::4],
        whole.to(torch.float64)[:3, :5],
        torch.tensor(7.0),
    ]
    first = 2**32 - 9  # the index leaves 32 bits inside each region
    regions, expected = LocatedRegions(), []
    for array in arrays:
        strides = [100, 1][: array.ndim]
        regions.add(array, first, strides)
        words = array.unsqueeze(-1).contiguous().view({1: torch.uint8, 2: torch.int16}.get(array.itemsize, torch.int32))
        parts = words.shape[-1]
        unsigned = words.numpy().view(f"uint{8 * words.itemsize}")
        of_words = [*(parts * stride for stride in strides), 1]
        expected.append(digest_region(unsigned, of_words, first * parts))
        assert region_digests._digest_region_on_device(words, of_words, first * parts) == expected[-1]
    assert regions.find_digests().tolist() == expected
    whole[1, 3] += 1  # digests are of what the memory holds now
    assert (regions.find_digests() != np.array(expected, dtype=np.uint64)).tolist() == [True] * 3 + [False] * 5


def test_digests_of_parts_add_up_to_that_of_the_tensor():
    tensor = torch.randn(9, 14, generator=torch.Generator().manual_seed(4))
    strides = region_digests.flat_strides(tensor.shape)
    regions, whole = LocatedRegions(), LocatedRegions()
    whole.add(tensor, 0, strides)
    for rows in (slice(0, 4), slice(4, 9)):
        for columns in (slice(0, 5), slice(5, 14)):
            regions.add(tensor[rows, columns], rows.start * 14 + columns.start, strides)
    assert (
        region_digests.add_digests(regions.find_digests(), np.zeros(4, dtype=np.int64), 1).tolist()
        == whole.find_digests().tolist()
    )
    expected = whole.find_digests().tolist()
    tensor[[0, 1]] = tensor[[1, 0]]  # the same elements in other places
    assert whole.find_digests().tolist() != expected


def make_manifest(model: dict[str, torch.Tensor]) -> Manifest:
    return merge_states({0: state_of_rank(read_state(model))}, "the model")


def test_arrays_whose_memory_or_strides_changed_in_place_are_digested_anew():
    values = torch.arange(16.0).reshape(4, 4)
    model = {"w": values.clone()}
    manifest = make_manifest(model)
    checker = Checker(manifest, manifest, match(manifest, manifest, "the engine"))
    expected = checker.digest_target(model, 0)
    model["w"].data = values + 1  # the same tensor object in other memory
    assert checker.digest_target(model, 0) == checker.digest_target({"w": values + 1}, 0) != expected
    memory = values.t().contiguous()
    model["w"].data = memory
    assert checker.digest_target(model, 0) != expected
    assert checker.digest_target({"w": memory.t()}, 0) == expected  # the same memory, but other strides


def test_a_program_may_end_while_a_thread_holds_digests():
    code = (
        "import threading, time; from reshard.weights.model.region_digests import LocatedRegions; "
        "threading.Thread(target=lambda held: time.sleep(60), args=(LocatedRegions(),), daemon=True).start()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not run.stderr


def test_tensor_without_memory_is_refused_before_it_is_read():
    """FSDP1 frees the storage of its parameters after each use; reading one would end the process."""
    model = {"a": torch.zeros(5), "b": torch.zeros(6)[2:], "empty": torch.zeros(0)}
    reader = StateReader(model, None)
    reader.read()
    model["b"].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="'b' is a Tensor that has no storage"):
        reader.read()
    model["b"].untyped_storage().resize_(8)
    with pytest.raises(ArgumentError, match="'b' is a tensor that ends at byte 24 of a storage of 8 bytes"):
        reader.read()
    model["b"].untyped_storage().resize_(24)
    assert reader.read().holdings.keys() == model.keys()
