"""The HTML page of a plan: what it says is what the plan does, whatever the size, and browsers show it."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from reshard.cli.commands.plan_command import default_topology
from reshard.cli.main import main
from reshard.cli.plan_page.html_report import plan_to_html
from reshard.cli.plan_page.plan_times import sample_progress
from reshard.cli.plan_page.plan_trees import draw_tree
from reshard.cost import simulate
from reshard.plan import HostBoxes
from reshard.planner import make_plan, plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import Host, Link, Topology
from tests.goldens import make_pictures
from tests.support.browser import WIDTHS, Browser, find_browser

PLAN = ["plan", "--shape", "1024,1024,512", "--dtype", "float32", "--src-mesh", "2x4", "--src", "S0 R R"]
TO = ["--dst-mesh", "3x4", "--dst", "S0 R R"]


def _plan(src_mesh, src, dst_mesh, dst, first=None, shape=(1024, 1024), topology=None, **options):
    mesh = Mesh.of(src_mesh)
    layouts = Layout(mesh, src), Layout(Mesh.of(dst_mesh, first_rank=mesh.size if first is None else first), dst)
    topology = topology or default_topology(layouts[0].mesh, layouts[1].mesh)
    return make_plan(*layouts, shape, "float32", topology=topology, **options)


def _in_pods(order):
    """Eight hosts of four ranks in three pods."""
    hosts = tuple(Host((Link.of(1.25e9),), pod) for pod in order)
    return Topology(tuple(rank // 4 for rank in range(32)), hosts, pods=(Link.of(1e9),) * 3)


#: Plans of all kinds of drawings: columns and rings, of hosts and of groups, with and without pods.
PLANS = {
    "three": lambda: _plan("2", "S0", "1", "R"),
    "trees": lambda: _plan("2x4", "S0 R R", "3x4", "R R", shape=(256, 64)),
    "ring": lambda: _plan("8x8", "S0 S1", "8x8", "S1 S0", first=0),
    "groups": lambda: _plan("24x2", "S0 S1", "40x2", "R S1"),
    "ring of groups": lambda: _plan("40x2", "S0 S1", "40x2", "S1 S0", first=0),
    "pods": lambda: _plan("4x4", "S0 S1", "4x4", "S1 S0", topology=_in_pods([0, 1, 2, 0, 1, 2, 0, 1])),
    "ring of pods": lambda: _plan("8x4", "S0 S1", "8x4", "S1 S0", first=0, topology=_in_pods([0, 0, 0, 1, 1, 1, 2, 2])),
    "one host": lambda: _plan("1x4", "S0 S1", "1x4", "S1 S0", first=0),
}


@pytest.mark.parametrize("name", PLANS)
def test_arrows_carry_the_bytes_of_the_plan(name):
    plan = PLANS[name]()
    boxes = HostBoxes.of(plan)
    traffic = boxes.find_traffic()
    across, inside, _ = plan.bytes_moved()
    assert (traffic.nbytes.sum(), traffic.inside.sum()) == (across, inside)
    cells = [cell for box in boxes.all for cell in box.cells]
    assert len(cells) == len(plan.ranks) if all(box.is_host for box in boxes.all) else plan.topology.num_hosts
    if across:
        progress = sample_progress(boxes, traffic, simulate(plan))
        assert (np.diff(progress, axis=1) >= -1e-6).all()
        assert progress[:, 0].sum() == 0 and np.allclose(progress[:, -1], traffic.nbytes)
    page = plan_to_html(plan)
    assert (
        "NaN" not in page
        and "nan" not in page
        and set(re.findall("https?:[^ '\"]*", page)) <= {"http://www.w3.org/2000/svg"}
    )
    found = [(int(i), float(w)) for i, w in re.findall(r"data-i='(\d+)'.*?stroke-width='([\d.]+)'", page, flags=re.S)]
    by_bytes = sorted(zip(traffic.nbytes.tolist(), [width for _, width in sorted(found)], strict=True))
    assert [width for _, width in by_bytes] == sorted(width for _, width in by_bytes)


def test_the_page_names_the_bottleneck():
    page = plan_to_html(PLANS["three"]())
    assert (
        "<b class='hot'>Host 1 must receive 4 MiB and can receive 1.25 GB/s</b>: no plan is faster than 3.36 ms; "
        in page
    )
    assert "4 MiB from 2 ranks on 1 host to 1 rank on 1 host</h1>" in page and "What would help" not in page
    plan = _plan("2x4", "S0 R R", "3x4", "S0 R R", shape=(1024, 1024, 512), strategy="send_recv")
    page = plan_to_html(plan)
    assert "<b class='hot'>Host 0 sends 4 GiB at 1.25 GB/s</b>, which needs 3.44 s: this plan takes" in page
    assert "No plan is faster than 859 ms, because host 0 holds 1 GiB that no other host has" in page
    assert "Beyond the bound: messages that wait for each other (7" in page and "What would help: " in page
    boxes = HostBoxes.of(PLANS["pods"]())
    marked = boxes.find_traffic(("pod 1 down",))
    pods = [box.pod for box in boxes.all]
    assert [pods[b] == 1 != pods[a] for a, b in zip(marked.sender, marked.receiver, strict=True)] == (
        marked.is_marked.tolist()
    )


def test_html_draws_what_the_command_plans(capsys, monkeypatch):
    assert main([*PLAN, *TO, "--strategy", "broadcast", "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert page.count("<svg") == page.count("</svg>") > 2
    assert "host 4 in" in page and "Host 0 holds 1 GiB that no other host has" in page
    parts = json.loads(re.search(r"id='progress'>(.*?)</script>", page)[1])["parts"]
    assert all(row[0] == 0 and row[-1] == 1000 for row in parts)
    monkeypatch.setattr("reshard.cost.prediction.MAX_OPERATIONS", 1)
    assert main([*PLAN, *TO, "--strategy", "send_recv", "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert "too many to simulate" in page and "estimated, not simulated" in page and "Times</h2>" not in page
    assert main([*PLAN, *TO, "--format", "html", "--rank", "1"]) == 2
    assert "omit --rank" in capsys.readouterr().err


def test_names_of_users_are_escaped():
    mesh, name = Mesh.of("2"), "<script>alert(1)</script><b title='"
    spec = TensorSpec((8, 8), "float32", Layout(mesh, "S0"), Layout(Mesh.of("2", first_rank=2)), name=name)
    plan = plan_tensors([spec], topology=Topology.uniform([0, 0, 1, 1]))
    for page in (plan_to_html(plan), plan._repr_html_()):
        assert "&lt;script&gt;" in page and "<script>alert" not in page and "<b title" not in page


def test_trees_of_hosts_that_exchange_replicas():
    """Two hosts send a region to each other, so neither of them is a source."""
    assert draw_tree([(0, 1), (1, 0)]).count("<circle") == 2
    assert draw_tree([(0, 1), (2, 3), (3, 2)]).count("<circle") == 4


@pytest.mark.integration
def test_a_page_of_1024_devices_a_side_is_small_and_soon_drawn():
    plan = _plan("128x8", "S0 S1", "128x8", "R S1", shape=(16384, 16384))
    plan_to_html(PLANS["ring"]())  # imports what the first page needs
    begun = time.process_time()
    page = plan_to_html(plan)
    assert time.process_time() - begun < 2
    assert len(page) < 2e6 and len(plan._repr_html_()) < 2e5


@pytest.mark.integration
@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium or Chrome to show pages in")
def test_browsers_show_pages_at_every_width(tmp_path):
    with Browser(find_browser()) as browser:
        for name, make in PLANS.items():
            path = tmp_path / f"{name}.html"
            path.write_text(plan_to_html(make()))
            for width in WIDTHS:
                assert browser.open(path, width, is_dark=width == 768) == [], (name, width)
        path.write_text(plan_to_html(PLANS["trees"]()))
        assert browser.open(path, 1280) == []
        shown = browser.evaluate("""(() => {
          const slider = document.querySelector('input'), arrows = () => document.querySelectorAll('.arrow.on').length;
          const found = [arrows()];
          for (const value of [500, 1000]) {
            slider.value = value; slider.dispatchEvent(new Event('input'));
            found.push(arrows(), document.querySelector('output').value, document.getElementById('now').style.left);
          }
          return found;
        })()""")
        assert shown[0] == shown[4] == 0 < shown[1] and "% of the bytes between hosts have arrived" in shown[2]
        assert float(shown[3].removesuffix("%")) == pytest.approx(float(shown[6].removesuffix("%")) / 2, abs=0.1)


@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium or Chrome to show pages in")
@pytest.mark.integration
def test_the_check_of_pages_finds_faults(tmp_path):
    path = tmp_path / "bad.html"
    faults = {
        "<div style='width: 2000px'>x</div>": "overflow: page",
        "<script>throw new Error('planted')</script>": "exception",
        "<img src='missing.png'>": "error",
        "<script>console.error('planted')</script>": "console",
        "<img src='http://127.0.0.1:9/x.png'>": "request",
    }
    with Browser(find_browser()) as browser:
        for fault, text in faults.items():
            path.write_text(f"<!doctype html><link rel='icon' href='data:,'><body>{fault}")
            assert any(found.startswith(text) for found in browser.open(path, 375)), text


def test_the_picture_of_the_docs_is_what_the_page_draws():
    assert make_pictures.PATH.read_text() == make_pictures.picture()
