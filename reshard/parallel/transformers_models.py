"""GPT-2 and Llama of ``transformers`` on a grid.

Only modules that need whole heads or whole features are replaced. Blocks and models keep their forwards. In shapes,
``features_j`` are the features that this rank's column of the grid holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from reshard.errors import ArgumentError

from .converters import Conversion, register_by_name
from .layers.attention import Heads
from .layers.embedding import PositionEmbedding
from .layers.linear import Linear, multiply
from .layers.loss import CrossEntropy
from .layers.norms import RMSNorm
from .plain_state import FusedLinear, TransposedLinear


class _Attention(nn.Module):
    """An attention that drops weights in training, with probability ``dropout``."""

    dropout: float

    @property
    def draws_masks(self) -> bool:
        """Whether a forward draws masks, as in :class:`~reshard.parallel.layers.dropout.Dropout`."""
        return self.training and self.dropout > 0


class GPT2Attention(_Attention):
    """``GPT2Attention``, with three projections for the fused one, so that each column has q, k and v of its heads."""

    def __init__(self, module: Any, conversion: Conversion, path: str) -> None:
        super().__init__()
        if module.is_cross_attention:
            raise ArgumentError(f"{path!r} is a cross-attention, which parallelize cannot cut")
        self.heads = Heads(conversion.grid, module.num_heads, module.num_heads, module.head_dim)
        self.c_attn = FusedLinear(as_linear(module.c_attn), 3, conversion.grid, conversion.panel, is_transposed=True)
        self.c_proj = convert_conv1d(module.c_proj, conversion, path)
        self.resid_dropout = conversion.convert(module.resid_dropout, path)
        self.dropout, self.scaling = module.attn_dropout.p, module.scaling

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """``[batch, sequence, features_j]`` to the same shape, and None in place of the weights."""
        check_no_cache(kwargs)
        q, k, v = (self.heads.split(item, is_query=True) for item in self.c_attn(hidden_states))
        dropout = self.dropout if self.training else 0.0
        attended = self.heads.attend(q, k, v, attention_mask, dropout=dropout, scale=self.scaling)
        return self.resid_dropout(self.c_proj(self.heads.join(attended))), None


class LlamaAttention(_Attention):
    """``LlamaAttention``, with grouped-query attention and rotary position embeddings."""

    def __init__(self, module: Any, conversion: Conversion, path: str) -> None:
        super().__init__()
        config = module.config
        self.heads = Heads(conversion.grid, config.num_attention_heads, config.num_key_value_heads, module.head_dim)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Linear(getattr(module, name), conversion.grid, "in", conversion.panel))
        self.o_proj = conversion.convert(module.o_proj, f"{path}.o_proj")
        self.dropout, self.scaling = module.attention_dropout, module.scaling

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """``[batch, sequence, features_j]`` to the same shape, and None in place of the weights."""
        check_no_cache(kwargs)
        projected = multiply([self.q_proj, self.k_proj, self.v_proj], hidden_states)
        q, k, v = (self.heads.split(item, is_query=number == 0) for number, item in enumerate(projected))
        q, k = (rotate(item, *position_embeddings) for item in (q, k))
        dropout = self.dropout if self.training else 0.0
        attended = self.heads.attend(q, k, v, attention_mask, dropout=dropout, scale=self.scaling)
        return self.o_proj(self.heads.join(attended)), None


class LlamaMLP(nn.Module):
    """``LlamaMLP``, whose gate and up projections move their shared input once."""

    def __init__(self, module: Any, conversion: Conversion, path: str) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, Linear(getattr(module, name), conversion.grid, "in", conversion.panel))
        self.down_proj = conversion.convert(module.down_proj, f"{path}.down_proj")
        self.act_fn = conversion.convert(module.act_fn, f"{path}.act_fn")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, features_j]`` to the same shape."""
        gate, up = multiply([self.gate_proj, self.up_proj], x)
        result: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return result


