"""Errors and ratios of each codec on the tensors of a run, and the policy that follows from them.

A dump is a folder with one folder ``step-XXXXXXXX`` per dumped step, and in it one file ``rank-N.pt`` per rank.
``reshard train --dump-tensors`` or ``torch.save`` writes these files. A file holds ``{kind: {name: tensor}}``, and
under ``"dimensions"`` the dimensions of a policy that the rank has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reshard.codecs import BLOCK_CODECS, BlockCodec, parse_codec
from reshard.codecs.delta import HEADER_BYTES, encode_delta
from reshard.compression.policy import Policy
from reshard.errors import ArgumentError

#: Kinds of tensors in a dump. ``weights_before`` are the weights before the optimizer's step.
KINDS = ("gradients", "activations", "activation_gradients", "weights", "weights_before", "optimizer")
#: Largest relative L2 error that training tolerated, by kind: gradients at 4 bits, the others at 8
#: (docs/compression-method.md).
MAX_ERROR = {"gradients": 0.11, "activations": 0.015, "activation_gradients": 0.015, "weights": 0.012}
#: A codec with at least this fraction of the best compression ratio counts as equally small.
SAME_SIZE = 0.9
#: Tensors of fewer values are ignored: their transfers take almost no time.
MIN_VALUES = 1024


@dataclass(frozen=True)
class CodecReport:
    """Errors and ratio of a codec on all tensors of a kind.

    Attributes:
        error: L2 norm of the error over that of the values.
        ratio: plain bytes over encoded ones.
        bias: sum of the errors over the standard deviation that independent errors of mean 0 would give it. A codec
            with an absolute bias above about 3 is biased.
    """

    codec: str
    error: float
    ratio: float
    bias: float


@dataclass(frozen=True)
class KindReport:
    """All tensors of a kind, of all steps and ranks.

    Attributes:
        num_values: number of values of the tensors that count.
        exponent_bits: entropy of their exponents as bf16, of 8 bits.
        codecs: a report per block codec.
    """

    kind: str
    num_values: int
    exponent_bits: float
    codecs: tuple[CodecReport, ...]


@dataclass(frozen=True)
class TensorProfile:
    """The report of a dump.

    Attributes:
        kinds: one report for each kind of tensor found.
        dimensions: dimensions of a policy that the job has; None if the dump does not list them.
        changed: share of the bf16 weights that a step changes; None without ``weights_before`` of equal shapes.
        delta_ratio: plain bytes of bf16 weights over the bytes of their differences; None as for ``changed``.
    """

    kinds: tuple[KindReport, ...]
    dimensions: frozenset[str] | None
    changed: float | None
    delta_ratio: float | None

    def recommend(self) -> Policy:
        """The smallest codec whose error training tolerated, for each dimension that the job has.

        ``dp`` and ``zero``'s reduce-scatters carry gradients, ``pp`` activations and their gradients, and ``zero``'s
        gathers weights. ``tp`` and ``optimizer`` are left out: their tensors are not in a dump, or tolerate no error.
        """
        best = {kind.kind: _smallest(kind) for kind in self.kinds if kind.kind in MAX_ERROR}
        gradients, weights = best.get("gradients"), best.get("weights")
        edges = best.get("activations"), best.get("activation_gradients")
        codecs_of = {
            "dp": gradients,
            "pp": edges if any(edges) else None,
            "zero": (weights, gradients) if weights or gradients else None,
        }
        has = set(codecs_of) if self.dimensions is None else self.dimensions
        return Policy(**{name: codecs for name, codecs in codecs_of.items() if name in has})  # type: ignore[arg-type]

    def __str__(self) -> str:
        lines = []
        for kind in self.kinds:
            lossless = 16 / (8 + kind.exponent_bits)
            lines.append(
                f"{kind.kind}: {kind.num_values:,} values, exponents {kind.exponent_bits:.2f} of 8 bits (bf16 without "
                f"loss at most {lossless:.2f} times smaller)"
            )
            for codec in kind.codecs:
                sizes = f"{codec.ratio:.2f} times smaller"
                lines.append(f"  {codec.codec:14} error {codec.error:7.2%}  {sizes}  bias {codec.bias:+.1f}")
        if self.changed is not None:
            lines.append(
                f"a step changes {self.changed:.1%} of the weights as bf16; their differences are "
                f"{self.delta_ratio:.1f} times smaller"
            )
        return "\n".join(lines)


def read_dump(path: str | Path) -> tuple[dict[str, list[torch.Tensor]], set[str] | None]:
    """The tensors of all steps and ranks of a dump by kind, in equal order in each kind, and the job's dimensions.

    The dimensions are None if no file of the dump lists them.

    Raises:
        ArgumentError: there is no dump, or a file of it cannot be read.
    """
    dump: dict[str, list[torch.Tensor]] = {}
    dimensions: set[str] | None = None
    files = [item for item in sorted(Path(path).glob("step-*/rank-*.pt")) if re.fullmatch(r"rank-\d+\.pt", item.name)]
    if not files:
        raise ArgumentError(f"{path} has no files step-*/rank-*.pt; write them by reshard train --dump-tensors {path}")
    for file in files:
        try:
            data = torch.load(file, map_location="cpu", weights_only=True)
            if "dimensions" in data:
                dimensions = (dimensions or set()) | set(data.pop("dimensions"))
            for kind, tensors in data.items():
                if kind not in KINDS:
                    raise ValueError(f"kind {kind!r} is unknown; kinds are {', '.join(KINDS)}")
                dump.setdefault(kind, []).extend(tensors[name] for name in sorted(tensors))
        except Exception as error:  # torch.load raises anything
            raise ArgumentError(f"{file} cannot be read as a dump: {type(error).__name__}: {error}") from error
    return dump, dimensions


def profile_tensors(
    tensors: Mapping[str, Iterable[torch.Tensor]], dimensions: Iterable[str] | None = None
) -> TensorProfile:
    """The report of tensors by kind, of a job with these dimensions of a policy; None: of any job.

    Raises:
        ArgumentError: no kind has floating-point tensors that are large enough.
    """
    kept = {
        kind: [item.detach().float() for item in profiles if item.is_floating_point() and item.numel() >= MIN_VALUES]
        for kind, profiles in tensors.items()
    }
    kinds = tuple(_profile_kind(kind, kept[kind]) for kind in KINDS if kind != "weights_before" and kept.get(kind))
    if not kinds:
        raise ArgumentError(f"the dump has no floating-point tensor of {MIN_VALUES} values or more")
    changed, ratio = _profile_changes(kept.get("weights_before", []), kept.get("weights", []))
    return TensorProfile(kinds, None if dimensions is None else frozenset(dimensions), changed, ratio)


def _profile_kind(kind: str, tensors: list[torch.Tensor]) -> KindReport:
    counts = torch.zeros(256, dtype=torch.int64)
    for tensor in tensors:
        exponents = (tensor.bfloat16().contiguous().view(torch.int16).int() >> 7) & 0xFF
        counts += torch.bincount(exponents.reshape(-1), minlength=256)
    shares = counts[counts > 0].double() / counts.sum()
    entropy = float(-(shares * shares.log2()).sum())
    codecs = tuple(_try_codec(parse_codec(name), tensors) for name in BLOCK_CODECS)
    return KindReport(kind, sum(tensor.numel() for tensor in tensors), entropy, codecs)


def _try_codec(codec: BlockCodec, tensors: list[torch.Tensor]) -> CodecReport:
    plain = encoded_bytes = 0
    squares = error_squares = error_sum = 0.0
    for tensor in tensors:
        values = tensor.reshape(-1).contiguous()
        encoded = torch.empty(codec.nbytes(values.shape, 0), dtype=torch.uint8)
        decoded = torch.empty_like(values)
        codec.encode(values, encoded, 0)
        codec.decode(encoded, decoded, 0)
        errors = (decoded - values).double()
        plain += values.nbytes
        encoded_bytes += encoded.nbytes
        squares += float(values.double().square().sum())
        error_squares += float(errors.square().sum())
        error_sum += float(errors.sum())
    error = math.sqrt(error_squares / squares) if squares else 0.0
    bias = error_sum / math.sqrt(error_squares) if error_squares else 0.0
    return CodecReport(codec.name, error, plain / encoded_bytes, bias)


def _profile_changes(before: list[torch.Tensor], after: list[torch.Tensor]) -> tuple[float | None, float | None]:
    """The share of bf16 weights that steps change, and the ratio of their differences."""
    if not before or [item.shape for item in before] != [item.shape for item in after]:
        return None, None
    changed = plain = encoded = 0
    for old, new in zip(before, after, strict=True):
        words = [item.bfloat16().reshape(-1).view(torch.int16).numpy().view(np.uint8) for item in (old, new)]
        changed += int((words[0].view(np.int16) != words[1].view(np.int16)).sum())
        plain += words[0].nbytes
        encoded += encode_delta(words[1], words[0], np.empty(words[0].nbytes + HEADER_BYTES, dtype=np.uint8), 2)
    return 2 * changed / plain, plain / encoded


def _smallest(report: KindReport) -> str | None:
    """The smallest codec whose error training tolerated, or one of nearly the same size with a smaller error."""
    allowed = [codec for codec in report.codecs if codec.error <= MAX_ERROR[report.kind]]
    max_ratio = max((item.ratio for item in allowed), default=0.0)
    close = [item for item in allowed if item.ratio >= SAME_SIZE * max_ratio]
    return min(close, key=lambda trial: trial.error).codec if close else None
