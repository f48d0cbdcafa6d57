"""A worker of SGLang: versions of a trainer go through the loader of its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from reshard.coordination import find_group
from reshard.errors import RemoteError, ReshardError
from reshard.sglang.order import InstallOrder, Pairs, read_order
from reshard.weights.membership.team import AGREE_SECONDS, run_collectively
from reshard.weights.subscriber import Subscriber

#: Time to wait for a version that was sent before it was ordered.
_HELD_SECONDS = 30.0


def load_weights(model: torch.nn.Module, named_tensors: Pairs) -> None:
    """Install the version that a :class:`Trainer` orders. SGLang calls it on each worker of an engine.

    Start the engine with ``custom_weight_loader=["reshard.sglang.load_weights"]``. If an update fails, the workers keep
    their version, and the trainer gets the error; SGLang would end the engine if this function raised it.

    Raises:
        ReshardError: the engine has lost its version. SGLang then ends the engine.
    """
    order = read_order(named_tensors)
    if model not in _workers:
        _workers[model] = _EngineWorker(model)
    with torch.inference_mode(False):  # SGLang calls with it, and what arrives is written by another thread
        _workers[model].install(order)


class _EngineWorker:
    """One worker of an engine. All workers of the engine hold one version, and keep it if an update fails."""

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.distributed.parallel_state import get_world_group  # only workers of SGLang need it

        self._model = model
        self._group = get_world_group().cpu_group
        self._trainer = ""
        self._subscriber: Subscriber | None = None
        self._store: Any = None
        self._given: Pairs = ()  # to the loader by the last call
        self._held: Pairs = ()  # the version that the engine has; the memory is that of the Subscriber
        self._is_touched = False  # whether the loader has run in this update

    def install(self, order: InstallOrder) -> None:
        """Install a version, and answer."""
        self._is_touched = False
        failure = ""
        try:
            self._update(order)
        except ReshardError as error:
            failure = str(error)
            try:
                run_collectively(find_group(self._group), self._restore, "loads its old version again", AGREE_SECONDS)
            except ReshardError as lost:
                failure = f"{failure}; the engine ends, because it has lost its version: {lost}"
                raise RemoteError(failure) from error
        finally:
            if dist.get_rank(self._group) == 0 and self._store is not None:
                self._store.append(order.answer, f"{failure}\n")  # a draft model adds its answer

    def _update(self, order: InstallOrder) -> None:
        seconds = min(order.timeout_seconds, _HELD_SECONDS)
        if self._trainer != order.trainer:
            self._subscribe(order)
            seconds = order.timeout_seconds
        assert self._subscriber is not None
        while self._subscriber.version is None or self._subscriber.version < order.version:
            self._subscriber.update(seconds)
            self._held = self._given

    def _subscribe(self, order: InstallOrder) -> None:
        """Subscribe to a trainer, in place of an earlier one."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._trainer, self._store, self._subscriber = "", None, None

        def connect() -> dict[str, Any]:
            try:
                self._store = dist.TCPStore(order.host, order.port, is_master=False)
            except Exception as error:
                raise RemoteError(f"no store answers at {order.host}:{order.port}: {error}") from error
            return {}

        run_collectively(find_group(self._group), connect, "connects to the store of the trainer", AGREE_SECONDS)
        self._subscriber = Subscriber(
            None,
            self._store,
            order.name,
            self._group,
            load_weights=self._load,
            memory_bytes=order.memory_bytes,
            timeout_seconds=order.timeout_seconds,
        )
        self._trainer = order.trainer

    def _load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors, as SGLang does from a checkpoint."""
        self._is_touched = True
        self._given = list(pairs)
        with torch.no_grad():
            self._model.load_weights(iter(self._given))

    def _restore(self) -> dict[str, Any]:
        """Load the old version, unless the Subscriber has: ``begin_weight_update`` may have unpacked it in place."""
        is_whole = self._is_touched and self._subscriber is not None and self._subscriber.version is not None
        if self._held and not is_whole:
            self._load(self._held)
        elif self._is_touched and not is_whole:
            raise RemoteError("no version before it was kept")
        return {}


_workers: WeakKeyDictionary[torch.nn.Module, _EngineWorker] = WeakKeyDictionary()
