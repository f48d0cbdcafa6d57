"""A strategy that a search has found trains on real processes, with the numbers of one process."""

from __future__ import annotations

import functools

import torch

import reshard.scheduler as rs
from reshard.scheduler.autoparallel import (
    Cluster,
    LayerGraph,
    Profile,
    Strategy,
    search,
)
from reshard.scheduler.training.models import make_model
from reshard.scheduler.training.presets import GPTConfig
from reshard.topology import Topology
from tests.support.whole_models import Case, check_equal

CONFIG = GPTConfig(4, 2, 8, sequence=8, vocabulary=32, is_tied=False)


def make_gpt():
    torch.manual_seed(0)
    return make_model(CONFIG, "cpu")


def make_case():
    generator = torch.Generator().manual_seed(1)

    def batch():
        tokens = torch.randint(CONFIG.vocabulary, (8, 9), generator=generator)
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return Case(
        make_gpt, [batch() for _ in range(2)], batch(), lambda model, batch: (model(**batch), {}), microbatches=None
    )


def find_strategy(hosts, keep=None, memory_bytes=1e9, **options):
    graph = LayerGraph.transformer(
        layers=CONFIG.num_layers,
        hidden=CONFIG.hidden,
        heads=CONFIG.num_heads,
        sequence=8,
        vocabulary=32,
        dtype="float32",
    )
    profile = Profile.estimate(graph, flops_per_second=1e9, efficiency=1.0)
    cluster = Cluster(Topology.uniform(hosts, 1e8), memory_bytes)
    return search(graph, cluster, profile, rows=8, keep={"tp": 1, **(keep or {})}, **options)


def pipe_of_strategy(case, text):
    return rs.Pipe(case.make_model(), strategy=Strategy.from_json(text))


def check_trains(strategy):
    check_equal(make_case(), functools.partial(pipe_of_strategy, text=strategy.to_json()), strategy.num_ranks)


def test_a_strategy_trains_as_one_process():
    strategy = find_strategy((0, 0, 1))
    assert strategy.num_ranks == 3
    assert len(strategy.stages) > 1
    check_trains(strategy)
