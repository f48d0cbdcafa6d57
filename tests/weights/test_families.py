"""Models of transformers to the shards of an engine with fused names, and back, at TP and EP 1, 2 and 4: all bits, and logits."""

from __future__ import annotations

import pytest
import torch

from reshard.weights.model.pieces import match
from tests.support.sharded_state import ShardedState, chunks, execute, whole

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GPT2 = {
    "vocab_size": 99,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES = {
    "Llama": SIZES,
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 8},
    "Qwen3Moe": {**SIZES, **MOE, "head_dim": 8, "num_experts": 4},
    "Mixtral": {**SIZES, "num_local_experts": 4},
    "DeepseekV3": {
        **SIZES,
        **MOE,
        **MLA,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "GPT2": GPT2,
}
WITH_EXPERTS = "Qwen3Moe", "Mixtral", "DeepseekV3"
#: Rows of vocabularies are padded to a multiple of this.
PADDING = 64


def _model(family):
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], tie_word_embeddings=False)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape) / 4)
    return model


def _as_checkpoint(state, family):
    """The names of a checkpoint: experts one by one, and Mixtral's own names."""
    parts = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, value in state.items():
        if family == "Mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            prefix = name.rpartition(".")[0]
            for e, expert in enumerate(value):
                matrices = expert.chunk(2) if "gate_up" in name else [expert]
                kinds = parts[:2] if "gate_up" in name else parts[2:]
                found |= {f"{prefix}.{e}.{part}.weight": each for part, each in zip(kinds, matrices, strict=True)}
        else:
            found[name] = value
    return found


def _as_engine(state, family):
    """What an engine with vLLM's names holds, computed by torch."""
    found = dict(state)
    for name in state:
        prefix, _, part = name.rpartition(".")
        if name.endswith(".experts.gate_up_proj"):
            found[f"{prefix}.w13_weight"] = found.pop(name)
        elif name.endswith(".experts.down_proj"):
            found[f"{prefix}.w2_weight"] = found.pop(name)
        elif family == "GPT2" and prefix.endswith(("c_attn", "c_proj", "c_fc")) and part == "weight":
            found[name] = found[name].t().contiguous()
        for fused, parts in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
        ):
            if prefix.endswith(f".{parts[0]}"):
                names = [name.replace(parts[0], each) for each in parts]
                found[name.replace(parts[0], fused)] = torch.cat([found.pop(each) for each in names])
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
            rows = -found[name].shape[0] % PADDING
            found[name] = torch.cat([found[name], torch.zeros(rows, found[name].shape[1])])
    if family == "Mixtral":
        found = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in found.items()}
    return found


def _engine_regions(family, size, is_expert_parallel):
    """Tensor parallelism as in vLLM. Heads of keys repeat on ranks if there are more ranks."""
    sizes = FAMILIES[family]
    heads, kv_heads = sizes.get("num_attention_heads", 4), sizes.get("num_key_value_heads", 4)

    def sections(shape, dim, runs):
        return [tuple(run if each == dim else (0, n) for each, n in enumerate(shape)) for run in runs]

    def find(name, shape, rank):
        if ".w13_weight" in name or ".w2_weight" in name:
            if is_expert_parallel:
                return chunks(0, size)(name, shape, rank)
            if ".w2_weight" in name:
                return chunks(2, size)(name, shape, rank)
        if ".qkv_proj." in name or ".c_attn." in name:
            unit = shape[0] // (heads + 2 * kv_heads)
            own, replicas = heads // size * unit, max(1, size // kv_heads)
            kv = max(1, kv_heads // size) * unit
            at = rank // replicas * kv
            runs = [(rank * own, (rank + 1) * own)]
            runs += [(first * unit + at, first * unit + at + kv) for first in (heads, heads + kv_heads)]
            return sections(shape, 0, runs)
        if "gate_up_proj" in name or ".w13_weight" in name:
            dim = 0 if len(shape) == 2 else 1
            half, step = shape[dim] // 2, shape[dim] // 2 // size
            return sections(shape, dim, [(at + rank * step, at + (rank + 1) * step) for at in (0, half)])
        if name.endswith((".o_proj.weight", ".down_proj.weight", ".c_proj.weight")):
            return chunks(1, size)(name, shape, rank)
        if any(part in name for part in ("embed_tokens", "lm_head", "wte", "c_fc", "q_b_proj", "kv_b_proj")):
            return chunks(0, size)(name, shape, rank)
        return whole(name, shape, rank)

    return find


CASES = [(family, size, False, "in memory") for family in FAMILIES for size in (1, 2, 4)]
CASES += [(family, size, True, "in memory") for family in WITH_EXPERTS for size in (2, 4)]
CASES += [(family, size, size > 1, "checkpoint") for family in WITH_EXPERTS for size in (1, 2, 4)]


@pytest.mark.parametrize(("family", "size", "is_expert_parallel", "form"), CASES)
def test_engine_has_each_bit_and_the_way_back_gives_equal_logits(family, size, is_expert_parallel, form):
    """With experts, ``form`` says whether the trainer has them stacked, as transformers in memory, or one by one."""
    torch.manual_seed(size)
    model = _model(family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = _as_engine(state, family)
    given = _as_checkpoint(state, family) if form == "checkpoint" else state
    source = ShardedState(given, 3, chunks(0, 3))
    blank = {name: torch.zeros_like(value) for name, value in expected.items()}
    engine = ShardedState(blank, size, _engine_regions(family, size, is_expert_parallel))
    execute(match(source.manifest, engine.manifest, "it"), source, engine)
    engine.check(expected)
    back = ShardedState({name: torch.zeros_like(value) for name, value in given.items()}, 1, whole)
    execute(match(engine.manifest, back.manifest, "it"), engine, back)
    back.check(given)
    if form == "in memory":
        other = _model(family)  # of other weights
        other.load_state_dict(back.arrays[0])
        tokens = torch.arange(20).reshape(2, 10)
        with torch.no_grad():
            assert torch.equal(other(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_checkpoint_of_experts_fits_the_model_in_memory(family):
    torch.manual_seed(3)
    state = {name: value.clone() for name, value in _model(family).state_dict().items()}
    source = ShardedState(_as_checkpoint(state, family), 3, chunks(0, 3))
    model = ShardedState({name: torch.zeros_like(value) for name, value in state.items()}, 2, chunks(0, 2))
    execute(match(source.manifest, model.manifest, "it"), source, model)
    model.check(state)
