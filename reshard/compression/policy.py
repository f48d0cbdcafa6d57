"""Compression policies: the codec of each parallel dimension of a training job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.arguments import check_arguments
from reshard.codecs import has_base, has_variable_size, parse_codec
from reshard.errors import ArgumentError
from reshard.formatting import brief

#: A codec, or one for each direction: of activations and their gradients, or of gathers and reduce-scatters.
Codecs = str | tuple[str | None, str | None] | None

#: Names of the dimensions.
DIMENSIONS = ("dp", "pp", "tp", "zero", "optimizer")
_PAIRS = ("pp", "zero")
#: Dimensions that sum gradients.
_SUMMED = ("dp", "zero")


@dataclass(frozen=True)
class Policy:
    """The codec of each parallel dimension. Dimensions without one stay as they are.

    Args:
        dp: codec of the all-reduces of gradients over data-parallel replicas. An all-reduce is raw inside a host and
            encoded between hosts. If all replicas are on one host, it is encoded among them. The codec also serves the
            sums over pipeline stages that share a parameter.
        pp: codec of the transfers between pipeline stages, or ``(activations, gradients)``. A direction of an edge is
            encoded only where the simulation of the schedule says that the iteration gets shorter.
        tp: codec of the panels and all-to-alls of :mod:`reshard.parallel`.
        zero: codec of FSDP2's collectives, or ``(gathers of parameters, reduce-scatters of gradients)``.
        optimizer: codec of the moves of optimizer state by :func:`reshard.parallel.relayout`. It may also be
            ``"bf16-lossless"``, for state that is bf16.
        force_pp: encode all edges between stages, whatever the simulation says.
        feedback: ``("dp",)``, ``("zero",)`` or both: each rank adds the errors of its codings to its next gradients, in
            sums over replicas or in FSDP2's reduce-scatters, but not in sums over stages. At 4 bits and more, training
            with Adam does not need it.
        raw_steps: number of first steps whose all-reduces of gradients (``dp``) are not encoded.

    Raises:
        ArgumentError: there is no such codec, ``force_pp`` without ``pp``, ``feedback`` for a dimension whose gradients
            are not summed or have no codec, or ``raw_steps`` without ``dp``.
    """

    dp: str | None = None
    pp: Codecs = None
    tp: str | None = None
    zero: Codecs = None
    optimizer: str | None = None
    force_pp: bool = False
    feedback: tuple[str, ...] = ()
    raw_steps: int = 0

    def __post_init__(self) -> None:
        for dimension in self.dimensions:
            value = getattr(self, dimension)
            if dimension in _PAIRS and isinstance(value, (tuple, list)):
                if len(value) != 2 or all(codec is None for codec in value):
                    raise ArgumentError(f"{dimension}= of a policy must be one codec or two, not {brief(value)}")
                object.__setattr__(self, dimension, tuple(value))
                value = [codec for codec in value if codec is not None]
            for codec in value if isinstance(value, list) else [value]:
                is_exact = has_variable_size(codec) and not has_base(codec)
                if dimension != "optimizer" or not is_exact:
                    parse_codec(codec)
        if not isinstance(self.force_pp, bool) or (self.force_pp and self.pp is None):
            raise ArgumentError(f"force_pp is {brief(self.force_pp)}; it must be a bool, and needs pp=")
        self._check_sums()

    def _check_sums(self) -> None:
        if not isinstance(self.feedback, (tuple, list)):
            raise ArgumentError(
                f"feedback is {brief(self.feedback)}; it must be a tuple of {', '.join(map(repr, _SUMMED))}"
            )
        for name in self.feedback:
            if not isinstance(name, str) or name not in _SUMMED:
                known = " and ".join(map(repr, _SUMMED))
                raise ArgumentError(
                    f"feedback has {brief(name)}; it may have {known} only: an error is added to the next value of the "
                    "same gradient, and only sums of gradients send one in each step"
                )
        if len(set(self.feedback)) < len(self.feedback):
            raise ArgumentError(f"feedback is {brief(self.feedback)}; it may name each dimension once")
        object.__setattr__(self, "feedback", tuple(name for name in _SUMMED if name in self.feedback))
        if "zero" in self.feedback and self.pair("zero")[1] is None:
            raise ArgumentError(
                f"feedback={self.feedback} needs a codec for the reduce-scatters of zero=, which is {brief(self.zero)}"
            )
        if isinstance(self.raw_steps, bool) or not isinstance(self.raw_steps, int) or not 0 <= self.raw_steps < 2**62:
            raise ArgumentError(f"raw_steps is {brief(self.raw_steps)}; it must be a number of steps, at least 0")
        if self.dp is None and ("dp" in self.feedback or self.raw_steps):
            raise ArgumentError(
                f"feedback={self.feedback} and raw_steps={self.raw_steps} apply to sums of gradients, which need dp="
            )

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the dimensions that have a codec."""
        return tuple(name for name in DIMENSIONS if getattr(self, name) is not None)

    @check_arguments()
    def pair(self, dimension: str) -> tuple[str | None, str | None]:
        """Both codecs of ``pp`` or ``zero``."""
        if dimension not in ("pp", "zero"):
            raise ArgumentError(f"dimension is {brief(dimension)}; it must be 'pp' or 'zero'")
        value: Codecs = getattr(self, dimension)
        return value if isinstance(value, tuple) else (value, value)

    @check_arguments()
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

    def transfer_codec(self) -> str:
        """The codec of a transfer outside of a pipeline, such as one by :func:`reshard.reshard`: ``pp``.

        Raises:
            ArgumentError: the policy lacks ``pp``, has one codec for each direction, or has other dimensions.
        """
        codec = self.check_only("pp", "a transfer")
        if not isinstance(codec, str):
            raise ArgumentError(f"a transfer has one direction; compression={self} has two codecs in pp=")
        return codec

    def __str__(self) -> str:
        """The text that :func:`parse_policy` reads."""
        parts = [
            f"{name}={'/'.join(item or 'raw' for item in self.pair(name)) if name in _PAIRS else getattr(self, name)}"
            for name in self.dimensions
        ]
        parts += ["force-pp"] * self.force_pp
        if self.feedback:
            parts.append("feedback" if self.feedback == ("dp",) else f"feedback={'/'.join(self.feedback)}")
        return ",".join([*parts, *([f"raw-steps={self.raw_steps}"] if self.raw_steps else [])])


