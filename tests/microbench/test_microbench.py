"""Arithmetic of the benchmark: calibration tests, records, tables and the command line."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from microbench.__main__ import CASES, main
from microbench.cases.rows import CLUSTERS, read_cluster
from microbench.emulation.link_commands import cluster_link_commands, etc_hosts, host_link_commands, nominal
from microbench.harness.benchmark_rank import _merge
from microbench.harness.calibrate import deviations, mean_topology, measured_topology, plan_tests
from microbench.harness.plots import draw_summary
from microbench.harness.steal_time import Lap, Laps, RetryBudget, TimeBudget
from microbench.harness.suite import make_records, plan_row
from microbench.planner import large
from microbench.planner.planning_time import time_planning
from microbench.training_plans.accuracy import CASES as CASES_OF_ACCURACY, draw_cases
from microbench.training_plans.by_hand import parse_stages
from microbench.transfers import hosts
from microbench.transfers.report import format_suites, format_table, ratios_of_contenders
from reshard.topology.topology import Link
from reshard.topology.topology_files import read_topology, topology_from_json


@pytest.mark.parametrize("name", sorted(path.stem for path in CLUSTERS.glob("*.json")))
def test_calibration_fills_every_port_once(name):
    topology = read_cluster(name)
    wanted = {
        (kind, host, nic)
        for host in range(topology.num_hosts)
        for nic in range(len(topology.host(host).nics))
        for kind in ("egress", "ingress")
    } | {(kind, pod, 0) for pod in range(len(topology.pods)) for kind in ("up", "down")}
    filled = []
    for tests in plan_tests(topology):
        used = [port for test in tests for port in test.uses]
        assert len(used) == len(set(used))
        for test in tests:
            filled += test.fills
            total = sum(rate for *_, rate in test.flows)
            for kind, place, nic in test.fills:
                port = topology.pods[place] if kind in ("up", "down") else topology.host(place).nics[nic]
                rate = port.egress_bytes_per_second if kind in ("egress", "up") else port.ingress_bytes_per_second
                assert total == pytest.approx(rate)
            for sender, receiver, rate in test.flows:
                assert topology.host_of_rank[sender] != topology.host_of_rank[receiver]
                assert rate <= topology.nic(sender).egress_bytes_per_second
                assert rate <= topology.nic(receiver).ingress_bytes_per_second
    assert sorted(filled) == sorted(wanted)


def test_measured_rates_replace_described_rates():
    topology = read_cluster("pods")
    found = {
        "rates": {("egress", 1, 0): 4e7, ("down", 1, 0): 3e7},
        "inside": 1e9,
        "inside_total": 3e9,
        "latency": 1e-4,
        "inside_latency": None,
        "start": 0.008,
    }
    measured = measured_topology(topology, found)
    assert measured.host(1).nics[0] == Link(4e7, 5e7)
    assert measured.host(0).nics[0] == Link.of(5e7)
    assert measured.pods[1] == Link(5e7, 3e7)
    assert measured.latency_seconds == 1e-4
    assert (measured.inside_bytes_per_second, measured.inside_total_bytes_per_second) == (1e9, 3e9)
    assert measured.start_seconds == 0.008
    shaped = measured_topology(nominal(topology), found)
    assert (shaped.send_buffer_bytes, shaped.burst_bytes) == (262144, 125358)
    slow = nominal(topology_from_json({"hosts": [{"count": 2, "devices": 1, "nics": ["80 Mbit/s"]}]}))
    assert (slow.send_buffer_bytes, slow.burst_bytes) == (65536, 31340)
    off = deviations(measured, topology)
    assert {name for name, part in off.items() if part} == {("egress", 1, 0), ("down", 1, 0)}
    assert off["egress", 1, 0] == pytest.approx(-0.2)
    assert mean_topology(measured, topology).host(1).nics[0].egress_bytes_per_second == 4.5e7


def _laps(wanted, *laps):
    return Laps(wanted, done=[Lap(*lap) for lap in laps])


def test_disturbed_laps_are_repeated_and_dropped():
    laps = Laps(2)
    laps.done.append(Lap(1.0, 0.5, 0.3))
    assert laps.needs_more()
    laps.done += [Lap(0.5, 0.5, 0.0), Lap(0.6, 0.5, 0.005)]
    assert not laps.needs_more()  # two are undisturbed
    assert [lap.seconds for lap in laps.kept()] == [0.5, 0.6]
    noisy = Laps(2, max_tries=2, done=[Lap(float(n), 0.5, stolen) for n, stolen in enumerate((0.4, 0.2, 0.3, 0.5))])
    assert not noisy.needs_more()  # reached max_tries
    assert [lap.seconds for lap in noisy.kept()] == [1.0, 2.0]  # the least disturbed


def _records():
    from microbench.cases.rows import all_rows

    row = next(row for row in all_rows(0, 0) if row.name == "R S0 R on 2x4 -> S0 R R on 2x4")
    one = plan_row(row, "0", ("broadcast_greedy", "broadcast_search", "send_recv", "gloo broadcast"), 2)
    links = replace(nominal(read_cluster("five")), latency_seconds=0.0, inside_latency_seconds=0.0, start_seconds=0.01)
    gathered = [
        {
            "broadcast_greedy": {
                "laps": _laps(3, (0.29, 0.5, 0.0), (9.9, 0.9, 0.2), (0.28, 0.4, 0.01), (0.30 + rank / 100, 0.45, 0.0)),
                "wrong": 0,
                "first_use_seconds": 0.5,
            },
            "send_recv": {
                "laps": _laps(3, (1.1, 0.1, 0.5), (1.2, 0.1, 0.4), (1.3, 0.1, 0.0), (1.4, 0.1, 0.3)),
                "wrong": rank,
                "first_use_seconds": 1.5,
            },
            "gloo broadcast": {"refused": "both layouts must be replicated"}
            if rank
            else {"laps": _laps(3), "wrong": 0},
        }
        for rank in range(2)
    ]
    return [
        {
            "kind": "run",
            "command": "python -m microbench",
            "date": "today",
            "machine": "m",
            "load": 0.0,
            "versions": {"a": "1"},
        },
        *make_records(one, _merge(gathered), {}, links),
    ]


def test_rows_get_shares_of_the_spare_time():
    budget = TimeBudget(100.0, 50.0)
    first = budget.spare_seconds(5.0)
    assert 0.39 * 47 < first < 0.4 * 47  # four times a tenth of the time left after the overhead
    assert 47 < budget.spare_seconds(45.0) < 52.5  # the last row gets all of it
    assert budget.spare_seconds(0.0) == 0.0
    assert TimeBudget(10.0, 50.0).spare_seconds(5.0) == 0.0
    retries = RetryBudget(2.0)
    retries.spend(1.5)
    assert not retries.is_spent
    retries.spend(0.5)
    assert retries.is_spent


def test_records_and_tables_have_the_measured_values_of_a_row():
    records = _records()
    by_name = {record["contender"]: record for record in records[1:]}
    ours = by_name["broadcast_greedy"]
    assert ours["seconds"] == [0.29, 0.28, 0.31]  # of the slowest rank
    assert ours["bound_seconds"] == pytest.approx(2**25 / (1.25e8 * 1448 / 1514))
    assert ours["ratio"] == pytest.approx(0.29 / ours["bound_seconds"])
    assert ours["busy"] == 0.45
    burst = 125358 / 2**25  # part that passes before the rate limit applies
    start = 0.01 * 16 / 20 / ours["bound_seconds"]  # 16 of the 20 ranks take part
    assert ours["predicted_ratio"] == pytest.approx(1 - burst + start, abs=1e-6)
    assert by_name["broadcast_search"]["same_as"] == "broadcast_greedy"
    assert by_name["send_recv"]["wrong"] == 1
    assert (ours["disturbed"], ours["repeated"]) == (0, 1)
    assert (by_name["send_recv"]["disturbed"], by_name["send_recv"]["repeated"]) == (2, 1)
    assert by_name["gloo broadcast"]["refused"].startswith("both")
    table = format_table(records)
    assert "1 WRONG" in table
    assert "2 of 3 turns DISTURBED" in table
    assert "does not apply: both layouts" in table
    assert "the same plan as broadcast_greedy" in table
    short = format_suites(records, ("broadcast_greedy", "gloo broadcast"))
    assert short.splitlines()[2:] == ["| study | 1 | 1.03 (1.03) | - |"]
    brief = {**ours, "row": "brief", "bound_seconds": 0.09, "ratio": 4.0}
    both = [*records, {**ours, "row": "another", "ratio": 4 * ours["ratio"]}, brief]
    twice = format_suites(both, ("broadcast_greedy", "send_recv")).splitlines()[2:]
    assert twice[0].startswith("| study | 2 | 2.07 (4.13) | ")
    assert twice[0].endswith(" of 1) |")
    assert twice[1] == "| under 0.1 s, all suites | 1 | 4.00 (4.00) | - |"


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar")  # matplotlib on NumPy 1.26
def test_summary_plot_names_contenders_and_their_means(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'reshard[bench]'")
    draw_summary(ratios_of_contenders(_records()), tmp_path / "summary.svg")
    svg = (tmp_path / "summary.svg").read_text()
    assert ">each receiver fetches its part<" in svg and "in 1 rows, worst 4.6<" in svg


def test_interface_names_are_unique_in_every_cluster():
    for path in CLUSTERS.glob("*.json"):
        topology = read_cluster(path.stem)
        commands = cluster_link_commands(topology, list(range(100, 100 + topology.num_hosts)))
        made = [line.split()[2] for line in commands.ip if line.startswith("link add")]
        assert len(made) == len(set(made))
        assert max(map(len, made)) <= 15  # kernel limit of interface names
        num_nics = sum(len(topology.host(host).nics) for host in range(topology.num_hosts))
        at_host = host_link_commands(topology, 0, [7] * (len(topology.host(0).nics) - 1))
        shaped = [sum(" root " in line for line in some.tc) for some in (commands, at_host)]
        assert shaped == [num_nics + 2 * len(topology.pods), 1]
        assert etc_hosts(topology).count("host0\n") >= 2


@pytest.mark.integration
def test_list_prints_rows_and_rejects_unknown_ones(capsys):
    assert main(["hosts", "--list"]) == 0
    output = capsys.readouterr().out
    assert "study         R S0 R on 2x4 -> R R S0 on 2x4 " in output
    assert "about" in output
    for wrong in (["--suite", "no"], ["--contender", "no"], ["--row", "no such row"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            main(["hosts", "--list", *wrong])


def test_outputs_are_compared_bit_by_bit():
    from microbench.harness.benchmark_rank import _same

    a = torch.tensor([1.0, float("nan")])
    assert _same(a, a.clone())
    assert not _same(a, torch.tensor([1.0, 2.0]))


@pytest.mark.slow
def test_rows_run_under_torchrun(tmp_path):
    out = tmp_path / "out.jsonl"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "-m", "microbench", "hosts",
         "--suite", "sweep", "--row", "64 KiB", "--repeats", "2", "--out", str(out)],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["kind"] for record in records} == {"run", "cluster", "row"}
    assert all(not record.get("wrong") for record in records)


def test_plans_above_their_limits_are_named():
    fast, slow = {"cpu": 1.9, "mib": 100}, {"cpu": 2.1, "mib": 100}
    assert not large.exceeds_limit("swap/1024", fast) and large.exceeds_limit("swap/1024", slow)
    assert not large.exceeds_limit("swap/4096/dgx_h100", slow)
    assert large.exceeds_limit("swap/16384", {"cpu": 0.1, "mib": 4097})
    assert large.exceeds_limit("300 tensors, 128 to 128", {"error": "exit status 1"})
    assert not large.exceeds_limit("pods", slow)
    assert large.MODEL_LIMITS.keys() < large.MODELS.keys()


def test_planning_time_grows_with_the_ranks():
    seconds, plan = time_planning(16, "S0 R", "R S1", "", 1)
    assert 0 < seconds < 10
    assert plan.num_messages > 16
    assert large.growth([2, 4, 8], [3.0, 6.0, 12.0]) == pytest.approx(1.0)
    assert large.growth([2, 4, 8], [1.0, 4.0, 16.0]) == pytest.approx(2.0)


@pytest.mark.slow
def test_calibrate_writes_a_topology_file(tmp_path):
    out = tmp_path / "cluster.json"
    given = tmp_path / "given.yaml"
    given.write_text("hosts: [{devices: 2, nics: [10 Gbit/s], count: 2}]\n")
    job = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "microbench",
        "hosts",
    ]
    measure = functools.partial(
        subprocess.run, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2]
    )
    run = measure([*job, "--calibrate", str(out)])
    assert "all 4 ranks are on one host" in run.stderr
    assert not out.exists()
    run = measure([*job, "--calibrate", str(out), "--topology", str(given)])
    assert run.returncode == 0, run.stderr[-2000:]
    assert "4 ranks on 2 hosts" in run.stderr
    topology = read_topology(out)
    assert topology.host_of_rank == (0, 0, 1, 1)
    assert topology.latency_seconds > 0
    assert topology.nic(0).egress_bytes_per_second > 1e6
    assert topology.inside_total_bytes_per_second > 1e6


def test_calibrate_without_torchrun_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["hosts", "--calibrate", str(tmp_path / "cluster.json")])
    assert "--calibrate need torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1 Gbit/s"], "--rate needs torchrun"),
        (["--out", "."], "--out .: is a folder"),
        (["--minutes", "-1"], "argument --minutes: must be 0 to 10000, not -1"),
        (["--row", "nowhere: nothing"], "no row matches 'nowhere: nothing'"),
    ],
)
def test_command_line_errors_name_the_argument(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["hosts", *arguments])
    assert message in capsys.readouterr().err


def test_row_option_matches_suite_and_name(capsys):
    assert main(["hosts", "--list", "--row", "unequal NICs: replicated -> S0", "--contender", "auto"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3  # machine, row and total


def test_interrupt_prints_one_line(capsys, monkeypatch, tmp_path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hosts, "run_cluster", interrupted)
    monkeypatch.setattr(hosts, "why_unsupported", lambda: None)
    out = tmp_path / "out.jsonl"
    assert (
        main(["hosts", "--row", "study: S0 R R on 2x4 -> S0 R R on 2x4", "--contender", "auto", "--out", str(out)])
        == 130
    )
    assert f"{out} has the results of the completed clusters\nhosts: interrupted" in capsys.readouterr().err
    assert json.loads(out.read_text())["kind"] == "run"


def test_every_case_starts_and_is_in_the_table_of_the_guide(capsys):
    page = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
    table = page.partition("```bash")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.M)) == sorted(CASES)
    for name in CASES:
        if name in ("gpu_codecs", "ray_actors"):  # import optional packages
            continue
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: python -m microbench {name}" in capsys.readouterr().out


def test_fresh_training_plans_have_all_layers_and_devices():
    cases = draw_cases(7)
    assert cases == draw_cases(7) != draw_cases(8)
    assert len(set(cases)) == 9 and set(cases) & set(CASES_OF_ACCURACY) == {"4:2, 4:2"}
    assert any("@" in text for seed in range(5) for text in draw_cases(seed))
    for text in cases:
        stages = parse_stages(text)
        assert stages[-1].end_layer == 8 and max(stage.end_rank for stage in stages) == 4
