"""A trainer that drives engines of vLLM: it publishes versions and tells the engines to install them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from vllm.distributed.weight_transfer import base

from reshard.errors import ArgumentError, RemoteError
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.vllm.plugin import BACKEND
from reshard.weights.publisher import Publisher


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):
    """The arguments of :meth:`TrainerEngine.trainer_init` on a rank of the trainer.

    Attributes:
        model: as for :class:`reshard.weights.Publisher`, with the names of a Hugging Face checkpoint.
        store: a ``torch.distributed.TCPStore`` that the trainer and all workers reach.
        host: the address at which the workers reach the store.
        name, group, dtype: as for :class:`reshard.weights.Publisher`.
        timeout_seconds: how long an update may take.
    """

    backend: ClassVar[str] = BACKEND

    model: Any
    store: Any
    host: str
    name: str = "default"
    group: Any = None
    dtype: Any = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS


class TrainerEngine(base.TrainerWeightTransferEngine[TrainerInitInfo]):
    """Sends the shards of each rank of the trainer. No rank gathers whole tensors."""

    init_info_cls = TrainerInitInfo

    def __init__(self, init_info: TrainerInitInfo, client: base.VLLMWeightSyncClient) -> None:
        super().__init__(client=client, is_sender=init_info.is_sender)
        self._timeout_seconds = init_info.timeout_seconds
        self._publisher = Publisher(
            init_info.model,
            init_info.store,
            init_info.name,
            init_info.group,
            dtype=init_info.dtype,
            timeout_seconds=init_info.timeout_seconds,
        )

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: base.VLLMWeightSyncClient,
        source: base.WeightSource | None = None,
    ) -> TrainerEngine:
        """Claim the name, and subscribe the workers to it. Every rank of the trainer calls it."""
        if source is not None:
            raise ArgumentError("reshard sends the shards of TrainerInitInfo.model: it takes no WeightSource")
        if not isinstance(init_info.store, dist.TCPStore):
            raise ArgumentError(f"store is a {type(init_info.store).__name__}; workers join a TCPStore")
        engine = cls(init_info, client)
        if engine.is_sender:
            worker = {"host": init_info.host, "port": init_info.store.port, "name": init_info.name}
            client.init_weight_transfer_engine({**worker, "transfer_seconds": init_info.timeout_seconds})
        return engine

    def send_weights(self) -> None:
        """Publish the weights as they are now, and let the engines install them. Every rank of the trainer calls it.

        Engines serve their old version until they hold the new one.

        Raises:
            ReshardError: the version was not published, or no engine holds it; engines keep their version.
            Exception: of the client, on the sender: an engine has not installed the version.
        """
        version = (self._publisher.version or 0) + 1
        engines = self._publisher.publish(version).wait(self._timeout_seconds).engines
        if engines and all(engines.values()):
            raise RemoteError(f"no engine holds version {version}: {'; '.join(sorted(set(engines.values())))}")
        if not self.is_sender:
            return
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": version, "timeout_seconds": self._timeout_seconds})
        except BaseException:
            with contextlib.suppress(Exception):  # it ends the update on all workers, whichever have failed
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        """Stop publishing. Engines keep their versions."""
        self._publisher.close()
