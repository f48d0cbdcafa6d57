"""A ctypes binding of NCCL with communicators that never block the host without a deadline.

Communicators are non-blocking (``ncclConfig_t.blocking = 0``). An NCCL thread creates the communicator, and connects
two ranks when they first exchange messages. :meth:`Communicator.wait` polls until it is done. Since NCCL 2.22 such a
thread also launches every group; before, only those that connect ranks. Decision 18 explains why this is not
``ProcessGroupNCCL``.

Signatures are those of ``nccl.h`` 2.18 and later.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

UNIQUE_ID_BYTES = 128
#: ``ncclResult_t``
SUCCESS, IN_PROGRESS = 0, 7
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700
_UNDEFINED = -(2**31)
MIN_VERSION = 21800
#: ``ncclDataType_t`` of the dtypes that collectives can reduce. Messages are sent as uint8.
DATA_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
#: ``ncclRedOp_t``
REDUCTIONS = {"sum": 0, "product": 1, "max": 2, "min": 3}
#: How long an abort waits for a call of another thread to return before it aborts anyway.
ABORT_WAIT_SECONDS = 0.5
#: How long :meth:`Communicator.abort` and :meth:`Communicator.close` wait for NCCL. It frees device memory, which waits
#: for all kernels of the device. It also waits until all CUDA graphs that captured the communicator are destroyed.
ABORT_SECONDS, CLOSE_SECONDS = 2.0, 5.0
#: A wait polls without pauses for this long, since NCCL launches a group in tens of microseconds.
SPIN_SECONDS = 0.0005

#: ``(device address, bytes, rank at the other end)``.
Message = tuple[int, int, int]
#: Called now and then during a wait; raises an error if the wait is pointless.
Poll = Callable[[], None]


class NcclError(RuntimeError):
    """An NCCL call or a communicator failed."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` with the fields of 2.17; newer libraries use defaults for the rest."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
    ]


_comm, _stream = ctypes.c_void_p, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "ncclGetVersion": ([ctypes.POINTER(ctypes.c_int)], ctypes.c_int),
    "ncclGetUniqueId": ([ctypes.POINTER(_UniqueId)], ctypes.c_int),
    "ncclGetErrorString": ([ctypes.c_int], ctypes.c_char_p),
    "ncclGetLastError": ([_comm], ctypes.c_char_p),
    "ncclCommInitRankConfig": (
        [ctypes.POINTER(_comm), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)],
        ctypes.c_int,
    ),
    "ncclCommGetAsyncError": ([_comm, ctypes.POINTER(ctypes.c_int)], ctypes.c_int),
    "ncclCommFinalize": ([_comm], ctypes.c_int),
    "ncclCommDestroy": ([_comm], ctypes.c_int),
    "ncclCommAbort": ([_comm], ctypes.c_int),
    "ncclGroupStart": ([], ctypes.c_int),
    "ncclGroupEnd": ([], ctypes.c_int),
    "ncclSend": ([ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _comm, _stream], ctypes.c_int),
    "ncclRecv": ([ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _comm, _stream], ctypes.c_int),
    "ncclBroadcast": (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _comm, _stream],
        ctypes.c_int,
    ),
    "ncclAllReduce": (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _comm, _stream],
        ctypes.c_int,
    ),
}


