"""Rules between names and shapes: every element lands where torch itself would put it, and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard.errors import ArgumentError, RemoteError, VerificationError
from reshard.testing.processes import run_processes
from reshard.weights import transfer_state_dict
from reshard.weights.mapping.families import find_rules
from reshard.weights.mapping.rules import (
    Concatenate,
    Drop,
    Pad,
    Rename,
    Split,
    Stack,
    Transpose,
    Trim,
    Unstack,
    inverted,
    rules_from_json,
    rules_to_json,
)
from reshard.weights.model import verify
from reshard.weights.model.holdings import read_state
from reshard.weights.model.manifest import merge_states, state_of_rank
from reshard.weights.model.pieces import compose, match


def _random(*shape):
    return torch.randn(shape)


def _llama(layers=2, experts=0):
    state = {"model.embed_tokens.weight": _random(11, 6), "lm_head.weight": _random(11, 6)}
    for layer in range(layers):
        p = f"model.layers.{layer}"
        state |= {
            f"{p}.self_attn.{part}_proj.weight": _random(rows, 6) for part, rows in zip("qkv", (8, 4, 4), strict=True)
        }
        state |= {f"{p}.self_attn.{part}_proj.bias": _random(rows) for part, rows in zip("qkv", (8, 4, 4), strict=True)}
        if experts:
            for e in range(experts):
                state |= {f"{p}.mlp.experts.{e}.{part}_proj.weight": _random(5, 6) for part in ("gate", "up")}
                state[f"{p}.mlp.experts.{e}.down_proj.weight"] = _random(6, 5)
        else:
            state |= {f"{p}.mlp.{part}_proj.weight": _random(5, 6) for part in ("gate", "up")}
            state[f"{p}.mlp.down_proj.weight"] = _random(6, 5)
    return state


def _fused(state, layers=2, experts=0):
    """What an engine with fused names holds, computed by torch."""
    found = {name: value for name, value in state.items() if "layers" not in name}
    found["model.embed_tokens.weight"] = torch.cat([found["model.embed_tokens.weight"], torch.zeros(5, 6)])
    for layer in range(layers):
        p = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            found[f"{p}.self_attn.qkv_proj.{kind}"] = torch.cat(
                [state[f"{p}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            )
        if experts:
            names = [f"{p}.mlp.experts.{e}" for e in range(experts)]
            found[f"{p}.mlp.experts.w13_weight"] = torch.stack(
                [torch.cat([state[f"{n}.gate_proj.weight"], state[f"{n}.up_proj.weight"]]) for n in names]
            )
            found[f"{p}.mlp.experts.w2_weight"] = torch.stack([state[f"{n}.down_proj.weight"] for n in names])
        else:
            found[f"{p}.mlp.gate_up_proj.weight"] = torch.cat(
                [state[f"{p}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
            )
            found[f"{p}.mlp.down_proj.weight"] = state[f"{p}.mlp.down_proj.weight"]
    return found


def _shard(state, mesh, dims):
    """Shard each tensor along a dim, or the last one if it has fewer."""
    return {
        name: distribute_tensor(value, mesh, [Shard(min(dim, value.ndim - 1)) for dim in dims])
        for name, value in state.items()
    }


def _there_and_back(rank, experts):
    torch.manual_seed(7)
    state = _llama(experts=experts)
    fused = _fused(state, experts=experts)
    line = init_device_mesh("cpu", (3,))
    source = _shard(state, line, [0])
    for dim in (0, 1):
        target = _shard({name: torch.zeros_like(value) for name, value in fused.items()}, line, [dim])
        transfer_state_dict(source, target)
        for name, value in fused.items():
            assert torch.equal(target[name].full_tensor(), value), name
        back = _shard({name: torch.zeros_like(value) for name, value in state.items()}, line, [1 - dim])
        transfer_state_dict(target, back)
        for name, value in state.items():
            assert torch.equal(back[name].full_tensor(), value), name


@pytest.mark.integration
@pytest.mark.parametrize("experts", [0, 4])
def test_families_are_fused_and_split_whatever_the_sharding(experts):
    run_processes(_there_and_back, 3, experts)


def _gpt2(rank):
    torch.manual_seed(3)
    names = {"attn.c_attn": (6, 18), "attn.c_proj": (6, 6), "mlp.c_fc": (6, 24), "mlp.c_proj": (24, 6)}
    state = {f"h.0.{name}.weight": _random(*shape) for name, shape in names.items()} | {"wte.weight": _random(9, 6)}
    state["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    target = {
        name: torch.zeros(value.t().shape if "c_" in name else value.shape)
        for name, value in state.items()
        if name != "h.0.attn.bias"
    }
    mesh = init_device_mesh("cpu", (2,))
    transfer_state_dict(_shard(state, mesh, [0]), target)
    for name, value in target.items():
        assert torch.equal(value, state[name].t() if "c_" in name else state[name]), name


def test_gpt2_is_transposed_square_matrices_too():
    run_processes(_gpt2, 2)


RULES = (
    Rename("transformer.{p}", "model.{p}"),
    Concatenate(("model.{p}.a", "model.{p}.b"), "model.{p}.ab", dim=1),
    Stack("model.{e:d}.ab", "model.all"),
    Drop("model.unused"),
    Pad("model.all", dim=2),
)


def test_rules_have_inverses_and_survive_json():
    assert rules_from_json(rules_to_json(RULES)) == RULES
    assert inverted(inverted(RULES)) == RULES
    assert inverted(RULES) == (
        Trim("model.all", 2),
        Drop("model.unused"),
        Unstack("model.all", "model.{e:d}.ab"),
        Split("model.{p}.ab", ("model.{p}.a", "model.{p}.b"), 1),
        Rename("model.{p}", "transformer.{p}"),
    )


def _manifest(state, rules=None):
    manifest = merge_states({0: state_of_rank(read_state(state))}, "it")
    return type(manifest)(**{**manifest.__dict__, "rules": rules})


def _execute(pieces, source, target):
    """Copy pieces by torch alone."""
    whole = {name: (tuple((0, size) for size in value.shape),) for name, value in (source | target).items()}
    for piece in pieces:
        piece.target.view(target[piece.target.name], whole[piece.target.name]).copy_(
            piece.source.view(source[piece.source.name], whole[piece.source.name])
        )


def test_rules_of_a_user_and_their_inverses_move_every_element():
    torch.manual_seed(1)
    source = {f"transformer.{e}.{part}": _random(3, 2 + (part == "b")) for e, part in itertools.product(range(4), "ab")}
    stacked = torch.stack([torch.cat([source[f"transformer.{e}.{p}"] for p in "ab"], 1) for e in range(4)])
    rules = (*RULES[:3], RULES[4])
    target = {"model.all": torch.zeros(4, 3, 7)}
    _execute(match(_manifest(source), _manifest(target, rules), "it"), source, target)
    assert torch.equal(target["model.all"][..., :5], stacked)
    assert not target["model.all"][..., 5:].any()
    back = {name: torch.zeros_like(value) for name, value in source.items()}
    trimmed = {"model.all": stacked}
    _execute(match(_manifest(trimmed), _manifest(back, inverted(rules[:3])), "it"), trimmed, back)
    assert all(torch.equal(back[name], value) for name, value in source.items())


def test_pieces_between_two_engines_go_through_the_trainer():
    torch.manual_seed(2)
    state = _llama(experts=3)
    fused = _fused(state, experts=3)
    plain = {name: torch.zeros_like(value) for name, value in state.items()}
    trainer = _manifest(state)
    held, wanted = match(trainer, _manifest(fused), "one"), match(trainer, _manifest(plain), "other")
    _execute(compose(held, wanted), fused, plain)
    assert all(torch.equal(plain[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ((Concatenate(("a", "c"), "ac"),), "lacks 'c'"),
        ((Concatenate(("a", "b"), "ab"),), r"shapes \[3, 2\] and \[2, 3\] do not join along dim 0"),
        ((Split("a", ("a1", "a2")),), "the destination lacks 'a1', 'a2'"),
        ((Stack("{p}", "all"),), "needs one placeholder for a number"),
        ((Rename("{p}", "{q}"),), "has a placeholder 'q' that the other side lacks"),
        ((Transpose("c"), Rename("a", "d")), r"1 tensor \('a'\) that the source does not have"),
        ((Drop("a"),), r"1 tensor \('a'\) that the source does not have"),
        (("a",), "'a' is not a rule"),
    ],
)
def test_rules_that_do_not_fit_are_named(rules, text):
    source = {"a": _random(3, 2), "b": _random(2, 3)}
    with pytest.raises(ArgumentError, match=text):
        match(_manifest(source), _manifest(source, rules), "it")


def test_no_rule_applies_where_names_and_shapes_are_equal():
    shapes = {name: tuple(value.shape) for name, value in _llama(experts=2).items()}
    assert find_rules(None, shapes, shapes)[0] == ()


def test_a_version_without_a_digest_of_the_trainer_is_not_taken_for_proved():
    state = {"a": _random(3, 2), "b": _random(2)}
    source = _manifest(state)
    checker = verify.Checker(source, source, match(source, source, "it"))
    landed = {0: checker.digest_target(state, 0)}
    totals = checker.add_tensors(landed[0])
    checker.compare_whole(totals, landed)
    with pytest.raises(RemoteError, match="the digest of 'b' is not known"):
        checker.compare_whole({"a": totals["a"]}, landed)
    with pytest.raises(VerificationError, match="'b': the digest differs"):
        checker.compare_whole({**totals, "b": totals["b"] ^ 1}, landed)


def test_the_digest_of_a_part_is_not_that_of_the_whole_tensor():
    """An engine that records its loader may hold a part of a tensor, although the piece is the whole of it."""
    state = {"a": _random(8, 2), "b": _random(3)}
    source = _manifest(state)
    shards = {"a": ((8, 2), [[(0, 4), (0, 2)]]), "b": ((3,), [[(0, 3)]])}
    part = merge_states({0: state_of_rank(read_state({"a": state["a"][:4], "b": state["b"]}, shards))}, "it")
    whole, partial = (verify.Checker(source, target, match(source, target, "it")) for target in (source, part))
    digests = partial.digest_source(state, 0)
    assert partial.add_tensors(digests) == {"b": whole.add_tensors(whole.digest_source(state, 0))["b"]}
