"""``parallelize``: replace the layers of a model by layers on a grid."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.compression import Policy
from reshard.errors import ArgumentError, DisagreementError
from reshard.gradients.declared_sums import CHECK_EVERY, digest_local_shard, mark_replaced
from reshard.public_api import not_compiled

from . import transformers_models  # noqa: F401  # registers its converters
from .converters import Conversion, convert_children, find_converter, register
from .grid import Grid
from .grid.cuts import size_of
from .grid.grid import check_grid
from .layers.dropout import Dropout
from .layers.embedding import Embedding
from .layers.linear import Linear
from .layers.loss import CrossEntropy
from .layers.norms import LayerNorm, RMSNorm
from .optimizers import watch_optimizers
from .products.dataflow import PANEL_WIDTH


def find_refusal(module: Any, path: str = "") -> str | None:
    """The reason why :func:`parallelize` cannot cut a module; None if it knows all classes in it.

    It needs no grid. It checks classes only. A converter may still refuse a module, such as a norm over several dims.
    """
    try:
        converter = find_converter(module, path)
    except ArgumentError as error:
        return str(error)
    if converter is not convert_children:
        return None
    parts = ((f"{path}.{name}" if path else name, child) for name, child in module.named_children())
    return next((refusal for name, child in parts if (refusal := find_refusal(child, name)) is not None), None)


def _convert_linear(module: nn.Linear, conversion: Conversion, path: str) -> nn.Module:
    conversion.features = module.out_features
    return Linear(module, conversion.grid, panel=conversion.panel)


def _convert_embedding(module: nn.Embedding, conversion: Conversion, path: str) -> nn.Module:
    is_tied = conversion.is_tied(module.weight)  # then cut as the Linear that shares the table
    cut_rows = 1 if is_tied and module.embedding_dim < module.num_embeddings else 0
    conversion.features = module.embedding_dim
    return Embedding(module, conversion.grid, cut_rows)


def _convert_norm(module: Any, conversion: Conversion, path: str) -> nn.Module:
    if len(module.normalized_shape) != 1:
        raise ArgumentError(f"{path!r} normalizes over {list(module.normalized_shape)}; a grid needs one dim")
    conversion.features = module.normalized_shape[-1]
    return LayerNorm(module, conversion.grid) if isinstance(module, nn.LayerNorm) else RMSNorm(module, conversion.grid)


def _convert_dropout(module: nn.Dropout, conversion: Conversion, path: str) -> nn.Module:
    if conversion.features is None:
        raise ArgumentError(f"{path!r} is a Dropout, but no layer before it says how many features its input has")
    return Dropout(module.p, conversion.grid, conversion.features)


def _convert_loss(module: nn.CrossEntropyLoss, conversion: Conversion, path: str) -> nn.Module:
    if module.weight is not None or module.reduction != "mean" or module.label_smoothing:
        raise ArgumentError(
            f"{path!r} has class weights, label smoothing or a reduction other than mean; CrossEntropy on a grid "
            "supports none of them"
        )
    if conversion.features is None:
        raise ArgumentError(f"{path!r} is a loss, but no Linear before it says how many classes there are")
    return CrossEntropy(conversion.grid, conversion.features, module.ignore_index)


register(nn.Linear, _convert_linear)
register(nn.Embedding, _convert_embedding)
register(nn.LayerNorm, _convert_norm)
register(nn.RMSNorm, _convert_norm)
register(nn.Dropout, _convert_dropout)
register(nn.CrossEntropyLoss, _convert_loss)


@check_arguments(panel=(1, 2**40))
def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    panel: int = PANEL_WIDTH,
    keep_inputs: bool = False,
    has_local_input: bool = False,
    compression: Policy | None = None,
) -> nn.Module:
    """Cut a model over a grid, in place. All ranks of the grid call it with the same model.

    The function knows ``nn.Linear``, ``Embedding``, ``LayerNorm``, ``RMSNorm``, ``Dropout``, ``CrossEntropyLoss``,
    elementwise activations, containers of these, the GPT of ``reshard train``, and GPT-2 and Llama of ``transformers``.
    :func:`register` adds others. Every rank keeps only its shard of each parameter, as a DTensor. The forward of the
    result takes the whole batch on every rank. It returns the loss of the whole batch. Other outputs have this rank's
    rows and features. Call :func:`sync_gradients` after the last backward of each step.

    Args:
        model: the model, with the same values on all ranks.
        grid: the grid.
        panel, keep_inputs: see :class:`Linear`.
        has_local_input: the forward takes only this rank's rows, as a stage of a pipeline does.
        compression: a policy that sets ``tp``, the codec of the messages of matrix products, and nothing else. It
            encodes fp32, bf16 and fp16 values.

    Returns:
        The model; a new module if ``model`` itself is replaced.

    Raises:
        ArgumentError: an argument has a wrong type, a module cannot be cut, modules that share a parameter would cut
            it in two ways, or the policy has another dimension.
    """
    grid = check_grid(grid, "parallelize").copy()
    if compression is not None:
        grid.set_codec(compression.check_only("tp", "parallelize"))
    conversion, before = Conversion(model, grid, panel), list(model.parameters())
    modes = {path: submodule.training for path, submodule in model.named_modules(remove_duplicate=False)}
    result = conversion.convert(model, "")
    for names in conversion.ties:
        _tie(result, names)
    for path, module in reversed(list(result.named_modules())):  # errors name the first use of a tied parameter
        if isinstance(module, Linear):
            module.keep_inputs = keep_inputs
        if hasattr(module, "declare"):
            module.declare(f"{path}." if path else "")
        while path not in modes:  # a part of a converted module
            path = path.rpartition(".")[0]
        module.training = modes[path]
    kept = set(map(id, result.parameters()))
    mark_replaced([item for item in before if id(item) not in kept], "parallelize")
    watch_optimizers()
    _BatchHooks(grid, has_local_input).attach(result)
    result.reshard_grid = grid  # type: ignore[assignment]
    return result


def _tie(model: nn.Module, names: list[str]) -> None:
    """Let the modules at ``names`` share one parameter again, as they did before conversion.

    Raises:
        ArgumentError: the modules have cut the parameter in different ways.
    """
    first, *others = names
    parameter = model.get_parameter(first)
    for name in others:
        other: Any = model.get_parameter(name)
        if other.placements != parameter.placements:  # type: ignore[attr-defined]
            raise ArgumentError(
                f"{first!r} and {name!r} are one parameter, but the grid cuts them in two ways: "
                f"{parameter.placements} and {other.placements}"  # type: ignore[attr-defined]
            )
        path, _, key = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, key, parameter)


class _BatchHooks:
    """Forward hooks that cut the batch, and set its number of rows in the grid."""

    def __init__(self, grid: Grid, has_local_input: bool) -> None:
        self.grid, self.has_local_input = grid, has_local_input
        self._open: list[Any] = []
        self._has_warned = False
        self._num_forwards = 0

    def attach(self, model: nn.Module) -> None:
        """Register the hooks before and after each forward of a model."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    @not_compiled
    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        _sum_under_fsdp(model)
        tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor) and item.dim()]
        if not tensors:
            raise ArgumentError("the forward of a model on a grid needs a tensor whose first dim is the batch")
        rows = _rows_of(tensors)
        if self.has_local_input:
            sizes = set(map(len, tensors))  # a tensor that all rows share has 1 in its first dim
            context = self.grid.local_batch(min(sizes) and max(sizes), tensors[0].device)
        else:
            context = self.grid.batch(rows)
            self._warn_if_idle(rows)
            if self._num_forwards % CHECK_EVERY == 0:
                self._compare_batches(model, args, kwargs)
            self._num_forwards += 1
            lo, hi = self.grid.local_rows(rows)
            args = tuple(_narrow(argument, rows, lo, hi) for argument in args)
            kwargs = {
                name: argument if _has_no_batch_dim(name, argument) else _narrow(argument, rows, lo, hi)
                for name, argument in kwargs.items()
            }
        context.__enter__()
        self._open.append(context)
        return args, kwargs

    @not_compiled
    def _after(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def _compare_batches(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise DisagreementError, on all ranks alike, if ranks pass different batches, or would draw different masks.

        A floating-point input may hold only the features of its column, so it may differ between columns.
        """
        named = [(f"argument {number}", argument) for number, argument in enumerate(args)] + sorted(kwargs.items())
        tensors = [(name, item) for name, item in named if isinstance(item, torch.Tensor)]
        device = tensors[0][1].device
        if any(getattr(submodule, "draws_masks", False) for submodule in model.modules()):
            tensors.append(("the state of torch's CPU generator", torch.get_rng_state()))
        if bool(self._differs(torch.tensor([len(tensors)], device=device), torch.tensor([False], device=device))):
            raise DisagreementError(f"ranks of {self.grid} pass different numbers of tensors to a model")
        is_cut = torch.tensor([tensor.is_floating_point() for _, tensor in tensors], device=device)
        different = self._differs(torch.stack([digest_local_shard(tensor).to(device) for _, tensor in tensors]), is_cut)
        for index in different.nonzero().flatten().tolist():
            raise DisagreementError(
                f"ranks of {self.grid} pass different batches to a model: {tensors[index][0]} differs; every rank must "
                "pass the whole batch, and have the same seed if the model has dropout"
            )

    def _differs(self, values: torch.Tensor, may_differ_by_column: torch.Tensor) -> torch.Tensor:
        """1 where any two ranks have different values, 0 elsewhere; the same on all ranks."""
        row, col, depth = (self.grid.along(axis) for axis in ("row", "col", "depth"))
        high, low = (depth.max(row.max(item)) for item in (values, -values))
        by_column = (col.max(values) != -col.max(-values)) & ~may_differ_by_column
        wrong = ((high != -low) | by_column).int()
        return depth.max(row.max(col.max(wrong)))

    def _warn_if_idle(self, rows: int) -> None:
        grid = self.grid
        holders = sum(size_of(span) > 0 for index in range(grid.depth) for span in grid.spans_of_batch(rows)[index])
        idle = (grid.depth * grid.rows - holders) * grid.cols
        if idle and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a batch of {rows} rows leaves {idle} of the {grid.size} ranks of {grid} without a row; use a "
                f"multiple of {grid.depth * grid.rows} rows",
                stacklevel=2,
            )


def _sum_under_fsdp(model: nn.Module) -> None:
    """Make FSDP sum gradients instead of averaging them, because the loss is already the mean over the whole batch."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule) and not getattr(module, "_reshard_sums", False):
            module.set_gradient_divide_factor(1.0)
            object.__setattr__(module, "_reshard_sums", True)


def _rows_of(tensors: Sequence[torch.Tensor]) -> int:
    """Number of rows of a batch. Tensors that all rows share do not count: 1 row, or 1 dim where others have more."""
    several = [tensor for tensor in tensors if tensor.dim() > 1] or tensors
    return next((len(item) for item in several if len(item) != 1), 1)


def _has_no_batch_dim(name: str, value: Any) -> bool:
    """Whether an argument has one element per position of a sequence, and so no dim for the batch."""
    return name in ("position_ids", "cache_position") and isinstance(value, torch.Tensor) and value.dim() == 1


def _narrow(value: Any, rows: int, lo: int, hi: int) -> Any:
    """The rows ``lo:hi`` of a tensor with the batch as its first dim; another value as it is."""
    return value[lo:hi] if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows else value
