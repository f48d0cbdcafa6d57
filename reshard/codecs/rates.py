"""Measured rates of encoding and decoding in this process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.codecs.block import BlockCodec
from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.formats import FORMATS, decode_piece, known_formats
from reshard.codecs.lossless_choice import SHARES, FormatRates

#: Values of the timed array: 4 MiB of fp32.
NUM_VALUES = 2**20
#: Time of the measurement of encoding, and of decoding.
WINDOW_SECONDS = 0.03
#: Words of a piece of bf16 weights, and pieces that each lossless format encodes; the fastest one counts.
NUM_WORDS, NUM_PIECES = 2**19, 3


def measure_rates(codec: BlockCodec) -> tuple[float, float]:
    """Bytes of plain fp32 values that one thread encodes and decodes per second, on average over a short time.

    Call this on all ranks at once. Ranks that share cores or memory then also share them while they are timed.
    """
    plain = np.random.default_rng(0).standard_normal(NUM_VALUES, dtype=np.float32)
    encoded = np.empty(codec.nbytes(plain.shape), dtype=np.uint8)
    codec.encode(plain, encoded)  # maps the memory

    def rate(run: Callable[[], object]) -> float:
        count, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < WINDOW_SECONDS or not count:
            run()
            count += 1
        return plain.nbytes * count / passed

    return rate(lambda: codec.encode(plain, encoded)), rate(lambda: codec.decode(encoded, plain))


@functools.cache
def measure_format_rates() -> FormatRates:
    """The result of :func:`time_formats`, measured once per process."""
    return time_formats()


def time_formats() -> FormatRates:
    """The rates of all lossless formats that this process knows, on bf16 weights and on a core that does nothing else.

    A format is timed by the CPU time of its fastest run. How long threads wait for a core when the process starts says
    nothing about later versions.
    """
    rng = np.random.default_rng(0)
    shape = NUM_PIECES, NUM_WORDS  # one after another, as a core's cache does not hold real weights
    old = (rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = np.rint(8 * rng.standard_normal(shape, dtype=np.float32)).astype(np.int16).view(np.uint16)
    order = rng.random(shape)
    out = np.empty((NUM_PIECES, 2 * NUM_WORDS + HEADER_BYTES), dtype=np.uint8)
    seconds_by_format: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in known_formats()}
    for share in SHARES:
        words, base, target = (
            item.view(np.uint8) for item in (np.where(order < share, old + steps, old), old, old.copy())
        )
        for name, (encoding, decoding) in seconds_by_format.items():
            seconds = []
            for number in range(NUM_PIECES):
                begun = time.thread_time()
                size = FORMATS[name].encode(words[number], base[number], out[number], 2)
                encoded = time.thread_time()
                decode_piece(out[number, :size], target[number], 2)
                seconds.append((encoded - begun, time.thread_time() - encoded))
            encoding.append(max(min(second for second, _ in seconds), 1e-9))
            decoding.append(max(min(second for _, second in seconds), 1e-9))
    return {
        name: tuple(tuple(2 * NUM_WORDS / item for item in side) for side in seconds_by_format[name])
        for name in seconds_by_format
    }


def slowest_rates(rates: Sequence[Mapping[str, Any]]) -> FormatRates:
    """The lowest rates of some ranks, for the formats that all of them list."""
    names = [name for name in rates[0] if all(name in rate for rate in rates)] if rates else []
    return {
        name: tuple(
            tuple(min(rate[name][side][nth] for rate in rates) for nth in range(len(SHARES))) for side in range(2)
        )
        for name in names
    }
