"""A communication hook for ``DistributedDataParallel``."""

import torch
import torch.distributed as dist

from reshard.arguments import check_arguments
from reshard.compression.gradient_sum import GradientSum
from reshard.errors import ArgumentError
from reshard.runtime.torch_compat import call_after_backward


@check_arguments()
def ddp_hook(state: GradientSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum the gradients of a bucket: ``ddp.register_comm_hook(GradientSum("int8x128"), ddp_hook)``.

    The sum runs in a thread, so that the backward continues. If it fails, the backward raises its error on every rank.

    Raises:
        ArgumentError: error feedback without ``module``, or with another module than the one inside DDP, whose
            parameter names key the errors; or a gradient that the sum refuses on any rank.
        DisagreementError: ranks pass other gradients.
    """
    parameters, failure = bucket.parameters(), None
    unnamed = next((parameter for parameter in parameters if id(parameter) not in state.names), None)
    if unnamed is None:
        names = [state.names[id(parameter)] for parameter in parameters]
    else:
        names = list(map(str, range(len(parameters))))
    if unnamed is not None and state.feedback:
        failure = ArgumentError(
            "a GradientSum with feedback needs module=, whose parameter names key the errors; its module names "
            f"{len(state.names)} parameters, but not one of shape {list(unnamed.shape)}"
        )
    gradients = dict(zip(names, bucket.gradients(), strict=True))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def run() -> None:
        try:
            state.sum(gradients, failure)
        finally:
            future.set_result(bucket.buffer())

    done = state.thread.submit(run)
    call_after_backward(done.result)  # before DDP waits for the future, whose errors would lose their class
    return future
