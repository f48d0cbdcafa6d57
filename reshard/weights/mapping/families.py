"""Rules for families of models, chosen by the names and shapes on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import ArgumentError
from reshard.weights.mapping.parts import ComposedTensor
from reshard.weights.mapping.rules import (
    Concatenate,
    Drop,
    GroupHeads,
    Pad,
    Rename,
    Rope,
    Rule,
    Shapes,
    Stack,
    Transpose,
    Trim,
    apply_rules,
    fill,
    inverted,
    match_names,
)

_EXPERT = "{p}.experts.{e:d}."


def _fuse_experts(parts: Sequence[str], target: str) -> tuple[Rule, ...]:
    """Rules that join the tensors of experts to one tensor of all experts. Parts of an expert are joined first."""
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
    # DeepSeek-V3
    (Concatenate(("{p}.q_a_proj.{t}", "{p}.kv_a_proj_with_mqa.{t}"), "{p}.fused_qkv_a_proj.{t}"),),
)

_GATE = Rename("{p}.mlp.gate.weight", "{p}.block_sparse_moe.gate.weight")
#: Experts that transformers has stacked: in vLLM's names; Mixtral in vLLM's names, and in the names of its checkpoints.
_STACKED: tuple[tuple[Rule, ...], ...] = (
    (
        Rename("{p}.experts.gate_up_proj", "{p}.experts.w13_weight"),
        Rename("{p}.experts.down_proj", "{p}.experts.w2_weight"),
    ),
    (
        _GATE,
        Rename("{p}.mlp.experts.gate_up_proj", "{p}.block_sparse_moe.experts.w13_weight"),
        Rename("{p}.mlp.experts.down_proj", "{p}.block_sparse_moe.experts.w2_weight"),
    ),
    (
        _GATE,
        *(
            Rename(f"{{p}}.mlp.experts.{name}", f"{{p}}.block_sparse_moe.experts.{name}")
            for name in ("gate_up_proj", "down_proj")
        ),
        *inverted(_fuse_experts(("w1", "w3"), "{p}.experts.gate_up_proj")),
        *inverted(_fuse_experts(("w2",), "{p}.experts.down_proj")),
    ),
)

#: Tensors with one row for each token of the vocabulary. Either side may pad the rows.
VOCABULARY = "{p}.embed_tokens.weight", "{p}.wte.weight", "lm_head.weight"

#: Groups of rules. A group applies if more tensors of the destination then get their shape, and no tensor loses it.
GROUPS: tuple[tuple[Rule, ...], ...] = (
    *_FUSED,
    *(inverted(group) for group in reversed(_FUSED)),
    *_STACKED,
    *map(inverted, _STACKED),
    tuple(Transpose(f"{{p}}.{name}.weight") for name in ("c_attn", "c_proj", "c_fc")),  # GPT-2
    *((kind(name),) for kind in (Pad, Trim) for name in VOCABULARY),
)

#: Buffers that a model computes by itself. They are dropped where the destination does not have them.
COMPUTED = "{p}.rotary_emb.inv_freq", "{p}.attn.bias", "{p}.attn.masked_bias"


#: Hugging Face's names and those of Megatron-Core, in one layer.
_MEGATRON_LAYER = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}
#: Names of whole tensors that end differently in both. In Transformer Engine, a norm belongs to the linear layer that
#: follows it.
_MEGATRON_TENSORS = {
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
}


def megatron(num_query_groups: int | None, moe_layers: Iterable[int] = ()) -> tuple[Rule, ...]:
    """Rules from Hugging Face's names to those of a ``GPTModel`` of Megatron-Core with Transformer Engine.

    The rules cover Llama, Qwen2 and Qwen3 (also MoE), and DeepSeek-V3 without its layers that predict further tokens.
    An expert keeps its number in the whole model: ``experts.linear_fc1.weight7``. Pass the rules through
    :func:`inverted` if Megatron is the source.

    Args:
        num_query_groups: number of heads of keys; None for multi-latent attention (DeepSeek).
        moe_layers: numbers of the layers with experts.
    """
    hf, mcore = "model.layers.{i:d}.", "decoder.layers.{i:d}."
    rules: list[Rule] = [
        Rename("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        Rename("lm_head.weight", "output_layer.weight"),
        Rename("model.norm.weight", "decoder.final_layernorm.weight"),
    ]
    rules += [Rename(f"{hf}{old}", f"{mcore}{new}") for old, new in _MEGATRON_TENSORS.items()]
    kinds = "weight", "bias"
    rules += [
        Rename(f"{hf}{old}.{kind}", f"{mcore}{new}.{kind}") for old, new in _MEGATRON_LAYER.items() for kind in kinds
    ]
    if num_query_groups is None:
        rules.append(Rename(f"{hf}input_layernorm.weight", f"{mcore}input_layernorm.weight"))
    else:
        attention = f"{mcore}self_attention.linear_qkv"
        rules.append(Rename(f"{hf}input_layernorm.weight", f"{attention}.layer_norm_weight"))
        for kind in kinds:
            sources = tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv")
            rules.append(GroupHeads(sources, f"{attention}.{kind}", num_query_groups))
    for layer in moe_layers:
        norm = f"decoder.layers.{layer}.pre_mlp_layernorm.weight"
        rules.append(Rename(f"model.layers.{layer}.post_attention_layernorm.weight", norm))
    rules.append(Rename(f"{hf}post_attention_layernorm.weight", f"{mcore}mlp.linear_fc1.layer_norm_weight"))
    for place, number in (("", ""), ("shared_experts.", ""), ("experts.", "{e:d}")):
        for kind in kinds:
            parts = tuple(f"{hf}mlp.{place}{number}{'.' * bool(number)}{part}_proj.{kind}" for part in ("gate", "up"))
            rules.append(Concatenate(parts, f"{mcore}mlp.{place}linear_fc1.{kind}{number}"))
    for kind in kinds:
        rules.append(
            Rename(f"{hf}mlp.experts.{{e:d}}.down_proj.{kind}", f"{mcore}mlp.experts.linear_fc2.{kind}{{e:d}}")
        )
    return (*rules, Pad("embedding.word_embeddings.weight"), Pad("output_layer.weight"))


def original_llama(head_dim: int) -> tuple[Rule, ...]:
    """Rules from Hugging Face's names and order of rotary rows to those of the original Llama, and of torchtitan.

    Args:
        head_dim: number of rows of a head.
    """
    hf, original = "model.layers.{i:d}.", "layers.{i:d}."
    names = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    return (
        Rename("model.embed_tokens.weight", "tok_embeddings.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "output.weight"),
        *(Rename(f"{hf}{old}.weight", f"{original}{new}.weight") for old, new in names.items()),
        Rope(f"{original}attention.wq.weight", head_dim, to="pairs"),
        Rope(f"{original}attention.wk.weight", head_dim, to="pairs"),
    )


def find_rules(
    given: Sequence[Rule] | None, shapes: Shapes, wanted: Shapes
) -> tuple[tuple[Rule, ...], dict[str, ComposedTensor]]:
    """The rules between two models, and the tensors that they make from the tensors of the source.

    Args:
        given: rules of the user; None for those of the families that fit.
        shapes: shapes of the source, by name.
        wanted: shapes of the destination.

    Raises:
        ArgumentError: a rule of the user does not fit the tensors.
    """
    if given is not None:
        return tuple(given), apply_rules(given, shapes, wanted)
    made = {name: ComposedTensor.of(name, shape) for name, shape in shapes.items()}
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
    return tuple(chosen), made


def find_misfit(shapes: Shapes, wanted: Shapes, missing: Iterable[str]) -> tuple[str, tuple[int, ...], Rule] | None:
    """A missing tensor that a family's rules make with another shape: its name, that shape, and the last rule."""
    for group in GROUPS:
        made = {name: ComposedTensor.of(name, shape) for name, shape in shapes.items()}
        try:
            for rule in group:
                rule.apply(made, wanted)
        except ArgumentError:
            continue
        for name in missing:
            if name in made:
                return name, made[name].shape, group[-1]
    return None


def find_lacking(shapes: Shapes, wanted: Shapes, missing: str) -> tuple[Rule, str, list[str]] | None:
    """A family's rule that needs some tensors and lacks others: the rule, the side that lacks them, and their names.

    Args:
        shapes: shapes of the source, by name.
        wanted: shapes of the destination.
        missing: a tensor of the destination that the rule would make.
    """
    for rule in (rule for group in _FUSED for rule in group if isinstance(rule, Concatenate)):
        fused = match_names(rule.target, {missing: ()})
        split = [filled for source in rule.sources for _, filled in match_names(source, {missing: ()})]
        if fused:
            parts = [fill(source, fused[0][1]) for source in rule.sources]
            lacking = [name for name in parts if name not in shapes]
            if 0 < len(lacking) < len(parts):
                return rule, "source", lacking
        elif split and fill(rule.target, split[0]) in shapes:
            lacking = [name for name in (fill(source, split[0]) for source in rule.sources) if name not in wanted]
            if lacking:
                return rule.inverse(), "destination", lacking
    return None


def _fitting(made: Mapping[str, ComposedTensor], wanted: Shapes) -> set[str]:
    """The names of the destination that have their tensor."""
    return {name for name, shape in wanted.items() if name in made and made[name].shape == shape}