@check_arguments()
def parse_policy(text: str) -> Policy:
    """A policy from text, such as ``"dp=int4x128-bf16,pp=int8x128/raw"``; the inverse of ``str(policy)``.

    A slash joins the two codecs of ``pp`` or ``zero``; ``raw`` means no codec. ``force-pp`` encodes all edges.
    ``feedback`` is short for ``feedback=dp``; with ``feedback=dp/zero``, both dimensions add coding errors to the next
    gradients. ``raw-steps=100`` leaves the ``dp`` sums of the first 100 steps raw.

    Raises:
        ArgumentError: the text names an unknown dimension or codec, or a dimension twice; or :class:`Policy` refuses
            the combination.
    """
    if not isinstance(text, str):
        raise ArgumentError(f"a policy is a text such as 'dp=int8x128', not {type(text).__name__}")
    codecs_of: dict[str, Codecs] = {}
    options: dict[str, Any] = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = part.partition("=")
        if part == "force-pp":
            options["force_pp"] = True
            continue
        if name == "feedback" and (value or not equals) and "feedback" not in options:
            options["feedback"] = tuple(value.split("/")) if equals else ("dp",)
            continue
        if name == "raw-steps" and value.isdecimal() and "raw_steps" not in options:
            options["raw_steps"] = int(value)
            continue
        if not equals or name not in DIMENSIONS or name in codecs_of:
            raise ArgumentError(
                f"the policy {text!r} has {part!r}; write dp=, pp=, tp=, zero= or optimizer= with a codec, each once, "
                "force-pp, feedback, or raw-steps= with a number"
            )
        codecs = [None if item == "raw" else item for item in value.split("/")]
        codecs_of[name] = codecs[0] if len(codecs) == 1 else tuple(codecs)  # type: ignore[assignment]
    return Policy(**codecs_of, **options)  # type: ignore[arg-type]
