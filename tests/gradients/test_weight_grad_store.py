"""Split backward: the input-gradient pass and the weight-gradient pass give the gradients of a whole backward."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from reshard.errors import ArgumentError
from reshard.gradients.weight_grad_store import WeightGradStore, later_tasks
from reshard.runtime import torch_compat


class Tied(nn.Module):
    """A weight that is used twice, and one that is computed from another."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return nn.functional.linear(self.a(self.a(x).relu()), self.scale * 2)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.a.weight.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Functional(nn.Module):
    """Convolutions with omitted, positional and named arguments."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Parameter(torch.randn(4, 2, 3)), nn.Parameter(torch.randn(4)), nn.Conv1d(4, 2, 2)

    def forward(self, x):
        y = nn.functional.conv1d(x, self.a).tanh()
        y = nn.functional.conv1d(y.repeat(1, 2, 1), bias=self.b, weight=self.a, groups=4, stride=2)
        return self.c(nn.functional.conv1d(y, self.c.weight, None, 1, (1,)).repeat(1, 2, 1))


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3, bias=False)), (4, 2, 5)),
    "one row": (lambda: nn.Linear(5, 3), (5,)),
    "tied": (Tied, (3, 5)),
    "frozen": (Frozen, (3, 5)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 2, stride=2)),
        (2, 4, 8, 8),
    ),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, dilation=2, bias=False), (2, 3, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 2)), (1, 2, 3, 4, 5)),
    "functional": (Functional, (2, 2, 13)),
    "same": (lambda: nn.Conv2d(2, 2, 3, padding="same"), (1, 2, 5, 5)),
    "unbatched": (lambda: nn.Conv2d(2, 2, 3), (2, 5, 5)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("needs_input", [True, False])
def test_split_backward_gives_the_whole_gradients(name, needs_input):
    make, shape = CASES[name]
    torch.manual_seed(0)
    module = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=needs_input)
    out = module(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    whole = {n: p.grad for n, p in module.named_parameters()}
    whole_x = x.grad
    module.zero_grad()
    x.grad = None
    tasks = []
    with WeightGradStore(tasks):
        again = module(x)
    assert torch.equal(out, again)
    again.backward(gradient)
    deferred = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if name not in ("same", "unbatched"):  # these are not deferred
        assert tasks
        assert deferred or name == "tied"
    if needs_input:
        torch.testing.assert_close(x.grad, whole_x, rtol=1e-12, atol=1e-14)
    for task in tasks:
        task()
    for n, p in module.named_parameters():
        if whole[n] is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, whole[n], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", ["hook", "post_accumulate_grad_hook"])
@pytest.mark.parametrize("bias", [False, True])
def test_hooks_receive_the_whole_gradient_once(how, bias):
    """The parameter has other uses as well, so none of its gradients is deferred."""
    module = nn.Linear(3, 3)
    seen, tasks = [], []
    parameter = module.bias if bias else module.weight
    getattr(parameter, f"register_{how}")(lambda x: seen.append(x.shape))
    with WeightGradStore(tasks):
        out = module(module(torch.ones(2, 3)))
        out = out @ module.weight + module.bias
    out.sum().backward()
    assert seen == [parameter.shape] and not tasks


def test_autocast_gives_the_same_gradients():
    torch.manual_seed(0)
    module, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    grads = []
    for tasks in (None, []):
        module.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if tasks is None:
                out = module(x)
            else:
                with WeightGradStore(tasks):
                    out = module(x)
        assert out.dtype is torch.bfloat16
        out.float().pow(2).sum().backward()
        for task in tasks or []:
            task()
        grads.append((x.grad.clone(), module.weight.grad.clone(), module.bias.grad.clone()))
    for whole, halves in zip(*grads, strict=True):
        torch.testing.assert_close(halves, whole, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 3), lambda: nn.Conv1d(2, 3, 2)])
def test_nothing_is_cast_without_autocast(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 2, 5)
    with WeightGradStore([]):
        out = module(x)
    assert out.dtype is torch.float32 and torch.equal(out, module(x))


def test_custom_autograd_functions_can_defer_tasks():
    class Deferring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.tasks = later_tasks()
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if ctx.tasks is not None:
                ctx.tasks.append(lambda: done.append(1))
            return g

    done, tasks = [], []
    x = torch.ones(2, requires_grad=True)
    with WeightGradStore(tasks):
        y = Deferring.apply(x)
    y.sum().backward()
    assert not done
    tasks[0]()
    assert done == [1]
    assert later_tasks() is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("width", [4, 7])
def test_checkpointed_layers_are_not_deferred(reentrant, width):
    """The recomputation of a checkpoint saves the tensors that torch saves, so the forward must save the same."""
    inner = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
    outer = nn.Linear(4, 4)
    grads = []
    for tasks in (None, []):
        for item in (inner, outer):
            item.zero_grad()
        torch.manual_seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        with contextlib.nullcontext() if tasks is None else WeightGradStore(tasks):
            out = outer(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant))
        out.pow(2).sum().backward()
        assert tasks is None or (len(tasks) == 1 and outer.weight.grad is None and inner[0].weight.grad is not None)
        for task in tasks or []:
            task()
        grads.append([p.grad.clone() for p in (*inner.parameters(), *outer.parameters(), x)])
    for whole, halves in zip(*grads, strict=True):
        torch.testing.assert_close(halves, whole)


def test_deferred_task_does_not_keep_the_graph():
    """A task holds a layer's input and output gradient; the input-gradient pass frees everything else."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 4))
    seen = []
    module[1].register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    x = torch.randn(3, 4, requires_grad=True)
    tasks = []
    with WeightGradStore(tasks):
        out = module(x)
    nodes = weakref.ref(out.grad_fn)
    out.sum().backward()
    del out
    gc.disable()
    try:
        assert nodes() is None
        tasks.clear()
        assert seen[0]() is None
    finally:
        gc.enable()


