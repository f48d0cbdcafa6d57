"""Run tests in forked workers: ``pytest --workers 4``.

One process imports and collects all tests, then forks the workers. So torch is imported once, and workers share its
memory. A worker asks for its next test when it starts one, because a test keeps the fixtures that the next one needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--workers``."""
    parser.addoption("--workers", type=int, default=0, help="run the tests in this many forked processes")


@dataclass
class _Worker:
    """A process, and the indices of its tests: the one it runs and the one after it, None at the end."""

    pid: int
    running: int
    following: int | None = None


class _Sender:
    """In a worker: send reports to the process that forked it, which prints and counts them."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pipe.send(("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report)))


def _work(session: pytest.Session, pipe: Connection, index: int | None) -> None:
    manager = session.config.pluginmanager
    reporter = manager.getplugin("terminalreporter")
    if reporter is not None:
        manager.unregister(reporter)
    capture = manager.getplugin("capturemanager")
    if capture is not None:  # forked processes would share the offsets of the files that hold the output
        capture.stop_global_capturing()
        capture.start_global_capturing()
    manager.register(_Sender(session.config, pipe))
    while index is not None:
        pipe.send(("start", None))
        following = pipe.recv()
        session.config.hook.pytest_runtest_protocol(
            item=session.items[index], nextitem=None if following is None else session.items[following]
        )
        index = following
    pipe.send(("done", None))


class _Scheduler:
    """Forks workers, tells them what to run, and passes on their reports."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.hook = session, session.config.hook
        self.queue = deque(range(len(session.items)))
        self.workers: dict[Connection, _Worker] = {}

    def fork(self) -> None:
        first = self.queue.popleft()
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            self.workers[ours] = _Worker(pid, first)
            return
        try:
            ours.close()
            _work(self.session, theirs, first)
        except BaseException:
            theirs.send(("error", traceback.format_exc()))
        finally:
            os._exit(0)

    def run(self, num_workers: int) -> None:
        try:
            for _ in range(min(num_workers, len(self.queue))):
                self.fork()
            while self.workers:
                for pipe in wait(list(self.workers)):
                    self.receive(pipe)
                if self.session.shouldfail or self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldfail or self.session.shouldstop)
        finally:
            for worker in self.workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def receive(self, pipe: Any) -> None:
        worker = self.workers[pipe]
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            kind, value = "error", f"the process ended with status {self.end(pipe)}"
        if kind == "start":
            if worker.following is not None:
                worker.running = worker.following
            item = self.session.items[worker.running]
            self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            worker.following = self.queue.popleft() if self.queue else None
            with contextlib.suppress(OSError):  # of a worker that has just ended
                pipe.send(worker.following)
        elif kind == "report":
            report = self.hook.pytest_report_from_serializable(config=self.session.config, data=value)
            self.hook.pytest_runtest_logreport(report=report)
        elif kind == "error":
            self.fail(worker, value)
            self.end(pipe)
        else:
            self.end(pipe)

    def end(self, pipe: Any) -> int:
        """Forget a worker whose pipe is closed or will be, and return how it exited."""
        worker = self.workers.pop(pipe, None)
        if worker is None:
            return 0
        pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def fail(self, worker: _Worker, text: str) -> None:
        """Report a test whose process ended as failed, and start another worker for the tests that are left."""
        item = self.session.items[worker.running]
        self.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        )
        if worker.following is not None:
            self.queue.appendleft(worker.following)
        if self.queue:
            self.fork()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers."""
    num_workers = session.config.getoption("--workers")
    if not num_workers or session.config.option.collectonly or session.testsfailed:
        return None
    session.config._tmp_path_factory.getbasetemp()  # shared by the workers; the end of the session tidies it
    _Scheduler(session).run(num_workers)
    return True
