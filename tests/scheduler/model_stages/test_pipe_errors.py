"""Wrong models, cuts, placements and batches: errors name the thing, on every rank alike, and the engine goes on."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.distributed.device_mesh
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import reshard.scheduler as rs
from reshard.errors import ArgumentError, DisagreementError, ScheduleError
from reshard.scheduler.model_stages.profile import StageProfile, StageTimes
from reshard.testing import run_processes
from tests.scheduler.model_stages.test_parallel_stages import make_batch as make_mixer_batch, make_mixer
from tests.scheduler.model_stages.test_pipe import make_batch, make_chain


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x).sum() if x.sum() > 0 else x.sum()


@pytest.mark.parametrize(
    ("model", "cuts", "message"),
    [
        (Branching, ["second"], "Branching cannot be cut by module paths, because torch.fx cannot trace its forward"),
        (make_chain, ["layers.7"], "Chain has no module 'layers.7'"),
        (
            make_chain,
            ["layers.3", "layers.1"],
            "cannot be cut before 'layers.1': its forward does not call that module after",
        ),
        (make_chain, ["layers.1.inner"], "Chain has no module 'layers.1.inner'"),
        (make_chain, ["layers"], "cannot be cut before 'layers': its forward does not call that module"),
    ],
)
def test_errors_say_why_a_model_cannot_be_cut(model, cuts, message):
    batch = {"x": torch.ones(4, 4)} if model is Branching else make_batch(0)
    pipe = rs.Pipe(model(), cuts, stages=",".join(["1x1"] * (len(cuts) + 1)))
    with pytest.raises(ArgumentError, match=message):
        pipe.cut(list(batch))


class Experts(nn.Module):
    """Sends the samples whose first element is positive through one layer, and adds up."""

    def __init__(self):
        super().__init__()
        self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        num_samples = (x[:, 0] > 0).nonzero()[:, 0]
        return self.head(torch.zeros_like(x).index_add(0, num_samples, self.expert(x[num_samples])))


def compile_experts(rank):
    model = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 1))
    pipe = rs.Pipe(model, ["2"], stages="1x1,1x1", loss=lambda output: output.mean())
    with pytest.raises(ArgumentError) as caught:
        pipe.compile({"input": torch.ones(4, 4)}, 2)
    return str(caught.value)


def test_an_error_names_the_module_whose_shapes_depend_on_data():
    for text in run_processes(compile_experts, 2):
        assert "stage 0 of the model does not run on tensors without data, because of '1' (Experts)" in text
        assert text.endswith("put the whole model in one stage")


def test_wrong_cuts_and_placements_are_refused():
    one = rs.Placement()
    with pytest.raises(ArgumentError, match="1 cut makes 2 stages, but stages has 3 placements"):
        rs.Pipe(make_chain(), ["layers.1"], stages="1x1,1x1,1x1")
    with pytest.raises(
        ArgumentError, match=r"stage 0 is on rank 0 as dp=1, tp=1 and stage 1 on ranks 0-1 as dp=2, tp=1"
    ):
        rs.Pipe(make_chain(), ["layers.1"], stages=[one, rs.Placement(dp=2, ranks=(0, 1))])
    with pytest.raises(ArgumentError, match="a list of modules is already cut"):
        rs.Pipe([nn.Linear(2, 2)], ["0"], stages="1x1")
    with pytest.raises(ArgumentError, match="a list with the module of each stage, not list"):
        rs.Pipe([], stages="1x1")
    with pytest.raises(
        ArgumentError, match=r"training_plan is a str, not a TrainingPlan; .* TrainingPlan.read\(path\)"
    ):
        rs.Pipe(make_chain(), training_plan="plan.json")


def fails(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def use_wrongly(rank):
    torch.set_num_threads(1)
    fails(
        ArgumentError,
        "the stages are on ranks 0-2, but the process group has 2 ranks",
        lambda: rs.Pipe(make_chain(), ["layers.1"], stages="2x1,1x1").compile(make_batch(0), 2),
    )
    fails(
        ArgumentError,
        "the stages are on rank 0, but the process group has 2 ranks",
        lambda: rs.Pipe(make_chain(), stages="1x1").compile(make_batch(0), 2),
    )
    good = make_batch(0)
    tokens = good["tokens"]
    profile = StageProfile(2, (StageTimes(1.0, 1.0, 1.0, 1.0, activation_bytes=10),) * 2)
    fails(
        ScheduleError,
        r"pp rank 0 keeps 20 bytes of activations at once; at most 19 are allowed \(schedule '1f1b', stage 0\)",
        lambda: rs.Pipe(make_chain(), ["layers.1"], stages="1x1,1x1").compile(
            good, 4, schedule=rs.one_f_one_b, profile=profile, activation_limit_bytes=19
        ),
    )
    with rs.Pipe(make_chain(), ["layers.1"], stages="1x1,1x1").compile(good, 2) as engine:
        before = engine.evaluate(good).loss
        wrong = [
            (
                ArgumentError,
                "the batch has no 'targets', which the model reads; it has .'tokens'.$",
                {"tokens": tokens},
            ),
            (ArgumentError, "the batch has 'other', which the stages do not read", {**good, "other": tokens}),
            (
                ArgumentError,
                "the batch has 'mask', which the stages do not read",
                {**good, "mask": torch.ones(8, 5, 1)},
            ),
            (  # torch 2.9 looks up indices of any dtype on fake tensors
                ArgumentError,
                "does not run on a batch of|'tokens' of the batch is float32, but int64 in the example of compile",
                {**good, "tokens": tokens.float()},
            ),
            (ArgumentError, "the batch has 0 samples", {name: item[:0] for name, item in good.items()}),
            (
                ArgumentError,
                "'targets' of the batch has 7 samples, but the first tensor has 8",
                {**good, "targets": tokens[:7]},
            ),
            (ArgumentError, "it must be a tensor, a number, a string or None", {**good, "tokens": [1]}),
            (ArgumentError, "a batch must be a dict", "tokens"),
            (ArgumentError, "the batch has a key 3; keys must be names", good if rank else {**good, 3: tokens}),
            (
                ArgumentError,
                "'tokens' of the batch is a tensor that is torch.sparse_coo; its tensors must be dense",
                good if rank else {**good, "tokens": tokens.to_sparse()},
            ),
            (
                ArgumentError,
                "'tokens' of the batch is a tensor that is without data",
                good if rank else {**good, "tokens": tokens.to("meta")},
            ),
            (ArgumentError, "no rank passes a batch", None),
            (ArgumentError, "rank 1 passes no batch, but stage 1 reads targets", good if rank == 0 else None),
            (ArgumentError, "the batch has no tensor with samples", {} if rank else good),
            (DisagreementError, "ranks 0 and 1 pass batches of 8 and 6 samples", make_batch(0, 8 - 2 * rank)),
            (DisagreementError, "ranks 0 and 1 pass different batches", make_batch(0, 8, 5 + rank)),
            (
                DisagreementError,
                "ranks 0 and 1 pass different values of 'tokens'",
                {**good, "tokens": tokens.flip(0) if rank else tokens},
            ),
        ]
        for kind, message, batch in wrong:
            fails(kind, message, lambda batch=batch: engine.step(batch))
            fails(kind, message, lambda batch=batch: engine.evaluate(batch))
        for number in (0, 10**5000):
            fails(ArgumentError, "must be an integer from 1 to", lambda n=number: engine.step(good, accumulate=n))
        tensor = torch.ones(2)
        for name, usual in (("accumulate", 1), ("local_batch", False)):
            options = {name: usual if rank else tensor}
            fails(ArgumentError, f"{name} is tensor", lambda options=options: engine.step(good, **options))
        fails(ArgumentError, "accumulate is 9, but the batch has only 8", lambda: engine.step(good, accumulate=9))
        fails(DisagreementError, "different accumulate and local_batch", lambda: engine.step(good, accumulate=1 + rank))
        assert all(parameter.grad is None for parameter in engine.parameters())
        assert engine.step(good).loss == pytest.approx(before)
    return True


@pytest.mark.integration
def test_wrong_use_leaves_the_engine_usable():
    assert run_processes(use_wrongly, 2) == [True, True]


class Flat(nn.Module):
    """Its reshape does not accept 0 samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.second(self.first(x))
        return x.reshape(x.shape[0], -1).mean()


