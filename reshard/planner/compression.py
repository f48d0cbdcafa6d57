"""Choose the coding of the tensors of a plan: the codec that the caller names, or the one predicted to be fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reshard.codecs import Codec, find_codec, parse_codec
from reshard.cost import coded_makespan, find_bound, simulate
from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.sharding import TensorSpec, code_tensor
from reshard.topology import CodecRate, Topology

#: Value of ``compression=`` that lets the planner choose.
AUTO_CODEC = "auto"
#: A codec is chosen only if its predicted time is below this fraction of the raw time.
MIN_GAIN = 0.95


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a plan.

    Attributes:
        seconds: predicted seconds of the transfer with its coding. bound_seconds: lower bound of the transfer alone.
    """

    codec: str | None
    seconds: float
    bound_seconds: float

    def __str__(self) -> str:
        return f"{self.codec or 'raw'} {self.seconds:.3g} s (bound {self.bound_seconds:.3g})"


def predict(plan: Plan, rate: CodecRate | None = None, *, encodes_first: bool = False) -> Prediction:
    """Predict the time of a plan, including its coding, by simulation.

    Args:
        plan: the plan.
        rate: rate of the codec of the coded tensors; None: coding takes no time.
        encodes_first: see :func:`reshard.cost.coded_makespan`.
    """
    bound = find_bound(plan).seconds
    if rate is None:
        return Prediction(None, simulate(plan).makespan_seconds, bound)
    return Prediction(rate.codec, coded_makespan(plan, rate, encodes_first=encodes_first), bound)


def code_tensors(
    tensors: Sequence[TensorSpec],
    compression: str | Codec | None,
    max_error: float | None,
    topology: Topology | None,
    plan: Callable[[Sequence[TensorSpec]], Plan],
    wire_dtypes: Sequence[str] | None = None,
    *,
    encodes_first: bool = False,
) -> list[TensorSpec]:
    """The specs of tensors on the wire, coded or raw.

    Args:
        tensors: specs with the dtypes of the sources.
        compression: a codec or its name; ``"auto"``: the codec with the lowest predicted time, or none; None: none.
        max_error: with ``"auto"``: largest usual error of a codec to choose. None allows no lossy codec.
        topology: with ``"auto"``: has the rates of the codecs to choose from. plan: plans tensors on this topology.
        wire_dtypes: dtypes of tensors that travel raw; default: those of the sources.
        encodes_first: whether ranks encode all tensors before they move any.

    Returns:
        The coded tensors. A tensor that is not coded has the raw dtype, and ``raw_because`` says why.
        If ``"auto"`` chose the codec, ``coded_because`` says why.

    Raises:
        ArgumentError: there is no such codec, or with ``"auto"`` the topology has no rates of codecs.
    """
    dtypes = [spec.dtype for spec in tensors] if wire_dtypes is None else wire_dtypes
    raw = [replace(spec, dtype=dtype) for spec, dtype in zip(tensors, dtypes, strict=True)]

    def code(named: str | Codec) -> list[TensorSpec]:
        codec = find_codec(named)
        coded = [code_tensor(spec, codec, dtype) for spec, dtype in zip(tensors, dtypes, strict=True)]
        return [
            spec if spec.codec is not None else replace(spec, dtype=dtype)
            for spec, dtype in zip(coded, dtypes, strict=True)
        ]

    if compression is None:
        return raw
    if not isinstance(compression, str) or compression != AUTO_CODEC:
        return code(compression)
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

    plain = predict(plan(raw))
    candidates = [(code(rate.codec), rate) for rate in allowed]
    predicted = [(predict(plan(specs), rate, encodes_first=encodes_first), specs) for specs, rate in candidates]
    best, specs = min(predicted, key=lambda pair: pair[0].seconds)
    reason = f"auto predicts {', '.join(map(str, [plain, *(pair[0] for pair in predicted)]))}"
    if best.seconds < MIN_GAIN * plain.seconds:
        return [spec if spec.codec is None else replace(spec, coded_because=reason) for spec in specs]
    return [replace(spec, raw_because=reason) for spec in raw]