def check_no_cache(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError if attention on a grid is called with cached keys and values.

    Args:
        options: keyword arguments of the call.
    """
    for name in ("cache", "past_key_values"):  # since transformers 5.24, and before
        if options.get(name) is not None:
            raise ArgumentError(
                f"attention on a grid keeps no cache of keys and values; omit use_cache=True and {name}"
            )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021), which pairs element ``i`` with ``i + head_size / 2``.

    Args:
        x: ``[batch, heads, sequence, head_size]``.
        cos, sin: ``[batch, sequence, head_size]``.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def as_linear(conv1d: Any) -> nn.Linear:
    """A Linear whose parameters are views of those of a ``Conv1D``, whose weight is ``[in, out]``."""
    linear = nn.Linear(conv1d.nx, conv1d.nf, device="meta")
    linear.weight = nn.Parameter(conv1d.weight.detach().t(), requires_grad=conv1d.weight.requires_grad)
    linear.bias = nn.Parameter(conv1d.bias.detach(), requires_grad=conv1d.bias.requires_grad)
    return linear


def convert_conv1d(module: Any, conversion: Conversion, path: str) -> nn.Module:
    """Convert a ``Conv1D`` to a Linear on the grid; ``plain_state_dict`` transposes its weight back."""
    return TransposedLinear(as_linear(module), conversion.grid, panel=conversion.panel)


def _convert_llama_norm(module: Any, conversion: Conversion, path: str) -> nn.Module:
    conversion.features = module.weight.shape[0]
    return RMSNorm(module, conversion.grid)


def _convert_gpt2(module: Any, conversion: Conversion, path: str) -> nn.Module:
    if module.wpe is not None:  # a pipeline stage may lack the embedding
        module.wpe = PositionEmbedding(module.wpe, conversion.grid)
    for name, child in list(module.named_children()):
        if name != "wpe":
            setattr(module, name, conversion.convert(child, f"{path}.{name}" if path else name))
    module.register_forward_pre_hook(_omit_empty_mask, with_kwargs=True)
    return module


def _omit_empty_mask(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """On a rank without rows, call ``GPT2Model`` without a mask, because the model cannot reshape an empty mask.

    The exception on one rank would leave the other ranks waiting in a collective.
    """
    names = [*inspect.signature(module.forward).parameters][: len(args)]
    values = {**dict(zip(names, args, strict=True)), **kwargs}
    mask = values.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not mask.numel():
        values["attention_mask"] = None
    return tuple(values.pop(name) for name in names), values


def _convert_causal_lm(module: Any, conversion: Conversion, path: str) -> nn.Module:
    """Compute the loss from sharded logits, and turn off the cache of keys and values."""
    module.config.use_cache = False
    entropy = CrossEntropy(conversion.grid, module.config.vocab_size)

    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: Any = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        entropy.ignore_index = ignore_index
        result: torch.Tensor = entropy(logits, shift_labels, num_items_in_batch)
        return result

    loss_function.sum_over_batch = entropy.sum_over_batch  # type: ignore[attr-defined]
    module.loss_function = loss_function
    return conversion.convert_children(module, path)


def _convert_children(module: Any, conversion: Conversion, path: str) -> nn.Module:
    return conversion.convert_children(module, path)


def _leave_unchanged(module: Any, conversion: Conversion, path: str) -> nn.Module:
    result: nn.Module = module
    return result


register_by_name(
    "transformers",
    {
        "GPT2LMHeadModel": _convert_causal_lm,
        "GPT2Model": _convert_gpt2,
        "GPT2Block": _convert_children,
        "GPT2Attention": GPT2Attention,
        "GPT2MLP": _convert_children,
        "Conv1D": convert_conv1d,
        "LlamaForCausalLM": _convert_causal_lm,
        "LlamaModel": _convert_children,
        "LlamaDecoderLayer": _convert_children,
        "LlamaAttention": LlamaAttention,
        "LlamaMLP": LlamaMLP,
        "LlamaRMSNorm": _convert_llama_norm,
        "LlamaRotaryEmbedding": _leave_unchanged,
    },
)