def step_on_few_rows(rank):
    """A step on 1 sample with 2 replicas, under FSDP and under DDP, and a fixed schedule of 4 microbatches on 1 to 8 samples."""
    torch.set_num_threads(1)
    batches = {num_samples: {"x": torch.ones(num_samples, 4)} for num_samples in (1, 2, 3, 8)}
    losses = []
    for wrap in (rs.fsdp, rs.ddp):
        placements = [rs.Placement(), rs.Placement(dp=2, wrap=wrap)]
        torch.manual_seed(0)
        pipe = rs.Pipe(Flat(), ["second"], stages=placements)
        with pipe.compile(batches[8], 4, schedule=rs.one_f_one_b) as engine:
            losses.append(engine.step(batches[1]).loss)
            message = "'x' of the batch is float64, but float32 in the example of compile; convert it"
            fails(ArgumentError, message, lambda engine=engine: engine.step({"x": torch.ones(8, 4).double()}))
            losses.append(engine.step(batches[2]).loss)
            fixed = engine.schedule
    torch.manual_seed(0)
    with rs.Pipe(Flat(), ["second"], stages="1x1,2x1").compile(batches[8], 4, schedule=fixed) as engine:
        losses += [engine.step(batches[num_samples]).loss for num_samples in batches]
        losses.append(engine.step(batches[3], accumulate=2).loss)
    torch.manual_seed(0)
    pipe = rs.Pipe(Flat(), ["second"], stages="1x1,2x1")
    shared = rs.Pipe(Flat(), ["second"], stages=[rs.Placement(dp=3), rs.Placement(dp=3, ranks=(0, 1, 2))])
    message = r"the schedule '1f1b' has stages on pp ranks \[0, 1\], but by their ranks they are on \[0, 0\]"
    fails(ArgumentError, message, lambda: shared.compile(batches[8], 4, schedule=rs.one_f_one_b))
    message = "has 3 microbatches, but the step has 2"
    longer = lambda pipeline, num: rs.one_f_one_b(pipeline, num + 1)  # noqa: E731
    fails(ArgumentError, message, lambda: pipe.compile(batches[8], 2, schedule=longer))
    torch.manual_seed(0)
    pipe = rs.Pipe(Flat(), ["second"], stages="1x1,2x1")
    message = "has 3 microbatches, but this batch has 4; pass a function such as auto_schedule instead"
    fails(ArgumentError, message, lambda: pipe.compile(batches[8], 4, schedule=fixed.first(3)))
    return losses


