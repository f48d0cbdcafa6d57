"""``reshard search --model``: layers of models of transformers, against the models themselves."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import reshard.scheduler as rs
from reshard.cli.main import main
from reshard.cli.model_shapes import read_model
from reshard.errors import ArgumentError
from reshard.scheduler import torch_compat
from reshard.scheduler.autoparallel import TrainingPlan
from reshard.scheduler.autoparallel.inputs.model_graph import make_model_graph
from reshard.scheduler.model_stages.profile import count_saved_bytes
from tests.support.whole_models import Case, check_equal

transformers = pytest.importorskip("transformers")

SEQUENCE = 256
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "num_attention_heads": 8, "dtype": "bfloat16"}
GQA = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 512}
CONFIGS = {
    "llama": GQA | {"intermediate_size": 352},
    "qwen3": GQA | {"intermediate_size": 352, "head_dim": 16, "tie_word_embeddings": True},
    "mixtral": GQA | {"intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": GQA | {
        "num_key_value_heads": 8, "intermediate_size": 384, "moe_intermediate_size": 64, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
    },
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 8, "vocab_size": 512, "n_positions": 512},
}  # fmt: skip


def _write(folder, kind, **more):
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | CONFIGS[kind] | more))
    return str(folder / "config.json")


def _graph(folder, kind, sequence=SEQUENCE, **more):
    return make_model_graph(read_model(_write(folder, kind, **more), None), sequence)


def _make(kind, **more):
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind] | more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _saved_bytes(kind, num_layers):
    """Bytes that autograd keeps in a forward of one sample, without parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        model = _make(kind, num_hidden_layers=num_layers, first_k_dense_replace=0)
        with count_saved_bytes(torch_compat.storage_key) as counted:
            model(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.int64), use_cache=False)
    return counted.nbytes - sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("kind", CONFIGS)
def test_graph_has_the_parameters_of_the_model_and_a_stage_may_begin_with_each_layer(tmp_path, kind):
    graph = _graph(tmp_path, kind)
    with torch.device("meta"):
        model = _make(kind)
    assert graph.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert len(graph.layers) == 6
    paths = dict(model.named_modules())
    for layer in graph.layers[1:]:
        assert layer.name in paths
        inside = sum(parameter.numel() for parameter in paths[layer.name].parameters())
        assert layer.num_params == inside or layer is graph.layers[-1]


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("llama", 0.05), ("qwen3", 0.1), ("mixtral", 0.1), ("deepseek_v3", 0.2)]
)
def test_layers_keep_as_many_bytes_as_the_model(tmp_path, kind, tolerance):
    graph = _graph(tmp_path, kind)
    measured = _saved_bytes(kind, 2) - _saved_bytes(kind, 1)
    assert graph.layers[4].saved_bytes == pytest.approx(measured, rel=tolerance)


def test_tokens_work_only_on_the_experts_that_they_choose(tmp_path):
    model = read_model(_write(tmp_path, "mixtral"), None)
    layer = make_model_graph(model, SEQUENCE).layers[1]
    unnamed = tuple(replace(tensor, is_expert=False) for tensor in model.tensors)  # without a plan for experts
    assert make_model_graph(replace(model, tensors=unnamed), SEQUENCE).layers[1].forward_flops == layer.forward_flops
    attention, router, expert = 2 * 128 * 128 + 2 * 32 * 128, 8 * 128, 3 * 256 * 128
    scores = 4 * SEQUENCE**2 * 128
    assert layer.forward_flops == 2 * SEQUENCE * (attention + router + 2 * expert) + scores
    assert layer.tp_limit == 2 and layer.tp_params == attention + 8 * expert  # a rank has whole heads of keys
    assert layer.tp_all_reduces == 2 and "mixtral" in layer.grid_refusal


def test_model_without_a_plan_is_not_divided_and_sliding_attention_reads_its_window_alone(tmp_path):
    assert {layer.tp_limit for layer in _graph(tmp_path, "gpt2").layers} == {1}
    assert _graph(tmp_path, "gpt2").layers[1].grid_sizes.products == ((128, 384), (128, 128), (128, 512), (512, 128))
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    window = {"layer_types": kinds, "sliding_window": 64, "use_sliding_window": True}
    full, sliding = _graph(tmp_path, "qwen3", **window).layers[1:3]
    assert full.forward_flops - sliding.forward_flops == 4 * SEQUENCE * (SEQUENCE - 64) * 128


