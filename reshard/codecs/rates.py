"""How fast this process encodes and decodes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from reshard.codecs.block import BlockCodec

#: Values of the timed array: 4 MiB of fp32.
NUM_VALUES = 2**20
REPEATS = 7


def measure_rates(codec: BlockCodec) -> tuple[float, float]:
    """Bytes of plain fp32 values that one thread encodes and decodes per second, in the fastest of some runs.

    It takes a few milliseconds.
    """
    plain = np.random.default_rng(0).standard_normal(NUM_VALUES, dtype=np.float32)
    coded = np.empty(codec.nbytes(plain.shape), dtype=np.uint8)

    def rate(run: Callable[[], object]) -> float:
        seconds = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begun)
        return plain.nbytes / min(seconds)

    return rate(lambda: codec.encode(plain, coded)), rate(lambda: codec.decode(coded, plain))
