"""The memory that a version needs beyond shards stays within ``memory_bytes``, as the operating system counts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from reshard.testing.processes import run_processes
from reshard.weights import Publisher, Quantize, Subscriber
from tests.support.pausable_store import PausableStore

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from Linux"),
]

ROWS, COLUMNS, MIB = 12288, 2048, 1 << 20
MEMORY_BYTES = 16 * MIB
#: For code that is loaded when it is first used, and sockets.
SLACK = 10 * MIB


def _read_status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


class _Peak:
    """The largest resident memory since it was made, beyond what there was then."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self._begun = _read_status("VmRSS:")

    def bytes(self):
        return _read_status("VmHWM:") - self._begun


def _measure(rank, _, store, published, engine):
    """A tensor of 96 MiB in float32 goes from rank 0 to the halves of ranks 1 and 2."""
    torch.set_num_threads(1)
    raw = dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False)
    found = []
    options = {"memory_bytes": MEMORY_BYTES}
    if rank == 0:
        model = {"w": torch.ones(ROWS, COLUMNS)}
        quantize = [Quantize("w")] if published == torch.float8_e4m3fn else []
        dtype = None if quantize else published
        with Publisher(model, raw, dtype=dtype, quantize=quantize, **options) as publisher:
            raw.wait(["ready1", "ready2"])
            for version in (1, 2, 3):
                model["w"].copy_(torch.arange(COLUMNS) % 7 + version)
                peak = _Peak()
                assert set(publisher.publish(version).wait(60).engines.values()) == {""}
                found.append(peak.bytes())
                raw.wait([f"updated{version}-1", f"updated{version}-2"])
        return found
    group = dist.PrefixStore("engine", raw)
    dist.init_process_group("gloo", store=group, rank=rank - 1, world_size=2)
    rows, half = (ROWS, COLUMNS), ROWS // 2
    model = {"w": torch.ones(half, COLUMNS).to(engine)}  # ones, so that the memory is there
    shards = {"w": (rows, [(((rank - 1) * half, rank * half), (0, COLUMNS))])}
    if engine == torch.float8_e4m3fn:
        model["w_scale_inv"] = torch.zeros(half // 128, COLUMNS // 128)
        boxes = [(((rank - 1) * half // 128, rank * half // 128), (0, COLUMNS // 128))]
        shards["w_scale_inv"] = ((ROWS // 128, COLUMNS // 128), boxes)
    with Subscriber(model, raw, shards=shards, **options) as subscriber:
        key = f"ready{rank}"
        for version in (1, 2, 3):
            peak = _Peak()
            raw.set(key, "")  # the trainer publishes
            assert subscriber.update(60) == version
            found.append(peak.bytes())
            key = f"updated{version}-{rank}"
        raw.set(key, "")
    return found


@pytest.mark.parametrize(
    ("published", "engine"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_memory_beyond_shards_stays_within_the_limit(published, engine):
    with PausableStore(3) as store:
        trainer, *engines = run_processes(_measure, 3, store, published, engine, init_group=False)
    shard = ROWS * COLUMNS * published.itemsize
    assert trainer[0] < shard + MEMORY_BYTES + SLACK, [each / MIB for each in trainer]
    assert max(trainer[1:]) < MEMORY_BYTES, [each / MIB for each in trainer]
    for peaks in engines:
        assert peaks[0] < shard // 2 + MEMORY_BYTES + SLACK, [each / MIB for each in peaks]
        assert max(peaks[1:]) < MEMORY_BYTES, [each / MIB for each in peaks]
