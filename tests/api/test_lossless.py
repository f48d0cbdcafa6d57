"""Tensors that travel losslessly in buckets of agreed sizes: bits, sizes, versions, and failures that leave the earlier version."""

from __future__ import annotations

import itertools
import os
import re
import signal
import warnings

import numpy as np
import pytest
import torch

import reshard
from reshard import Layout, Mesh, Topology
from reshard.coordination import CallGroup
from reshard.errors import (
    ArgumentError,
    DisagreementError,
    RankLostError,
    RemoteError,
    ResourceError,
    VerificationError,
)
from reshard.runtime.transport import GlooTransport
from reshard.testing.processes import LaunchError, run_processes
from tests.support.tensors import same_bytes, take_shard
from tests.support.versions import DST, DTYPES, SHAPES, SRC, make_version, shards_of


def _move(rank, number, base, out, **options):
    """Send a version as the differences to ``base``, the number of a version or shards."""
    base = shards_of(SRC, rank, base) if isinstance(base, int) else base
    keywords = {"shape": SHAPES, "dtype": DTYPES, "topology": Topology((0, 0, 1, 1, 2)), "timeout_seconds": 20}
    keywords |= {"compression": "delta", "base": base, "out": out} | options
    return reshard.reshard_async(shards_of(SRC, rank, number), SRC, DST, **keywords)


def _holds(rank, out, number):
    wanted = shards_of(DST, rank, number) or {}
    return all(same_bytes(out[name], wanted[name]) for name in wanted)


def _deltas(rank):
    out = None if rank < 3 else {name: torch.zeros_like(shard) for name, shard in shards_of(DST, rank, 0).items()}
    if out is not None:  # a shard with strides
        out["w"] = torch.zeros(out["w"].shape[::-1], dtype=out["w"].dtype).t()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = _move(rank, 1, None, out)
        first.wait()
        assert (first.report.base, first.report.because) == (None, "ranks 0-3 pass no base") and _holds(rank, out, 1)
        second = _move(rank, 2, 1, out, verify=True)
        result = second.wait()
        assert out is None or all(result[name] is out[name] for name in out)
        assert second.report.because == "" and _holds(rank, out, 2)
        assert second.report.encoded_bytes < first.report.encoded_bytes / 5
        assert second.report.plain_bytes == first.report.plain_bytes
        assert not caught

        if rank == 4:
            out["w"][5, 5] += 1  # a receiver that lost its base
        third = _move(rank, 3, 2, out)
        third.wait()
        assert third.report.because == "rank 4 holds another base of 'w' than rank 0" and _holds(rank, out, 3)
        fourth = _move(rank, 4, None if rank == 1 else 3, out)  # a source that was restarted
        fourth.wait()
        assert fourth.report.because == "rank 1 passes no base" and _holds(rank, out, 4)
        texts = {str(warning.message) for warning in caught}
        assert texts == {f"compression='delta' sends the tensors in full: {x.report.because}" for x in (third, fourth)}

    spoiled = shards_of(SRC, rank, 5)
    if rank == 1:
        spoiled["scale"][0] += 1
    for error, text, base, options in (
        (DisagreementError, "ranks 0 and 1 hold the same .*; every out is unchanged, at base", 4, {"spoiled": 0}),
        (ArgumentError, "rank 0 passes a base of bfloat16 .* but the source shard is", spoiled, {"swapped": 0}),
        (ArgumentError, "max_error is 0.1, but delta is lossless", 4, {"max_error": 0.1}),
        (ArgumentError, "base= is for compression='delta', not None", 4, {"compression": None}),
        (ArgumentError, "'odd': delta sends float16 bit for bit, and cannot make float32", 4, {"dst_dtype": "float32"}),
    ):
        if "spoiled" in options:
            call = lambda: reshard.reshard(  # noqa: E731
                spoiled, SRC, DST, shape=SHAPES, dtype=DTYPES, compression="delta",
                base=shards_of(SRC, rank, 4), out=out,
            )  # fmt: skip
        elif "swapped" in options:
            swapped = base if rank else {**base, "w": base["w"].t()}
            call = lambda b=swapped: _move(rank, 5, b, out)  # noqa: E731
        else:
            call = lambda o=options: _move(rank, 5, 4, out, **o)  # noqa: E731
        with pytest.raises(error, match=text):
            call()
    assert _holds(rank, out, 4)
    with pytest.raises(ArgumentError, match=r"delta makes output .* pass compression='delta' to the Mover"):
        reshard.make_plan(SRC, DST, SHAPES, "float32", compression="delta")


@pytest.mark.integration
def test_differences_arrive_bit_for_bit_and_bases_are_compared_by_digest():
    run_processes(_deltas, 5)


