"""All-reduces of gradients over depth that run while the backward computes other gradients."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.gradients.declared_sums import (
    CHECK_EVERY,
    SumState,
    axes_left,
    check_interval,
    declared_sums,
    frozen_on_some_ranks,
    sum_state_of,
)
from reshard.runtime.torch_compat import local_of
from reshard.threads import start_thread

from .gradient_sync import hash_of_sums, sync_gradients, sync_gradients_of
from .grid.grid_axis import Axis
from .grid.sum_agreement import SumAgreement, SumCall

#: A bucket is full when its gradients have this many bytes.
EARLY_BUCKET_BYTES = 2**20


@contextlib.contextmanager
@check_arguments()
def sync_during_backward(model: torch.nn.Module, *, check_every: int = CHECK_EVERY) -> Iterator[None]:
    """Sum the gradients while the backward runs, in place of :func:`sync_gradients`.

    All ranks enter it around the last backward of a step::

        with sync_during_backward(model):
            loss.backward()
        optimizer.step()

    Gradients of weights are summed over depth in buckets of 1 MiB, from the last layer to the first. The sum of a
    bucket begins when its gradients, and those of all buckets before it, are complete. Other sums follow at the end.
    The result is bit-identical to that of :func:`sync_gradients`. Gradients whose sum has begun take twice their memory
    until the end of the context. On devices other than the CPU, all sums run at the end.

    Args:
        model: a model, or a stage, that :func:`parallelize` has cut.
        check_every: as in :func:`sync_gradients`.

    Raises:
        ArgumentError: a backward adds to a gradient whose sum has begun, or the context is entered twice, also for two
            models on one grid.
        DisagreementError: replicas differ, on all ranks of the grid; some ranks froze a parameter; or other ranks along
            depth call :func:`sync_gradients`.
        RemoteError: a rank failed, also in its backward, or did not take part within the time-out of the grid. After a
            failed backward, the next step may run if the sums of this one are discarded on all ranks.
    """
    check_interval(check_every)
    sums = _EarlySums(model)
    sums.begin()
    is_complete = False
    try:
        yield
        sums.finish()
        is_complete = True
    finally:
        sums.end(is_complete=is_complete)
    if sums.is_empty:
        sync_gradients(model, check_every=check_every)
    else:
        sync_gradients_of(model, check_every)


@dataclass
class _Bucket:
    """Parameters whose gradients are summed together, and their sum once it has begun."""

    entries: list[tuple[torch.Tensor, SumState]] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)
    total: Future[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(local_of(parameter).nbytes for parameter, _ in self.entries)


class _EarlySums:
    """Buckets of gradients over the depth of a grid, and the thread that sums one bucket after the other.

    All ranks have the same buckets and sum them in the same order, even if their backwards run in different orders.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buckets: list[_Bucket] = []
        self.num_begun = 0
        self._work: queue.SimpleQueue[tuple[Future[torch.Tensor], torch.Tensor] | None] = queue.SimpleQueue()
        self._depth: Axis | None = None
        self.has_ended, self._is_reported = False, False
        trained: list[tuple[str, torch.Tensor, SumState]] = []
        for name, parameter, axes in reversed(list(declared_sums(model))):
            state, left = sum_state_of(parameter), axes_left(parameter, axes)
            if state is None or parameter.device.type != "cpu" or [item.name for item in left] != ["depth"]:
                continue
            if not isinstance(left[0], Axis) or self._depth not in (None, left[0]):
                continue  # another grid, or a group that the user declared
            if state.on_gradient is not None:
                raise ArgumentError(f"sync_during_backward is entered twice for the gradient of {name!r}")
            self._depth = left[0]
            trained.append((name, parameter, state))
        if self._depth is None:
            return
        self._agreement = SumAgreement.of(self._depth, trained[0][1].device)
        earlier = self._agreement.unfinished
        if earlier is not None and not earlier.has_ended:
            raise ArgumentError(
                "sync_during_backward is entered for two models on one grid; enter it once, for an nn.ModuleList of "
                "both"
            )
        num_begun = 0 if earlier is None else earlier.num_begun
        num_begun = self._agreement.agree(SumCall.BEGIN, hash_of_sums(model), num_begun)
        self._axis = self._depth.for_sums()
        if earlier is not None:
            earlier.discard(num_begun)
            self._agreement.unfinished = None
        self._check_trained(trained, self._depth)
        for _, parameter, state in trained:
            if not parameter.requires_grad:
                continue
            last = self._buckets[-1] if self._buckets else None
            if last is None or last.nbytes >= EARLY_BUCKET_BYTES or last.entries[0][0].dtype != parameter.dtype:
                last = _Bucket()
                self._buckets.append(last)
            last.entries.append((parameter, state))

    @staticmethod
    def _check_trained(trained: Sequence[tuple[str, torch.Tensor, SumState]], depth: Axis) -> None:
        """Raise DisagreementError, on all ranks along depth, if only some froze a parameter: buckets would differ."""
        own = torch.tensor([(item.requires_grad, not item.requires_grad) for _, item, _ in trained])
        for (name, _, _), both in zip(trained, depth.max(own.int()).all(1).tolist(), strict=True):
            if both:
                raise frozen_on_some_ranks(name, [depth])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to sum early."""
        return self._depth is None

    def begin(self) -> None:
        """Start the thread, and call :meth:`_note_complete` for each complete gradient.

        Raises:
            ResourceError: the system allows no further thread.
        """
        if self._depth is None:
            return
        for bucket in self._buckets:
            for number, (_, state) in enumerate(bucket.entries):
                state.on_gradient = partial(self._note_complete, bucket, number)
        self._thread = threading.Thread(target=self._sum_buckets, name="reshard-gradient-sums", daemon=True)
        start_thread(self._thread)
        self._agreement.unfinished = self

    def _note_complete(self, bucket: _Bucket, number: int) -> None:
        bucket.complete.add(number)
        while self.num_begun < len(self._buckets):
            following = self._buckets[self.num_begun]
            if len(following.complete) < len(following.entries):
                return
            self._begin_sum(following)

    def _begin_sum(self, bucket: _Bucket) -> None:
        self.num_begun += 1
        for parameter, state in bucket.entries:
            state.is_early = True
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            flat = torch.cat([local_of(parameter.grad).reshape(-1) for parameter, _ in bucket.entries])
        bucket.total = Future()
        self._work.put((bucket.total, flat))

    def _sum_buckets(self) -> None:
        """Body of the thread: sum buckets in order until ``None`` arrives."""
        while (work := self._work.get()) is not None:
            total, flat = work
            try:
                with torch.no_grad():
                    total.set_result(self._axis.all_reduce(flat))
            except BaseException as error:  # finish() raises it
                total.set_exception(error)

    def finish(self) -> None:
        """Wait for the sums and write them into the gradients."""
        if self._depth is None:
            return
        # If this rank's part of the batch does not use a layer, the rank still joins the sums that others have begun.
        self._is_reported = True
        max_begun = self._agreement.agree(SumCall.END, value=self.num_begun)
        while self.num_begun < max_begun:
            self._begin_sum(self._buckets[self.num_begun])
        with torch.no_grad():
            for bucket in self._buckets[:max_begun]:
                assert bucket.total is not None
                gradients = [local_of(parameter.grad) for parameter, _ in bucket.entries]
                parts = bucket.total.result().split([item.numel() for item in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view(gradient.shape))

    def end(self, *, is_complete: bool) -> None:
        """End the thread. After a failed step, mark its gradients as not summed."""
        if self._depth is None:
            return
        self.has_ended = True
        self._work.put(None)
        for bucket in self._buckets:
            for _, state in bucket.entries:
                state.on_gradient = None
                state.is_early = state.is_early and is_complete
        if is_complete:
            self._agreement.unfinished = None
        elif not self._is_reported:
            self._agreement.report_failure()

    def discard(self, num_begun: int) -> None:
        """After a failed step, take part in the sums that other ranks have begun, so that none waits in the next step.

        Args:
            num_begun: the largest number of sums that any rank has begun.
        """
        self._thread.join()
        for bucket in self._buckets[self.num_begun : num_begun]:
            numel = sum(local_of(parameter).numel() for parameter, _ in bucket.entries)
            self._axis.all_reduce(torch.zeros(numel, dtype=bucket.entries[0][0].dtype))
