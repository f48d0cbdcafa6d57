"""How fast this process encodes and decodes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from reshard.codecs.block import BlockCodec

#: Values of the timed array: 4 MiB of fp32.
NUM_VALUES = 2**20
#: How long each of encoding and decoding is timed.
WINDOW_SECONDS = 0.03


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
