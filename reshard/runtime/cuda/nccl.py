"""A ctypes binding of NCCL with communicators that never block the host without a deadline.

Communicators are non-blocking (``ncclConfig_t.blocking = 0``). An NCCL thread creates the communicator, and connects
two ranks when they first exchange messages. :meth:`Communicator.wait` polls until it is done. Once all pairs are
connected, the thread that ends a group launches it. Decision 18 explains why this is not ``ProcessGroupNCCL``.

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

#: ``(device address, bytes, rank at the other end)``.
Message = tuple[int, int, int]
#: Called every 0.2 s during a wait. Raises an error to end the wait, for example if a rank has failed.
Look = Callable[[], None]


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
        NcclError: the library lacks a function, or is older than 2.18. OSError: it cannot be loaded.
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
        """Call a function of NCCL by name. Returns its ``ncclResult_t``."""
        return int(getattr(self._library, name)(*arguments))

    def check(self, name: str, *arguments: object, also: Sequence[int] = ()) -> int:
        """Like :meth:`call`, but raise NcclError unless the result is success or in ``also``."""
        result = self.call(name, *arguments)
        if result != SUCCESS and result not in also:
            raise NcclError(f"{name}: {self.describe(result)}")
        return result

    def describe(self, result: int) -> str:
        """NCCL's text for an ``ncclResult_t``, with NCCL's last warning."""
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
        NcclError: no library was found, or the first one is too old.
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

    A lock serializes calls of different threads. Any thread may call :meth:`abort` at any time.

    Args:
        library: NCCL. unique_id: from :meth:`Library.make_unique_id`, the same on all ranks.
        rank, size: this rank within the communicator, and the number of its ranks.
        timeout_seconds: limit for creating the communicator, for launching a group and for closing.
        look: called every 0.2 s during a wait; raises an error to end the wait.

    Raises:
        NcclError: NCCL could not create it. TimeoutError: not all ranks joined in time. Or what ``look`` raises.
    """

    def __init__(
        self,
        library: Library,
        unique_id: bytes,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        look: Look = lambda: None,
    ) -> None:
        self.nccl, self.rank, self.size = library, rank, size
        self._timeout_seconds, self._look = timeout_seconds, look
        self._lock = threading.RLock()
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

    def wait(self, what: str = "launching a group") -> None:
        """Wait until NCCL has no operation in progress on this communicator.

        Args:
            what: the operation, for errors.

        Raises:
            NcclError: the operation failed or was aborted. TimeoutError: it took too long. Or what ``look`` raises.
        """
        begun = looked = time.monotonic()
        while (result := self._async_result()) == IN_PROGRESS:
            now = time.monotonic()
            if now - begun > self._timeout_seconds:
                raise TimeoutError(f"NCCL took longer than {self._timeout_seconds:g} s {what}")
            if now - looked > 0.2:
                looked = now
                self._look()
            time.sleep(min(0.01, max(1e-5, 0.05 * (now - begun))))
        if result != SUCCESS:
            raise NcclError(f"NCCL failed {what}: {self.nccl.describe(result)}")

    def find_error(self) -> str | None:
        """Why this communicator failed, such as an exited peer; None if it works, was aborted or is closed."""
        if self._aborted or self._closed:
            return None
        result = self._async_result()
        return None if result in (SUCCESS, IN_PROGRESS) else self.nccl.describe(result)

    def _async_result(self) -> int:
        with self._lock:
            if self._aborted:
                raise NcclError("the communicator was aborted")
            result = ctypes.c_int()
            self.nccl.check("ncclCommGetAsyncError", self._comm, ctypes.byref(result))
            return result.value

    def exchange(self, recvs: Sequence[Message], sends: Sequence[Message], stream: int) -> None:
        """Enqueue receives and sends on a stream as one group. Messages between two ranks match by order.

        Args:
            recvs, sends: ``(device address, bytes, rank at the other end)`` of each message.
            stream: the handle of a CUDA stream (``torch.cuda.Stream.cuda_stream``).

        Raises:
            NcclError: NCCL rejected a message, or the communicator failed. TimeoutError: ranks did not connect in time.
        """
        with self._group():
            for name, messages in (("ncclRecv", recvs), ("ncclSend", sends)):
                for address, nbytes, rank in messages:
                    self._check(name, address, nbytes, DATA_TYPES["uint8"], rank, stream=stream)

    def all_reduce(self, address: int, count: int, dtype: str, reduction: str, stream: int) -> None:
        """Reduce an array over all ranks, in place.

        Args:
            address, count: device address and number of elements. dtype: a name in :data:`DATA_TYPES`.
            reduction: a name in :data:`REDUCTIONS`. stream, errors: as for :meth:`exchange`.
        """
        with self._group():
            self._check(
                "ncclAllReduce", address, address, count, DATA_TYPES[dtype], REDUCTIONS[reduction], stream=stream
            )

    def broadcast(self, address: int, nbytes: int, root: int, stream: int) -> None:
        """Overwrite ``nbytes`` at a device address on all ranks with those of ``root``. Errors: :meth:`exchange`."""
        with self._group():
            self._check("ncclBroadcast", address, address, nbytes, DATA_TYPES["uint8"], root, stream=stream)

    def _check(self, name: str, *arguments: int, stream: int) -> None:
        self.nccl.check(name, *arguments, self._comm, _stream(stream), also=(IN_PROGRESS,))

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """A group of calls. It ends even after an error: otherwise later calls of the thread would join the group."""
        with self._lock:
            if self._aborted or self._closed:
                raise NcclError(f"the communicator is {'aborted' if self._aborted else 'closed'}")
            self.nccl.check("ncclGroupStart")
            try:
                yield
            except BaseException:
                self.nccl.call("ncclGroupEnd")
                raise
            result = self.nccl.check("ncclGroupEnd", also=(IN_PROGRESS,))
        if result == IN_PROGRESS:  # NCCL connects pairs of ranks
            self.wait()

    def abort(self) -> None:
        """Cancel operations in progress: on this rank at once, on the others soon after. Later calls fail."""
        locked = self._lock.acquire(timeout=ABORT_WAIT_SECONDS)  # another thread may block inside NCCL
        try:
            if not (self._aborted or self._closed):
                self._aborted = True
                self.nccl.call("ncclCommAbort", self._comm)
        finally:
            if locked:
                self._lock.release()

    def close(self) -> None:
        """Wait for operations in progress, then destroy the communicator. If that fails, abort it."""
        try:
            with self._lock:
                if self._aborted or self._closed:
                    return
                self.nccl.check("ncclCommFinalize", self._comm, also=(IN_PROGRESS,))
                self.wait("closing a communicator")
                self._closed = True
                self.nccl.check("ncclCommDestroy", self._comm)
        except (NcclError, TimeoutError):
            self.abort()
