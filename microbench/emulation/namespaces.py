"""Linux namespaces for emulated hosts. Functions that enter or change a namespace raise OSError if Linux refuses.

They call the C library, because Python 3.11 lacks ``unshare`` and ``setns``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1


def why_unsupported() -> str | None:
    """The reason why this machine cannot emulate hosts, and a remedy; None if it can."""
    if sys.platform != "linux":
        return "emulated hosts need Linux namespaces; run the benchmark on real machines with torchrun instead"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None and not Path(f"/usr/sbin/{tool}").exists():
            return f"the command {tool!r} is missing: install iproute2 (apt install iproute2, dnf install iproute-tc)"
    pid = os.fork()
    if pid == 0:
        try:
            enter_cluster()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    return (
        f"this process may not create namespaces ({os.strerror(code)}): run as root, or allow user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
        "user.max_user_namespaces above 0; in a container, use --privileged)"
    )


def enter_cluster() -> None:
    """Move this process into new network and mount namespaces. Without root rights, also create a user namespace."""
    if os.geteuid() == 0:
        try:
            _unshare(_CLONE_NEWNET | _CLONE_NEWNS)
        except PermissionError:
            _enter_user_namespace()
    else:
        _enter_user_namespace()
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def _enter_user_namespace() -> None:
    """Move this process into new user, network and mount namespaces, in which it is root."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def enter_host() -> None:
    """Move this process into new network, IPC, UTS and mount namespaces. Its children get a new PID namespace."""
    _unshare(_CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWNS)


def enter_nic() -> None:
    """Move this process into a new network namespace."""
    _unshare(_CLONE_NEWNET)


def join_nic(pid: int) -> None:
    """Move this process into the network namespace of process ``pid``."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if _libc().setns(descriptor, _CLONE_NEWNET):
            raise _last_error("setns")
    finally:
        os.close(descriptor)


def replace_etc_hosts(text: str) -> None:
    """Replace /dev/shm, and /etc/hosts with ``text``, in this mount namespace and in those created from it."""
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV)
    file = Path("/dev/shm/hosts")
    file.write_text(text)
    with contextlib.suppress(OSError):  # optional: ranks connect by address
        _mount(str(file), "/etc/hosts", None, _MS_BIND)


def set_up_host(name: str) -> None:
    """Give this host its own host name, /proc and /dev/shm. The init process of the host calls this."""
    socket.sethostname(name)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    with contextlib.suppress(PermissionError):  # a container that masks /proc forbids this; keep the old /proc
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV)


def mount_private(folder: str) -> None:
    """Mount an empty file system at ``folder``, which only processes of this host see."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits for any reason."""
    parent = os.getppid()
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent == 0:  # the parent is outside this PID namespace
        return
    if os.getppid() != parent:  # the parent exited before the prctl call
        os._exit(1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    if _libc().unshare(flags):
        raise _last_error("unshare")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    if _libc().mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None):
        raise _last_error(f"mount {target}")


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
