"""Choose the coding of the tensors of a plan: the codec that the caller names, or the one predicted to be fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reshard.arguments import check_arguments
from reshard.codecs import Codec, TransferPolicy, find_codec, parse_codec
from reshard.cost import encoded_makespan, find_bound, predict_makespan, simulate
from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of
from reshard.plan import Plan
from reshard.sharding import AnyLayout, TensorSpec, check_tensors, compress_tensor
from reshard.topology import CodecRate, Topology

#: Value of ``compression=`` that lets the planner choose.
AUTO_CODEC = "auto"
#: A codec is chosen only if its predicted time is below this fraction of the raw time.
MIN_GAIN = 0.95
#: Only this many groups of tensors with equal layouts and dtypes, the largest ones, get a choice of their own.
MAX_GROUPS = 8
#: Name of a choice that differs between tensors.
MIXED = "a choice per layout and dtype"
#: The rate of a codec, None without one, and the specs of all tensors with it.
_Option = tuple[CodecRate | None, list[TensorSpec]]


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a plan.

    Attributes:
        seconds: predicted seconds of the transfer with its coding.
        bound_seconds: lower bound of the transfer alone.
    """

    codec: str | None
    seconds: float
    bound_seconds: float

    def __str__(self) -> str:
        return f"{self.codec or 'raw'} {self.seconds:.3g} s (bound {self.bound_seconds:.3g})"


@check_arguments()
def predict(
    plan: Plan, rate: CodecRate | Sequence[CodecRate | None] | None = None, *, encodes_first: bool = False
) -> Prediction:
    """Predict the time of a plan, including its coding.

    It is simulated. Without coding, a plan that is too large gets the estimate of
    :func:`reshard.cost.predict_makespan`.

    Args:
        plan: the plan.
        rate: rate of the codec of the encoded tensors, or one for each tensor; None: coding takes no time.
        encodes_first: see :func:`reshard.cost.encoded_makespan`.
    """
    bound = find_bound(plan).seconds
    if rate is None:
        return Prediction(None, predict_makespan(plan).seconds, bound)
    codec = rate.codec if isinstance(rate, CodecRate) else MIXED
    return Prediction(codec, encoded_makespan(plan, rate, encodes_first=encodes_first), bound)


def compress_tensors(
    tensors: Sequence[TensorSpec],
    compression: str | Codec | TransferPolicy | None,
    max_error: float | None,
    topology: Topology | None,
    plan: Callable[[Sequence[TensorSpec]], Plan],
    wire_dtypes: Sequence[str] | None = None,
    *,
    encodes_first: bool = False,
) -> list[TensorSpec]:
    """The specs of tensors on the wire, encoded or raw.

    Args:
        tensors: specs with the dtypes of the sources.
        compression: a codec, its name, or a policy; None: none. ``"auto"``: the codec with the lowest predicted time,
            or none. Tensors with another layout or dtype than the rest, such as tensors inside one host, may get
            another codec, or none, if the prediction says so.
        max_error: with ``"auto"``: largest usual error of a codec to choose. None allows no lossy codec.
        topology: topology with the rates of the codecs among which ``"auto"`` chooses.
        plan: plans tensors on this topology.
        wire_dtypes: dtypes of tensors that travel raw; default: those of the sources.
        encodes_first: whether ranks encode all tensors before they move any.

    Returns:
        The encoded tensors. A tensor that is not encoded has the raw dtype, and ``raw_because`` says why.
        If ``"auto"`` chose the codec, ``encoded_because`` says why.

    Raises:
        ArgumentError: there is no such codec, or with ``"auto"`` the topology has no rates of codecs.
    """
    check_tensors(tensors)
    if wire_dtypes is not None and not isinstance(wire_dtypes, (list, tuple)):
        raise ArgumentError(f"wire_dtypes is {brief(wire_dtypes)}; it must be a list of names of dtypes")
    dtypes = [spec.dtype for spec in tensors] if wire_dtypes is None else wire_dtypes
    if len(dtypes) != len(tensors):
        raise ArgumentError(f"wire_dtypes has {len(dtypes)} dtypes for {count_of(len(tensors), 'tensor')}")
    raw = [replace(spec, dtype=dtype) for spec, dtype in zip(tensors, dtypes, strict=True)]

    if compression is None:
        return raw
    if not isinstance(compression, str) or compression != AUTO_CODEC:
        return _compress_all(tensors, compression, dtypes)
    if topology is None or not topology.codec_rates:
        raise ArgumentError(
            'compression="auto" needs the rates of codecs: pass topology=reshard.find_topology(codecs=["int8x128"]), '
            "or another topology with codec_rates"
        )
    if max_error is None:
        return [replace(spec, raw_because="auto uses lossy codecs only if max_error is given") for spec in raw]
    allowed = [rate for rate in topology.codec_rates if parse_codec(rate.codec).usual_error <= max_error]
    if not allowed:
        return [replace(spec, raw_because=f"the usual error of every codec is above {max_error:g}") for spec in raw]

    options: list[_Option] = [(None, raw), *((rate, _compress_all(tensors, rate.codec, dtypes)) for rate in allowed)]
    chosen, reason = _choose(options, plan, encodes_first)
    result = []
    for number, option in enumerate(chosen):
        spec, encoded = options[option][1][number], [specs[number] for _, specs in options[1:]]
        if spec.codec is not None:
            result.append(replace(spec, encoded_because=reason))
        elif any(item.codec is not None for item in encoded):
            result.append(replace(spec, raw_because=reason))
        else:
            result.append(replace(spec, raw_because=encoded[0].raw_because))  # no codec can encode it
    return result


