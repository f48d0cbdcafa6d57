"""List scheduling: run the pipeline forward in time, and let each idle pp rank start its most urgent computation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DispatchRule:
    """A rule by which an idle pp rank chooses its next computation.

    If several forwards are ready, or several backwards, the oldest group of ``group`` microbatches goes first. In a
    group, forwards of earlier stages and backwards of later stages go first. Without groups, the oldest microbatch goes
    first, then the stage nearest to the end of the pipeline.

    Attributes:
        max_in_flight: for each stage, the limit on microbatches that are begun and not finished.
        max_bytes: for each pp rank, the limit on the bytes of activations that its stages keep together.
        splits: for each stage, whether its backward is split into an input-gradient and a weight-gradient pass.
        forward_first: whether a forward goes before a backward when both are ready.
        weights_first: whether a weight-gradient pass goes before a forward.
        patience: a pp rank stays idle instead of starting a weight-gradient pass if a more urgent input arrives within
            this fraction of the pass.
        group: number of microbatches in a group; 0: none.
    """

    max_in_flight: tuple[int, ...]
    max_bytes: tuple[float, ...]
    splits: tuple[bool, ...]
    forward_first: bool = False
    weights_first: bool = False
    patience: float = 0.0
    group: int = 0
