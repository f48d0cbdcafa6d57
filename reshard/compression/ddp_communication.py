"""A communication hook for ``DistributedDataParallel``."""

import torch
import torch.distributed as dist

from reshard.compression.gradient_sum import GradientSum
from reshard.errors import ArgumentError


def ddp_hook(state: GradientSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum the gradients of a bucket: ``ddp.register_comm_hook(GradientSum("int8x128"), ddp_hook)``.

    The sum runs in a thread, so that the backward continues.

    Raises:
        ArgumentError: error feedback without ``module``, whose parameter names key the errors; or a gradient that the
            sum refuses.
    """
    if state.feedback and not state.names:
        raise ArgumentError("a GradientSum with feedback needs module=, whose parameter names key the errors")
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    gradients = {
        state.names.get(id(parameter), str(number)): gradient for number, (parameter, gradient) in enumerate(pairs)
    }
    state.check(gradients)  # an error of the thread would lose its class in torch
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def run() -> None:
        try:
            state(gradients)
            future.set_result(bucket.buffer())
        except Exception as error:
            future.set_exception(error)

    state.thread.submit(run)
    return future
