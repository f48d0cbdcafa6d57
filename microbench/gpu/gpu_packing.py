"""Packing of strided boxes on a GPU: one kernel launch for many boxes, compared with one ``copy_`` per box.

Each box is a block of columns of a matrix. With longer rows, packing should approach the rate of a contiguous copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from microbench.harness.case_options import add_number
from microbench.harness.machine_description import stderr
from microbench.harness.table import Table
from reshard.cli.progress_bars import track

TOTAL_BYTES = 2**28
ROW_BYTES = (64, 128, 256, 512, 1024, 4096, 16384)
NUM_BOXES = 64


#: Calls that are enqueued one after another and timed together, so that the device does not wait for launches.
CALLS = 10


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of ``work`` on the device, after one warm-up call, timed with CUDA events."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()  # type: ignore[no-untyped-call]
        for _ in range(CALLS):
            work()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def measure(row_bytes: int, repeats: int) -> tuple[float, float, float, float]:
    """Rates of a contiguous copy, of packing and of unpacking in one launch, and of one ``copy_`` per box.

    Args:
        row_bytes: length of a row of one box.
        repeats: timed calls of each.

    Returns:
        Bytes per second. Each byte counts once, although it is read and written.
    """
    from reshard.runtime.cuda.pack_kernel import RegionCopier
    from reshard.runtime.strided_regions import box_regions, make_tables

    device = torch.device("cuda")
    rows, columns = TOTAL_BYTES // (NUM_BOXES * row_bytes), NUM_BOXES * row_bytes
    array = torch.randint(0, 255, (rows, columns), dtype=torch.uint8, device=device)
    buffer = torch.empty(TOTAL_BYTES, dtype=torch.uint8, device=device)
    boxes = [(slice(0, rows), slice(i * row_bytes, (i + 1) * row_bytes)) for i in range(NUM_BOXES)]
    regions = [
        region for i, box in enumerate(boxes) for region in box_regions(0, array.shape, 1, box, i * rows * row_bytes)
    ]
    copier = RegionCopier(device)
    tables = [copier.upload(table) for table in make_tables(regions, [16])]
    addresses = copier.find_addresses((array.data_ptr(),))
    parts = [part.view(rows, row_bytes) for part in buffer.split(rows * row_bytes)]

    def in_launches(to_buffer: bool) -> None:
        for table in tables:
            copier.copy(table, addresses, buffer, to_buffer)

    def one_by_one() -> None:
        for part, box in zip(parts, boxes, strict=True):
            part.copy_(array[box])

    plain = seconds_of(lambda: buffer.copy_(array.view(-1)), repeats)
    packed = seconds_of(lambda: in_launches(True), repeats)
    expected = torch.cat([array[box].reshape(-1) for box in boxes])
    assert torch.equal(buffer, expected)
    unpacked = seconds_of(lambda: in_launches(False), repeats)
    looped = seconds_of(one_by_one, repeats)
    return TOTAL_BYTES / plain, TOTAL_BYTES / packed, TOTAL_BYTES / unpacked, TOTAL_BYTES / looped


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--repeats", 5, "repetitions of each measurement")


def run(options: argparse.Namespace) -> int:
    """Print a table with one line per row length of the boxes."""
    if not torch.cuda.is_available():
        stderr("gpu_packing: no CUDA device found; run this on a machine with a GPU")
        return 2
    print(torch.cuda.get_device_name())
    print("pack, unpack and copy_ loop are fractions of the rate of copy_")
    table = Table({"row bytes": ">", "copy_ GB/s": ">.0f", "pack": ">6.2f", "unpack": ">.2f", "copy_ loop": ">.2f"})
    for row_bytes in track(ROW_BYTES, "row lengths"):
        plain, packed, unpacked, looped = measure(row_bytes, options.repeats)
        table.add(row_bytes, plain / 1e9, packed / plain, unpacked / plain, looped / plain)
    return 0
