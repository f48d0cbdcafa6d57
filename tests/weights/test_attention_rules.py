"""Rules for attention heads and whole families, compared with formulas of torch and transformers, at TP and EP 1, 2 and 4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard.errors import ArgumentError
from reshard.testing.processes import run_processes
from reshard.weights import (
    Concatenate,
    Drop,
    GroupHeads,
    Pad,
    Rename,
    Rope,
    Split,
    Trim,
    UngroupHeads,
    inverted,
    megatron,
    original_llama,
    transfer_state_dict,
)
from reshard.weights.mapping.parts import intersect, pick, positions
from reshard.weights.mapping.rules import rules_from_json, rules_to_json
from reshard.weights.model.pieces import check_pieces, compose, match
from tests.support.sharded_state import ShardedState, chunks, execute, whole

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, EXPERTS = 4, 2, 6, 10, 12, 4
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

ranges = st.builds(
    lambda start, step, count: range(start, start + step * count, step),
    st.integers(0, 40),
    st.integers(1, 7),
    st.integers(0, 12),
)


@given(ranges, ranges)
def test_meet_has_the_numbers_of_both_ranges(first, second):
    found = intersect(first, second)
    assert list(found) == sorted(set(first) & set(second))
    assert pick(first, positions(found, first)) == found


def _attention(layer, bias=False):
    p = f"model.layers.{layer}.self_attn"
    state = {f"{p}.q_proj.weight": torch.randn(Q, HIDDEN), f"{p}.o_proj.weight": torch.randn(HIDDEN, Q)}
    state |= {f"{p}.{part}_proj.weight": torch.randn(KV, HIDDEN) for part in "kv"}
    if bias:
        state |= {f"{p}.{part}_proj.bias": torch.randn(rows) for part, rows in zip("qkv", (Q, KV, KV), strict=True)}
    return state


def _dense(prefix, rows=FFN):
    state = {f"{prefix}.{part}_proj.weight": torch.randn(rows, HIDDEN) for part in ("gate", "up")}
    return state | {f"{prefix}.down_proj.weight": torch.randn(HIDDEN, rows)}


def _llama(layers=2, bias=False):
    state = {"model.embed_tokens.weight": torch.randn(11, HIDDEN), "lm_head.weight": torch.randn(11, HIDDEN)}
    state["model.norm.weight"] = torch.randn(HIDDEN)
    for layer in range(layers):
        state |= _attention(layer, bias) | _dense(f"model.layers.{layer}.mlp")
        for norm in ("input", "post_attention"):
            state[f"model.layers.{layer}.{norm}_layernorm.weight"] = torch.randn(HIDDEN)
    return state


def _deepseek():
    """Two layers with multi-latent attention, of which the second has experts."""
    state = {"model.embed_tokens.weight": torch.randn(11, HIDDEN), "lm_head.weight": torch.randn(11, HIDDEN)}
    state["model.norm.weight"] = torch.randn(HIDDEN)
    shapes = {"q_a_proj": (5, HIDDEN), "q_b_proj": (Q, 5), "kv_a_proj_with_mqa": (7, HIDDEN), "kv_b_proj": (Q, 4)}
    shapes |= {"o_proj": (HIDDEN, Q), "q_a_layernorm": (5,), "kv_a_layernorm": (4,)}
    for layer in range(2):
        p = f"model.layers.{layer}"
        state |= {f"{p}.self_attn.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        state |= {f"{p}.{norm}_layernorm.weight": torch.randn(HIDDEN) for norm in ("input", "post_attention")}
    state |= _dense("model.layers.0.mlp") | _dense("model.layers.1.mlp.shared_experts", 4)
    for e in range(EXPERTS):
        state |= _dense(f"model.layers.1.mlp.experts.{e}", 8)
    gate = "model.layers.1.mlp.gate"
    return state | {f"{gate}.weight": torch.randn(EXPERTS, HIDDEN), f"{gate}.e_score_correction_bias": torch.randn(4)}


def _to_pairs(weight):
    """Rows of Hugging Face's order in that of the original Llama: the inverse of transformers' ``permute``."""
    heads = weight.shape[0] // HEAD_DIM
    return weight.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(weight.shape)


def _to_original(state):
    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv"}
    names |= {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "lm_head": "output"}
    names |= {"post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings"}
    found = {}
    for name, value in state.items():
        new = name.removeprefix("model.")
        for old, other in names.items():
            new = new.replace(old, other)
        found[new] = _to_pairs(value) if ".wq." in new or ".wk." in new else value
    return found


def _group(parts, groups):
    return torch.cat([torch.cat([part.chunk(groups)[group] for part in parts]) for group in range(groups)])


def _to_megatron(state, moe_layers=()):
    """What Megatron-Core holds, by its names."""
    found = {
        "embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], torch.zeros(5, HIDDEN)])
    }
    found["output_layer.weight"] = torch.cat([state["lm_head.weight"], torch.zeros(5, HIDDEN)])
    found["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    for layer in range(2):
        old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention = f"{new}self_attention"
        found[f"{attention}.linear_proj.weight"] = state[f"{old}self_attn.o_proj.weight"]
        if f"{old}self_attn.q_a_proj.weight" in state:
            for hf, mcore in (("q_a_proj", "linear_q_down_proj"), ("q_b_proj", "linear_q_up_proj")):
                found[f"{attention}.{mcore}.weight"] = state[f"{old}self_attn.{hf}.weight"]
            for hf, mcore in (("kv_a_proj_with_mqa", "linear_kv_down_proj"), ("kv_b_proj", "linear_kv_up_proj")):
                found[f"{attention}.{mcore}.weight"] = state[f"{old}self_attn.{hf}.weight"]
            for part in ("q", "kv"):
                norm = state[f"{old}self_attn.{part}_a_layernorm.weight"]
                found[f"{attention}.linear_{part}_up_proj.layer_norm_weight"] = norm
            found[f"{new}input_layernorm.weight"] = state[f"{old}input_layernorm.weight"]
        else:
            for kind in ("weight", "bias"):
                parts = [state.get(f"{old}self_attn.{part}_proj.{kind}") for part in "qkv"]
                if parts[0] is not None:
                    found[f"{attention}.linear_qkv.{kind}"] = _group(parts, KV_HEADS)
            found[f"{attention}.linear_qkv.layer_norm_weight"] = state[f"{old}input_layernorm.weight"]
        norm = f"{new}pre_mlp_layernorm.weight" if layer in moe_layers else f"{new}mlp.linear_fc1.layer_norm_weight"
        found[norm] = state[f"{old}post_attention_layernorm.weight"]
        places = {"mlp.": ""} | {"mlp.shared_experts.": ""} | {f"mlp.experts.{e}.": str(e) for e in range(EXPERTS)}
        for place, number in places.items():
            if f"{old}{place}gate_proj.weight" in state:
                kept = f"{new}{place.removesuffix(f'{number}.') if number else place}"
                both = [state[f"{old}{place}{part}_proj.weight"] for part in ("gate", "up")]
                found[f"{kept}linear_fc1.weight{number}"] = torch.cat(both)
                found[f"{kept}linear_fc2.weight{number}"] = state[f"{old}{place}down_proj.weight"]
        if layer in moe_layers:
            found[f"{new}mlp.router.weight"] = state[f"{old}mlp.gate.weight"]
            found[f"{new}mlp.router.expert_bias"] = state[f"{old}mlp.gate.e_score_correction_bias"]
    return found


def _column_parallel(size):
    """Megatron's tensor parallelism: rank by rank half of the gate and half of the up projection, and so on."""

    def find(name, shape, rank):
        if "linear_fc1.weight" in name and shape[0] % (2 * size) == 0:
            half, step = shape[0] // 2, shape[0] // 2 // size
            return [((at + rank * step, at + (rank + 1) * step), (0, shape[1])) for at in (0, half)]
        is_row = "linear_proj" in name or "linear_fc2" in name
        return chunks(1 if is_row else 0, size)(name, shape, rank)

    return find