@pytest.mark.slow
def test_few_rows_run_or_are_refused_before_the_step():
    torch.manual_seed(0)
    expected = Flat()(torch.ones(1, 4)).item()
    for losses in run_processes(step_on_few_rows, 3):
        assert losses == pytest.approx([expected] * 9, rel=1e-6)


class Pairs(nn.Module):
    """It does not run on one sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.second(self.first(x))
        return (x + x.unflatten(0, (2, -1)).flatten(0, 1)).mean()


def step_on_too_few_rows(rank):
    torch.set_num_threads(1)
    pipe = rs.Pipe(Pairs(), ["second"], stages=[rs.Placement(), rs.Placement(dp=2, wrap=rs.fsdp)])
    with pipe.compile({"x": torch.ones(8, 4)}, 2) as engine:
        message = "stage 1 has 2 replicas under FSDP, which must all run, but a microbatch has 1 sample, and the stage"
        for call in (engine.step, engine.evaluate):
            fails(ArgumentError, message, lambda call=call: call({"x": torch.ones(1, 4)}))
        return engine.step({"x": torch.ones(8, 4)}).finite


@pytest.mark.slow
def test_a_stage_that_fails_on_replicas_without_rows_is_refused_before_the_step():
    assert run_processes(step_on_too_few_rows, 3) == [True] * 3


#: Divides the sequence over the ranks, but not the loss.
SEQUENCE_PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def step_on_uneven_sequences(rank):
    torch.set_num_threads(1)
    pipe = rs.Pipe(make_mixer(tied=False), stages="1x2", tp_plan=SEQUENCE_PLAN)
    batches = [{name: item[:, :length] for name, item in make_mixer_batch(0, 4).items()} for length in (2, 3, 4)]
    with pipe.compile(batches[2], 2) as engine:
        message = (
            "stage 0 divides the sequence over tp=2 ranks, and does not run on .* pad the sequence to a multiple of 2"
        )
        fails(ArgumentError, message, lambda: engine.step(batches[1]))
        return engine.step(batches[0]).loss


@pytest.mark.slow
def test_sequences_that_ranks_cannot_divide_are_refused_before_the_step():
    batch = {name: item[:, :2] for name, item in make_mixer_batch(0, 4).items()}
    expected = make_mixer(tied=False)(**batch).item()
    assert run_processes(step_on_uneven_sequences, 2) == [pytest.approx(expected, rel=1e-6)] * 2


def freeze_one_copy(rank):
    pipe = rs.Pipe(make_chain(), ["layers.2"], stages="1x1,1x1")
    with pipe.compile(make_batch(0), num_microbatches=2) as engine:
        named = dict(engine.named_parameters())
        if rank == 0:
            named["embed.weight"].requires_grad_(False)
        with pytest.raises(DisagreementError) as found:
            engine.step(make_batch(0))
        if rank == 1:
            named["head.weight"].requires_grad_(False)
        engine.step(make_batch(0))
        assert all(named[name].grad is None for name in named if name in ("embed.weight", "head.weight"))
        return str(found.value)


@pytest.mark.nightly
def test_a_shared_parameter_that_only_one_stage_froze():
    first, second = run_processes(freeze_one_copy, 2)
    assert first == second
    assert "'head.weight' of stage 1 is trained, but 'embed.weight' of stage 0" in first


def freeze_on_one_replica(rank, wrap):
    pipe = rs.Pipe(make_chain(), ["layers.2"], stages=[rs.Placement(), rs.Placement(dp=2, wrap=wrap)])
    with pipe.compile(make_batch(0), num_microbatches=2) as engine:
        if rank == 2:
            engine.named_parameters()[0][1].requires_grad_(False)
        with pytest.raises(DisagreementError, match="ranks 1 and 2 of stage 1 froze different parameters"):
            engine.step(make_batch(0))


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", [rs.ddp, rs.fsdp])
def test_a_parameter_that_only_one_replica_froze(wrap):
    run_processes(freeze_on_one_replica, 3, wrap)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "profile.json cannot be read: No such file"),
        ("{}", "profile.json is not a profile: KeyError"),
        (
            '{"num_samples": 0, "stages": []}',
            "the profile .*: StageProfile: num_samples is 0; it must be an integer from 1",
        ),
        ('{"num_samples": 1, "stages": [["x", 1, 1, 2]]}', "is not a profile: TypeError"),
        (
            '{"num_samples": 1, "stages": [{"forward_seconds": "1", "input_grad_seconds": 1, "weight_grad_seconds": 1, '
            '"whole_backward_seconds": 2}]}',
            "the profile .*: forward_seconds of a stage is '1'; it must be a number from 0",
        ),
        (
            '{"num_samples": 1, "stages": [{"forward_seconds": 1, "input_grad_seconds": NaN, "weight_grad_seconds": 1, '
            '"whole_backward_seconds": 2}]}',
            "the profile .*: input_grad_seconds of a stage is nan; it must be",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, message):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        rs.StageProfile.load(path)
