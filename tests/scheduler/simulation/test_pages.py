"""Pages and notebook outputs of layouts, schedules and training plans: what they say, their size, and how they look."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from reshard.drawing import draw_page
from reshard.errors import ArgumentError
from reshard.scheduler import (
    Pipeline,
    interleaved_1f1b,
    one_f_one_b,
    simulate_schedule,
    to_html,
    zb_v,
)
from reshard.scheduler.autoparallel import Cluster, LayerGraph, LayerProfile, search
from reshard.scheduler.ir.schedule_drawing import MAX_ACTIONS, draw_schedule
from reshard.sharding import Layout, Mesh
from reshard.topology import Topology
from tests.support.browser import WIDTHS, Browser, find_browser


def _pipeline(num_stages):
    return Pipeline.of_costs([1.0] * num_stages, [2.0] * num_stages, [0.1] * (num_stages - 1))


def _found():
    graph = LayerGraph.transformer(layers=4, hidden=64, heads=4, sequence=16, vocabulary=100)
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    cluster = Cluster(Topology.uniform([0, 0, 1, 1]), 1e9)
    return search(graph, cluster, profile, num_samples=8, fixed={"num_microbatches": 4})


def _spans(page):
    """``(left, width)`` of each action, in per cent, by row."""
    rows = re.findall(r"<div class='row'><b>\d+</b><div>(.*?)</div>", page)
    return [
        [(float(a), float(b)) for a, b in re.findall(r"left: ([\d.]+)%; width: ([\d.]+)%[^>]*title='\d+[FBIW]\d", row)]
        for row in rows
    ]


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(_pipeline(4), 8), interleaved_1f1b(_pipeline(8), 8, 4), zb_v(_pipeline(8), 8)],
    ids=lambda schedule: schedule.name,
)
def test_a_schedule_draws_every_action_once_and_in_order(schedule):
    rows = _spans(draw_schedule(schedule))
    actions = [[a for a in row if not a.kind.is_transfer] for row in schedule.rank_actions]
    assert list(map(len, rows)) == list(map(len, actions))
    for row in rows:
        assert all(a + width <= b + 0.02 for (a, width), (b, _) in itertools.pairwise(row))
    assert max(a + width for row in rows for a, width in row) == pytest.approx(100, abs=0.02)


def test_one_forward_one_backward_takes_the_units_of_its_formula():
    rows = _spans(draw_schedule(one_f_one_b(_pipeline(4), 8)))
    unit = rows[0][0][1]
    assert 100 / unit == pytest.approx((8 + 4 - 1) * 3, rel=1e-3)  # (microbatches + stages - 1) forwards and backwards


def test_a_long_schedule_is_cut_and_says_so():
    text = draw_schedule(one_f_one_b(_pipeline(8), 128))
    assert "Drawn are the first 62 of 128 microbatches." in text
    assert text.count("<i style") <= MAX_ACTIONS and len(text) < 2e5


def test_a_page_of_a_schedule_shows_memory_beside_its_limit():
    pipeline = _pipeline(4)
    schedule = one_f_one_b(pipeline, 8)
    timeline = simulate_schedule(schedule, pipeline)
    page = to_html(schedule, timeline, pipeline, activation_limit_bytes=[8, 8, 8, 0.5])
    assert "The fullest is pp rank 3: 1 bytes of 0.5 bytes." in page
    assert page.count("title='peak ") == 4 and page.count("border-color: var(--hot)") == 1
    assert "waits for a transfer" in page
    with pytest.raises(ArgumentError, match="activation_limit_bytes needs pipeline"):
        to_html(schedule, timeline, activation_limit_bytes=8)
    page = to_html(replace(schedule, name="<b>x</b>"), timeline)
    assert "<b>x</b>" not in page and "&lt;b&gt;x&lt;/b&gt;" in page


def test_the_result_of_a_search_shows_each_stage_beside_its_limits():
    found = _found()
    for page in (found.to_html(), found._repr_html_()):
        assert page.count("<div class='stage'>") == len(found.stages)
        assert page.count("class='bar'") == page.count("<em ") == 2 * len(found.stages)
        for number, stage in enumerate(found.stages):
            assert f"<b>stage {number}</b>: {stage}" in page
    assert len(found._repr_html_()) < 2e5
    names = tuple(tuple("<b>x</b>" for _ in row) for row in found.layer_names)
    assert "<b>x</b>" not in replace(found, layer_names=names).to_html()


def test_a_layout_names_the_ranks_of_each_part():
    text = Layout(Mesh.of("dp=2,tp=4"), "(tp, dp)")._repr_html_()
    assert "dim 0 in 4 parts over tp; dim 1 in 2 parts over dp; each part on 1 rank" in text
    assert re.findall(r"<title>(.*?)</title>", text) == [f"rank {rank}" for rank in (0, 4, 1, 5, 2, 6, 3, 7)]
    text = Layout(Mesh.of("dp=2,tp=4"), "(-, dp)")._repr_html_()
    assert re.findall(r"<title>(.*?)</title>", text) == ["ranks 0-3", "ranks 4-7"]
    assert "the whole tensor on 2 ranks" in Layout(Mesh.of("2"))._repr_html_()
    assert len(Layout(Mesh.of("32x32"), "S0 S1")._repr_html_()) < 2e5
    assert "<rect" not in Layout(Mesh.of("128x8"), "S0 S1")._repr_html_()


@pytest.mark.integration
@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium or Chrome to show pages in")
def test_browsers_show_them_at_every_width(tmp_path):
    pipeline = _pipeline(16)
    schedule = one_f_one_b(pipeline, 64)
    found = _found()
    pages = {
        "schedule": to_html(schedule, simulate_schedule(schedule, pipeline), pipeline, activation_limit_bytes=20),
        "search": found.to_html(),
        "notebook": draw_page("notebook", found._repr_html_() + schedule._repr_html_()),
        "layout": draw_page("layout", Layout(Mesh.of("8x8"), "S1 S0")._repr_html_()),
    }
    with Browser(find_browser()) as browser:
        for name, page in pages.items():
            path = tmp_path / f"{name}.html"
            path.write_text(page)
            for width in WIDTHS:
                assert browser.open(path, width, is_dark=width == 768) == [], (name, width)
