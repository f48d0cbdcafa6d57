"""Moves CuPy arrays over a communicator of ``cupy.cuda.nccl``, for programs without torch.

::

    import cupy.cuda.nccl

    comm = cupy.cuda.nccl.NcclCommunicator(size, unique_id, rank)  # the program shares unique_id
    mover = reshard.cupy.Mover(plan, comm)
    shard = mover(source)  # ordered with the work on the current stream

If one rank refuses its plan, or its arrays in the first transfer, all ranks raise an error. So they do if an exception
such as KeyboardInterrupt ends the constructor or this check. Nothing else detects failures: the only connection is
NCCL's. If a rank exits, or raises before it starts its part of a later transfer, the other ranks block until the
program aborts their communicators, as in any NCCL program.

May import packages below :mod:`reshard.coordination`, and no torch.
"""

from reshard.cupy.cupy_mover import Handle, Mover

__all__ = ["Handle", "Mover"]
