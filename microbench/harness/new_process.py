"""Run a function in a new process, so that its peak memory and its caches are those of one case."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def call_in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that a new process calls."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
