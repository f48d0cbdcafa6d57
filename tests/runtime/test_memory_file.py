"""Files in memory that ranks of a host share: no process can cut one, because a mapping of it would then be deadly."""

from __future__ import annotations

import os
import sys

import pytest

from reshard import _native
from reshard.runtime.memory_file import create_memory_file, map_memory_file, open_memory_file, write_memory_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory need Linux")


@pytest.fixture
def descriptors():
    """Descriptors to close at the end."""
    opened: list[int] = []
    yield opened
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize("options", [{}, {"reserves": False}, {"grows": True}])
def test_no_process_can_cut_a_file(descriptors, options):
    descriptors.append(create_memory_file(5, 8192, **options))
    descriptors.append(open_memory_file(os.getpid(), descriptors[0], 5, writes=True))
    for descriptor in descriptors:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 4096)
    mapped = _native.map_shared(descriptors[1], 4096, 4096)
    mapped[:] = 1
    assert os.pread(descriptors[0], 2, 4095) == b"\0\1"
    if options.get("grows"):
        os.ftruncate(descriptors[1], 12288)
    else:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptors[1], 12288)


def test_no_process_can_change_a_file_that_was_written_whole(descriptors):
    descriptors.append(write_memory_file(6, [b"ab", memoryview(b"cd")]))
    descriptors.append(open_memory_file(os.getpid(), descriptors[0], 6))
    assert map_memory_file(descriptors[1], 4).tobytes() == b"abcd"
    with pytest.raises(PermissionError):
        os.pwrite(descriptors[0], b"x", 0)


def test_files_that_may_be_cut_or_are_too_short_are_not_mapped(descriptors):
    descriptors.append(os.memfd_create("reshard-7", os.MFD_ALLOW_SEALING))
    os.ftruncate(descriptors[0], 8192)
    with pytest.raises(PermissionError):
        _native.map_shared(descriptors[0], 0, 8192)
    _native.seal_memory(descriptors[0], False, True)
    assert len(_native.map_shared(descriptors[0], 0, 8192)) == 8192
    for offset, nbytes in ((0, 8193), (4096, 8192), (12288, 1), (-4096, 4096)):
        with pytest.raises(PermissionError):
            _native.map_shared(descriptors[0], offset, nbytes)
