"""Parameters that several stages share, such as an embedding that is also the weight of the output layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.api.mover import Mover, fail_transfers
from reshard.codecs import parse_codec
from reshard.compression import Policy
from reshard.errors import ArgumentError, DisagreementError
from reshard.sharding import AnyLayout, Layout, TensorSpec, check_shape, compress_tensor

from ..pipeline import Pipeline
from .data_parallel import REPLICATED, find_parameter, is_sharded


@dataclass(frozen=True)
class TiedParameter:
    """One parameter that several stages share. Its gradients are summed over the stages after each step.

    A stage whose ranks see different data must wrap its module in DDP or FSDP.

    Args:
        names: ``{stage: name of the parameter in the stage's module}``.
        shape, dtype: shape and dtype of the global parameter.
        layouts: ``{stage: layout}`` for stages that shard the parameter; default: replicated on all ranks of the stage.

    Raises:
        ArgumentError: there are fewer than two stages, or an argument has the wrong type.
    """

    names: Mapping[int, str]
    shape: tuple[int, ...]
    dtype: str = "float32"
    layouts: Mapping[int, AnyLayout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.names, Mapping) or not isinstance(self.layouts, Mapping):
            raise ArgumentError("names and layouts of a tie must be {stage: name} and {stage: layout}")
        for stage, name in self.names.items():
            if isinstance(stage, bool) or not isinstance(stage, int) or not isinstance(name, str):
                raise ArgumentError(
                    f"a tie names {name!r} of stage {stage!r}; stages must be integers and names strings"
                )
        object.__setattr__(self, "shape", check_shape(self.shape))
        if len(self.names) < 2 or not set(self.layouts) <= set(self.names):
            raise ArgumentError(
                f"a tie needs at least two stages, and layouts of no others; names have stages {sorted(self.names)}, "
                f"layouts {sorted(self.layouts)}"
            )

    def __str__(self) -> str:
        parameters = ", ".join(
            f"{stage}: {name} {self.layouts.get(stage, '')}" for stage, name in sorted(self.names.items())
        )
        return f"{self.dtype} {list(self.shape)} of {parameters}"


#: The Movers of a tie by sending and receiving stage.
Movers = dict[tuple[int, int], Mover]


@dataclass(frozen=True)
class _Tie:
    """A tied parameter on one rank.

    Attributes:
        mine: ``{stage of this rank: the parameter in its module}``.
        raw: Movers between stages, which compress nothing.
        encoded: Movers between stages, and from each stage to itself, which compress gradients; empty if none are
            encoded.
    """

    tie: TiedParameter
    mine: Mapping[int, Any]
    raw: Movers
    encoded: Movers


class TiedParameters:
    """Synchronizes all tied parameters of one rank.

    Args:
        ties, pipeline: the same on all ranks.
        modules: ``{stage: module}`` for the stages of this rank.
        rank: this rank.
        open_mover: makes the Mover of a tensor. It must plan the tensor equally on all ranks.
        policy: policy whose codec for ``dp`` encodes the gradients. A stage also encodes and decodes its own gradient,
            and adds the decoded values, as the other stages do. So all stages get the same sum. Gradients that do not
            fit the blocks of the codec are sent raw.

    Attributes:
        steps: number of steps taken. The first ``raw_steps`` of the policy send raw gradients.
    """

    def __init__(
        self,
        ties: Iterable[TiedParameter],
        pipeline: Pipeline,
        modules: Mapping[int, torch.nn.Module],
        rank: int,
        open_mover: Callable[[TensorSpec], Mover],
        policy: Policy | None = None,
    ) -> None:
        codec, self._raw_steps = (None, 0) if policy is None else (policy.dp, policy.raw_steps)
        self.steps, self._modules = 0, modules

        def open_movers(specs: Mapping[tuple[int, int], TensorSpec]) -> Movers:
            ours = ((pair, spec) for pair, spec in specs.items() if rank in (*spec.src.ranks, *spec.dst.ranks))
            return {pair: open_mover(spec) for pair, spec in ours}

        self._ties: list[_Tie] = []
        for tie in ties:
            mine = {
                stage: find_parameter(modules[stage], name) for stage, name in tie.names.items() if stage in modules
            }
            encoded = {} if codec is None else _code(tie, pipeline, codec)
            sums_raw = not encoded or self._raw_steps > 0  # else only the values that the first stage sends travel raw
            specs = _specs(tie, pipeline)
            raw = {(a, b): spec for (a, b), spec in specs if a != b and (sums_raw or a == min(tie.names))}
            self._ties.append(_Tie(tie, mine, open_movers(raw), open_movers(encoded)))

    def parameters(self) -> list[torch.Tensor]:
        """Tied parameters of this rank."""
        return [parameter for tie in self._ties for parameter in tie.mine.values()]

    def training(self) -> list[tuple[int, str, bool]]:
        """See :func:`training_of`."""
        return training_of((tie.tie for tie in self._ties), self._modules)

    def share_values(self) -> None:
        """Copy the values of the first stage of each tie to the others."""
        for tie in self._ties:
            first = min(tie.tie.names)
            values = {stage: _local(parameter.detach()) for stage, parameter in tie.mine.items()}
            from_first = {pair: mover for pair, mover in tie.raw.items() if pair[0] == first}
            for stage, received in _exchange(values, from_first).items():
                values[stage].copy_(received[first])

    def add_gradients(self) -> None:
        """Replace each stage's gradient by the sum over stages, added in the order of stages on every rank."""
        for tie in self._ties:
            for parameter in tie.mine.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            own = {stage: _local(parameter.grad) for stage, parameter in tie.mine.items()}
            is_encoded = bool(tie.encoded) and self.steps >= self._raw_steps
            for stage, received in _exchange(own, tie.encoded if is_encoded else tie.raw).items():
                terms = received if is_encoded else {**received, stage: own[stage]}
                own[stage].copy_(torch.stack([terms[other] for other in sorted(terms)]).sum(0))
            for parameter in tie.mine.values():
                if not parameter.requires_grad:
                    parameter.grad = None

    def _movers(self) -> Iterator[Mover]:
        for tie in self._ties:
            yield from (*tie.raw.values(), *tie.encoded.values())

    def fail(self, error: BaseException) -> None:
        """End all transfers with an error, on all ranks that take part in them."""
        for mover in self._movers():
            fail_transfers(mover, error)

    def close(self) -> None:
        """Close the Movers."""
        for mover in self._movers():
            mover.close()


def _specs(tie: TiedParameter, pipeline: Pipeline) -> Iterator[tuple[tuple[int, int], TensorSpec]]:
    """The moves of a tied parameter by sending and receiving stage, also from each stage to itself."""
    for a in sorted(tie.names):
        for b in sorted(tie.names):
            src, dst = (_layout(tie, pipeline, stage) for stage in (a, b))
            yield (a, b), TensorSpec(tie.shape, tie.dtype, src, dst)


def _code(tie: TiedParameter, pipeline: Pipeline, codec: str) -> dict[tuple[int, int], TensorSpec]:
    """The encoded moves of a tied parameter; empty unless all have the same blocks, so that all sums are equal."""
    encoded = {pair: compress_tensor(spec, parse_codec(codec)) for pair, spec in _specs(tie, pipeline)}
    blocks = {(spec.shape, spec.dtype) for spec in encoded.values()}
    return encoded if len(blocks) == 1 and all(spec.codec is not None for spec in encoded.values()) else {}


def _exchange(
    values: Mapping[int, torch.Tensor], movers: Mapping[tuple[int, int], Mover]
) -> dict[int, dict[int, torch.Tensor]]:
    """Send the values of this rank's stages, and return what its stages receive.

    Returns:
        ``{stage of this rank: {sending stage: tensor}}``.
    """
    values = {stage: value.clone() for stage, value in values.items()}
    handles = {pair: mover.start(values.get(pair[0])) for pair, mover in movers.items()}
    received: dict[int, dict[int, torch.Tensor]] = {}
    for (src, dst), handle in handles.items():
        tensor = handle.synchronize()  # on a GPU, a transfer can fail after wait() has returned
        if tensor is not None:
            received.setdefault(dst, {})[src] = tensor
    return received


def training_of(ties: Iterable[TiedParameter], modules: Mapping[int, torch.nn.Module]) -> list[tuple[int, str, bool]]:
    """For each tied parameter of this rank: the index of its tie, its name in errors, and whether it is trained."""
    return [
        (index, f"{name!r} of stage {stage}", find_parameter(modules[stage], name).requires_grad)
        for index, tie in enumerate(ties)
        for stage, name in tie.names.items()
        if stage in modules
    ]


def check_training(trainings: Iterable[tuple[int, str, bool]]) -> None:
    """Raise DisagreementError if only some stages train a shared parameter, because their copies would differ.

    Args:
        trainings: the results of :func:`training_of` on all ranks.
    """
    first: dict[int, tuple[str, bool]] = {}
    for index, name, is_trained in trainings:
        other, was_trained = first.setdefault(index, (name, is_trained))
        if is_trained != was_trained:
            trained, frozen = (name, other) if is_trained else (other, name)
            raise DisagreementError(
                f"{trained} is trained, but {frozen}, which is the same parameter of the model, is frozen; set "
                "requires_grad alike in all stages that share it"
            )


def check_ties(
    ties: Iterable[TiedParameter], pipeline: Pipeline, modules: Mapping[int, torch.nn.Module], rank: int
) -> None:
    """Raise ArgumentError unless the ties fit the pipeline and the parameters of this rank, each in one tie."""
    taken: set[tuple[int, str]] = set()
    objects: dict[int, int] = {}
    for tie in ties:
        for stage, name in tie.names.items():
            if stage not in range(len(pipeline.stages)):
                raise ArgumentError(f"a tie names stage {stage}; there are stages 0 to {len(pipeline.stages) - 1}")
            if (stage, name) in taken:
                raise ArgumentError(f"{name!r} of stage {stage} is in two ties; use one tie for all its stages")
            taken.add((stage, name))
            mesh = pipeline.stages[stage].mesh
            if mesh is not None and set(_layout(tie, pipeline, stage).ranks) != set(mesh.ranks):
                raise ArgumentError(f"the layout of {name!r} in a tie must be on the ranks of stage {stage}")
            if stage not in modules:
                continue
            try:
                local = _local(find_parameter(modules[stage], name).detach())
            except AttributeError as error:
                raise ArgumentError(f"stage {stage} has no parameter {name!r}, which a tie names") from error
            if _is_plain(modules[stage], name) and is_sharded(pipeline, stage):
                raise ArgumentError(
                    f"a tie names {name!r} of stage {stage}, whose ranks see different data and so have different "
                    "gradients; wrap the module in DistributedDataParallel or fully_shard, which sum them"
                )
            other = objects.setdefault(id(find_parameter(modules[stage], name)), stage)
            if other != stage:
                raise ArgumentError(
                    f"{name!r} of stage {stage} is the same Parameter as that of stage {other}: its gradients already "
                    "add up, so it needs no tie"
                )
            spec = TensorSpec(tie.shape, tie.dtype, _layout(tie, pipeline, stage), _layout(tie, pipeline, stage))
            expected = spec.src_tiles.local_shape(rank)
            if tuple(local.shape) != tuple(expected):
                raise ArgumentError(
                    f"parameter {name!r} of stage {stage} has shape {list(local.shape)}, but rank {rank} has the shard "
                    f"{list(expected)} of the tie of shape {list(tie.shape)}"
                )


def _is_plain(module: torch.nn.Module, name: str) -> bool:
    """Whether no wrapper sums the gradients of the replicas of a parameter."""
    return not isinstance(module, REPLICATED) and not hasattr(find_parameter(module, name), "to_local")


def _layout(tie: TiedParameter, pipeline: Pipeline, stage: int) -> AnyLayout:
    mesh = pipeline.stages[stage].mesh
    assert mesh is not None
    return tie.layouts.get(stage, Layout(mesh))


def _local(array: Any) -> torch.Tensor:
    local: torch.Tensor = array.to_local() if hasattr(array, "to_local") else array
    return local
