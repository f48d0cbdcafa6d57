"""CuPy arrays over a communicator of ``cupy.cuda.nccl``, for programs without torch.

::

    comm = cupy.cuda.nccl.NcclCommunicator(size, unique_id, rank)  # however the ranks found each other
    mover = reshard.cupy.Mover(plan, comm)
    shard = mover(source)  # behind what is on the current stream, before what is put there next

There is no store and no connection but NCCL's, so what those are for is missing here: a rank that dies, or raises
before it has begun its part, leaves the others waiting; abort their communicators, as in any NCCL program.
"""

from reshard.cupy.transfer import Handle, Mover

__all__ = ["Handle", "Mover"]