def test_finish_runs_and_drops_deferred_tasks():
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    with WeightGradStore([]) as store:
        out = layer(x)
    out.sum().backward()
    assert len(store.tasks) == 1 and any(item.data_ptr() == x.data_ptr() for item in store.held)
    store.finish()
    assert not store.tasks and not store.held
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 4.0))


def test_finish_adds_gradients_in_few_backwards_with_the_bits_of_single_ones(monkeypatch):
    torch.manual_seed(0)
    tied, large = nn.Linear(16, 16), nn.Linear(16, 2**15)
    module = nn.Sequential(tied, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), tied, nn.Tanh(), large)
    x, gradient = torch.randn(8, 16), torch.randn(8, 2**15)
    calls, run = [], torch_compat.run_backward
    monkeypatch.setattr(torch_compat, "run_backward", lambda *args: (calls.append(len(args[0])), run(*args)))
    grads = []
    for finishes in (False, True):
        module.zero_grad()
        for _ in range(2):
            with WeightGradStore([]) as store:
                out = module(x)
            out.backward(gradient)
            calls.clear()
            if finishes:
                store.finish()
            for task in store.tasks:
                task()
        grads.append([parameter.grad.clone() for parameter in module.parameters()])
        # the weight of the last layer exceeds the limit of a call, and a parameter comes once in a call
        assert calls == ([1, 5, 2] if finishes else [2] * 4)
    assert all(map(torch.equal, *grads))


def test_forward_that_calls_autograd_is_rejected():
    """Otherwise the inner backward would also defer its weight gradients."""
    layer, tasks = nn.Linear(3, 1), []
    x = torch.randn(2, 3, requires_grad=True)
    with WeightGradStore(tasks), pytest.raises(ArgumentError, match="forward that calls autograd"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert not tasks


UNUSUAL = {
    "complex": lambda: nn.functional.linear(
        torch.ones(2, 3, dtype=torch.complex64), _parameter(4, 3, dtype=torch.complex64)
    ),
    "weight of one dim": lambda: nn.functional.linear(torch.ones(2, 3), _parameter(3)),
    "bias of one element": lambda: nn.functional.linear(torch.ones(2, 3), _parameter(4, 3), _parameter(1)),
    "no features": lambda: nn.functional.linear(torch.ones(2, 0), _parameter(4, 0)),
}


def _parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_calls_are_not_deferred(name):
    tasks = []
    with WeightGradStore(tasks):
        out = UNUSUAL[name]()
    out.abs().sum().backward()
    assert not tasks


@pytest.mark.parametrize(("args", "kwargs"), [((), {"other": 1}), ((None, None), {}), ((None,), {"weight": 1})])
def test_unknown_arguments_raise_as_in_torch(args, kwargs):
    weight = _parameter(2, 3)
    with WeightGradStore([]), pytest.raises(TypeError):
        nn.functional.linear(torch.ones(2, 3), weight, *args, **kwargs)


def test_mismatched_dtypes_raise_as_in_torch():
    with WeightGradStore([]), pytest.raises(RuntimeError, match="dtype"):
        nn.functional.linear(torch.ones(2, 3, dtype=torch.float64), _parameter(4, 3))
    tasks = []
    with WeightGradStore(tasks), torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.Linear(3, 4).double()(torch.ones(2, 3, dtype=torch.float64)).dtype is torch.float64
    assert not tasks