def _experts(size):
    """Expert parallelism: each rank holds some experts whole, and the other tensors too."""

    def find(name, shape, rank):
        if name.endswith(("w13_weight", "w2_weight")):
            return chunks(0, size)(name, shape, rank)
        number = name.rpartition("weight")[2] if ".experts.linear_fc" in name else ""
        return whole(name, shape, rank) if not number or int(number) * size // EXPERTS == rank else []

    return find


def _strided(name, shape, rank):
    """FSDP inside tensor parallelism, over 2 x 2 ranks, with tensor parallelism first: two runs of rows each."""
    quarter = -(-shape[0] // 4)
    rows = [(min(at, shape[0]), min(at + quarter, shape[0])) for at in (rank // 2 * quarter, (rank // 2 + 2) * quarter)]
    half = [(lo + (hi - lo) // 2 * (rank % 2), (lo + hi) // 2 if rank % 2 == 0 else hi) for lo, hi in rows]
    return [((lo, hi), *((0, size) for size in shape[1:])) for lo, hi in half if lo < hi]


def _there_and_back(state, fused, rules, size, regions):
    """Move a state to other names and shardings and back, from FSDP over three ranks and from strided shards."""
    zeros = {name: torch.zeros_like(value) for name, value in fused.items()}
    for num_ranks, shards in ((3, chunks(0, 3)), (4, _strided)):
        source = ShardedState(state, num_ranks, shards)
        target = ShardedState(zeros, size, regions, rules)
        execute(match(source.manifest, target.manifest, "it"), source, target)
        target.check(fused)
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        back = ShardedState(blank, num_ranks, shards, inverted(rules))
        execute(match(target.manifest, back.manifest, "it"), target, back)
        back.check(state)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_llama_becomes_megatrons_and_comes_back(size, bias):
    """With four ranks and two heads of keys, a rank holds half of a group."""
    torch.manual_seed(4)
    state = _llama(bias=bias)
    _there_and_back(state, _to_megatron(state), megatron(KV_HEADS), size, _column_parallel(size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_llama_takes_the_original_order_of_rotary_rows_and_comes_back(size):
    torch.manual_seed(5)
    state = _llama()
    _there_and_back(state, _to_original(state), original_llama(HEAD_DIM), size, chunks(0, size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_deepseek_becomes_megatrons_with_experts_on_ranks_and_comes_back(size):
    torch.manual_seed(6)
    state = _deepseek()
    _there_and_back(state, _to_megatron(state, (1,)), megatron(None, moe_layers=(1,)), size, _experts(size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_deepseek_fits_an_engine_with_fused_names_and_experts_on_ranks(size):
    torch.manual_seed(7)
    state = _deepseek()
    fused = {name: value for name, value in state.items() if not name.endswith(("gate_proj.weight", "up_proj.weight"))}
    for layer in range(2):
        p = f"model.layers.{layer}.self_attn."
        parts = [fused.pop(f"{p}{part}.weight") for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        fused[f"{p}fused_qkv_a_proj.weight"] = torch.cat(parts)
    for prefix in ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts"):
        both = [state[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")]
        fused[f"{prefix}.gate_up_proj.weight"] = torch.cat(both)
    names = [f"model.layers.1.mlp.experts.{e}" for e in range(EXPERTS)]
    w13 = [torch.cat([state[f"{n}.{part}_proj.weight"] for part in ("gate", "up")]) for n in names]
    fused["model.layers.1.mlp.experts.w13_weight"] = torch.stack(w13)
    fused["model.layers.1.mlp.experts.w2_weight"] = torch.stack([fused.pop(f"{n}.down_proj.weight") for n in names])
    source = ShardedState(state, 3, chunks(0, 3))
    target = ShardedState({name: torch.zeros_like(value) for name, value in fused.items()}, size, _experts(size))
    execute(match(source.manifest, target.manifest, "it"), source, target)
    target.check(fused)


def test_heads_of_keys_repeat_on_ranks_of_an_engine_that_has_more():
    """Four ranks of vLLM, two heads of keys: two ranks hold each, fused after their queries."""
    torch.manual_seed(8)
    state = _attention(0)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = {"model.layers.0.self_attn.qkv_proj.weight": torch.cat([state.pop(name) for name in names]), **state}
    state = _attention(0) | state

    def regions(name, shape, rank):
        if "qkv" not in name:
            return chunks(1, 4)(name, shape, rank)
        q, kv = rank * HEAD_DIM, rank // 2 * HEAD_DIM
        rows = (q, Q + kv, Q + KV + kv)
        return [((row, row + HEAD_DIM), (0, HIDDEN)) for row in rows]

    fused["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat([state[name] for name in names])
    source = ShardedState(state, 3, chunks(0, 3))
    target = ShardedState({name: torch.zeros_like(value) for name, value in fused.items()}, 4, regions)
    execute(match(source.manifest, target.manifest, "it"), source, target)
    target.check(fused)


def test_rotary_rows_give_the_attention_scores_of_transformers():
    """The original Llama rotates pairs as complex numbers, transformers rotates halves: the scores are equal."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(9)
    state = {f"{part}.weight": torch.randn(2 * HEAD_DIM, HIDDEN, dtype=torch.float64) for part in "qk"}
    rules = tuple(Rope(f"{part}.weight", HEAD_DIM, to="pairs") for part in "qk")
    source = ShardedState(state, 1, whole)
    target = ShardedState({name: torch.zeros_like(value) for name, value in state.items()}, 1, whole, rules)
    execute(match(source.manifest, target.manifest, "it"), source, target)
    inputs = torch.randn(5, HIDDEN, dtype=torch.float64)
    angles = torch.outer(torch.arange(5.0, dtype=torch.float64), 10.0 ** -torch.arange(HEAD_DIM // 2))
    halves = torch.cat([angles, angles], dim=-1)
    of_hf = [(inputs @ state[f"{part}.weight"].t()).view(1, 5, 2, HEAD_DIM).transpose(1, 2) for part in "qk"]
    q, k = modeling.apply_rotary_pos_emb(*of_hf, halves.cos()[None], halves.sin()[None])
    turned = []
    for part in "qk":
        pairs = (inputs @ target.arrays[0][f"{part}.weight"].t()).view(5, 2, HEAD_DIM // 2, 2)
        complex_pairs = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles)[:, None]
        turned.append(torch.view_as_real(complex_pairs).flatten(2).transpose(0, 1))
    torch.testing.assert_close(turned[0] @ turned[1].mT, (q @ k.mT)[0])


def test_versions_pass_from_an_engine_with_grouped_heads_to_one_with_rotary_pairs():
    torch.manual_seed(10)
    state = {name: value for name, value in _llama().items() if "layers.0.self_attn.q" in name or ".k_proj" in name}
    state |= {name: torch.randn(KV, HIDDEN) for name in ("model.layers.0.self_attn.v_proj.weight",)}
    state = {name: value for name, value in state.items() if "layers.0" in name}
    p = "model.layers.0.self_attn"
    parts = [state[f"{p}.{part}_proj.weight"] for part in "qkv"]
    grouped = {f"{p}.qkv.weight": _group([_to_pairs(parts[0]), *parts[1:]], KV_HEADS)}
    to_grouped = (
        Rope(f"{p}.q_proj.weight", HEAD_DIM, to="pairs"),
        GroupHeads(tuple(f"{p}.{part}_proj.weight" for part in "qkv"), f"{p}.qkv.weight", KV_HEADS),
    )
    paired = {f"{p}.qk.weight": torch.cat([_to_pairs(part) for part in parts[:2]]), f"{p}.v_proj.weight": parts[2]}
    to_paired = (
        Concatenate((f"{p}.q_proj.weight", f"{p}.k_proj.weight"), f"{p}.qk.weight"),
        Rope(f"{p}.qk.weight", HEAD_DIM, to="pairs"),
    )
    trainer = ShardedState(state, 3, chunks(0, 3))
    holder = ShardedState(grouped, 4, chunks(0, 4), to_grouped)
    late = ShardedState({name: torch.zeros_like(value) for name, value in paired.items()}, 2, chunks(1, 2), to_paired)
    held, wanted = (match(trainer.manifest, each.manifest, "it") for each in (holder, late))
    execute(compose(held, wanted), holder, late)
    late.check(paired)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_head_in_several_runs_of_a_rank_is_moved(size):
    """Every second row of a head is not evenly spaced in the memory of a rank that joins two runs of rows."""
    torch.manual_seed(12)
    state = {"q.weight": torch.randn(Q, HIDDEN)}
    halved = {"q.weight": state["q.weight"].view(Q // 2, 2, HIDDEN).transpose(0, 1).reshape(Q, HIDDEN)}
    _there_and_back(state, halved, (Rope("q.weight", Q),), size, chunks(0, size))


def _in_processes(rank):
    torch.manual_seed(11)
    state = _llama()
    for fused, rules in ((_to_megatron(state), megatron(KV_HEADS)), (_to_original(state), original_llama(HEAD_DIM))):
        line = init_device_mesh("cpu", (4,))
        source = {name: distribute_tensor(value, line, [Shard(0)]) for name, value in state.items()}
        target = {name: distribute_tensor(torch.zeros_like(value), line, [Shard(0)]) for name, value in fused.items()}
        transfer_state_dict(source, target, rules=rules)
        for name, value in fused.items():
            assert torch.equal(target[name].full_tensor(), value), name
        back = {name: distribute_tensor(torch.zeros_like(value), line, [Shard(0)]) for name, value in state.items()}
        transfer_state_dict(target, back, rules=inverted(rules))
        for name, value in state.items():
            assert torch.equal(back[name].full_tensor(), value), name


@pytest.mark.integration
def test_families_move_between_processes_with_their_digests():
    run_processes(_in_processes, 4)


def test_rules_of_heads_survive_json_and_have_inverses():
    for rules in (megatron(KV_HEADS, (1,)), original_llama(HEAD_DIM)):
        assert rules_from_json(rules_to_json(rules)) == rules
        assert inverted(inverted(rules)) == rules
    assert GroupHeads(("q", "k"), "qk", 2).inverse() == UngroupHeads("qk", ("q", "k"), 2)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda: Rope("q", 5), "head_dim is 5; it must be an even number"),
        (lambda: Rope("q", 4, to="thirds"), "to is 'thirds'"),
        (lambda: GroupHeads(("q", "k"), "qk", 0), "groups is 0"),
        (lambda: UngroupHeads("qk", ("q", "k"), "2"), "groups is '2'"),
        (lambda: Rope("q", 4), "'q' has 6 rows, not a multiple of head_dim=4"),
        (lambda: GroupHeads(("q", "k"), "qk", 4), "4 groups do not divide the 6 rows of 'q'"),
        (lambda: GroupHeads(("q", "v"), "qv", 2), "lacks 'v'"),
        (lambda: UngroupHeads("q", ("k", "q2"), 2), "the destination lacks 'q2'"),
        (lambda: UngroupHeads("q", ("k", "scale"), 2), "2 groups do not divide the 0 rows of 'scale'"),
        (lambda: UngroupHeads("q", ("q", "k"), 2), "'q' has 6 rows, and its parts have 10"),
        (lambda: Rename("q", "k"), "there is a tensor 'k' already"),
        (lambda: Split("q", ("q", "k"), 2), r"a tensor of shape \[6, 3\] has no dim 2"),
        (lambda: Trim("q", 3), r"a tensor of shape \[6, 3\] has no dim 3"),
    ],
)
def test_rules_of_heads_that_do_not_fit_are_named(rule, text):
    state = {"q": torch.zeros(6, 3), "k": torch.zeros(4, 3), "scale": torch.zeros(())}
    source = ShardedState(state, 1, whole)
    with pytest.raises(ArgumentError, match=text):
        match(source.manifest, ShardedState(state, 1, whole, (rule(),)).manifest, "it")


def test_pieces_that_leave_elements_out_or_write_them_twice_are_refused():
    state = {name: torch.zeros(4, 6) for name in ("a", "b")}
    rules = (Concatenate(("a", "b"), "ab"),)
    source, target = (ShardedState(each, 1, whole).manifest for each in (state, {"ab": torch.zeros(8, 6)}))
    target = replace(target, rules=rules)
    pieces = match(source, target, "it")
    with pytest.raises(ArgumentError, match="the rules write 24 of the 48 elements of 'ab'"):
        check_pieces(pieces[:1], rules, source, target, "it")
    check_pieces(pieces[:1], (Pad("ab"), Drop("b")), source, target, "it")
    with pytest.raises(ArgumentError, match="write a region of 'ab' twice"):
        check_pieces([*pieces, pieces[0]], rules, source, target, "it")
    with pytest.raises(ArgumentError, match="the rules use 12 of the 24 elements of 'a'"):
        check_pieces([pieces[0].slice(0, range(2)), *pieces[1:]], (Pad("ab"),), source, target, "it")