def _break(rank, victim):
    """Spoil a bucket on its way, or kill a rank: every other rank keeps the version that it holds."""
    out = shards_of(DST, rank, 1)
    _move(rank, 1, 1, out).wait()
    if rank == 0:
        send = GlooTransport.send

        def flip(self, data, *args):
            if victim is None and data.numel() > 256:
                data = data.clone()
                data[data.numel() // 2] ^= 1
            return send(self, data, *args)

        GlooTransport.send = flip
    handle = _move(rank, 2, 1, out)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(VerificationError if victim is None else RemoteError) as caught:
        handle.wait()
    assert _holds(rank, out, 1)
    with pytest.raises(type(caught.value)):
        handle.wait()
    return str(caught.value)


@pytest.mark.parametrize("victim", [None, 2])
def test_after_a_failure_every_rank_holds_the_earlier_version_and_the_error_names_it(victim):
    if victim is None:
        texts = run_processes(_break, 5, victim)
    else:
        with pytest.raises(LaunchError) as caught:
            run_processes(_break, 5, victim, timeout_seconds=90, grace_seconds=30)
        assert {failure.rank for failure in caught.value.failures} == {victim}, caught.value
        texts = [caught.value.results[rank] for rank in range(5) if rank != victim]
    assert len({text.partition("; every out is unchanged, at base ")[2] for text in texts} - {""}) == 1, texts
    if victim is None:
        assert len(set(texts)) == 1 and "from ranks 0-1 arrived at rank 4" in texts[0], texts
    else:
        assert "rank 2" in texts[0], texts


def _repeat(rank):
    out = None if rank < 3 else {name: torch.zeros_like(shard) for name, shard in shards_of(DST, rank, 0).items()}
    plan = reshard.make_plan(SRC, DST, SHAPES, {name: str(dtype)[6:] for name, dtype in DTYPES.items()})
    with pytest.raises(ArgumentError, match=r"compression of a Mover is 'int8x128'; it must be one of .* to make_plan"):
        reshard.Mover(plan, compression="int8x128")
    with pytest.raises(DisagreementError, match="compression"):
        reshard.Mover(plan, compression=None if rank == 2 else "delta")
    with reshard.Mover(plan, compression="delta", timeout_seconds=20, verify=True) as mover:
        handle = mover.start(shards_of(SRC, rank, 1), out=out)
        handle.wait()
        assert handle.report.because == "ranks 0-3 pass no base" and _holds(rank, out, 1)
        for number in (2, 3, 4):
            handle = mover.start(shards_of(SRC, rank, number), base=shards_of(SRC, rank, number - 1), out=out)
            result = handle.wait()
            assert out is None or all(result[name] is out[name] for name in out)
            assert handle.report.because == "" and _holds(rank, out, number)
            assert handle.report.encoded_bytes < handle.report.plain_bytes / 5
            if number == 3:  # wrong arrays of one rank are an error of all, and the next transfer works
                wrong = shards_of(SRC, rank, 4)
                if rank == 1:
                    del wrong["odd"]
                with pytest.raises(ArgumentError, match="rank 1: the dict of tensors"):
                    mover.start(wrong, base=shards_of(SRC, rank, 3), out=out)
    with (
        reshard.Mover(plan) as raw,
        pytest.raises(ArgumentError, match="base= is for a Mover with compression='delta'"),
    ):
        raw(shards_of(SRC, rank, 1), base=shards_of(SRC, rank, 1))
    base = None if rank >= 4 else shards_of(SRC, rank, 4)
    if rank == 3:  # its base of "scale" is also its destination
        base["scale"] = out["scale"]
    with pytest.raises(ArgumentError, match=r"out of 'scale' shares storage with a base, which .* must not change"):
        _move(rank, 5, base, out)
    assert _holds(rank, out, 4)


def test_a_mover_repeats_differences_and_a_base_is_never_overwritten():
    run_processes(_repeat, 5)


def _repeat_beside_a_rank_without_elements(rank):
    rows, columns = Layout(Mesh.of("3"), "S0 R"), Layout(Mesh.of("3"), "R S0")
    plan, whole = reshard.make_plan(rows, columns, (2, 2), "bfloat16"), torch.arange(4.0).bfloat16().reshape(2, 2)
    for codec in ("delta", "bf16-lossless"):
        with reshard.Mover(plan, compression=codec, timeout_seconds=20) as mover:
            for _ in range(2):
                assert same_bytes(mover(take_shard(rows, rank, whole)), take_shard(columns, rank, whole))

    def fail(*_args, **_options):
        raise ResourceError("rank 0: no descriptors")

    with pytest.MonkeyPatch.context() as patched, reshard.Mover(plan, compression="delta") as mover:
        patched.setattr("reshard.api.lossless.lossless_mover.plan_tensors", fail)
        with pytest.raises(ResourceError, match="rank 0: no descriptors; every out is unchanged"):
            mover(take_shard(rows, rank, whole))


def test_a_mover_repeats_differences_beside_a_rank_without_elements():
    run_processes(_repeat_beside_a_rank_without_elements, 3, timeout_seconds=60)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_buckets_move_inside_one_process(kind):
    dtypes = {"w": torch.bfloat16, "scale": torch.float32, "odd": torch.float16}
    for name, shape in SHAPES.items():
        wholes = [make_version(number)[name] for number in (1, 2)]
        if kind == "numpy":  # NumPy has no bf16
            wholes = [whole.float() if dtypes[name] == torch.bfloat16 else whole for whole in wholes]

        def cut(layout, whole):
            cuts = {rank: take_shard(layout, rank, whole) for rank in layout.ranks}
            return {rank: item.numpy() if kind == "numpy" else item for rank, item in cuts.items()}

        (base, shards), (out, wanted) = ([cut(side[name], whole) for whole in wholes] for side in (SRC, DST))
        moved = reshard.reshard_local(
            shards, SRC[name], DST[name], shape=shape, compression="delta", base=base, out=out
        )
        assert all((moved[rank] == wanted[rank]).all() and (out[rank] != wanted[rank]).any() for rank in wanted)
        out[3].reshape(-1)[0] += 1
        with pytest.warns(UserWarning, match="in full: rank 3 holds another base than rank 0") as caught:
            moved = reshard.reshard_local(
                shards, SRC[name], DST[name], shape=shape, compression="delta", base=base, out=out
            )
        assert caught[0].filename == __file__  # a warning points to the caller's line
        assert all((moved[rank] == wanted[rank]).all() for rank in wanted)
        if moved[3].dtype == torch.bfloat16:
            exact = reshard.reshard_local(shards, SRC[name], DST[name], shape=shape, compression="bf16-lossless")
            assert all(same_bytes(exact[rank], wanted[rank]) for rank in wanted)
            shards[1][0, 0] += 1
            with pytest.raises(DisagreementError, match="ranks 0 and 1 hold the same regions"):
                reshard.reshard_local(shards, SRC[name], DST[name], shape=shape, compression="bf16-lossless")


#: Ranks 0 and 1 hold one half of "w", ranks 2 and 3 the other half.
REPLICATED = {"w": Layout(Mesh.of("2x2"), "R S0")}


def _die_at_round(number):
    """Make this process kill itself when it enters a round of the agreement, or at its first message ("send")."""
    if number == "send":
        GlooTransport.send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return
    agree, rounds = CallGroup.agree, []

    def count_and_die(self, *args, **options):
        rounds.append(0)
        if len(rounds) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(self, *args, **options)

    CallGroup.agree = count_and_die


def _survive(rank, victim, moment, on_loss):
    """Send differences while a rank dies; survivors hold the new version, or every one the earlier version."""
    shape = {"w": (512, 1024)}
    old = torch.randn(*shape["w"], generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    new.view(-1)[::50] *= 1.01
    dst = {"w": Layout(Mesh.of("2x2", first_rank=4), "R S1")}
    out = {"w": take_shard(dst["w"], rank, old).contiguous()} if rank >= 4 else None
    source, base = ({"w": take_shard(REPLICATED["w"], rank, whole)} if rank < 4 else None for whole in (new, old))
    options = {"shape": shape, "dtype": "bfloat16", "timeout_seconds": 20, "compression": "delta", "on_loss": on_loss}
    options["topology"] = Topology((0, 0, 1, 1, 2, 2, 3, 3))
    reshard.reshard(base, REPLICATED, dst, **options, base=base, out=out)  # connects all ranks
    if rank in victim:
        _die_at_round(moment)
    outcome = {}
    try:
        handle = reshard.reshard_async(source, REPLICATED, dst, **options, base=base, out=out)
        outcome["is_delta"] = handle.report.because == "" and handle.report.base is not None
        handle.wait()
    except RankLostError as error:
        outcome |= {"text": str(error), "lost": error.ranks}
        assert out is None or same_bytes(out["w"], take_shard(dst["w"], rank, old))
        if error.plan is not None:
            error.recover()
    held = {
        name: out is None or same_bytes(out["w"], take_shard(dst["w"], rank, whole))
        for name, whole in (("old", old), ("new", new))
    }
    return outcome | held


def _survivors(victims, moment, on_loss):
    with pytest.raises(LaunchError) as caught:
        run_processes(_survive, 8, victims, moment, on_loss, timeout_seconds=90, grace_seconds=60)
    assert {failure.rank for failure in caught.value.failures} == set(victims), caught.value
    return [caught.value.results[rank] for rank in range(8) if rank not in victims]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("victims", "moment"),
    [
        pytest.param((0,), 1, id="a source before the call", marks=pytest.mark.slow),
        pytest.param((0,), 2, id="a source before it offers its bucket"),
        pytest.param((5,), 3, id="a destination while planning", marks=pytest.mark.slow),
        pytest.param((0,), "send", id="a source in the transfer"),
        pytest.param((6,), 4, id="a destination before it reports its outcome", marks=pytest.mark.slow),
        pytest.param((4,), 5, id="a destination before it confirms its data", marks=pytest.mark.slow),
        pytest.param((7,), 6, id="a destination before it confirms the result"),
    ],
)
def test_survivors_hold_the_new_version(victims, moment):
    for outcome in _survivors(victims, moment, "recover"):
        assert outcome["new"] and "text" not in outcome and outcome["is_delta"], outcome


@pytest.mark.integration
def test_survivors_are_offered_a_plan_for_buckets():
    outcomes = _survivors((0,), "send", "offer")
    assert {outcome["lost"] for outcome in outcomes} == {(0,)} and all(outcome["new"] for outcome in outcomes)


@pytest.mark.integration
@pytest.mark.parametrize("on_loss", ["recover", "offer"])
@pytest.mark.parametrize("moment", [2, pytest.param("send", id="in the transfer")])
def test_a_bucket_that_no_survivor_holds_is_named_and_every_out_is_unchanged(moment, on_loss):
    outcomes = _survivors((0, 1), moment, on_loss)
    texts = {outcome["text"] for outcome in outcomes}
    text = texts.pop()
    assert not texts and "ranks 0-1 are lost, and with them regions of 'w': ranks 4,6 still need" in text, text
    assert re.search("; every out is unchanged, at base [0-9a-f]{16}$", text), text
    assert all(outcome["old"] for outcome in outcomes)


def _lossless(rank):
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2), "R S0")
    whole = torch.randn(256, 640, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole[3, 5:9] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40])
    options = {"shape": whole.shape, "dtype": "bfloat16", "compression": "bf16-lossless", "verify": True}
    handle = reshard.reshard_async(take_shard(src, rank, whole), src, dst, **options)
    out = handle.wait()
    assert out is None or same_bytes(out, take_shard(dst, rank, whole))
    assert handle.report.encoded_bytes < handle.report.plain_bytes / 1.38 and handle.report.because == ""
    with pytest.raises(ArgumentError, match=r"^the tensor: bf16-lossless encodes bfloat16, not float32$"):
        reshard.reshard(take_shard(src, rank, whole.float()), src, dst, **{**options, "dtype": "float32"})
    with pytest.raises(ArgumentError, match=r"bf16-lossless makes output .* which a plan does not know"):
        reshard.make_plan(src, dst, whole.shape, "bfloat16", compression="bf16-lossless")
    empty = reshard.reshard(take_shard(src, rank, whole[:0]), src, dst, **{**options, "shape": (0, 640)})
    assert empty is None or empty.numel() == 0
    thin = reshard.reshard(
        take_shard(src, rank, whole[:1]), src, dst, **{**options, "shape": (1, 640)}
    )  # rank 1: empty
    assert thin is None or same_bytes(thin, take_shard(dst, rank, whole[:1]))
    handles = [reshard.reshard_async(take_shard(src, rank, whole), src, dst, **options) for _ in range(2)]
    with pytest.raises(DisagreementError, match=r"must wait for transfers with lossless codecs, in the same order"):
        handles[rank == 0].wait()


def test_bf16_travels_without_loss_and_other_dtypes_are_refused():
    run_processes(_lossless, 4)


def test_local_delta_moves_arrays_in_another_byte_order():
    rows, columns = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
    new = np.arange(32, dtype=np.float32).reshape(4, 8)
    for orders in itertools.product("<>", repeat=3):
        src, old, held = ((new * k).astype(f"{order}f4") for order, k in zip(orders, (1, 2, 2), strict=True))
        moved = reshard.reshard_local(
            {0: src[:2], 1: src[2:]},
            rows,
            columns,
            shape=new.shape,
            compression="delta",
            base={0: old[:2], 1: old[2:]},
            out={0: np.asfortranarray(held[:, :4]), 1: held[:, 4:]},
        )
        np.testing.assert_array_equal(np.hstack([moved[0], moved[1]]), new)
        assert moved[0].dtype == moved[1].dtype == src.dtype  # as without a codec
