"""Manifests of the surviving ranks of a model. Survivors that do not hold the whole model are an error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.errors import RemoteError
from reshard.formatting import describe_ranks
from reshard.sharding import format_box
from reshard.weights.model.manifest import Manifest, ManifestEntry
from reshard.weights.model.pieces import cut_held

#: Number of lost regions that an error lists.
MAX_REGIONS = 5


def on_ranks(manifest: Manifest, ranks: Sequence[int], what: str) -> Manifest:
    """The manifest of the surviving ranks of a model, which are numbered again from 0.

    Args:
        ranks: the surviving ranks, ascending.
        what: name of the model, for errors.

    Raises:
        RemoteError: no survivor holds some region. The text names the first such regions.
    """
    if len(ranks) == manifest.size:
        return manifest
    number = {rank: place for place, rank in enumerate(ranks)}
    lost = [rank for rank in range(manifest.size) if rank not in number]
    regions = list(itertools.islice(_lost_regions(manifest, lost), MAX_REGIONS + 1))
    if regions:
        more = ", and more" if len(regions) > MAX_REGIONS else ""
        are = "is" if len(lost) == 1 else "are"
        named = f"{', '.join(regions[:MAX_REGIONS])}{more}"
        raise RemoteError(f"{describe_ranks(lost)} of {what} {are} lost, and no other rank holds {named}")
    shared: dict[Any, ManifestEntry] = {}
    entries = {}
    for name, entry in manifest.entries.items():
        if entry not in shared:
            held = tuple((number[rank], boxes) for rank, boxes in entry.held if rank in number)
            shared[entry] = replace(entry, held=held)
        entries[name] = shared[entry]
    return replace(manifest, size=len(ranks), entries=entries)


def _lost_regions(manifest: Manifest, lost: Sequence[int]) -> Iterator[str]:
    for name, entry in manifest.entries.items():
        if not entry.held or name in manifest.tied:
            continue
        tiles = cut_held(entry.held, entry.shape)
        is_lost = np.isin(tiles.ranks, [*lost, *tiles.ranks[tiles.ranks < 0]]).all(axis=1)
        for start, stop in zip(tiles.start[is_lost].tolist(), tiles.stop[is_lost].tolist(), strict=True):
            yield f"{name!r} {format_box(list(zip(start, stop, strict=True)))}"
