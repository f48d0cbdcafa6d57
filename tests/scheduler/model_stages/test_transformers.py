"""Models of ``transformers``, with random weights, train over stages as they do in one process."""

from __future__ import annotations

import pytest
import torch

import reshard.scheduler as rs
from reshard.errors import ArgumentError
from reshard.scheduler.model_stages.partition import adapters
from reshard.testing import run_processes
from tests.support.whole_models import Case, check_equal, pipe_of

transformers = pytest.importorskip("transformers")

VOCABULARY = 32


def make_gpt2(attention="eager"):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        attn_implementation=attention,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def make_like_llama(name, **changes):
    """A model with the chain of Llama. Gemma and Qwen tie their head; Qwen2 slides a window in two of four layers."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.2,
        use_cache=False,
        **changes,
    )
    return getattr(transformers, name + "ForCausalLM")(config)


def make_llama(attention="sdpa", tied=False):
    return make_like_llama("Llama", attn_implementation=attention, tie_word_embeddings=tied)


LIKE_LLAMA = {
    "Gemma": {"head_dim": 4},
    "Mistral": {"head_dim": 4, "sliding_window": 3},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 2, "tie_word_embeddings": True},
    "Qwen3": {"head_dim": 4},
}


def test_every_class_with_an_adapter_is_tested_here():
    tested = {"GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in ("Llama", *LIKE_LLAMA))}
    assert tested == set(adapters._ADAPTERS)


def make_batch(seed, num_samples=8, length=6, mask=False, ignored=False):
    """Tokens; with ``mask``, samples of unlike length; with ``ignored``, labels that do not count, unlike in each sample."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    lengths = torch.randint(2, length + 1, (num_samples, 1), generator=generator)
    if mask:
        batch["attention_mask"] = (torch.arange(length)[None] < lengths).long()
    if ignored:
        batch["labels"][torch.arange(length)[None] >= lengths] = -100
        batch["labels"][0] = -100
    return batch


def make_case(make_model, steps=3, **batch):
    return Case(
        make_model,
        [make_batch(seed, (8, 7, 8)[seed % 3], **batch) for seed in range(steps)],
        make_batch(100, 6, **batch),
    )


def gpt2_layers(*numbers):
    return [f"transformer.h.{number}" for number in numbers]


def llama_layers(*numbers):
    return [f"model.layers.{number}" for number in numbers]


@pytest.mark.integration
def test_gpt2_equals_one_process():
    case = make_case(make_gpt2, mask=True, ignored=True)
    check_equal(case, pipe_of(gpt2_layers(2), "2x1,1x1"), 3)


@pytest.mark.nightly
def test_llama_equals_one_process():
    check_equal(make_case(lambda: make_llama(tied=True), ignored=True), pipe_of(llama_layers(1), "1x1,1x1"), 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("Qwen2", "1x1,1x1"),
        *(pytest.param(item, "1x1,1x1", marks=pytest.mark.slow) for item in ("Gemma", "Mistral", "Qwen3")),
        *(pytest.param(item, "1x2,2x2", marks=pytest.mark.slow) for item in ("Gemma", "Mistral", "Qwen2", "Qwen3")),
    ],
)
def test_models_with_the_chain_of_llama_equal_one_process(name, stages):
    case = make_case(lambda: make_like_llama(name, **LIKE_LLAMA[name]), mask=True, ignored=True)
    check_equal(case, pipe_of(llama_layers(3), stages), 2 if stages == "1x1,1x1" else 6)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by transformers, up to torch 2.10
def test_replicas_of_a_mixture_of_experts_equal_one_process():
    case = make_case(lambda: make_like_llama("Mixtral", head_dim=4, num_local_experts=4), steps=2)
    check_equal(case, pipe_of([], "2x1", loss=lambda output: output.loss), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_stage_may_have_only_the_head(model):
    case = make_case(make_gpt2 if model == "gpt2" else make_llama, steps=2)
    check_equal(case, pipe_of(["lm_head"], "1x1,1x1"), 2)


def test_subclass_with_its_own_forward_is_not_cut_as_its_base():
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels, **options):
            return 0.5 * super().forward(input_ids, labels=labels, **options).loss

    pipe = rs.Pipe(Scaled(make_llama().config), llama_layers(2), stages="1x1,1x1")
    with pytest.raises(ArgumentError, match=r"Scaled cannot be cut by module paths: .* pass blocks="):
        pipe.cut(["input_ids", "labels"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "both"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "llama tied"])
