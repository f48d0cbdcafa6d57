"""A model that trainer ranks publish to engines, for the cases of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from reshard import weights

#: The first ranks train, the others are engines.
NUM_TRAINERS = 4
PUBLICATION_TIMEOUT_SECONDS = 600


def make_group(rank: int, num_engines: int, ranks_per_engine: int = 1) -> Any:
    """The process group of the trainer or of the engine that a rank is in. All ranks call this."""
    firsts = range(NUM_TRAINERS, NUM_TRAINERS + num_engines * ranks_per_engine, ranks_per_engine)
    sides = [range(NUM_TRAINERS), *(range(first, first + ranks_per_engine) for first in firsts)]
    return next(group for group, ranks in [(dist.new_group(list(ranks)), ranks) for ranks in sides] if rank in ranks)


class Publication:
    """One rank's end of a model that is published version by version.

    Args:
        model: tensors of this rank.
        group: process group from :func:`make_group`.
        is_trainer: whether this rank trains.
        num_engines: number of engines that must hold each version.
        options: keywords of :class:`reshard.weights.Publisher` or :class:`reshard.weights.Subscriber`.
    """

    def __init__(
        self, model: Mapping[str, torch.Tensor], group: Any, is_trainer: bool, num_engines: int, **options: Any
    ) -> None:
        store = dist.distributed_c10d._get_default_store()
        self.publisher = weights.Publisher(model, store, group=group, **options) if is_trainer else None
        first_rank = dist.get_rank() - dist.get_rank(group)
        self.subscriber = (
            None if is_trainer else weights.Subscriber(model, store, group=group, first_rank=first_rank, **options)
        )
        self._num_engines = num_engines
        self.version = 0

    def publish(self) -> Any:
        """Publish the next version, until all engines hold it. Returns the report on trainer ranks."""
        self.version += 1
        if self.publisher is None:
            return None
        published = self.publisher.publish(self.version).wait(PUBLICATION_TIMEOUT_SECONDS)
        assert list(published.engines.values()) == [""] * self._num_engines, published
        return published

    def update(self) -> None:
        """Swap the last version in on engines."""
        if self.subscriber is not None:
            assert self.subscriber.update(PUBLICATION_TIMEOUT_SECONDS) == self.version

    def close(self) -> None:
        """Leave the publication."""
        for side in (self.publisher, self.subscriber):
            if side is not None:
                side.close()
