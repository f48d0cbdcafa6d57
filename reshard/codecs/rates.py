"""How fast this process encodes and decodes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.codecs.block import BlockCodec
from reshard.codecs.choice import SHARES, FormatRates
from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.formats import FORMATS, decode_piece, known_formats

#: Values of the timed array: 4 MiB of fp32.
NUM_VALUES = 2**20
#: How long each of encoding and decoding is timed.
WINDOW_SECONDS = 0.03
#: Words of the array for lossless formats, a piece of bf16 weights, and runs of which the fastest counts.
NUM_WORDS, FORMAT_RUNS = 2**19, 3


def measure_rates(codec: BlockCodec) -> tuple[float, float]:
    """Bytes of plain fp32 values that one thread encodes and decodes per second, on average over a short time.

    Call it on all ranks at once: where ranks share cores or memory, they share them while they are timed, too.
    """
    plain = np.random.default_rng(0).standard_normal(NUM_VALUES, dtype=np.float32)
    coded = np.empty(codec.nbytes(plain.shape), dtype=np.uint8)
    codec.encode(plain, coded)  # maps the memory

    def rate(run: Callable[[], object]) -> float:
        count, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < WINDOW_SECONDS or not count:
            run()
            count += 1
        return plain.nbytes * count / passed

    return rate(lambda: codec.encode(plain, coded)), rate(lambda: codec.decode(coded, plain))


@functools.cache
def measure_format_rates() -> FormatRates:
    """The rates of all lossless formats that this process knows, on bf16 weights; measured once per process.

    As for :func:`measure_rates`, call it on all ranks at once. A format is timed by the CPU time of its fastest run, as
    its runs are few. How much longer a run takes because threads wait for a core is averaged over all formats.
    """
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(NUM_WORDS, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = np.rint(8 * rng.standard_normal(NUM_WORDS, dtype=np.float32)).astype(np.int16).view(np.uint16)
    order = rng.random(NUM_WORDS)
    out = np.empty(old.nbytes + HEADER_BYTES, dtype=np.uint8)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in known_formats()}
    begun, begun_cpu = time.perf_counter(), time.thread_time()
    for share in SHARES:
        new = np.where(order < share, old + steps, old)
        words, base, target = new.view(np.uint8), old.view(np.uint8), old.copy().view(np.uint8)
        for name, seconds in found.items():
            encode = functools.partial(FORMATS[name].encode, words, base, out, old.itemsize)
            decode = functools.partial(decode_piece, out[: encode()].copy(), target, old.itemsize)
            seconds[0].append(_fastest(encode))
            seconds[1].append(_fastest(decode))
    busy = (time.thread_time() - begun_cpu) / (time.perf_counter() - begun)
    return {name: tuple(tuple(busy * old.nbytes / each for each in side) for side in found[name]) for name in found}


def _fastest(run: Callable[[], object]) -> float:
    """CPU seconds of the fastest run."""
    found = []
    for _ in range(FORMAT_RUNS):
        begun = time.thread_time()
        run()
        found.append(time.thread_time() - begun)
    return max(min(found), 1e-9)


def slowest_rates(rates: Sequence[Mapping[str, Any]]) -> FormatRates:
    """The lowest rates of some ranks, for the formats that all of them list."""
    names = [name for name in rates[0] if all(name in each for each in rates)] if rates else []
    return {
        name: tuple(
            tuple(min(each[name][side][nth] for each in rates) for nth in range(len(SHARES))) for side in range(2)
        )
        for name in names
    }