class Library:
    """A loaded ``libnccl``.

    Raises:
        NcclError: the library lacks a function, or is older than 2.18.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        for name, (arguments, result) in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise NcclError(f"{path} has no {name}; NCCL 2.18 or later is needed") from None
            function.argtypes, function.restype = arguments, result
        version = ctypes.c_int()
        self.check("ncclGetVersion", ctypes.byref(version))
        #: ``NCCL_VERSION_CODE``: 22705 is 2.27.5.
        self.version = version.value
        if self.version < MIN_VERSION:
            raise NcclError(f"{path} is NCCL version code {self.version}; {MIN_VERSION} or later is needed")

    def call(self, name: str, *arguments: object) -> int:
        """Call a function; returns its ``ncclResult_t``."""
        return int(getattr(self._library, name)(*arguments))

    def check(self, name: str, *arguments: object, also: Sequence[int] = ()) -> int:
        """Like :meth:`call`, but raise NcclError unless the result is success or in ``also``."""
        result = self.call(name, *arguments)
        if result != SUCCESS and result not in also:
            raise NcclError(f"{name}: {self.describe(result)}")
        return result

    def describe(self, result: int) -> str:
        """NCCL's text for a result, with its last warning."""
        text = self._library.ncclGetErrorString(result).decode(errors="replace")
        last = (self._library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        return f"{text}: {last}" if last else text

    def make_unique_id(self) -> bytes:
        """An id for one communicator. One rank makes it and shares it with the others."""
        unique_id = _UniqueId()
        self.check("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)


@functools.cache
def find_library() -> Library:
    """The NCCL library that is already loaded (by torch), or else the system's, or else that of ``nvidia-nccl-*``.

    A loaded library comes first because two versions of NCCL in one process can deadlock.

    Raises:
        NcclError: no library was found.
    """
    candidates = ["libnccl.so.2"]  # dlopen returns the loaded library of that name, if any
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        candidates += map(str, sorted(Path(folder).glob("nccl/lib/libnccl.so*")))
    failures = []
    for path in candidates:
        try:
            return Library(path)
        except OSError as error:
            failures.append(str(error))
    raise NcclError(f"no NCCL library found; install nvidia-nccl-cu12 or -cu13 ({'; '.join(failures)})")


class Communicator:
    """A non-blocking communicator on the current CUDA device.

    Groups of different threads run one after another. Any thread may call :meth:`abort` at any time.

    Args:
        library: NCCL. unique_id: from :meth:`Library.make_unique_id`, the same on all ranks.
        rank, size: this rank within the communicator, and the number of its ranks.
        timeout_seconds: limit for creating the communicator, and for launching a group.
        poll: called every 0.2 s during a wait; raises an error to end the wait.
        in_abort: a context of the thread that aborts the communicator.

    Raises:
        NcclError: NCCL could not create it. TimeoutError: not all ranks joined in time. Or what ``poll`` raises.
    """

    def __init__(
        self,
        library: Library,
        unique_id: bytes,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        poll: Poll = lambda: None,
        in_abort: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.nccl, self.rank, self.size = library, rank, size
        self._timeout_seconds, self._poll, self._in_abort = timeout_seconds, poll, in_abort
        self._lock = threading.RLock()  # held during calls of NCCL
        self._posting = threading.RLock()  # held from the start of a group until it is launched
        self._ending = threading.Lock()  # held to decide whether the communicator is aborted or closed
        self._abort_ended = threading.Event()
        self._comm = _comm()
        self._aborted = self._closed = False
        config = _Config(
            ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, None
        )
        shared = _UniqueId.from_buffer_copy(unique_id)
        library.check(
            "ncclCommInitRankConfig",
            ctypes.byref(self._comm), size, shared, rank, ctypes.byref(config),
            also=(IN_PROGRESS,),
        )  # fmt: skip
        try:
            self.wait("creating a communicator")
        except BaseException:
            self.abort()
            raise

    def wait(self, what: str = "launching a group", timeout_seconds: float | None = None) -> None:
        """Wait until NCCL has no operation in progress on this communicator.

        Args:
            what: the operation, for errors. timeout_seconds: default: that of the communicator.

        Raises:
            NcclError: the operation failed or was aborted. TimeoutError: it took too long. Or what ``poll`` raises.
        """
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        begun = polled_at = time.monotonic()
        while (result := self._async_result()) == IN_PROGRESS:
            now = time.monotonic()
            if now - begun > limit:
                raise TimeoutError(f"NCCL took longer than {limit:g} s {what}")
            if now - polled_at > 0.2:
                polled_at = now
                self._poll()
            time.sleep(0 if now - begun < SPIN_SECONDS else min(0.01, 0.05 * (now - begun)))
        if result != SUCCESS:
            raise NcclError(f"NCCL failed {what}: {self.nccl.describe(result)}")

    def find_error(self) -> str | None:
        """Why this communicator failed, such as an exited peer; None if it works, is in use, was aborted or is closed.

        It does not block, not even while another thread is inside NCCL.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            result = SUCCESS if self._aborted or self._closed else self._async_result()
        finally:
            self._lock.release()
        return None if result in (SUCCESS, IN_PROGRESS) else self.nccl.describe(result)

    def _async_result(self) -> int:
        with self._lock:
            self._check_open()
            result = ctypes.c_int()
            self.nccl.check("ncclCommGetAsyncError", self._comm, ctypes.byref(result))
            return result.value

    def _check_open(self) -> None:
        if self._aborted or self._closed:
            raise NcclError(f"the communicator {'was aborted' if self._aborted else 'is closed'}")

    def exchange(self, recvs: Sequence[Message], sends: Sequence[Message], stream: int) -> None:
        """Enqueue receives and sends on a stream as one group. Messages between two ranks match by order.

        Args:
            stream: the handle of a CUDA stream (``torch.cuda.Stream.cuda_stream``).

        Raises:
            NcclError: NCCL rejected a message, or the communicator failed; it cannot be used again.
            TimeoutError: ranks did not connect in time.
        """
        with self._group():
            for name, messages in (("ncclRecv", recvs), ("ncclSend", sends)):
                for address, nbytes, rank in messages:
                    self._check(name, address, nbytes, DATA_TYPES["uint8"], rank, stream=stream)

    def all_reduce(self, address: int, count: int, dtype: str, reduction: str, stream: int) -> None:
        """Reduce an array over all ranks, in place.

        Args:
            address, count: device address and number of elements. dtype: a name in :data:`DATA_TYPES`.
            reduction: a name in :data:`REDUCTIONS`. stream: as for :meth:`exchange`.
        """
        with self._group():
            self._check(
                "ncclAllReduce", address, address, count, DATA_TYPES[dtype], REDUCTIONS[reduction], stream=stream
            )

    def broadcast(self, address: int, nbytes: int, root: int, stream: int) -> None:
        """Overwrite an array on all ranks with that of ``root``."""
        with self._group():
            self._check("ncclBroadcast", address, address, nbytes, DATA_TYPES["uint8"], root, stream=stream)

    def _check(self, name: str, *arguments: int, stream: int) -> None:
        self.nccl.check(name, *arguments, self._comm, _stream(stream), also=(IN_PROGRESS,))

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """A group of calls, which NCCL launches before the ``with`` block ends.

        The group ends even after an error: otherwise later calls of the thread would join it. NCCL rejects calls of
        another thread until it has launched the group.
        """
        with self._posting:
            with self._lock:
                self._check_open()
                self.nccl.check("ncclGroupStart")
                try:
                    yield
                except BaseException:
                    self.nccl.call("ncclGroupEnd")
                    raise
                result = self.nccl.check("ncclGroupEnd", also=(IN_PROGRESS,))
            if result == IN_PROGRESS:
                self.wait()

    def abort(self) -> None:
        """Cancel operations in progress: on this rank at once, on the others soon after. Later calls fail.

        Returns after :data:`ABORT_SECONDS` at the latest; a thread goes on with an abort that takes longer.
        """
        self.begin_abort()
        if self._aborted:
            self._abort_ended.wait(ABORT_SECONDS)

    def begin_abort(self) -> None:
        """As :meth:`abort`, but do not wait.

        An abort ends when all kernels of the device have ended. So a program with several communicators must begin to
        abort all of them before it waits for one.
        """
        with self._ending:
            if self._aborted or self._closed:
                return
            self._aborted = True
        try:
            threading.Thread(target=self._abort, name="reshard-nccl-abort", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down
            self._abort_ended.set()

    def _abort(self) -> None:
        if self._lock.acquire(timeout=ABORT_WAIT_SECONDS):  # another thread may block inside NCCL
            self._lock.release()  # no call follows, because the communicator is marked as aborted
        try:
            with self._in_abort():
                self.nccl.call("ncclCommAbort", self._comm)
        finally:
            self._abort_ended.set()

    def close(self) -> None:
        """Wait for operations under way, then destroy the communicator. Abort it after an error or a time-out."""
        try:
            with self._lock:
                if self._aborted or self._closed:
                    return
                self.nccl.check("ncclCommFinalize", self._comm, also=(IN_PROGRESS,))
            self.wait("closing a communicator", CLOSE_SECONDS)
            with self._ending:
                self._check_open()
                self._closed = True
            with self._lock:
                self.nccl.check("ncclCommDestroy", self._comm, also=(IN_PROGRESS,))
        except Exception:  # also errors of other ranks that ``poll`` raises
            self.abort()
