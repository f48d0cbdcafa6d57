"""The command line: its text, JSON and HTML output, and its errors."""

from __future__ import annotations

import importlib.util
import json
import os
import time
import warnings
from pathlib import Path

import pytest
import torch

from reshard.cli import demo_transfers
from reshard.cli.commands import info_command
from reshard.cli.commands.plan_command import MAX_PRINTED_MESSAGES, default_topology
from reshard.cli.demo_cases import gpu_cases
from reshard.cli.main import main
from reshard.errors import ArgumentError
from reshard.plan import plan_from_json
from reshard.planner.strategy_registry import STRATEGIES
from reshard.sharding.mesh import Mesh
from reshard.testing import share_gpus, sharing

PLAN = ["plan", "--shape", "1024,1024,512", "--dtype", "float32", "--src-mesh", "2x4", "--src", "S0 R R"]
TO = ["--dst-mesh", "3x4", "--dst", "S0 R R"]
GOLDENS = Path(__file__).parents[1] / "goldens"


def test_a_wrong_option_is_an_error_of_two_lines_that_names_a_close_one(capsys):
    for words, message in (
        (["profile", "gpt3-125m", "--batch", "0"], "there is no option --batch 0"),
        (["plan", "--topolgy=tcp", *PLAN[1:], *TO], "there is no option --topolgy=tcp; did you mean '--topology'?"),
        (
            ["plan", *PLAN[1:], *TO, "--format", "txt"],
            "argument --format: 'txt' is none of text, summary, json, html; did you mean 'text'?",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        shown = capsys.readouterr().err
        assert caught.value.code == 2
        command = f"reshard {words[0]}"
        assert shown == f"{command}: error: {message}\n{command} --help lists all options\n"


def test_text_matches_the_golden_files(capsys):
    assert main([*PLAN, *TO, "--strategy", "broadcast"]) == 0
    assert capsys.readouterr().out == (GOLDENS / "plan_2x4_3x4.txt").read_text()
    small = ["plan", "--shape", "96,64", "--src-mesh", "2x2", "--src", "S0 R", "--dst-mesh", "3x2", "--dst", "S0 S1"]
    assert main(small) == 0
    whole = capsys.readouterr().out
    assert whole == (GOLDENS / "plan_2x2_3x2.txt").read_text()
    assert main([*small, "--format", "summary"]) == 0
    assert capsys.readouterr().out == whole.split("\n\n")[0] + "\n"
    assert main([*small, "--format", "summary", "--rank", "1"]) == 2


def test_ratio_to_the_bound_states_the_latency_share(capsys):
    rows = ["plan", "--src-mesh", "2", "--src", "S0 R", "--dst-mesh", "2", "--dst", "R S0", "--format", "summary"]
    for shape, text in (("1400,1400", "which counts no latency (latency is 6 %"), ("16384,16384", None)):
        assert main([*rows, "--shape", shape]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("predicted"))
        assert (text or "times the bound\n") in line + "\n"


def test_a_plan_far_above_its_bound_says_what_costs_time_and_what_would_help(tmp_path, capsys):
    def lines_of(strategy="auto", shape="2048,2048", **fields):
        fields = {"hosts": [{"devices": 8, "nics": "8 x 400 Gbit/s", "count": 4}], "inside": "450 GB/s"} | fields
        (tmp_path / "cluster.json").write_text(json.dumps(fields))
        given = ["--topology", str(tmp_path / "cluster.json"), "--format", "summary", "--strategy", strategy]
        meshes = ["--src-mesh", "2x8", "--src", "S01 R", "--dst-mesh", "2x8", "--dst", "R R"]
        assert main(["plan", "--shape", shape, *meshes, *given]) == 0
        lines = (line.partition("  ") for line in capsys.readouterr().out.splitlines())
        return {name: text.strip() for name, _, text in lines}

    by_default = lines_of()
    assert by_default["above bound"].startswith("latency (92 %")
    assert "less than these defaults, which are those of TCP" in by_default["what helps"]
    rdma = {"latency_seconds": 1e-5, "inside_latency_seconds": 5e-6}
    assert lines_of(**rdma)["what helps"].startswith("a larger tensor, or several in one plan: a message between hosts")
    slow_inside = lines_of(inside="50 GB/s", shape="8192,8192", **rdma)
    assert slow_inside["above bound"].startswith("rates inside hosts (")
    assert "needs less twice in a host" in slow_inside["what helps"]
    waiting = lines_of("broadcast", "8192,8192", latency_seconds=1e-9, inside_latency_seconds=1e-9)
    assert waiting["above bound"].startswith("messages that wait for each other (")
    assert "--strategy all" in waiting["what helps"]
    assert waiting["faster"].startswith("without --strategy: multicast takes ")
    assert "above bound" not in lines_of(shape="32768,32768", **rdma)
    one_host = lines_of(hosts=[{"devices": 32, "nics": "8 x 400 Gbit/s"}], **rdma)
    assert one_host["above bound"].startswith("latency (") and "with latency" not in one_host


def test_axes_can_be_named(capsys):
    named = ["plan", "--shape", "96,64", "--src-mesh", "dp=2,tp=2", "--src", "(dp, -)", "--dst-mesh", "x=3, y=2"]
    assert main([*named, "--dst", "(x, y)"]) == 0
    shown = capsys.readouterr().out
    numbered = (GOLDENS / "plan_2x2_3x2.txt").read_text()
    assert "from (dp) on Mesh(dp=2, tp=2; ranks 0-3) to (x, y) on Mesh(x=3, y=2; ranks 4-9)" in shown
    assert shown.split("\n0: ")[1] == numbered.split("\n0: ")[1]
    assert main([*named, "--dst", "(x, tp)"]) == 2
    assert "names axis 'tp', but Mesh(x=3, y=2; ranks 4-9) has axes x, y" in capsys.readouterr().err


def test_info_lists_available_backends(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "torch (Gloo, CPU tensors)" in shown
    assert ("ray (actors, Gloo)" in shown) == (importlib.util.find_spec("ray") is not None)


def test_json_has_the_documented_keys(capsys):
    assert main([*PLAN, *TO, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) >= {
        "tensors", "host_of_rank", "strategy", "plan_hash", "lower_bound_seconds", "predicted_seconds", "is_estimate",
        "latency_bound_seconds", "unmerged_bound_seconds", "messages",
    }  # fmt: skip
    assert data["predicted_seconds"] == pytest.approx(0.873068, abs=1e-5)
    assert data["lower_bound_seconds"] == pytest.approx(0.8589934592)
    assert data["lower_bound_seconds"] < data["latency_bound_seconds"] <= data["unmerged_bound_seconds"] < 0.873
    assert data["host_of_rank"] == [rank // 4 for rank in range(20)]
    assert data["tensors"][0]["src"]["ranks"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert data["tensors"][0]["src"]["spec"] == "S0 R R"
    plan = plan_from_json(data)
    assert plan.plan_hash == data["plan_hash"]
    earlier = set()
    for number, message in enumerate(data["messages"]):
        assert set(message) == {"id", "tensor", "sender", "receiver", "start", "stop", "after", "window"}
        assert message["id"] == number
        assert earlier.issuperset(message["after"])
        earlier.add(number)


def test_preset_can_replace_a_topology_file(capsys):
    assert main([*PLAN, *TO, "--topology", "dgx_h100", "--strategy", "broadcast"]) == 0
    assert '"inside": 450000000000.0' in capsys.readouterr().out
    assert main([*PLAN, *TO, "--topology", "dgx_h101"]) == 2


def test_rank_option_prints_only_its_messages(capsys):
    assert main([*PLAN, *TO, "--format", "json", "--rank", "13"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["messages"]
    assert all(13 in (message["sender"], message["receiver"]) for message in data["messages"])
    assert main([*PLAN, *TO, "--rank", "13"]) == 0
    assert " -> 13" in capsys.readouterr().out


def test_plans_with_both_meshes_on_the_same_ranks_copy_locally(capsys):
    assert main([*PLAN, "--dst-mesh", "2x4", "--dst", "R S0 R", "--dst-first-rank", "0", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lower_bound_seconds"] == pytest.approx(2**29 / 1.25e9)
    assert data["host_of_rank"] == [0] * 4 + [1] * 4
    assert any(message["sender"] == message["receiver"] for message in data["messages"])


def test_default_hosts_follow_the_meshes():
    assert default_topology(Mesh.of("2x2x4"), Mesh.of("4", first_rank=16)).host_of_rank == (
        *([0] * 4), *([1] * 4), *([2] * 4), *([3] * 4), *([4] * 4),
    )  # fmt: skip
    assert default_topology(Mesh.of("2x4"), Mesh.of("4x2", first_rank=4)).host_of_rank == (
        *([0] * 4), *([1] * 4), 2, 2, 3, 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "4,x", "--src-mesh", "2", "--dst-mesh", "2"], "ArgumentError: shape '4,x'"),
        (["--shape", "4", "--src-mesh", "2", "--src", "S3", "--dst-mesh", "2"], "LayoutError: spec 'S3' names axis 3"),
        (["--shape", "4", "--src-mesh", "0", "--dst-mesh", "2"], "MeshError"),
        (["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--strategy", "x"], "no strategy 'x'"),
        (["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--strategy", "multcast"], "did you mean 'multicast'?"),
        (["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--topology", "dgxh100"], "did you mean 'dgx_h100'?"),
        (["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--dtype", "flaot32"], "did you mean 'float32'?"),
        (["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--compression", "int8"], "did you mean 'int8x128'?"),
        (
            ["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--rank", "9"],
            "rank 9 is not in the plan, whose ranks are 0-3",
        ),
        (["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--topology", "/nonexistent"], "TopologyError"),
        (
            ["--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--dst-first-rank", "-1"],
            "first_rank is -1; it must be an integer from 0",
        ),
    ],
)
def test_errors_of_bad_arguments_are_one_line(arguments, text, capsys):
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("reshard: ")
    assert text in err
    assert err.count("\n") == 1


def test_unknown_command_names_a_close_one(capsys):
    with pytest.raises(SystemExit):
        main(["plna"])
    assert "there is no command 'plna'; commands are demo, doctor" in (err := capsys.readouterr().err)
    assert "did you mean 'plan'?" in err


def test_layouts_may_be_placements_of_torch(capsys):
    shape = ["plan", "--shape", "64,64", "--src-mesh", "2x4", "--dst-mesh", "2x4", "--format", "summary"]
    assert main([*shape, "--src", "Shard(0), Shard(-1)", "--dst", "Replicate(), Shard(0)"]) == 0
    placements = capsys.readouterr().out
    assert main([*shape, "--src", "S0 S1", "--dst", "S1 R"]) == 0
    assert capsys.readouterr().out == placements


def test_too_many_messages_require_a_rank(capsys, monkeypatch):
    big = ["plan", "--shape", "64,64,2", "--src-mesh", "16x4", "--src", "R S01 R", "--dst-mesh", "16x4"]
    big += ["--dst", "S01 R R", "--strategy", "send_recv", "--format", "json"]
    assert MAX_PRINTED_MESSAGES == 1_000_000
    monkeypatch.setattr("reshard.cli.commands.plan_command.MAX_PRINTED_MESSAGES", 4095)
    assert main(big) == 2
    assert "4096 messages; select one rank with --rank" in capsys.readouterr().err
    monkeypatch.setattr("reshard.cli.commands.plan_command.MAX_PRINTED_MESSAGES", 4096)
    assert main(big) == 0


def test_info_lists_transports_and_no_command_prints_help(capsys):
    assert main(["info"]) == 0
    assert "local (NumPy or torch" in capsys.readouterr().out
    assert main([]) == 2
    assert "A mesh is a grid of ranks" in capsys.readouterr().out


def test_all_strategies_are_printed_as_a_table(capsys):
    arguments = ["plan", "--shape", "64,64", "--src-mesh", "2x2", "--src", "S0 R", "--dst-mesh", "1x2", "--dst", "R S1"]
    assert main([*arguments, "--strategy", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lower bound  1.31072e-05 s: host 2 must receive 16 KiB and can receive 1.25 GB/s"
    assert [line.split()[0] for line in lines[2:]] == ["auto", *STRATEGIES, "latency:"]
    assert lines[2].split()[:2] == ["auto", "(send_recv)"]
    assert lines[2].split()[-2:] == ["94", "%"]  # 200 us of latency, and 13 us of bytes
    assert lines[-1].startswith("latency: its share of the predicted time; the bound ignores latency")
    assert main([*arguments, "--strategy", "all", "--format", "json"]) == 2
    assert "--strategy all prints a table" in capsys.readouterr().err


def test_long_argument_is_truncated_in_the_error(capsys):
    assert main(["plan", "--shape", "8" * 5000 + "x", "--src-mesh", "2", "--dst-mesh", "2"]) == 2
    assert len(capsys.readouterr().err) < 2100


def test_default_hosts_of_a_large_mesh_are_found_quickly():
    begun = time.perf_counter()
    assert default_topology(Mesh.of("1x4"), Mesh.of("65536x2", first_rank=4)).num_hosts == 65537
    assert time.perf_counter() - begun < 10


@pytest.mark.parametrize("name", ["dgx", "dgx_a100" * 40])
def test_unknown_topology_error_lists_the_presets(name, capsys):
    assert main(["plan", "--shape", "4", "--src-mesh", "2", "--dst-mesh", "2", "--topology", name]) == 2
    assert "presets are p3.8xlarge, dgx_a100" in capsys.readouterr().err


def test_demo_on_gpus_needs_a_gpu_for_each_rank_or_leave_to_share_them(capsys, monkeypatch):
    for num_gpus, options, text in (
        (0, [], "--device cuda needs 4 GPUs on this machine, which has 0\n"),
        (1, [], "--device cuda needs 4 GPUs on this machine, which has 1; with --share-gpus, ranks share them"),
        (0, ["--share-gpus"], "--device cuda needs 1 GPU on this machine, which has 0\n"),
    ):
        monkeypatch.setattr(sharing, "count_gpus", lambda num_gpus=num_gpus: num_gpus)
        assert main(["demo", "--device", "cuda", *options]) == 2
        assert text in capsys.readouterr().err
    assert main(["demo", "--share-gpus"]) == 2
    assert "--share-gpus needs --device cuda" in capsys.readouterr().err


@pytest.mark.nightly
def test_cases_of_the_demo_on_gpus_move_every_element(capsys):
    assert demo_transfers._run(gpu_cases(64)) == 0
    assert "18 of 18 runs moved every element correctly" in capsys.readouterr().out


def test_ranks_that_share_gpus_are_different_hosts_to_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "eth0"})
    for rank in range(3):
        assert share_gpus(rank) == chosen[-1]
        assert os.environ["NCCL_HOSTID"].endswith(str(rank))
    assert [device.index for device in chosen] == [0, 1, 0]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0" and os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ArgumentError, match="no GPU"):
        share_gpus(0)


def test_a_warning_is_a_line_without_code(monkeypatch, capsys):
    def show(_):
        print(warnings.formatwarning("the profile is noisy", UserWarning, "search.py", 3), end="")
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr(info_command, "run", show)
    assert main(["info"]) == 0
    assert capsys.readouterr().out == "reshard: warning: the profile is noisy\n"
    assert warnings.formatwarning is before
