"""A headless Chromium that opens pages at a width, and reports errors and what does not fit."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Widths in pixels: a phone, a tablet, a laptop, a large screen.
WIDTHS = (375, 768, 1280, 1920)
#: A headless browser answers within this time, or the page counts as stuck.
SECONDS = 60
#: Elements that end right of the window, except inside those that scroll or clip by themselves.
_OVERFLOW = """(() => {
  document.body.offsetWidth;  // starts the transitions to this width, which must have ended
  for (const a of document.getAnimations()) a.effect.getComputedTiming().endTime === Infinity ? a.cancel() : a.finish();
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push('page ' + document.documentElement.scrollWidth);
  for (const e of document.body.querySelectorAll('*')) {
    let inner = false;
    for (let p = e; p; p = p.parentElement) inner ||= ['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX);
    const box = e.getBoundingClientRect();
    if (!inner && box.width && box.right > width + 1) found.push(e.tagName + ' ' + Math.round(box.right));
  }
  return found;
})()"""


#: Starts a browser, whose pipes must be the files 3 and 4.
_LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 50) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser():
    """The path of a Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A Chromium that takes commands of the DevTools protocol through two pipes."""

    def __init__(self, path):
        self._stack = contextlib.ExitStack()
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        (read, out), (into, write) = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(read), str(write), path, *flags],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._out, self._into = os.fdopen(out, "wb", buffering=0), os.fdopen(into, "rb")
        self._buffer, self._number, self.events = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page.enable", "Runtime.enable", "Log.enable", "Network.enable"):
            self.call(name)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._into.close()
        self._stack.close()

    def call(self, method, **params):
        """The result of a command. Events that come before it are kept in ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event):
        """Read until an event has come."""
        while not any(found.get("method") == event for found in self.events):
            self.events.append(self._read())

    def _read(self):
        while b"\0" not in self._buffer:
            more = os.read(self._into.fileno(), 1 << 20)
            if not more:
                raise AssertionError("the browser ended")
            self._buffer += more
        answer, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(answer)

    def evaluate(self, script):
        """The value of a script in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, page, width, *, is_dark=False):
        """Open a page of this width, and return what is wrong with it: errors, requests, and what does not fit.

        Args:
            page: the path of a file, or the address of a page, which may load what its server has.
            width: of the window, in pixels. is_dark: whether the reader prefers dark pages.
        """
        self.events.clear()
        self._set_width(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        is_address = str(page).startswith("http:")
        address = page if is_address else Path(page).resolve().as_uri()
        origin = "/".join(address.split("/")[:3]) + "/" if is_address else "file:"
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")
        found = self.resize(width)
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails'].get('exception', params)}")
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"error: {params['entry']['text']}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(f"console: {params['args']}")
            elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith((origin, "data:")):
                found.append(f"request: {params['request']['url']}")
        return found

    def resize(self, width):
        """The elements that do not fit if the window of the open page has this width."""
        self._set_width(width)
        return [f"overflow: {text}" for text in self.evaluate(_OVERFLOW)]

    def _set_width(self, width):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path):
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
