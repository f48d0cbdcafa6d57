"""Whole models on grids: losses, gradients and training equal to one process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, DisagreementError, MeshError, ReshardError
from reshard.parallel import Grid, Linear, parallelize, plain_state_dict, relayout, sync_gradients
from reshard.testing import LaunchError, run_processes

from .models import SEQUENCE, gradient_errors, make_batch, make_gpt, relative_error, train

FAST = [(2, 2, 2), (3, 2, 1)]
SLOW = [(1, 1, 1), (1, 4, 1), (2, 2, 1), (2, 3, 2), (2, 4, 1), (1, 1, 4), (4, 1, 1), (3, 3, 1), (2, 2, 4), (4, 4, 1)]
GRIDS = [*FAST, *(pytest.param(item, marks=pytest.mark.slow) for item in SLOW)]


def check_gpt(rank, grid_shape, rows, options):
    warnings.simplefilter("ignore")  # batches that leave ranks idle
    torch.set_num_threads(1)
    model, plain = make_gpt(**options), make_gpt(**options)
    model = parallelize(model, Grid.make(*grid_shape), panel=5)
    batch = make_batch(rows, options.get("vocabulary", 53))
    losses = [item(*batch) for item in (model, plain)]
    for loss in losses:
        loss.backward()
    sync_gradients(model)
    errors = gradient_errors(model, plain)
    return abs(float(losses[0] - losses[1])), max(errors.values()), max(errors, key=errors.get)


@pytest.mark.nightly
@pytest.mark.parametrize("grid_shape", GRIDS)
def test_gpt_has_the_loss_and_gradients_of_one_process(grid_shape):
    """Tied and untied; heads that the columns do not divide, odd widths, fewer rows than ranks."""
    for rows, options in ((5, {}), (3, {"vocabulary": 7, "heads": 5, "head_size": 7, "is_tied": False})):
        for loss, gradient, name in run_processes(check_gpt, _size(grid_shape), grid_shape, rows, options):
            assert loss < 1e-12
            assert gradient < 1e-12, name


def check_training(rank, grid_shape):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    for _ in range(2):
        model = parallelize(make_gpt(), Grid.make(*grid_shape))
        losses = train(model, 6, 10, lambda model: sync_gradients(model, check_every=3))
        results.append((losses, plain_state_dict(model)))
    plain = make_gpt()
    expected = train(plain, 6, 10)
    (losses, state), (again, same) = results
    is_bitwise = losses == again and all(torch.equal(state[name], same[name]) for name in state)
    errors = [relative_error(state[name], value) for name, value in plain.state_dict().items() if "k.bias" not in name]
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), max(errors), is_bitwise


@pytest.mark.slow
def test_ten_steps_of_adamw_equal_one_process_and_repeat_bitwise():
    for loss, state, is_bitwise in run_processes(check_training, 4, (1, 2, 2)):
        assert loss < 1e-10
        assert state < 1e-9
        assert is_bitwise


def make_transformers_model(kind, num_kv_heads=2):
    import transformers

    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=53, n_positions=8, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=30, intermediate_size=45, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=num_kv_heads, head_dim=6, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def check_transformers(rank, kind, grid_shape):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, plain = (make_transformers_model(kind) for _ in range(2))
    model = parallelize(model, Grid.make(*grid_shape))
    tokens, labels = make_batch(4)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    results = []
    for item in (model, plain):
        optimizer, losses = torch.optim.SGD(item.parameters(), 0.5), []
        for step in range(3):
            given = {"attention_mask": mask} if step else {}
            loss = item(input_ids=tokens, labels=labels, **given).loss
            loss.backward()
            if item is model:
                sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        results.append(losses)
    state, expected = plain_state_dict(model), plain.state_dict()
    assert state.keys() == expected.keys()
    errors = [relative_error(state[name], value) for name, value in expected.items()]
    return max(abs(a - b) for a, b in zip(*results, strict=True)), max(errors)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "grid_shape"),
    [
        pytest.param("gpt2", (2, 2, 1), marks=pytest.mark.slow),
        ("llama", (1, 4, 1)),  # more columns than key/value heads
        pytest.param("gpt2", (2, 3, 1), marks=pytest.mark.slow),
        pytest.param("llama", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("llama", (3, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_hugging_face_models_train_as_in_one_process(kind, grid_shape):
    make_transformers_model(kind)  # imports the model once, not in each process
    for loss, state in run_processes(check_transformers, _size(grid_shape), kind, grid_shape):
        assert loss < 2e-6
        assert state < 2e-5


def check_compiled(rank, kind):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tokens, labels = make_batch(4)
    losses = []
    for compiles in (False, True):
        model = parallelize(make_transformers_model(kind), Grid.make(2, 1, 1))
        run = torch.compile(model, backend="eager") if compiles else model
        optimizer = torch.optim.AdamW(run.parameters(), 1e-2)
        for _ in range(2):
            loss = run(input_ids=tokens, labels=labels).loss
            loss.backward()
            sync_gradients(run)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            relayout(model, Grid.make(1, 2, 1), optimizer)
        assert set(plain_state_dict(run)) == set(make_transformers_model(kind).state_dict())
    return losses


def check_frames(rank):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = parallelize(make_gpt(), Grid.make(1, 1))
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        torch.compile(model, backend="eager")(*make_batch(4)).backward()
    return torch._dynamo.utils.counters["frames"]["ok"]


@pytest.mark.nightly
def test_layers_on_a_grid_are_not_compiled_again_and_again():
    assert run_processes(check_frames, 1)[0] > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_compiled_models_train_and_move_to_another_grid(kind):
    make_transformers_model(kind)
    for losses in run_processes(check_compiled, 2, kind):
        assert losses[:2] == pytest.approx(losses[2:], abs=1e-6)


def check_bad_input(rank):
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(MeshError, match=r"needs a DeviceMesh with the axes \('depth', 'row', 'col'\)"):
        Grid(init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("row", "col", "depth")))
    with pytest.raises(MeshError, match="6 ranks, but the group has 2"):
        Grid.make(3, 2, 1)
    grid = Grid.make(1, 2, 1)
    with pytest.raises(ArgumentError, match="attention with 1 heads cannot be cut over 2 columns"):
        parallelize(make_gpt(heads=1), grid)
    with pytest.raises(ArgumentError, match=r"cannot cut '1', a torch.nn.modules.conv.Conv2d"):
        parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv2d(1, 1, 1)), grid)
    with pytest.raises(ArgumentError, match=r"has 4 on column . of Grid"):  # only a batch may have all features
        Linear(torch.nn.Linear(4, 4), grid)(torch.ones(2, 4, requires_grad=True))
    with pytest.raises(ArgumentError, match=r"has 3 on column . of Grid"):
        Linear(torch.nn.Linear(4, 4), grid)(torch.ones(2, 3))
    model = parallelize(make_gpt(), grid)
    with pytest.raises(ArgumentError, match="target 53 is not one of"):
        model(torch.zeros(2, 5, dtype=torch.int64), torch.full((2, 5), 53))
    with pytest.raises(ArgumentError, match="tokens from 0 to 99 do not fit"):
        model(torch.tensor([[0, 99, 1, 2, 3]] * 2), torch.zeros(2, 5, dtype=torch.int64))
    grid = Grid.make(2, 1, 1)
    with pytest.warns(UserWarning, match="a batch of 1 rows leaves 1 of the 2 ranks"):
        parallelize(make_gpt(), grid)(*make_batch(1))


def test_bad_input_is_refused():
    run_processes(check_bad_input, 2)


def _size(grid_shape):
    rows, cols, depth = grid_shape
    return rows * cols * depth


def check_lost(rank, victim, how):
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    model = parallelize(make_gpt(), Grid.make(2, 2, 1, timeout_seconds=4 if how == "stops" else 40))
    for step in range(50):
        if rank == victim and step == 3:
            if how == "raises":
                raise KeyError("an error of the user")
            store.set("lost at", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        try:
            model(*make_batch(4)).backward()
            sync_gradients(model)
        except ReshardError as error:
            if how == "killed" and time.monotonic() > float(store.get("lost at")) + 20.0:
                raise AssertionError("the error came late") from error
            raise
        model.zero_grad()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("victim", "how"),
    [(3, "killed")]
    + [
        pytest.param(*item, marks=pytest.mark.slow)
        for item in [(1, "killed"), (2, "raises"), (0, "raises"), (3, "stops")]
    ],
)
def test_a_lost_rank_is_named_by_every_survivor(victim, how):
    with pytest.raises(LaunchError) as caught:
        run_processes(check_lost, 4, victim, how, grace_seconds=30)
    texts = {failure.rank: str(failure.error) for failure in caught.value.failures if failure.rank != victim}
    assert len(texts) == 3
    for text in texts.values():
        assert f"rank {victim} is gone" in text


def check_empty_columns(rank):
    torch.set_num_threads(1)
    model, plain = (make_transformers_model("llama", 1).double() for _ in range(2))
    model = parallelize(model, Grid.make(1, 4, 1))  # the key has 6 features: 2, 2, 2 and 0
    tokens = make_batch(2)[0]
    losses = []
    for item in (model, plain):
        losses.append(item(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)  # a loss of transformers is in float32
    key = "model.layers.0.self_attn.k_proj.weight"
    assert relative_error(model.get_parameter(key).grad.full_tensor(), plain.get_parameter(key).grad) < 1e-5


@pytest.mark.integration
def test_columns_may_be_empty():
    make_transformers_model("llama")
    run_processes(check_empty_columns, 4)


def check_arguments(rank):
    torch.set_num_threads(1)
    model, plain = (make_transformers_model("gpt2").double() for _ in range(2))
    model = parallelize(model, Grid.make(1, 1, 2))
    tokens = make_batch(SEQUENCE)[0]  # as many rows as positions
    positions = torch.arange(SEQUENCE) + 2
    with pytest.raises(
        ArgumentError, match="attention on a grid keeps no cache of keys and values; omit use_cache=True"
    ):
        model(input_ids=tokens, use_cache=True)
    for given in (positions, positions[None]):
        losses = [item(position_ids=given, input_ids=tokens, labels=tokens).loss.item() for item in (model, plain)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_positions_may_come_first_and_a_cache_is_refused():
    make_transformers_model("gpt2")
    run_processes(check_arguments, 2)


def check_mask_of_no_rows(rank):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tokens = make_batch(1)[0]
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    model, plain = (make_transformers_model("gpt2") for _ in range(2))
    model = parallelize(model, Grid.make(2, 1, 1))
    for item in (model, plain):
        item(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()
    sync_gradients(model)
    name = "transformer.wte.weight"
    return relative_error(model.get_parameter(name).grad.full_tensor(), plain.get_parameter(name).grad)


def test_a_rank_without_rows_takes_a_mask():
    make_transformers_model("gpt2")
    assert max(run_processes(check_mask_of_no_rows, 2)) < 2e-5


def check_different_batches(rank):
    model = parallelize(make_gpt(), Grid.make(1, 2, 2))
    tokens, targets = make_batch(4)
    if rank == 2:
        targets[3, 1] = 7
    with pytest.raises(DisagreementError, match="pass different batches to a model: targets differs"):
        model(tokens, targets=targets)
    model(*make_batch(4))


def test_different_batches_are_refused_on_all_ranks():
    run_processes(check_different_batches, 4)


def check_different_seeds(rank):
    torch.manual_seed(3 + (rank == 2))
    for probability, is_training in ((0.5, True), (0.5, False), (0.0, True)):
        plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(probability)).train(is_training)
        model = parallelize(plain, Grid.make(1, 2, 2))
        is_refused = probability > 0 and is_training
        with pytest.raises(DisagreementError, match="state of torch's CPU gen") if is_refused else nullcontext():
            model(torch.ones(4, 8))


def test_different_seeds_of_a_model_with_dropout_are_refused_on_all_ranks():
    run_processes(check_different_seeds, 4)
