"""The options of a transfer, declared once for every function that takes them. Imports no torch.

A function takes options as ``**options: Unpack[TransferOptions]``, and reads them with :func:`read_options`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypedDict, TypeVar, cast, get_type_hints

from reshard.codecs import Codec, TransferPolicy
from reshard.errors import OptionError
from reshard.formatting import did_you_mean
from reshard.plan import DEFAULT_STAGING_BYTES
from reshard.planner import Strategy
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.topology import Topology

F = TypeVar("F", bound=Callable[..., Any])


class PlanOptions(TypedDict, total=False):
    """The options that also apply to a transfer inside one process. Each annotation ends with the default."""

    strategy: Annotated[str | Strategy | None, None]
    topology: Annotated[Topology | None, None]
    compression: Annotated[str | Codec | TransferPolicy | None, None]
    max_error: Annotated[float | None, None]


class TransferOptions(PlanOptions, total=False):
    """The options of a transfer: keyword arguments of ``reshard``, ``reshard_async`` and ``reshard.ray.reshard``.

    ``reshard_local`` takes ``strategy``, ``topology``, ``compression`` and ``max_error``. A function of yours passes
    options on as ``**options: Unpack[TransferOptions]``, which type checkers and editors understand.

    Attributes:
        strategy: ``"auto"`` (the default), the name of another strategy (``reshard plan --help`` lists them), or a
            function from :class:`~reshard.planner.PlanProblem` to :class:`~reshard.planner.Routes`.
        topology: hosts and links of the ranks. Default: one host per host name.
        compression: the name of a block codec, such as ``"int8x128"`` (see :mod:`reshard.codecs.block`), or a
            :class:`~reshard.Codec` that you implement: its elements travel in place of the values, and are decoded into
            the result's dtype. Tensors that the codec cannot encode, or would not make smaller, travel as they are.
            Each end allocates the encoded shard in addition. ``"auto"`` chooses among the codecs of
            ``topology.codec_rates``, or none. ``"bf16-lossless"`` encodes bf16 without loss; ``"delta"`` sends the
            changes since ``base``. A :class:`~reshard.compression.Policy` with only ``pp`` means that codec.
        max_error: limit on the error of each tensor, as the L2 norm of the error over the L2 norm of the values of all
            source shards. The ranks measure it while they encode, and agree on it before any data moves. Blocks that
            have NaN or infinity before coding do not count. With ``"auto"`` it also limits the choice of codecs, see
            :func:`~reshard.make_plan`.
        staging_bytes: memory limit of a rank beyond its shards, in bytes; 64 MiB by default. On GPUs, arrays that are
            cast or not contiguous can take 256 MiB more while a transfer runs.
        timeout_seconds: limit for the agreement of the ranks, and again for the transfer.
        verify: compare digests of the sent data, of the arrived data and of replicas after the transfer.
        on_loss: what to do if ranks are lost before or during the transfer. ``"raise"``: raise an error.
            ``"recover"``: the surviving ranks move the missing data among themselves, from other replicas and from
            data that has arrived, and every one of them gets its shard. ``"offer"``: raise a
            :class:`~reshard.errors.RankLostError` that holds the plan of this recovery and runs it on request. The last
            two cost one round of small messages among all ranks after the transfer. A rank that does not respond within
            the timeout counts as lost.
        on_error: what to do with a tensor over ``max_error``: ``"raw"``: send it without the codec; ``"raise"``: raise
            a :class:`~reshard.errors.CompressionError` on all ranks.
    """

    staging_bytes: Annotated[int, DEFAULT_STAGING_BYTES]
    timeout_seconds: Annotated[float, DEFAULT_TIMEOUT_SECONDS]
    verify: Annotated[bool, False]
    on_loss: Annotated[str, "raise"]
    on_error: Annotated[str, "raw"]


def _defaults_of(kind: type) -> dict[str, Any]:
    """The options that a class declares, and their defaults."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


_DEFAULTS: dict[type, dict[str, Any]] = {kind: _defaults_of(kind) for kind in (PlanOptions, TransferOptions)}


def read_options(
    kind: type, given: Mapping[str, Any], function: Callable[..., Any], name_of_function: str = ""
) -> TransferOptions:
    """All options of :class:`TransferOptions`: those given, and the defaults of the others. Does not check values.

    Args:
        kind: the class that declares the options of the function.
        given: what its caller passes.
        function: the function.
        name_of_function: its name in errors, if that is another one.

    Raises:
        OptionError: the function has no such option.
    """
    for name in given:
        if name not in _DEFAULTS[kind]:
            why = "cannot use the option" if name in _DEFAULTS[TransferOptions] else "has no argument"
            close = did_you_mean(name, inspect.signature(function).parameters)
            raise OptionError(
                f"{name_of_function or function.__name__} {why} {name!r}; its options are "
                f"{', '.join(sorted(_DEFAULTS[kind]))}{close}"
            )
    return cast(TransferOptions, _DEFAULTS[TransferOptions] | dict(given))


def shows_options(kind: type) -> Callable[[F], F]:
    """Decorate a function with ``**options: Unpack[kind]``: ``inspect.signature`` and ``help`` show each option."""

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        shown = [
            parameter for parameter in own.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        hints = get_type_hints(kind)
        for name, default in _DEFAULTS[kind].items():
            keyword = inspect.Parameter.KEYWORD_ONLY
            shown.append(inspect.Parameter(name, keyword, default=default, annotation=hints[name]))
        function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate


def is_fault_tolerant(options: TransferOptions) -> bool:
    """Whether surviving ranks continue without lost ones. An invalid ``on_loss`` is reported in the agreement."""
    return isinstance(options["on_loss"], str) and options["on_loss"] != "raise"
