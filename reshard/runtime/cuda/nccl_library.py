"""A ctypes binding of ``libnccl``. Signatures are those of ``nccl.h`` 2.18 and later."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
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


class NcclError(RuntimeError):
    """An NCCL call or a communicator failed."""


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

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


def make_config() -> _Config:
    """The configuration of a non-blocking communicator."""
    size, unset = ctypes.sizeof(_Config), _UNDEFINED
    return _Config(size, _CONFIG_MAGIC, _CONFIG_VERSION, 0, unset, unset, unset, None)


#: ``ncclComm_t`` and ``cudaStream_t``
CommHandle, StreamHandle = ctypes.c_void_p, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "ncclGetVersion": ([ctypes.POINTER(ctypes.c_int)], ctypes.c_int),
    "ncclGetUniqueId": ([ctypes.POINTER(UniqueId)], ctypes.c_int),
    "ncclGetErrorString": ([ctypes.c_int], ctypes.c_char_p),
    "ncclGetLastError": ([CommHandle], ctypes.c_char_p),
    "ncclCommInitRankConfig": (
        [ctypes.POINTER(CommHandle), ctypes.c_int, UniqueId, ctypes.c_int, ctypes.POINTER(_Config)],
        ctypes.c_int,
    ),
    "ncclCommGetAsyncError": ([CommHandle, ctypes.POINTER(ctypes.c_int)], ctypes.c_int),
    "ncclCommFinalize": ([CommHandle], ctypes.c_int),
    "ncclCommDestroy": ([CommHandle], ctypes.c_int),
    "ncclCommAbort": ([CommHandle], ctypes.c_int),
    "ncclGroupStart": ([], ctypes.c_int),
    "ncclGroupEnd": ([], ctypes.c_int),
    "ncclSend": (
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, CommHandle, StreamHandle],
        ctypes.c_int,
    ),
    "ncclRecv": (
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, CommHandle, StreamHandle],
        ctypes.c_int,
    ),
    "ncclBroadcast": (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, CommHandle, StreamHandle],
        ctypes.c_int,
    ),
    "ncclAllReduce": (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, CommHandle, StreamHandle],
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
            major, minor = divmod(self.version // 100, 100)
            raise NcclError(f"{path} is NCCL {major}.{minor}; 2.18 or later is needed")

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
        unique_id = UniqueId()
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
