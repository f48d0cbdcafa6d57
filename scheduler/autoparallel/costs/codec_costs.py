"""Seconds of encoded collectives, for each kind of traffic inside stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError

from ..inputs.cluster import Cluster
from ..inputs.layer_graph import LayerGraph, is_shared
from ..inputs.stages import StagePlan
from .collective_costs import StagePlace, ring_seconds
from .edge_costs import encoded_ratio

if TYPE_CHECKING:
    from reshard.compression import Policy

#: Dimensions of a policy that a search prices.
PRICED = ("dp", "pp", "tp", "zero")


@dataclass(frozen=True)
class CodecCost:
    """A codec on the wire.

    Attributes:
        ratio: encoded bytes of each byte of plain values.
        encode_bytes_per_second, decode_bytes_per_second: rates in bytes of plain values, on one rank.
    """

    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float

    def coding_seconds(self, encoded: float, decoded: float) -> float:
        """Seconds in which a rank encodes and decodes some bytes of plain values."""
        return encoded / self.encode_bytes_per_second + decoded / self.decode_bytes_per_second

    def all_reduce_seconds(self, place: StagePlace, nbytes: float) -> float:
        """Seconds of an all-reduce over all ranks of a place, encoded between hosts, or among all ranks of one host.

        A rank encodes its part for each host, adds the parts that it receives, encodes the sum, and decodes all sums.
        """
        if place.num_ranks == 1 or nbytes == 0:
            return 0.0
        hosts = place.num_hosts if place.num_hosts > 1 else place.num_ranks
        inside = place.num_ranks // hosts
        coding = self.coding_seconds(nbytes / inside * (1 + 1 / hosts), nbytes / inside + nbytes)
        if place.num_hosts == 1:
            rate, latency = place.inside_bytes_per_second, place.inside_latency_seconds
            return coding + ring_seconds(nbytes * self.ratio, hosts, rate, latency)
        raw = ring_seconds(nbytes, inside, place.inside_bytes_per_second, place.inside_latency_seconds)
        encoded = ring_seconds(nbytes * self.ratio, hosts, place.ring_bytes_per_second, place.latency_seconds)
        return coding + raw + encoded

    def encoded_all_gather_seconds(self, place: StagePlace, nbytes: float, tp: int) -> float:
        """Seconds of an all-gather among the replicas of a layer, after which each rank has ``nbytes``.

        Each rank encodes its part and decodes all parts. Computation does not overlap with an encoded all-gather,
        because the call returns only when it is done.
        """
        replicas = place.num_ranks // tp
        if replicas == 1 or nbytes == 0:
            return 0.0
        return self.coding_seconds(nbytes / replicas, nbytes) + place.replica_seconds(nbytes * self.ratio, tp, 1.0)

    def encoded_reduce_scatter_seconds(self, place: StagePlace, nbytes: float, tp: int) -> float:
        """Seconds of a reduce-scatter of ``nbytes`` of each rank among the replicas of a layer.

        Each rank sends a part to every other rank. So all ranks of a host send to all other hosts.
        """
        replicas = place.num_ranks // tp
        if replicas == 1 or nbytes == 0:
            return 0.0
        others = nbytes * (replicas - 1) / replicas
        encoded = nbytes * self.ratio
        inside = replicas // place.num_hosts if place.num_hosts > 1 else replicas
        moved = (inside - 1) * (place.inside_latency_seconds + encoded / replicas / place.inside_bytes_per_second)
        if place.num_hosts > 1:
            between = place.exchange_seconds(encoded * tp * inside / place.num_hosts)
            moved = max(moved, (place.num_hosts - 1) * place.latency_seconds + between)
        return self.coding_seconds(nbytes, others) + moved


@dataclass(frozen=True)
class CodecCosts:
    """The codec of each kind of traffic inside stages, with its costs; None: raw.

    Attributes:
        all_reduce: codec of the all-reduces of gradients over replicas under DDP.
        all_gather, reduce_scatter: codecs of the collectives of ZeRO 3 on parameters and gradients.
        panels: codec of the panels of matrix products on grids.
        is_optional: whether each layer may leave its traffic raw where that is faster. This holds while the search
            looks for stages. It does not hold for the chosen training plan, because an engine has one policy for all
            stages.
    """

    all_reduce: CodecCost | None = None
    all_gather: CodecCost | None = None
    reduce_scatter: CodecCost | None = None
    panels: CodecCost | None = None
    is_optional: bool = False

    @classmethod
    def of(
        cls, policy: Policy | None, cluster: Cluster, dtype: str, weight: float, gradient: float, is_optional: bool
    ) -> CodecCosts:
        """The codecs of a policy, with their costs.

        Args:
            dtype: dtype of activations.
            weight, gradient: bytes of a parameter and of its gradient.
        """
        if policy is None:
            return RAW
        rates = {codec_rate.codec: codec_rate for codec_rate in cluster.topology.codec_rates}

        def make(codec: str | None, ratio: float) -> CodecCost | None:
            if codec is None:
                return None
            return CodecCost(ratio, rates[codec].encode_bytes_per_second, rates[codec].decode_bytes_per_second)

        def of_values(codec: str | None, nbytes: float) -> CodecCost | None:
            """Codecs code a parameter or a gradient as fp32."""
            return make(codec, encoded_ratio(codec, "float32") * 4 / nbytes if codec and nbytes else 1.0)

        all_gather, reduce_scatter = policy.pair("zero")
        return cls(
            of_values(policy.dp, gradient),
            of_values(all_gather, weight),
            of_values(reduce_scatter, gradient),
            make(policy.tp, encoded_ratio(policy.tp, dtype) if policy.tp else 1.0),
            is_optional,
        )

    def faster(self, raw: float, encoded: float) -> float:
        """The seconds of traffic that has a codec."""
        return min(raw, encoded) if self.is_optional else encoded


#: Costs without any codec.
RAW = CodecCosts()


def check_policy(policy: Policy, cluster: Cluster) -> None:
    """Raise ArgumentError if a search cannot price a policy."""
    others = sorted(set(policy.dimensions) - set(PRICED))
    if others:
        raise ArgumentError(
            f"a search prices {', '.join(PRICED)} of a policy; compression={policy} has {others[0]}= too"
        )
    known = {rate.codec for rate in cluster.topology.codec_rates}
    wanted = [codec for codec in (policy.dp, *policy.pair("pp"), policy.tp, *policy.pair("zero")) if codec is not None]
    for codec in [item for item in wanted if item not in known]:
        raise ArgumentError(
            f"compression={policy} has the codec {codec}, whose rates the topology of the cluster lacks; give it "
            "codec_rates, as find_topology(codecs=[...]) measures them"
        )


def parts_of_policy(policy: Policy, stages: Sequence[StagePlan], graph: LayerGraph) -> Iterator[Policy]:
    """All policies that use some of the codecs of a policy, for traffic that the stages have.

    The engine compresses panels of grids only if no stage has torch's tensor parallelism. Sums over stages of the
    gradients of shared parameters have the codec of sums over replicas.
    """
    choices = [(stage, stage.choices[0]) for stage in stages]
    has_sums = any(s.num_ranks > choice.tp and not choice.zero and not choice.grid for s, choice in choices)
    has_sums = has_sums or any(is_shared(tied, s.first_layer, s.end_layer) for tied, _ in graph.ties for s in stages)
    has_zero = any(choice.zero == 3 for _, choice in choices)
    has_panels = any(choice.grid for _, choice in choices)
    has_torch_tp = any(choice.tp > 1 and not choice.grid for _, choice in choices)
    all_gather, reduce_scatter = policy.pair("zero")
    kinds: list[tuple[Any, ...]] = [
        (policy.dp, None) if has_sums else (None,),
        (policy.pp, None) if len(stages) > 1 else (None,),
        (policy.tp, None) if has_panels and not has_torch_tp else (None,),
        (all_gather, None) if has_zero else (None,),
        (reduce_scatter, None) if has_zero else (None,),
    ]
    for dp, pp, tp, gathered, scattered in itertools.product(*map(dict.fromkeys, kinds)):
        zero = (gathered, scattered) if gathered or scattered else None
        yield with_codecs(policy, dp, pp, tp, zero)


def with_codecs(policy: Policy, dp: Any, pp: Any, tp: Any, zero: Any) -> Policy:
    """A policy with other codecs, and with the options that apply to them."""
    encoded = replace(
        policy, dp=dp, pp=pp, tp=tp, zero=zero, force_pp=policy.force_pp and bool(pp), feedback=(), raw_steps=0
    )
    sums = {"dp": dp, "zero": encoded.pair("zero")[1]}
    feedback = tuple(name for name in policy.feedback if sums[name] is not None)
    return replace(encoded, feedback=feedback, raw_steps=policy.raw_steps if dp else 0)