def test_two_stages_equal_one_process_for_each_attention_and_mask(model, attention, kind):
    if model == "gpt2":
        make, cuts = (lambda: make_gpt2(attention)), gpt2_layers(1)
    else:
        make, cuts = (lambda: make_llama(attention, "tied" in model)), llama_layers(1)
    batch = {"mask": kind == "both", "ignored": kind == "both"}
    check_equal(make_case(make, **batch), pipe_of(cuts, "1x1,1x1"), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "cuts", "accumulate"),
    [("2x1,1x1", (2,), 2), ("1x1,2x1", (3,), 1), ("1x1,2x1,1x1", (1, 3), 2), ("2x1,1x1,2x1", (1, 2), 1)],
)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_stages_with_replicas_equal_one_process(model, stages, cuts, accumulate):
    make, layers = (make_gpt2, gpt2_layers) if model == "gpt2" else (lambda: make_llama(tied=True), llama_layers)
    num_ranks = sum(int(stage[0]) for stage in stages.split(","))
    case = make_case(make, mask=True, ignored=True)
    check_equal(case, pipe_of(layers(*cuts), stages), num_ranks, accumulate)


def placements_of(model, wrap):
    """Meshes like dp x tp = 1x2, 2x2 and 1x4. Grids cut GPT-2, which has no plan, and two key/value heads over four."""
    if model == "gpt2":
        return [rs.Placement(grid=(1, 2, 1)), rs.Placement(grid=(1, 2, 2), wrap=wrap), rs.Placement(grid=(1, 4, 1))]
    return [rs.Placement(tp=2), rs.Placement(dp=2, tp=2, wrap=wrap), rs.Placement(grid=(1, 4, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [None, rs.fsdp], ids=["default", "fsdp"])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_fifty_steps_equal_one_process(model, num_stages, wrap):
    make = make_gpt2 if model == "gpt2" else lambda: make_llama(tied=True)
    layers = gpt2_layers if model == "gpt2" else llama_layers
    places = placements_of(model, wrap)
    places, cuts = (places, layers(1, 3)) if num_stages == 3 else (places[1:2], [])
    case = make_case(make, steps=50, mask=True, ignored=True)
    check_equal(case, pipe_of(cuts, places), sum(place.size for place in places))


def test_heads_that_tensor_parallel_ranks_cannot_share_are_refused():
    with pytest.raises(ArgumentError, match=r"stage 1 has tp=4, but .* has 2 num_key_value_heads; .* or a grid"):
        rs.Pipe(make_llama(), llama_layers(2), stages="1x2,1x4")


def _compile_with_styles_of_torch(rank):
    pipe = rs.Pipe(make_gpt2(), stages="1x2", tp_plan={"transformer.h.*.mlp.c_fc": "colwise"})
    with pytest.raises(ArgumentError) as caught:
        pipe.compile(make_batch(0), 2)
    return str(caught.value)


@pytest.mark.integration
def test_an_error_names_the_module_that_a_style_does_not_know():
    for text in run_processes(_compile_with_styles_of_torch, 2):
        assert "the tp_plan does not fit 'transformer.h.0.mlp.c_fc' (Conv1D): ColwiseParallel currently only" in text
        assert "or a grid, such as Placement(grid=(1, 2, 1))" in text


#: A plan for the projections of attention only. It omits the norms of queries and keys, which act on each head.
PROJECTIONS = {f"model.layers.*.self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"}
NORMS = {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}


def _step_without_norms(rank):
    model = make_like_llama("Qwen3", **LIKE_LLAMA["Qwen3"])
    engine = rs.Pipe(model, stages="1x2", tp_plan=PROJECTIONS).compile(make_batch(0), 2)
    with (
        engine,
        pytest.raises(ArgumentError, match=r"ranks 0 and 1 of stage 0 have different gradients of .*[qk]_norm"),
    ):
        engine.step(make_batch(0))


@pytest.mark.nightly
def test_tp_plan_that_omits_norms_of_heads_is_refused():
    run_processes(_step_without_norms, 2)


@pytest.mark.nightly
def test_norms_of_heads_under_tensor_parallelism_equal_one_process():
    case = make_case(lambda: make_like_llama("Qwen3", **LIKE_LLAMA["Qwen3"]), steps=10, ignored=True)
    check_equal(case, pipe_of([], "1x2", tp_plan=PROJECTIONS | NORMS), 2)
