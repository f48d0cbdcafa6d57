"""Plan once, move many times."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reshard.api.dtensors import is_dtensor
from reshard.api.handle import EXIT_SECONDS, Handle, StreamHandle
from reshard.api.mover_arrays import MoverArrays
from reshard.api.options import check_device_type, check_verify
from reshard.api.tensor_checks import as_plain, check_apart
from reshard.coordination.calling_threads import Owner
from reshard.coordination.communicator import Channel, find_channel
from reshard.coordination.decide import Decision, Request, describe_error, plan_arguments, resolve_left
from reshard.coordination.liveness.call_sequence import calling, counted, report_error
from reshard.coordination.liveness.heartbeat import Monitor, call_at_exit
from reshard.coordination.process_group import check_inside, find_group
from reshard.coordination.topology_discovery import warn_of_hosts
from reshard.errors import ArgumentError, RankLostError, ReshardError, VerificationError
from reshard.formatting import format_ranks
from reshard.plan.check import ensure_checked
from reshard.plan.model import Plan
from reshard.runtime.cpu.executor import NOTIFY_TAG, VERIFY_TAG, WrongCopyError, describe_progress, run_program
from reshard.runtime.cpu.staging import Staging, carrier
from reshard.runtime.cpu.verification import Digests, Hops, compare_digests, describe_copy
from reshard.runtime.cuda.stream import STREAMS, StreamTransfers, make_runner
from reshard.runtime.program import Program, build_program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.runtime.transport import BrokenConnectionError, Work, wait_for
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout


class Mover:
    """Moves tensors as a plan says, as often as asked: no planning, no new group, no allocation per call.

    Use it as a context manager, or call :meth:`close`. All ranks of the plan make it, in the same order among
    themselves, and call it equally often. The thread that makes a Mover starts its transfers.

    Args:
        plan: what to do; equal on all ranks. One that :func:`reshard.make_plan` did not make in this process is
            checked first, as by :func:`reshard.check_plan`; once per object.
        group: whose ranks the plan names; omitted, the world. Or what :func:`reshard.join` returned.
        timeout_seconds: how long ranks may take to agree, and each transfer to finish.
        device: the type of device that the arrays are on, ``"cpu"`` or ``"cuda"``; of the latter the current one.
        verify: compare digests of what every source held and every destination holds, behind each transfer.
        both_ways: another Mover moves things the other way between the same ranks at the same time, so each direction
            gets connections of its own. The same on all ranks.
        fault_tolerant: ranks that do not come are lost to the group, which goes on without them.
        connection: on a GPU, Movers with one number share a communicator and start their transfers in the same order on
            every rank; Movers with different numbers have communicators of their own. The same on all ranks.

    Raises:
        PlanError: the plan does not deliver; on all ranks alike. RankLostError: with ``fault_tolerant``, some are lost.
        DisagreementError: ranks pass different plans. ArgumentError: the plan names ranks outside the group.
        TransferTimeoutError: some rank did not come.
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
        ours = find_group(group)
        try:
            if not isinstance(plan, Plan):
                raise ArgumentError(f"a Mover needs a Plan, not {type(plan).__name__}")
            check_inside(ours, plan.ranks)
        except ReshardError as error:
            report_error(ours, error)
            raise
        channel = find_channel(ours, plan.ranks)
        request = Request(channel.group.rank, hostname=channel.group.hostname)
        program = runner = None
        try:
            timeout_seconds = check_timeout(timeout_seconds)
            check_device_type(device)
            check_verify(verify, device)
            ensure_checked(plan)
            request.arguments = [*plan_arguments(plan), ("both_ways", str(bool(both_ways))), ("device", str(device))]
            request.arguments += [("verify", str(bool(verify))), ("connection", str(connection))]
            program = build_program(plan, channel.group.rank)
            runner = make_runner(plan, program, device)
        except Exception as error:  # a plan that does not deliver, or that this rank cannot serve
            request.error = describe_error(error) if isinstance(error, ReshardError) else ("PlanError", str(error))
        if request.error is not None:
            timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        with counted(ours), calling(ours):
            decide = functools.partial(resolve_left, layouts={}, members=plan.ranks)
            call, decision = channel.agree(request, decide, timeout_seconds, fault_tolerant)
            if decision.lost:
                raise RankLostError(f"ranks {format_ranks(decision.lost)} did not come", decision.lost)
            assert program is not None
            warn_of_hosts(plan, decision.hostnames)
            decision.device_type = device
            self._setup(plan, program, runner, channel, call, decision, timeout_seconds, verify, both_ways, connection)

    @classmethod
    def agreed(
        cls,
        plan: Plan,
        program: Program,
        runner: RoundRunner | None,
        channel: Channel,
        call: int,
        decision: Decision,
        timeout_seconds: float,
        verify: bool,
    ) -> Mover:
        """A Mover for ranks that have agreed on the plan already."""
        self = cls.__new__(cls)
        idle, channel.idle_staging = channel.idle_staging, None
        if runner is not None:
            if channel.idle_runner is not None and channel.idle_runner is not runner:
                channel.idle_runner.release()
            channel.idle_runner = runner
        self._setup(plan, program, runner, channel, call, decision, timeout_seconds, verify)
        if idle is not None and idle[0] == plan.plan_hash:
            self._staging = idle[1]
        self._keeps_staging = True
        return self

    def _setup(
        self,
        plan: Plan,
        program: Program,
        runner: RoundRunner | None,
        channel: Channel,
        call: int,
        decision: Decision,
        timeout_seconds: float,
        verify: bool,
        both_ways: bool = False,
        connection: int = 0,
    ) -> None:
        self.plan, self._program, self._verify = plan, program, verify
        self._group, self._channel = channel.group, channel
        self._tag, self._generation = call % (NOTIFY_TAG - 1), decision.generation
        self._timeout_seconds = timeout_seconds
        self._owner = Owner()
        self._staging = Staging(program, plan.staging_bytes)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._keeps_staging = False  # hand the buffers to the next call of the same plan
        self._arrays = MoverArrays(plan, program, channel.group, decision.device_type)
        self._streamed = self._transport = None
        if runner is not None:
            device = runner.memory.device
            first = plan.tensors[0]
            is_back = both_ways and first.src.ranks[0] > first.dst.ranks[0]
            number = 2 * connection + is_back
            exchange = channel.exchange(self._generation, device, number, runner.rounds, timeout_seconds)
            streams = STREAMS[device.type](device) if exchange is None else exchange.streams
            self._streamed = StreamTransfers(runner, exchange or _nobody, streams)
        else:
            self._transport = channel.transport(self._generation, both_ways or plan.is_two_way, timeout_seconds)
        self._group.held.add_user(self)

    @property
    def staging_allocated_bytes(self) -> int:
        """Bytes held beyond source and destination shards; at most the plan's ``staging_bytes``."""
        return self._staging.allocated_bytes if self._streamed is None else self._streamed.allocated_bytes

    def __call__(self, tensor: Any = None, *, out: Any = None, timeout_seconds: float | None = None) -> Any:
        """Move and wait; see :meth:`start`."""
        return self.start(tensor, out=out).wait(timeout_seconds)

    def start(self, tensor: Any = None, *, out: Any = None) -> Handle:
        """Start moving.

        Args:
            tensor: this rank's source shard or DTensor, or ``{name: shard}`` for a plan of named tensors; None
                outside the source. It must not change until the transfer is over.
            out: where to put the destination shard, a tensor or DTensor, or ``{name: array}``; allocated if omitted.

        Returns:
            A handle; several may be under way, they finish in the order in which they were started.

        Raises:
            ArgumentError: an array does not fit the plan. All ranks then get this error, from earlier transfers
                too that they have not finished by then. Or the Mover or its group is closed, or it was made in another
                process.
        """
        self._group.check_usable()
        if self._closed:
            raise ArgumentError("this Mover is closed")
        names = [spec.name for spec in self.plan.tensors]
        try:
            self._owner.check(self._program.rank)
            src = self._arrays.sources(self.plan.by_tensor(tensor))
            outs = self.plan.by_tensor(out)
            dst = self._arrays.targets(outs)
            check_apart(src, dst, names)
            src = [as_plain(array) for array in src]
        except ReshardError as error:
            raise self._channel.fail(self._generation, error) from None
        except BaseException as error:  # an interrupt, say: the other ranks start this transfer
            self._channel.fail(self._generation, error)
            raise
        named = isinstance(tensor, Mapping) or self.plan.tensors[0].name is not None
        results = [given if is_dtensor(given) else array for given, array in zip(outs, dst, strict=True)]

        def finish() -> Any:
            return dict(zip(names, results, strict=True)) if named else results[0]

        return self._enqueue(src, dst, finish)

    def start_checked(
        self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], finish: Callable[[], Any]
    ) -> Handle:
        """As :meth:`start`, for arrays that were checked in the agreement round."""
        return self._enqueue(src, dst, finish)

    def fail(self, error: BaseException) -> ReshardError:
        """End all transfers under way between these ranks with an error, here and at the others; returns it."""
        return self._channel.fail(self._generation, error)

    def check(self) -> None:
        """Raise the error that another rank told of, if one did."""
        self._channel.check_reported(self._generation)

    def close(self) -> None:
        """End the progress thread; transfers under way are finished first. The group's connections stay."""
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
        """An array for this rank's destination shard to pass as ``out=``, not filled; None outside the destination.

        For a plan of named tensors ``{name: array}``.
        """
        arrays = map(self._arrays.empty, self.plan.tensors, self._program.dst_shapes)
        if self.plan.tensors[0].name is None:
            return next(arrays)
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
            weakref.finalize(self, self._jobs.put, None).atexit = False  # dropped without close()
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
        Monitor.of(self._group).watch(handle)  # first: a start may wait for a rank that is gone
        try:
            handle.begin_at(streamed.start(list(map(carrier, src)), list(map(carrier, dst))))
        except BaseException as error:  # whatever it is, the other ranks wait for this one
            known = self._channel.fail(self._generation, error)
            handle.stop(known)
            if not isinstance(error, Exception):
                raise
            raise known from error
        return handle

    def finish(self, timeout_seconds: float | None) -> None:
        """Close, and wait for transfers under way; those that do not end in time are broken off."""
        self.close()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive() and self._transport is not None:
                self._transport.abort()
                self._thread.join(1.0)

    def release(self) -> None:
        """The group closes: let go of its connections once transfers under way are over."""
        self.close()
        self._streamed = None

    def _end(self) -> None:
        """What the thread does last once the Mover is closed."""
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
                digests = Digests()
                digests.replicas = self._hops.replicas.digest(self._program.rank, src)
            run_program(
                self._program,
                self._transport,  # type: ignore[arg-type]
                list(map(carrier, src)),
                list(map(carrier, dst)),
                self._staging,
                tag=self._tag,
                deadline=deadline,
                check=handle.check,
                digests=digests,
                tally=handle.tally,
            )
            if digests is not None and self._transport is not None:
                self._compare(digests, handle, deadline)
            handle.succeed()
        except VerificationError as error:  # which all ranks worked out alike
            handle.stop(error)
        except BaseException as error:
            # Buffers that the transport may still write are not used again.
            self._staging = Staging(self._program, self.plan.staging_bytes)
            if isinstance(error, BrokenConnectionError):
                error = self._channel.explain(self._generation, error, handle._done.wait)
            if isinstance(error, WrongCopyError):
                error = VerificationError(describe_copy(self.plan, self._program.rank, error.id))
            if not handle.done():  # nobody told of it
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
    """Run transfers one after the other. Between them it holds nothing of its Mover, which may be dropped."""
    while (job := jobs.get()) is not None:
        mover, handle, src, dst = job
        if handle is None:
            mover._end()
            return
        mover._run(handle, src, dst)
        del job, mover, handle, src, dst


#: Movers with a thread. A thread that is inside a wait when the interpreter ends would end the process abnormally.
_running: weakref.WeakSet[Mover] = weakref.WeakSet()


def _finish_all() -> None:
    for mover in list(_running):
        mover.finish(EXIT_SECONDS)


def _nobody(recvs: Sequence[Any], sends: Sequence[Any]) -> None:
    """How messages travel where there is one rank: there are none."""
