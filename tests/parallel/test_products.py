"""The three products on a grid equal those of one process in both dataflows, and receive the bytes of the formulas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from reshard.parallel import Grid
from reshard.parallel.grid.cuts import batch_spans, chunk_spans, cut_panels, size_of
from reshard.parallel.products.dataflow import (
    Dataflows,
    LayerProducts,
    ProductKind,
    ProductShape,
    busiest_elements,
    received_elements,
)
from reshard.parallel.products.multiply import Activation, Product, run_together
from reshard.testing import run_processes

#: Tokens, P, Q, panel.
SIZES = [(13, 7, 9, 3), (24, 16, 32, 1024), (3, 4, 50, 2), (5, 9, 7, 1)]
KINDS = list(ProductKind)


class CountingAxis:
    """An axis that counts the elements that this rank receives from others."""

    def __init__(self, axis, counts):
        self.axis, self.counts = axis, counts

    def __getattr__(self, name):
        return getattr(self.axis, name)

    def all_gather(self, part, sizes):
        self.counts.append((sum(sizes) - len(part)) * part[:1].numel() if part.numel() else sum(sizes) * part.shape[1])
        return self.axis.all_gather(part, sizes)

    def reduce_scatter(self, array, sizes):
        self.counts.append((self.axis.size - 1) * sizes[self.axis.index] * array.shape[1])
        return self.axis.reduce_scatter(array, sizes)

    def exchange(self, sent, send_sizes, receive_sizes):
        return self.start_exchange(sent, send_sizes, receive_sizes).wait()

    def start_exchange(self, sent, send_sizes, receive_sizes):
        self.counts.append(sum(receive_sizes) - receive_sizes[self.axis.index])
        return self.axis.start_exchange(sent, send_sizes, receive_sizes)


def check_products(rank, rows, cols, depth):
    torch.set_num_threads(1)
    ranks = torch.randperm(rows * cols * depth, generator=torch.Generator().manual_seed(rows)).view(depth, rows, cols)
    grid = Grid(DeviceMesh("cpu", ranks, mesh_dim_names=("depth", "row", "col")))
    worst, wrong_counts = 0.0, []
    for tokens, p, q, panel in SIZES:
        torch.manual_seed(0)
        x, w, z = (torch.randn(shape, dtype=torch.float64) for shape in ((tokens, p), (p, q), (tokens, q)))
        spans = batch_spans(tokens, depth, rows)[grid.index["depth"]]
        per_row = tuple(map(size_of, spans))
        mine, layer = slice(*spans[grid.row]), slice(spans[0][0], spans[-1][1])
        p_row, p_col = slice(*chunk_spans(p, rows)[grid.row]), slice(*chunk_spans(p, cols)[grid.col])
        q_col = slice(*chunk_spans(q, cols)[grid.col])
        shape = ProductShape(p, tuple(map(size_of, chunk_spans(q, cols))), rows, panel)
        expected = {
            ProductKind.CONTRACT_P: (x @ w)[mine, q_col],
            ProductKind.CONTRACT_Q: (z @ w.t())[mine, p_col],
            ProductKind.CONTRACT_TOKENS: (x[layer].t() @ z[layer])[p_row, q_col],
        }
        local = [x[mine, p_col], z[mine, q_col]], w[p_row, q_col]
        for keeps_weight in (False, True) if rows > 1 else (False,):
            product, counts = Product(grid, shape), []
            for name in ("_ranks_of_col", "_ranks_of_row", "_layer"):
                setattr(product, name, CountingAxis(getattr(product, name), counts))

            def run(kinds, x, z, product=product, keeps=keeps_weight, weight=local[1], per_row=per_row):
                makes = {
                    ProductKind.CONTRACT_P: lambda: product.contract_p(x, weight, per_row, keeps_weight=keeps),
                    ProductKind.CONTRACT_Q: lambda: product.contract_q(z, weight, per_row, keeps_weight=keeps),
                    ProductKind.CONTRACT_TOKENS: lambda: product.contract_tokens(x, z, per_row, keeps_weight=keeps),
                }
                return run_together(*(makes[kind]() for kind in kinds))

            def check(kinds, results, formula, counts=counts, expected=expected, case=(keeps_weight, tokens)):
                worst = 0.0
                for kind, actual in zip(kinds, results, strict=True):
                    assert actual.shape == expected[kind].shape
                    worst = max(worst, float((actual - expected[kind]).abs().max()) if actual.numel() else 0.0)
                if sum(counts) != formula[grid.row, grid.col]:
                    wrong_counts.append((kinds, case, sum(counts), formula[grid.row, grid.col]))
                counts.clear()
                return worst

            for kind in KINDS:
                results = run([kind], *map(Activation, local[0]))
                formula = received_elements(kind, shape, per_row, keeps_weight=keeps_weight)
                worst = max(worst, check([kind], results, formula))
            flows = Dataflows(keeps_weight, keeps_weight, keeps_weight)
            for rows_shard_input in (True, False):  # both products of a backward share the gathers of the gradient
                products = LayerProducts(shape, per_row, rows_shard_input, keeps_input=True)
                kinds = products.kinds
                readers = (1, 2) if rows_shard_input else (2, 1)
                given = [Activation(item, count) for item, count in zip(local[0], readers, strict=True)]
                received = LayerProducts(shape, per_row, rows_shard_input).received(flows)
                worst = max(worst, check(kinds[1:], run(kinds[1:], *given), received[1] + received[2]))
                assert not given[0].gathered and not given[1].gathered
                given = [Activation(item, 2) for item in local[0]]  # and the forward keeps those of the input
                forward = run(kinds[:1], *given)
                worst = max(worst, check(kinds, forward + run(kinds[1:], *given), sum(products.received(flows))))
    dist.barrier()
    return worst, wrong_counts


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rows", "cols", "depth"),
    [(2, 2, 1), (3, 2, 1), (2, 2, 2)]
    + [pytest.param(*item, marks=pytest.mark.slow) for item in [(1, 4, 1), (4, 1, 1), (2, 3, 2), (2, 4, 1), (4, 4, 1)]],
)
def test_products_are_those_of_one_process_and_receive_what_the_formulas_say(rows, cols, depth):
    for worst, wrong_counts in run_processes(check_products, rows * cols * depth, rows, cols, depth):
        assert worst < 1e-13
        assert wrong_counts == []


@pytest.mark.parametrize(("q", "d"), [(2, 1), (2, 2), (4, 4)])
def test_received_elements_follow_the_formulas_of_summa(q, d):
    """Output-stationary forward (q - 1)/q^2 (Mk/d + kn); each product of the backward the same (Tesseract)."""
    m, k, n = 64 * q * d, 32 * q, 48 * q
    shape, tokens = ProductShape(k, (n // q,) * q, q), (m // (q * d),) * q
    forward = busiest_elements(ProductKind.CONTRACT_P, shape, tokens, keeps_weight=False)
    assert forward * q * q == (q - 1) * (m * k // d + k * n)
    for kind in (ProductKind.CONTRACT_Q, ProductKind.CONTRACT_TOKENS):
        assert busiest_elements(kind, shape, tokens, keeps_weight=False) == forward


@pytest.mark.parametrize(("rows", "cols", "width"), [(3, 2, 2), (4, 4, 3), (1, 5, 1), (2, 2, 100)])
def test_panels_cover_each_piece_once(rows, cols, width):
    for size in (0, 1, 7, 13, 24):
        panels = cut_panels(chunk_spans(size, rows), chunk_spans(size, cols), width)
        for spans, by_piece in ((chunk_spans(size, rows), panels.by_row), (chunk_spans(size, cols), panels.by_col)):
            for span, pieces in zip(spans, by_piece, strict=True):
                held = sorted(index for panel in pieces for lo, hi in panel for index in range(lo, hi))
                assert held == list(range(size_of(span)))
        for panel in range(panels.num_panels):
            assert sum(panels.row_sizes(panel)) == sum(panels.col_sizes(panel))
