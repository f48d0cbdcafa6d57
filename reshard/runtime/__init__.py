"""One rank's program, and the executors that run it: on the CPU, on a GPU, or in rounds of grouped messages.

May import :mod:`reshard.plan` and the packages below it. ``program``, ``byte_runs`` and ``strided_regions`` import no
torch.
"""

from reshard.runtime.program import RankProgram, build_program

__all__ = ["RankProgram", "build_program"]
