"""A trainer that drives engines of SGLang: it publishes versions and tells the engines to install them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from reshard.coordination import find_group
from reshard.errors import ArgumentError, RemoteError
from reshard.sglang.order import LOADER, InstallOrder
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.weights.membership.team import AGREE_SECONDS, run_collectively
from reshard.weights.publisher import Publisher


@dataclass(eq=False)
class Trainer:
    """Sends the shards of each rank of a trainer to engines of SGLang. No rank gathers whole tensors.

    Every rank of the trainer makes one, with the same arguments but ``engines``.

    Attributes:
        model: as for :class:`reshard.weights.Publisher`, with the names of a Hugging Face checkpoint.
        store: a ``torch.distributed.TCPStore`` that the trainer and all workers reach.
        engines: the engines that this rank tells to install versions, for example all of them on rank 0: an ``Engine``
            or ``HttpServerEngineAdapter`` of SGLang, or objects with the same ``begin_weight_update``,
            ``update_weights_from_tensor`` and ``end_weight_update``.
        host: under which the workers reach the store.
        name, group, dtype: as for :class:`reshard.weights.Publisher`.
        memory_bytes: memory for data in transit on each rank and each worker.
        timeout_seconds: how long an update may take.

    Raises:
        ArgumentError: an argument does not fit, or another trainer publishes this name; on all ranks alike.
    """

    model: Any
    store: Any
    engines: Sequence[Any] = ()
    host: str = field(kw_only=True)
    name: str = field(default="default", kw_only=True)
    group: Any = field(default=None, kw_only=True)
    dtype: Any = field(default=None, kw_only=True)
    memory_bytes: int = field(default=1 << 30, kw_only=True)
    timeout_seconds: float = field(default=DEFAULT_TIMEOUT_SECONDS, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.store, dist.TCPStore):
            raise ArgumentError(f"store is a {type(self.store).__name__}; workers join a TCPStore")
        limits: Any = {"memory_bytes": self.memory_bytes, "timeout_seconds": self.timeout_seconds}
        self._group = find_group(self.group)
        self._order = InstallOrder(self.host, self.store.port, self.name, secrets.token_hex(8), **limits)
        self._publisher = Publisher(self.model, self.store, self.name, self.group, dtype=self.dtype, **limits)

    def send_weights(self) -> int:
        """Publish the weights as they are now, and let the engines install them. Every rank of the trainer calls it.

        Engines serve their old version until all of their workers hold the new one; the first time, they wait for it.

        Returns:
            The version that all engines have now.

        Raises:
            ReshardError: the version was not published, or an engine has not installed it; on all ranks alike. The
                text names the engine, which keeps its version unless the text says otherwise.
        """
        version = (self._publisher.version or 0) + 1
        subscribed = self._publisher.publish(version).wait(self.timeout_seconds).engines
        if subscribed and all(subscribed.values()):
            failures = "; ".join(sorted(set(filter(None, subscribed.values()))))
            raise RemoteError(f"no engine holds version {version}: {failures}")

        def install() -> dict[str, Any]:
            failures = []
            for number, engine in enumerate(self.engines):
                try:
                    key = f"sglang/{self._order.trainer}/{version}/{number}"
                    self._install(engine, replace(self._order, version=version, answer=key))
                except Exception as error:
                    failures.append(f"engine {number} has not installed version {version}: {error}")
            if failures:
                raise RemoteError("; ".join(failures))
            return {}

        seconds = AGREE_SECONDS + self.timeout_seconds
        run_collectively(self._group, install, "tells its engines to install a version", seconds)
        return version

    def _install(self, engine: Any, order: InstallOrder) -> None:
        _check("begin_weight_update", _try(engine.begin_weight_update))
        try:
            result = _try(engine.update_weights_from_tensor, order.named_tensors(), load_format=LOADER)
        finally:
            ended = _try(engine.end_weight_update)
        if not self.store.check([order.answer]):
            raise RemoteError(
                f"no worker has answered; was the engine started with custom_weight_loader=[{LOADER!r}], and do its "
                f"workers reach the store at {order.host}:{order.port}? SGLang says: {result[1]}"
            )
        if answer := self.store.get(order.answer).decode().strip():
            raise RemoteError(answer)
        _check("update_weights_from_tensor", result)
        _check("end_weight_update", ended)

    def close(self) -> None:
        """Stop publishing. Engines keep their versions."""
        self._publisher.close()


def _try(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[bool, str]:
    """Whether a call of an engine has succeeded, and its message. Servers answer with a dict."""
    try:
        result = function(*args, **options)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return (result["success"], result["message"]) if isinstance(result, dict) else result


def _check(call: str, result: tuple[bool, str]) -> None:
    if not result[0]:
        raise RemoteError(f"{call} of the engine has failed: {result[1]}")