def test_layers_with_other_heads_are_counted_as_they_are(tmp_path):
    """Gemma 4: layers with full attention have larger heads."""
    sizes = SIZES | {"head_dim": 16, "global_head_dim": 32, "intermediate_size": 256, "num_key_value_heads": 4}
    kinds = ["sliding_attention", "full_attention"] * 2
    more = {"layer_types": kinds, "sliding_window": 256, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text"} | sizes | more))
    sliding, full = make_model_graph(read_model(str(tmp_path / "config.json"), None), SEQUENCE).layers[1:3]
    works = [layer.forward_flops - 4 * SEQUENCE**2 * 8 * size for layer, size in ((sliding, 16), (full, 32))]
    wider = 2 * 16 * 8 * 128 + 2 * 16 * 4 * 128  # queries and output, keys and values
    assert works[1] - works[0] == 2 * SEQUENCE * wider


def test_search_plans_a_config_and_refuses_what_it_cannot(tmp_path, capsys):
    rest = ["--topology", "tcp", "--devices", "4", "--memory", "1GB", "--samples", "8"]
    path = _write(tmp_path, "llama")
    assert main(["search", "--model", path, "--sequence", "256", *rest, "--flops", "1T", "--method", "pure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model LlamaForCausalLM: 4 layers, 0.000837 B parameters"
    assert lines[1] == "estimated times: layers reach 0.5 of --flops 1e+12 (--efficiency)"
    for arguments, text in (
        ([path], "is the config of a model; pass it as --model"),
        (["--model", path], "--model and --sequence need each other"),
        ([path, "--model", path], "pass either a graph"),
        (["--model", path, "--sequence", "513"], "--sequence is 513, but LlamaForCausalLM takes at most 512 tokens"),
        (["--model", path, "--sequence", "256", "--flops", "989X"], "such as 989T"),
    ):
        assert main(["search", *rest, "--flops", "1T", *arguments]) == 2
        assert text in capsys.readouterr().err
    model = read_model(_write(tmp_path, "mixtral"), None)
    fields = {name: value for name, value in model.config.to_dict().items() if name != "num_experts_per_tok"}
    with pytest.raises(ArgumentError, match="does not say how many a token chooses"):
        make_model_graph(replace(model, config=SimpleNamespace(**fields)), SEQUENCE)


#: Sizes of models that tests train.
TRAINED = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 128, "num_key_value_heads": 2, "dtype": "float32"}


def _make_trained(kind):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **CONFIGS[kind] | TRAINED)
    )


def _pipe(path, case):
    return rs.Pipe(case.make_model(), training_plan=TrainingPlan.read(path), loss=lambda output: output.loss)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "memory", "options", "stages"),
    [("llama", "6MB", ["--fixed", "zero=0", "--fixed", "tp=1"], 4), ("mixtral", "1GB", ["--fixed", "zero=3"], 1)],
)
def test_model_of_a_config_trains_with_its_training_plan_as_in_one_process(
    kind, memory, options, stages, tmp_path, capsys
):
    path, plan_path = _write(tmp_path, kind, **TRAINED), str(tmp_path / "plan.json")
    arguments = ["--model", path, "--sequence", "16", "--topology", "tcp", "--devices", "2", "--memory", memory]
    arguments += ["--flops", "1G", "--samples", "8", "--output", plan_path, *options]
    assert main(["search", *arguments]) == 0, capsys.readouterr().err
    assert len(TrainingPlan.read(plan_path).stages) == stages
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(128, (8, 16), generator=generator) for _ in range(3)]
    batches = [{"input_ids": item, "labels": item} for item in tokens]
    case = Case(
        functools.partial(_make_trained, kind),
        batches[:2],
        batches[2],
        lambda model, batch: (model(**batch, use_cache=False).loss, {}),
        num_microbatches=None,
    )
    check_equal(case, functools.partial(_pipe, plan_path), 2)
