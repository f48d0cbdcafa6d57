"""Write ``parts.txt`` in this folder: transfers chosen by each strategy, and multicast chunks, for random problems.

No plan is built, so many problems take little time. A change of a strategy or of the number of chunks changes lines.
Review the diff before you commit it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reshard.planner.multicast.strategy import make_workload
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategy_registry import STRATEGIES
from reshard.sharding.tensor_spec import TensorSpec
from tests.support.random_problems import random_problem

FILE = Path(__file__).with_name("parts.txt")
NUM_PROBLEMS = 80


def make_lines() -> Iterator[str]:
    """The lines of the file."""
    for seed in range(1000, 1000 + NUM_PROBLEMS):
        src, dst, shape, topology = random_problem(seed)
        tensors = [TensorSpec(shape, "float32", src, dst, "one"), TensorSpec(shape[::-1], "int8", src, dst, "other")]
        problem = PlanProblem.of(tensors[: 1 + seed % 2], topology, staging_bytes=2**16 << seed % 5)
        chosen = [f"{name} {_hash_arrays(strategy(problem))}" for name, strategy in STRATEGIES.items()]
        yield f"{seed}: {', '.join(chosen)}"
        large = TensorSpec((32 * shape[0], 4 * shape[1]), "float32", src, dst)
        workload, _ = make_workload(PlanProblem.of([large], topology, staging_bytes=2**16 << seed % 9))
        counts = np.bincount(workload.host_class_of, minlength=len(workload.host_class_size))
        nbytes = workload.piece_bytes.tolist() or [0]
        yield (
            f"{seed}: {counts.tolist()} chunks of {workload.host_class_size.tolist()}, {len(workload.piece_class)} pieces of "
            f"{min(nbytes)} to {max(nbytes)} bytes, "
            f"turns of {workload.max_lead}, inside {workload.inside_each:.6g} + {workload.inside_per_byte:.6g} a byte"
        )


def _hash_arrays(chosen: object) -> str:
    arrays = [getattr(chosen, name) for name in chosen.__dataclass_fields__]  # type: ignore[attr-defined]
    return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()[:8]


def main() -> int:
    """Write the file."""
    FILE.write_text("".join(f"{line}\n" for line in make_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
