"""Warnings about the CPUs of this machine."""

from __future__ import annotations

from reshard.scheduler.training.cpu_limits import describe_shared_cores, describe_slow_float16, read_flags


def test_float16_on_a_cpu_without_it_gives_a_warning(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu f16c avx512bw avx512_bf16\n")
    flags = read_flags(tmp_path / "cpuinfo")
    assert "--autocast bfloat16 is several times as fast" in describe_slow_float16("cpu", "float16", flags)
    assert "--autocast none" in describe_slow_float16("cpu", "float16", frozenset({"fpu", "f16c"}))
    for device, autocast, other in (
        ("cuda", "float16", flags),
        ("cpu", "bfloat16", flags),
        ("cpu", "float16", flags | {"avx512_fp16"}),
        ("cpu", "float16", read_flags(tmp_path / "absent")),
    ):
        assert describe_slow_float16(device, autocast, other) == ""


def test_more_ranks_than_cores_give_a_warning():
    assert "4 ranks share 2 cores" in describe_shared_cores(4, 2)
    assert describe_shared_cores(2, 2) == ""
