"""``reshard plan --model``: layouts of all tensors of models of transformers, against slices that are worked out here."""

from __future__ import annotations

import json
import re

import pytest

from reshard.cli.main import main
from reshard.cli.model_plan import Parallelism, read_sizes
from reshard.cli.model_shapes import read_model

transformers = pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128,
    "num_attention_heads": 8, "num_key_value_heads": 2, "dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 8, "intermediate_size": 16, "num_experts": 4,
    "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_hidden_layers": 4, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 28,
        "patch_size": 14,
    },
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}


def _write(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def _layouts(folder, config, text, first_rank=0):
    model = read_model(_write(folder, config), None)
    layouts = Parallelism(model, read_sizes(text, "--dst"), "--dst", first_rank).layouts()
    return {tensor.name: (layouts[tensor.name], tensor.shape) for tensor in model.tensors}


def _region(layouts, name, rank):
    """``[[(start, stop) for each dim] for each box]`` of a rank's shard."""
    layout, shape = layouts[name]
    return [[tuple(cut) for cut in box] for box in layout.regions(shape, rank)]


@pytest.mark.integration
def test_tensor_parallel_layers_are_sharded_as_transformers_does(tmp_path):
    layouts = _layouts(tmp_path, LLAMA, "tp=4,dp=2", first_rank=8)
    prefix = "model.layers.3."
    assert "lm_head.weight" not in layouts  # tied
    for rank in range(8, 16):
        tp = (rank - 8) % 4
        assert _region(layouts, prefix + "self_attn.q_proj.weight", rank) == [[(16 * tp, 16 * tp + 16), (0, 64)]]
        assert _region(layouts, prefix + "self_attn.o_proj.weight", rank) == [[(0, 64), (16 * tp, 16 * tp + 16)]]
        head = tp // 2  # two heads of keys on four ranks: each on two
        assert _region(layouts, prefix + "self_attn.k_proj.weight", rank) == [[(8 * head, 8 * head + 8), (0, 64)]]
        assert _region(layouts, prefix + "mlp.down_proj.weight", rank) == [[(0, 64), (24 * tp, 24 * tp + 24)]]
        assert _region(layouts, "model.embed_tokens.weight", rank) == [[(32 * tp, 32 * tp + 32), (0, 64)]]
        assert _region(layouts, "model.norm.weight", rank) == [[(0, 64)]]


def test_fsdp_cuts_the_shards_of_tp_as_fsdp2_does(tmp_path):
    layouts = _layouts(tmp_path, LLAMA, "fsdp=2,tp=2")
    for rank in range(4):
        fsdp, tp = divmod(rank, 2)
        start = 32 * tp + 16 * fsdp
        assert _region(layouts, "model.layers.0.self_attn.q_proj.weight", rank) == [[(start, start + 16), (0, 64)]]
        assert _region(layouts, "model.layers.0.self_attn.o_proj.weight", rank) == [
            [(32 * fsdp, 32 * fsdp + 32), (32 * tp, 32 * tp + 32)]
        ]


def test_experts_are_sharded_by_ep_or_each_by_tp(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    by_experts = _layouts(tmp_path, MOE, "ep=4")
    assert [_region(by_experts, name, rank) for rank in range(4)] == [
        [[(rank, rank + 1), (0, 16), (0, 32)]] for rank in range(4)
    ]
    by_columns = _layouts(tmp_path, MOE, "tp=2")
    assert _region(by_columns, name, 1) == [[(0, 4), (4, 8), (0, 32)], [(0, 4), (12, 16), (0, 32)]]  # of gate, of up


def test_projections_whose_input_is_split_are_cut_by_columns(tmp_path):
    layouts = _layouts(tmp_path, PHI3, "tp=2")
    assert _region(layouts, "model.layers.0.self_attn.o_proj.weight", 1) == [[(0, 32), (16, 32)]]


def test_fsdp_shards_no_buffers(tmp_path):
    layouts = _layouts(tmp_path, DEEPSEEK, "fsdp=2")
    assert _region(layouts, "model.layers.3.mlp.gate.e_score_correction_bias", 1) == [[(0, 4)]]
    assert _region(layouts, "model.layers.3.mlp.gate.weight", 1) == [[(2, 4), (0, 32)]]


def test_stages_of_a_pipeline_hold_consecutive_layers(tmp_path):
    layouts = _layouts(tmp_path, LLAMA, "pp=2,tp=2")
    for name, ranks in {
        "model.embed_tokens.weight": (0, 1),
        "model.layers.1.mlp.up_proj.weight": (0, 1),
        "model.layers.2.mlp.up_proj.weight": (2, 3),
        "model.norm.weight": (2, 3),
    }.items():
        assert layouts[name][0].ranks == ranks, name


def test_command_prints_classes_of_tensors(tmp_path, capsys):
    config = _write(tmp_path, LLAMA | {"tie_word_embeddings": False})
    assert main(["plan", "--model", config, "--src", "fsdp=4", "--dst", "tp=2,dp=2"]) == 0
    out = capsys.readouterr().out
    total = 2 * (2 * 128 * 64 + 4 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 96 + 2 * 64) + 64)
    assert f"LlamaForCausalLM: 39 tensors, {total / 1024:.4g} KiB" in out
    assert "lower bound" in out and "predicted" in out
    assert any(line.split()[:1] == ["8"] and "(fsdp)" in line and "(tp)" in line for line in out.splitlines())
    assert main(["plan", "--model", config, "--src", "fsdp=4", "--dst", "tp=2,dp=2", "--format", "summary"]) == 0
    short, long = (re.sub(r"planned in .* s", "", text) for text in (capsys.readouterr().out, out))
    assert long.startswith(f"{short}\n") and "(fsdp)" not in short
    assert main(["plan", "--model", config, "--src", "fsdp=4", "--dst", "tp=2", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 39


def test_page_of_a_model_is_named_after_it(tmp_path, capsys):
    config = _write(tmp_path, LLAMA)
    assert main(["plan", "--model", config, "--src", "fsdp=4", "--dst", "tp=2", "--format", "html"]) == 0
    assert "<h1>LlamaForCausalLM (38 tensors, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "config.jsn",
            "no such file or folder; it is a config.json, its folder, or a name on the Hugging Face Hub; did ",
        ),
        ("./models", "no such file or folder"),
        ("", "the folder has no config.json"),
    ],
)
def test_path_that_does_not_exist_is_an_error_before_the_network_is_asked(tmp_path, monkeypatch, capsys, source, text):
    _write(tmp_path, LLAMA)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda _: pytest.fail("asked"))
    assert main(["plan", "--model", source or "empty", "--src", "fsdp=2", "--dst", "tp=2"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON: Expecting value: line 1 column 1 (char 0); pass the config.json of a model"),
        ("model_type: llama", "is not JSON: Expecting value"),
        ("[1, 2]", "has no model_type, such as"),
        ('{"hosts": []}', "has no model_type, such as"),
    ],
)
def test_a_file_that_is_no_config_is_an_error(tmp_path, capsys, text, message):
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", "--model", str(tmp_path / "config.json"), "--src", "fsdp=2", "--dst", "tp=2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "arguments", "text"),
    [
        (LLAMA, ["--src", "fdsp=2", "--dst", "tp=2"], "did you mean 'fsdp'?"),
        (LLAMA, ["--src", "fsdp=2", "--dst", "tp=two"], "such as tp=8"),
        (LLAMA, ["--src", "fsdp=2"], "--model also needs --dst, such as --dst fsdp=32"),
        (LLAMA, ["--src", "fsdp=2", "--dst", "tp=3"], "tp=3, which does not divide the 8 attention heads"),
        (LLAMA, ["--src", "fsdp=2", "--dst", "ep=2"], "LlamaForCausalLM has no experts"),
        (LLAMA, ["--src", "fsdp=2", "--dst", "pp=5"], "pp=5, but LlamaForCausalLM has 4 layers"),
        (GEMMA, ["--src", "fsdp=2", "--dst", "pp=2"], "several stacks of layers"),
        (GPT2, ["--src", "fsdp=2", "--dst", "tp=2"], "no tensor-parallel plan for GPT2LMHeadModel"),
        (LLAMA | {"model_type": "nonesuch"}, ["--src", "fsdp=2", "--dst", "tp=2"], "has no model for"),
        (LLAMA, ["--src", "fsdp=2", "--dst", "tp=2", "--shape", "4"], "--shape and --model exclude each other"),
        (
            LLAMA,
            ["--src", "fsdp=2", "--dst", "tp=2", "--strategy", "all"],
            "with --model omit it, or name one strategy",
        ),
    ],
)
def test_wrong_arguments_are_named(tmp_path, capsys, config, arguments, text):
    assert main(["plan", "--model", _write(tmp_path, config), *arguments]) == 2
    assert text in capsys.readouterr().err
