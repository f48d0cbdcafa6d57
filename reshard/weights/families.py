"""Rules for families of models, chosen by the names and shapes on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import ArgumentError
from reshard.weights.rules import Concatenate, Drop, Made, Pad, Rule, Shapes, Stack, Transpose, Trim, inverted

_EXPERT = "{p}.experts.{e:d}."


def _fuse_experts(parts: Sequence[str], target: str) -> tuple[Rule, ...]:
    """Experts with a tensor for each number as one tensor; several parts of an expert are joined first."""
    names = tuple(f"{_EXPERT}{part}.weight" for part in parts)
    if len(names) == 1:
        return (Stack(names[0], target),)
    return Concatenate(names, f"{_EXPERT}joined.weight"), Stack(f"{_EXPERT}joined.weight", target)


#: Qwen2 and Qwen3, DeepSeek-V3, OLMoE; Mixtral.
_EXPERT_PARTS = ("gate_proj", "up_proj"), ("w1", "w3"), ("down_proj",), ("w2",)
#: vLLM; transformers.
_EXPERT_NAMES = ("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")

_FUSED: tuple[tuple[Rule, ...], ...] = (
    *(
        _fuse_experts(parts, f"{{p}}.experts.{name}")
        for parts in _EXPERT_PARTS
        for name in _EXPERT_NAMES[len(parts) == 1]
    ),
    # Llama, Qwen2 and Qwen3, Mixtral, Gemma
    (Concatenate(tuple(f"{{p}}.{part}_proj.{{t}}" for part in "qkv"), "{p}.qkv_proj.{t}"),),
    (Concatenate(("{p}.gate_proj.{t}", "{p}.up_proj.{t}"), "{p}.gate_up_proj.{t}"),),
)

#: Tensors with a row for each token, which may be padded.
VOCABULARY = "{p}.embed_tokens.weight", "{p}.wte.weight", "lm_head.weight"

#: Groups of rules; a group applies if it gives more tensors of the destination their shape, and takes none away.
GROUPS: tuple[tuple[Rule, ...], ...] = (
    *_FUSED,
    *(inverted(group) for group in reversed(_FUSED)),
    tuple(Transpose(f"{{p}}.{name}.weight") for name in ("c_attn", "c_proj", "c_fc")),  # GPT-2
    *(
        (kind(name),)
        for kind in (Pad, Trim)
        for name in ("{p}.embed_tokens.weight", "lm_head.weight", "{p}.wte.weight")
    ),
)

#: Buffers that a model computes by itself. They are dropped where the destination does not have them.
COMPUTED = "{p}.rotary_emb.inv_freq", "{p}.attn.bias", "{p}.attn.masked_bias"


def find_rules(given: Sequence[Rule] | None, shapes: Shapes, wanted: Shapes) -> tuple[Rule, ...]:
    """The rules between two models.

    Args:
        given: by the user; None: those of the families that fit.
        shapes: of the source, by name. wanted: of the destination.
    """
    if given is not None:
        return tuple(given)
    made = {name: Made.of(name, shape) for name, shape in shapes.items()}
    chosen: list[Rule] = []
    for group in GROUPS:
        if len(_fitting(made, wanted)) == len(wanted):
            break
        trial = dict(made)
        try:
            for rule in group:
                rule.apply(trial, wanted)
        except ArgumentError:
            continue
        before, after = _fitting(made, wanted), _fitting(trial, wanted)
        if before < after:
            made, chosen = trial, [*chosen, *group]
    dropped = [Drop(pattern) for pattern in COMPUTED]
    for rule in dropped:
        trial = dict(made)
        rule.apply(trial, wanted)
        if trial.keys() != made.keys() and not (made.keys() - trial.keys()) & wanted.keys():
            made, chosen = trial, [*chosen, rule]
    return tuple(chosen)


def _fitting(made: Mapping[str, Made], wanted: Shapes) -> set[str]:
    """The names of the destination that have their tensor."""
    return {name for name, shape in wanted.items() if name in made and made[name].shape == shape}
