"""A Mover plans once and moves many times."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reshard.api.agreed_plan import AgreedPlan
from reshard.api.casts import finish_received, wire_source, wire_target
from reshard.api.dtensors import is_dtensor
from reshard.api.handle import EXIT_SECONDS, Handle, StreamHandle
from reshard.api.mover_arrays import MoverArrays
from reshard.api.options import check_coding, check_device_type, check_verify
from reshard.api.tensor_checks import check_no_aliasing, detach_source
from reshard.coordination import (
    Monitor,
    Owner,
    Request,
    call_at_exit,
    calling,
    check_inside,
    describe_error,
    find_channel,
    find_group,
    plan_arguments,
    publish_interruption,
    report_error,
    resolve_partial,
    warn_of_hosts,
)
from reshard.errors import ArgumentError, RankLostError, ReshardError, VerificationError
from reshard.formatting import format_ranks
from reshard.plan import Plan, ensure_checked
from reshard.runtime.cpu.coding import coded_array
from reshard.runtime.cpu.executor import (
    NOTIFY_TAG,
    VERIFY_TAG,
    RunOptions,
    WrongCopyError,
    run_program,
)
from reshard.runtime.cpu.progress import describe_progress
from reshard.runtime.cpu.staging import Staging, carrier
from reshard.runtime.cpu.verification import Digests, Hops, compare_digests, describe_copy
from reshard.runtime.cuda.stream import STREAMS, StreamTransfers, make_runner
from reshard.runtime.program import build_program
from reshard.runtime.transport import BrokenConnectionError, Work, wait_for
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout


class Mover:
    """Executes one plan many times, without planning, connecting or allocating per call.

    Use it as a context manager, or call :meth:`close`. All ranks of the plan must create their Movers in the same
    order and start the same number of transfers. Only the thread that created a Mover may start its transfers, until
    that thread ends.

    Args:
        plan: the plan, equal on all ranks. Checked once, as by :func:`reshard.check_plan`, unless
            :func:`reshard.make_plan` made it in this process.
        group: the process group (default: the world) or the result of :func:`reshard.join` that the plan's ranks
            refer to.
        timeout_seconds: limit for the agreement of the ranks, and again for each transfer.
        device: device type of the arrays, ``"cpu"`` or ``"cuda"``; the latter is the current CUDA device.
        verify: compare digests of the sent data, of the arrived data and of replicas after each transfer.
        both_ways: another Mover transfers in the opposite direction between the same ranks at the same time, so each
            direction gets its own connections. The same on all ranks.
        fault_tolerant: ranks that do not join in time are excluded from the group permanently.
        connection: on a GPU, Movers with the same number share a communicator and must start their transfers in the
            same order on every rank; Movers with different numbers use separate communicators. The same on all ranks.

    Raises:
        PlanError: the plan does not deliver every element.
        DisagreementError: ranks pass different plans or options.
        ArgumentError: the plan names ranks outside the group.
        TransferTimeoutError: a rank did not join in time. RankLostError: with ``fault_tolerant``, ranks were lost.
    """

    def __init__(
        self,
        plan: Plan,
        group: Any = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        device: str = "cpu",
        verify: bool = False,
        both_ways: bool = False,
        fault_tolerant: bool = False,
        connection: int = 0,
    ) -> None:
        found = find_group(group)
        try:
            if not isinstance(plan, Plan):
                raise ArgumentError(f"a Mover needs a Plan, not {type(plan).__name__}")
            check_inside(found, plan.ranks)
        except ReshardError as error:
            report_error(found, error)
            raise
        channel = find_channel(found, plan.ranks)
        arguments: list[tuple[str, str]] = []
        program = runner = failure = None
        try:
            timeout_seconds = check_timeout(timeout_seconds)
            check_device_type(device)
            check_verify(verify, device)
            check_coding(plan, device)
            ensure_checked(plan)
            arguments = [*plan_arguments(plan), ("both_ways", str(bool(both_ways))), ("device", str(device))]
            arguments += [("verify", str(bool(verify))), ("connection", str(connection))]
            program = build_program(plan, channel.group.rank)
            runner = make_runner(plan, program, device)
        except Exception as raised:  # the plan is wrong, or this rank cannot execute it
            failure = describe_error(raised) if isinstance(raised, ReshardError) else ("PlanError", str(raised))
            timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        request = Request(channel.group.rank, arguments, hostname=channel.group.hostname, error=failure)
        with publish_interruption(found), calling(found):
            decide = functools.partial(resolve_partial, layouts={}, members=plan.ranks)
            call, decision = channel.agree(request, decide, timeout_seconds, fault_tolerant)
            if decision.lost:
                raise RankLostError(f"ranks {format_ranks(decision.lost)} did not join in time", decision.lost)
            assert program is not None
            warn_of_hosts(plan, decision.hostnames)
            agreed = AgreedPlan(plan, program, runner, channel, call, replace(decision, device_type=device))
            self._setup(agreed, timeout_seconds, verify, both_ways, connection)

    @classmethod
    def agreed(cls, agreed: AgreedPlan, timeout_seconds: float, verify: bool) -> Mover:
        """A Mover for ranks that have already agreed on the plan; reuses the channel's idle buffers."""
        self = cls.__new__(cls)
        channel, runner = agreed.channel, agreed.runner
        idle, channel.idle_staging = channel.idle_staging, None
        if runner is not None:
            if channel.idle_runner is not None and channel.idle_runner is not runner:
                channel.idle_runner.release()
            channel.idle_runner = runner
        self._setup(agreed, timeout_seconds, verify)
        if idle is not None and idle[0] == agreed.plan.plan_hash:
            self._staging = idle[1]
        self._keeps_staging = True
        return self

    def _setup(
        self, agreed: AgreedPlan, timeout_seconds: float, verify: bool, both_ways: bool = False, connection: int = 0
    ) -> None:
        plan, program, runner, channel = agreed.plan, agreed.program, agreed.runner, agreed.channel
        self.plan, self._program, self._verify = plan, program, verify
        self._group, self._channel = channel.group, channel
        self._tag, self._generation = agreed.call % (NOTIFY_TAG - 1), agreed.decision.generation
        self._timeout_seconds = timeout_seconds
        self._owner = Owner()
        self._staging = Staging(program, plan.staging_bytes)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._keeps_staging = False  # return the buffers to the channel, for the next call with the same plan
        self._arrays = MoverArrays(plan, program, channel.group, agreed.decision.device_type)
        self._streamed = self._transport = None
        if runner is not None:
            device = runner.memory.device
            first = plan.tensors[0]
            number = 2 * connection + (both_ways and first.src.ranks[0] > first.dst.ranks[0])
            exchange = channel.exchange(self._generation, device, number, runner.rounds, timeout_seconds)
            streams = STREAMS[device.type](device) if exchange is None else exchange.streams
            self._streamed = StreamTransfers(runner, exchange or _no_exchange, streams)
        else:
            self._transport = channel.transport(self._generation, both_ways or plan.is_two_way, timeout_seconds)
        self._group.resources.add_user(self)

    @property
    def staging_allocated_bytes(self) -> int:
        """Bytes allocated beyond the source and destination shards; at most the plan's ``staging_bytes``."""
        return self._staging.allocated_bytes if self._streamed is None else self._streamed.allocated_bytes

    def __call__(self, tensor: Any = None, *, out: Any = None, timeout_seconds: float | None = None) -> Any:
        """Start a transfer and wait for its result; see :meth:`start` and :meth:`Handle.wait`."""
        return self.start(tensor, out=out).wait(timeout_seconds)

    def start(self, tensor: Any = None, *, out: Any = None) -> Handle:
        """Start a transfer.

        Args:
            tensor: this rank's source shard or DTensor, or ``{name: shard}`` for a plan of named tensors; None
                outside the source. It must not change until the transfer has ended.
            out: where to write the destination shard: a tensor or DTensor, or ``{name: array}``. Default: allocated.

        Returns:
            A handle. Several transfers may be in progress; they finish in the order in which they were started.

        Raises:
            ArgumentError: an array does not fit the plan; this error ends all unfinished transfers of the Mover on
                every rank. Also if the Mover or its group is closed, or was created by another thread or process.
        """
        self._group.check_usable()
        if self._closed:
            raise ArgumentError("this Mover is closed")
        with self._owner.starting(self._program.rank, self.fail):
            return self._start(tensor, out)

    def _start(self, tensor: Any, out: Any) -> Handle:
        names = [spec.name for spec in self.plan.tensors]
        try:
            src = self._arrays.sources(self.plan.by_tensor(tensor))
            outs = self.plan.by_tensor(out)
            dst = self._arrays.targets(outs)
            check_no_aliasing(src, dst, names)
            src = [wire_source(detach_source(array), spec) for array, spec in zip(src, self.plan.tensors, strict=True)]
            received = [wire_target(array, spec) for array, spec in zip(dst, self.plan.tensors, strict=True)]
        except ReshardError as error:
            raise self._channel.fail(self._generation, error) from None
        except BaseException as error:  # such as KeyboardInterrupt; the other ranks have started this transfer
            self._channel.fail(self._generation, error)
            raise
        named = isinstance(tensor, Mapping) or self.plan.tensors[0].name is not None
        results = [given if is_dtensor(given) else array for given, array in zip(outs, dst, strict=True)]

        def finish() -> Any:
            finish_received(received, dst)
            return dict(zip(names, results, strict=True)) if named else results[0]

        return self._enqueue(src, received, finish)

    def start_checked(
        self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], finish: Callable[[], Any]
    ) -> Handle:
        """As :meth:`start`, for arrays that are already checked."""
        return self._enqueue(src, dst, finish)

    def fail(self, error: BaseException) -> ReshardError:
        """End all transfers in progress between these ranks with an error, on every rank. Returns the error."""
        return self._channel.fail(self._generation, error)

    def check(self) -> None:
        """Raise the error that another rank published, if there is one."""
        self._channel.check_reported(self._generation)

    def close(self) -> None:
        """End the progress thread after the transfers in progress. The group's connections stay open."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self._transport = None
        elif self._group.pid == os.getpid():
            self._jobs.put((self, None, None, None))

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def empty_out(self) -> Any:
        """An uninitialized array for this rank's destination shard, to pass as ``out=``; None outside the destination.

        For a plan of named tensors ``{name: array}``.
        """
        arrays = self._arrays.empty_targets()
        if self.plan.tensors[0].name is None:
            return arrays[0]
        return {spec.name: array for spec, array in zip(self.plan.tensors, arrays, strict=True)}

    def _enqueue(
        self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], finish: Callable[[], Any]
    ) -> Handle:
        if self._streamed is not None:
            return self._put_on_stream(self._streamed, src, dst, finish)
        handle = Handle(self._channel, self._generation, finish)
        if self._transport is not None:
            Monitor.of(self._group).watch(handle)
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="reshard-progress", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False  # ends the thread of a Mover that is not closed
            _running.add(self)
            call_at_exit(_finish_all, priority=20)
        self._jobs.put((self, handle, src, dst))
        return handle

    def _put_on_stream(
        self,
        streamed: StreamTransfers,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        finish: Callable[[], Any],
    ) -> StreamHandle:
        self._channel.check_usable(self._generation)
        deadline = time.monotonic() + self._timeout_seconds
        handle = StreamHandle(self._channel, self._generation, finish, streamed, deadline)
        Monitor.of(self._group).watch(handle.watch)  # before the start, which may block on a rank that has died
        try:
            handle.begin_at(streamed.start(list(map(carrier, src)), list(map(carrier, dst))))
        except BaseException as error:  # the other ranks wait for this one
            known = self._channel.fail(self._generation, error)
            handle.stop(known)
            if not isinstance(error, Exception):
                raise
            raise known from error
        return handle

    def finish(self, timeout_seconds: float | None) -> None:
        """Close, wait for transfers in progress, and abort those that do not end within the timeout."""
        self.close()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive() and self._transport is not None:
                self._transport.abort()
                self._thread.join(1.0)

    def release(self) -> None:
        """Called when the group closes: close, and drop the connections once transfers in progress have ended."""
        self.close()
        self._streamed = None

    def _on_thread_end(self) -> None:
        """Drop the connections and return the buffers. The progress thread calls it last, after :meth:`close`."""
        self._transport = None
        if self._keeps_staging and self._channel.broken is None and self._group.is_usable():
            self._channel.idle_staging = self.plan.plan_hash, self._staging

    def _run(self, handle: Handle, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None]) -> None:
        try:
            handle.check()
            self._channel.check_usable(self._generation)
            handle.describe = functools.partial(describe_progress, self.plan, self._program, handle.tally)
            handle.begin()
            deadline = time.monotonic() + self._timeout_seconds
            digests = None
            if self._verify:
                digests, src = Digests(), list(map(coded_array, src))
                digests.replicas = self._hops.replicas.digest(self._program.rank, src)
            run_program(
                self._program,
                self._transport,  # type: ignore[arg-type]
                list(map(carrier, src)),
                list(map(carrier, dst)),
                self._staging,
                RunOptions(tag=self._tag, deadline=deadline, check=handle.check, digests=digests, tally=handle.tally),
            )
            if digests is not None and self._transport is not None:
                self._compare(digests, handle, deadline)
            handle.succeed()
        except VerificationError as error:  # every rank raises the same one, so it needs no report
            handle.stop(error)
        except BaseException as error:
            # The transport may still write to the old buffers.
            self._staging = Staging(self._program, self.plan.staging_bytes)
            if isinstance(error, BrokenConnectionError):
                error = self._channel.find_root_cause(self._generation, error, handle._done.wait)
            if isinstance(error, WrongCopyError):
                error = VerificationError(describe_copy(self.plan, self._program.rank, error.id))
            if not handle.done():  # no rank has published the error
                handle.stop(self._channel.fail(self._generation, error))
        finally:
            if self._transport is not None:
                Monitor.of(self._group).forget(handle)

    @functools.cached_property
    def _hops(self) -> Hops:
        return Hops(self.plan)

    def _compare(self, digests: Digests, handle: Handle, deadline: float) -> None:
        rank = self._program.rank

        def wait(work: Work, other: int) -> None:
            wait_for(work, deadline, handle.check, rank, other, f"comparing digests with rank {other}")

        compare_digests(self._hops, rank, digests, self._transport, self._tag + VERIFY_TAG, wait)


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    """Run transfers one after another. Between them the thread holds no reference to its Mover, so it can be freed."""
    while (job := jobs.get()) is not None:
        mover, handle, src, dst = job
        if handle is None:
            mover._on_thread_end()
            return
        mover._run(handle, src, dst)
        del job, mover, handle, src, dst


#: Movers with a thread. A thread that is inside a C++ wait at interpreter shutdown would crash the process.
_running: weakref.WeakSet[Mover] = weakref.WeakSet()


def _finish_all() -> None:
    for mover in list(_running):
        mover.finish(EXIT_SECONDS)


def _no_exchange(recvs: Sequence[Any], sends: Sequence[Any]) -> None:
    """The exchange of a plan with one rank, which has no messages."""
