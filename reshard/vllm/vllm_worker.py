"""A worker of vLLM: versions of a trainer go through the loader of its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from reshard.coordination import find_group
from reshard.errors import ArgumentError, RemoteError, ReshardError
from reshard.timeouts import DEFAULT_JOIN_SECONDS, DEFAULT_TIMEOUT_SECONDS
from reshard.weights.membership.team import AGREE_SECONDS, run_collectively
from reshard.weights.subscriber import Subscriber


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The store and the name by which the workers of an engine find the trainer.

    Attributes:
        host, port: host and port of the ``torch.distributed.TCPStore`` that the trainer shares.
        name: what the trainer publishes.
        memory_bytes: memory for data in transit on each worker, beyond two copies of the weights.
        join_seconds, transfer_seconds: how long others may take to connect, and limit of each transfer.
    """

    host: str
    port: int
    name: str = "default"
    memory_bytes: int = 1 << 30
    join_seconds: float = DEFAULT_JOIN_SECONDS
    transfer_seconds: float = DEFAULT_TIMEOUT_SECONDS


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to install.

    Attributes:
        version: the lowest version that is installed. None: any version newer than that of the engine.
        timeout_seconds: time to wait for the version.
    """

    version: int | None = None
    timeout_seconds: float = 60.0


class WorkerEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker of an engine. All workers of the engine hold the same version, and keep it if an update fails."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._subscriber: Subscriber | None = None
        self._is_touched = False  # whether the loader has run since the last update began
        self._refusal: Any = None
        self._group = get_world_group()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Subscribe to the trainer, in place of an earlier subscription."""
        with self._raised_once():
            self.shutdown()
            group = find_group(self._group.cpu_group)
            stores: list[dist.Store] = []

            def connect() -> dict[str, Any]:
                try:
                    stores.append(dist.TCPStore(init_info.host, init_info.port, is_master=False))
                except Exception as error:
                    raise RemoteError(f"no store answers at {init_info.host}:{init_info.port}: {error}") from error
                return {}

            run_collectively(group, connect, "connects to the store of the trainer", AGREE_SECONDS)
            self._subscriber = Subscriber(
                None,
                stores[0],
                init_info.name,
                self._group.cpu_group,
                load_weights=self._load,
                memory_bytes=init_info.memory_bytes,
                join_seconds=init_info.join_seconds,
                timeout_seconds=init_info.transfer_seconds,
            )

    def start_weight_update(self) -> None:
        """Do nothing. The old version serves until all workers have the new one."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Install a version. If that fails, the engine keeps its version, or refuses requests if it has lost it.

        Raises:
            ReshardError: the engine did not get the version. Only the last worker raises it, because vLLM reads the
                answers of the workers in order and stops at the first error. Call ``finish_weight_update`` before the
                next update.
        """
        with self._raised_once():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See :meth:`update_weights`."""
        subscriber, wanted = self._subscriber, update_info.version
        if subscriber is None:
            raise ArgumentError("call init_weight_transfer_engine before the first update")
        self._is_touched = False
        try:
            if wanted is None:
                subscriber.update(update_info.timeout_seconds)
            else:
                while subscriber.version is None or subscriber.version < wanted:
                    subscriber.update(update_info.timeout_seconds)
        except ReshardError:
            if self._is_touched and subscriber.version is None:
                self._refuse_requests()
            raise
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None

    def finish_weight_update(self) -> None:
        """Do nothing. :meth:`update_weights` has done everything."""

    def shutdown(self) -> None:
        """Stop receiving. The engine keeps its version."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors as from a checkpoint: vLLM cuts and fuses them, and packs them for its kernels."""
        self._is_touched = True
        given = dict(pairs)
        first_name: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            first = first_name.setdefault(id(parameter), name)
            if first in given:  # tied weights under each name, because each layer packs its own copy
                given.setdefault(name, given[first])
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(iter(given.items()))
            finally:  # also gives each layer that has not loaded all a state from which it can load again
                finalize_layerwise_reload(self.model, self.model_config)

    def _refuse_requests(self) -> None:
        """Let every request fail until an update succeeds."""
        if self._refusal is None:

            def refuse(*_: Any) -> None:
                raise RemoteError("this engine holds no whole version of the weights: an update failed while it loaded")

            self._refusal = self.model.register_forward_pre_hook(refuse)

    @contextmanager
    def _raised_once(self) -> Iterator[None]:
        """Raise a ReshardError or a ValueError of vLLM on the last worker only. All workers have the same error."""
        try:
            yield
        except (ReshardError, ValueError):
            size = self.parallel_config.world_size  # of one replica, if experts are spread over several
            if self._group.rank_in_group % size == size - 1:
                raise
