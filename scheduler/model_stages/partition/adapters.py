"""Blocks of models of ``transformers``, because torch.fx cannot trace their forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .blocks import Block


def find_blocks(model: torch.nn.Module) -> Callable[[Any], Sequence[Block]] | None:
    """The function that returns the blocks of a model of this class, if there is one."""
    if hasattr(type(model), "pipeline_blocks"):
        return type(model).pipeline_blocks
    for base in type(model).__mro__:
        is_known = base.__module__.startswith("transformers.") and base.__name__ in _ADAPTERS
        if is_known and type(model).forward is getattr(base, "forward", None):  # a subclass may compute something else
            return _ADAPTERS[base.__name__]
    return None


def gpt2_blocks(model: Any) -> list[Block]:
    """Blocks of ``transformers.GPT2LMHeadModel``. Inputs: its tensor arguments except those of a cache or encoder."""
    body = model.transformer

    def embed(input_ids: Any, position_ids: Any = None, token_type_ids: Any = None) -> dict[str, Any]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        made = body.wte(input_ids) + body.wpe(position_ids)
        if token_type_ids is not None:
            made = made + body.wte(token_type_ids)
        return {"hidden_states": body.drop(made)}

    def mask(hidden_states: Any, attention_mask: Any = None, position_ids: Any = None) -> dict[str, Any]:
        return {"causal_mask": _causal_mask(model, hidden_states, attention_mask, position_ids)}

    def layer(number: int) -> Callable[..., dict[str, Any]]:
        def run(hidden_states: Any, causal_mask: Any) -> dict[str, Any]:
            made = body.h[number](hidden_states, None, causal_mask, use_cache=False)
            return {"hidden_states": made[0] if isinstance(made, tuple) else made}

        return run

    def norm(hidden_states: Any) -> dict[str, Any]:
        return {"hidden_states": body.ln_f(hidden_states)}

    return [
        Block("transformer.wte", embed, ("transformer.wte", "transformer.wpe", "transformer.drop")),
        Block("causal_mask", mask, (), recomputed=("causal_mask",)),
        *(Block(f"transformer.h.{number}", layer(number)) for number in range(len(body.h))),
        Block("transformer.ln_f", norm),
        Block("lm_head", _causal_lm_head(model)),
    ]


def llama_blocks(model: Any) -> list[Block]:
    """Blocks of ``transformers.LlamaForCausalLM``, and of Gemma, Mistral, Qwen2 and Qwen3, which have its structure.

    Inputs: the tensor arguments of the model except those of a cache.
    """
    body, windows = model.model, _sliding_layers(model)

    def embed(input_ids: Any) -> dict[str, Any]:
        return {"hidden_states": body.embed_tokens(input_ids)}

    def prepare(hidden_states: Any, attention_mask: Any = None, position_ids: Any = None) -> dict[str, Any]:
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        masks = {
            slides: _causal_mask(model, hidden_states, attention_mask, position_ids, slides) for slides in set(windows)
        }
        rotary = body.rotary_emb(hidden_states, position_ids)
        return {"causal_masks": masks, "positions": position_ids, "rotary": rotary}

    def layer(number: int) -> Callable[..., dict[str, Any]]:
        def run(hidden_states: Any, causal_masks: Any, positions: Any, rotary: Any) -> dict[str, Any]:
            made = body.layers[number](
                hidden_states,
                attention_mask=causal_masks[windows[number]],
                position_ids=positions,
                position_embeddings=rotary,
                use_cache=False,
            )
            return {"hidden_states": made[0] if isinstance(made, tuple) else made}

        return run

    def norm(hidden_states: Any) -> dict[str, Any]:
        return {"hidden_states": body.norm(hidden_states)}

    return [
        Block("model.embed_tokens", embed),
        Block("rotary", prepare, ("model.rotary_emb",), recomputed=("causal_masks", "positions", "rotary")),
        *(Block(f"model.layers.{number}", layer(number)) for number in range(len(body.layers))),
        Block("model.norm", norm),
        Block("lm_head", _causal_lm_head(model)),
    ]


def _sliding_layers(model: Any) -> list[bool]:
    """Whether each layer of a model like Llama attends to a sliding window only."""
    config, number = model.config, len(model.model.layers)
    if config.model_type == "mistral":
        return [config.sliding_window is not None] * number
    if config.model_type in ("qwen2", "qwen3"):
        return [kind == "sliding_attention" for kind in config.layer_types[:number]]
    return [False] * number


def _causal_mask(
    model: Any, hidden_states: Any, attention_mask: Any, position_ids: Any, is_sliding: bool = False
) -> Any:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    make = create_sliding_window_causal_mask if is_sliding else create_causal_mask
    return make(model.config, hidden_states, attention_mask, None, position_ids)  # the name of the cache has changed


def _causal_lm_head(model: Any) -> Callable[..., Any]:
    from ...runtime.stage import StageOutput

    def head(hidden_states: Any, labels: Any) -> Any:
        logits = model.lm_head(hidden_states)
        shifted = labels[..., 1:]
        counted = (shifted != -100).sum()
        if hasattr(model.loss_function, "sum_over_batch"):  # on a grid, a rank has some of the samples
            counted = model.loss_function.sum_over_batch(counted)
        loss = model.loss_function(
            logits, labels, vocab_size=model.config.vocab_size, num_items_in_batch=counted.clamp(min=1)
        )
        return StageOutput(loss=loss, weight=counted / max(1, shifted.shape[1]))  # in samples

    return head


_ADAPTERS: dict[str, Callable[[Any], Sequence[Block]]] = {
    "GPT2LMHeadModel": gpt2_blocks,
    "GemmaForCausalLM": llama_blocks,
    "LlamaForCausalLM": llama_blocks,
    "MistralForCausalLM": llama_blocks,
    "Qwen2ForCausalLM": llama_blocks,
    "Qwen3ForCausalLM": llama_blocks,
}
