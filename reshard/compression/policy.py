"""Which codec each parallel dimension of a training job uses on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.codecs import parse_codec
from reshard.errors import ArgumentError

#: A codec, or one for each direction: of activations and their gradients, or of gathers and reduce-scatters.
Codecs = str | tuple[str | None, str | None] | None

#: Names of the dimensions.
DIMENSIONS = ("dp", "pp", "tp", "zero", "optimizer")
_PAIRS = ("pp", "zero")


@dataclass(frozen=True)
class Policy:
    """The codec of each parallel dimension. Dimensions without one stay as they are.

    Args:
        dp: of sums of gradients over data-parallel replicas: raw inside a host, coded between hosts. Replicas on one
            host are coded among themselves.
        pp: of transfers between pipeline stages: a codec, or ``(activations, gradients)``. A direction of an edge is
            coded only where the simulation of the schedule says that the iteration gets shorter.
        tp: of the panels and all-to-alls of :mod:`reshard.parallel`.
        zero: of FSDP2's collectives: a codec, or ``(gathers of parameters, reduce-scatters of gradients)``.
        optimizer: of moves of optimizer state by :func:`reshard.parallel.relayout`; also ``"bf16-lossless"``, for state
            that is bf16.
        force_pp: code all edges between stages, whatever the simulation says.

    Raises:
        ArgumentError: there is no such codec, or ``force_pp`` without ``pp``.
    """

    dp: str | None = None
    pp: Codecs = None
    tp: str | None = None
    zero: Codecs = None
    optimizer: str | None = None
    force_pp: bool = False

    def __post_init__(self) -> None:
        for dimension in self.dimensions:
            value = getattr(self, dimension)
            if dimension in _PAIRS and isinstance(value, (tuple, list)):
                if len(value) != 2 or all(codec is None for codec in value):
                    raise ArgumentError(f"{dimension}= of a policy is a codec or two, not {value!r}")
                object.__setattr__(self, dimension, tuple(value))
                value = [codec for codec in value if codec is not None]
            for codec in value if isinstance(value, list) else [value]:
                if dimension != "optimizer" or codec != "bf16-lossless":
                    parse_codec(codec)
        if not isinstance(self.force_pp, bool) or (self.force_pp and self.pp is None):
            raise ArgumentError(f"force_pp is {self.force_pp!r}; it must be a bool, and needs pp=")

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the dimensions that have a codec."""
        return tuple(name for name in DIMENSIONS if getattr(self, name) is not None)

    def pair(self, dimension: str) -> tuple[str | None, str | None]:
        """Both codecs of ``pp`` or ``zero``."""
        value: Codecs = getattr(self, dimension)
        return value if isinstance(value, tuple) else (value, value)

    def check_only(self, dimension: str, who: str) -> str:
        """The codec of the one dimension that a call uses.

        Raises:
            ArgumentError: the policy lacks the dimension, or has others, which the call would ignore.
        """
        if self.dimensions != (dimension,):
            raise ArgumentError(
                f"{who} uses {dimension}= of a policy and nothing else; compression={self} has "
                f"{', '.join(self.dimensions) or 'no dimension'}"
            )
        codec: str = getattr(self, dimension)
        return codec

    def __str__(self) -> str:
        """The text that :func:`parse_policy` reads."""
        parts = [
            f"{name}={'/'.join(each or 'raw' for each in self.pair(name)) if name in _PAIRS else getattr(self, name)}"
            for name in self.dimensions
        ]
        return ",".join([*parts, *(["force-pp"] if self.force_pp else [])])


def parse_policy(text: str) -> Policy:
    """A policy from text, such as ``"dp=int4x128-bf16,pp=int8x128/raw"``; the inverse of ``str(policy)``.

    Two codecs of ``pp`` or ``zero`` are joined by a slash; ``raw`` is no codec. ``force-pp`` codes all edges.

    Raises:
        ArgumentError: the text names an unknown dimension or codec, or a dimension twice.
    """
    found: dict[str, Codecs] = {}
    is_forced = False
    for part in filter(None, (each.strip() for each in text.split(","))):
        if part == "force-pp":
            is_forced = True
            continue
        name, equals, value = part.partition("=")
        if not equals or name not in DIMENSIONS or name in found:
            raise ArgumentError(
                f"the policy {text!r} has {part!r}; write dp=, pp=, tp=, zero= or optimizer= with a codec, each once, "
                "or force-pp"
            )
        codecs = [None if each == "raw" else each for each in value.split("/")]
        found[name] = codecs[0] if len(codecs) == 1 else tuple(codecs)  # type: ignore[assignment]
    return Policy(**found, force_pp=is_forced)  # type: ignore[arg-type]