def _compress_all(
    tensors: Sequence[TensorSpec], named: str | Codec | TransferPolicy, raw_dtypes: Sequence[str]
) -> list[TensorSpec]:
    """Encode the tensors that a codec can encode. The others get their raw dtypes."""
    codec = find_codec(named)
    encoded = [compress_tensor(spec, codec, dtype) for spec, dtype in zip(tensors, raw_dtypes, strict=True)]
    return [
        spec if spec.codec is not None else replace(spec, dtype=dtype)
        for spec, dtype in zip(encoded, raw_dtypes, strict=True)
    ]


def _choose(
    options: Sequence[_Option], plan: Callable[[Sequence[TensorSpec]], Plan], encodes_first: bool
) -> tuple[list[int], str]:
    """The option of each tensor with the lowest predicted time, and the text that says why. The first option is raw."""
    raw = plan(options[0][1])  # simulated like the others, however large it is
    plain = Prediction(None, simulate(raw).makespan_seconds, find_bound(raw).seconds)
    predicted = [predict(plan(specs), rate, encodes_first=encodes_first) for rate, specs in options[1:]]
    best = min(range(len(predicted)), key=lambda number: predicted[number].seconds)
    is_encoded = predicted[best].seconds < MIN_GAIN * plain.seconds
    chosen = [1 + best if is_encoded else 0] * len(options[0][1])
    fastest = predicted[best] if is_encoded else plain
    groups = _group_alike(options[0][1])
    for group in groups[:MAX_GROUPS] if len(groups) > 1 else []:
        for option, (rate, _) in enumerate(options):
            trial = [option if number in group else item for number, item in enumerate(chosen)]
            if trial == chosen:
                continue
            specs = [options[item][1][number] for number, item in enumerate(trial)]
            rates = [options[item][0] for item in trial]
            now = predict(plan(specs), rates, encodes_first=encodes_first)
            if now.seconds <= fastest.seconds if rate is None else now.seconds < MIN_GAIN * fastest.seconds:
                chosen, fastest = trial, now
    shown = [plain, *predicted, *([fastest] if len(set(chosen)) > 1 else [])]
    return chosen, f"auto predicts {', '.join(map(str, shown))}"


def _group_alike(tensors: Sequence[TensorSpec]) -> list[set[int]]:
    """The indices of tensors with equal layouts and dtypes, the groups with most bytes first."""
    groups: dict[tuple[AnyLayout, AnyLayout, str], set[int]] = {}
    nbytes: dict[tuple[AnyLayout, AnyLayout, str], int] = {}
    for number, spec in enumerate(tensors):
        key = spec.src, spec.dst, spec.dtype
        groups.setdefault(key, set()).add(number)
        nbytes[key] = nbytes.get(key, 0) + math.prod(spec.shape) * spec.itemsize
    return [groups[key] for key in sorted(groups, key=lambda key: -nbytes[key])]
