"""Digests of tensors: the loop in C++, the one for other devices and the twin in Python agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.weights.model import digests
from tests.reference.digest import digest_elements_python

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 7, 2**32 - 5, 3 * 2**40 + 11], ids=str)
def test_digests_of_a_view_agree(dtype, first, monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK_ELEMENTS", 40)  # the device loop takes several rows at a time
    bits = torch.randint(
        0, 256, (6, 5, 8 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    view = bits.view(dtype)[::2, 1:, 1:6]
    located = digests.locate(view, first, [1000, 70, 1])
    signed = torch.from_numpy(np.ascontiguousarray(located.words).view(f"int{8 * located.words.itemsize}"))
    on_device = digests.Located(signed, located.strides, located.first)
    expected = digest_elements_python(located.words, located.strides.tolist(), located.first)
    assert located.digest() == on_device.digest() == expected


def test_digests_of_parts_add_up_to_that_of_the_tensor():
    tensor = torch.randn(9, 14, generator=torch.Generator().manual_seed(4))
    strides = digests.flat_strides(tensor.shape)
    parts = [(rows, columns) for rows in (slice(0, 4), slice(4, 9)) for columns in (slice(0, 5), slice(5, 14))]
    own = [digests.locate(tensor[part], part[0].start * 14 + part[1].start, strides).digest() for part in parts]
    total = digests.add_digests(np.array(own, dtype=np.uint64), np.zeros(len(own), dtype=np.int64), 1)
    assert int(total[0]) == digests.locate(tensor, 0, strides).digest()
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert digests.locate(swapped, 0, strides).digest() != int(total[0])
