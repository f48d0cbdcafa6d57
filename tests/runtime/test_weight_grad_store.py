"""Backward in halves: first what others wait for, then the weights; together what a whole backward gives."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from reshard.errors import ArgumentError
from reshard.runtime.cpu.weight_grad_store import PutOff, later_tasks


class Tied(nn.Module):
    """A weight used twice, and one that is made from another."""

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
    """Convolutions by arguments that are left out, given by place, or by name."""

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
def test_halves_add_up(name, needs_input):
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
    with PutOff(tasks):
        again = module(x)
    assert torch.equal(out, again)
    again.backward(gradient)
    put_off = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if name not in ("same", "unbatched"):  # these take the plain way
        assert tasks
        assert put_off or name == "tied"
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
def test_hooks_see_gradients_once_and_whole(how, bias):
    """Whatever else uses the parameter: nothing of it is put off."""
    module = nn.Linear(3, 3)
    seen, tasks = [], []
    parameter = module.bias if bias else module.weight
    getattr(parameter, f"register_{how}")(lambda x: seen.append(x.shape))
    with PutOff(tasks):
        out = module(module(torch.ones(2, 3)))
        out = out @ module.weight + module.bias
    out.sum().backward()
    assert seen == [parameter.shape] and not tasks


def test_autocast_computes_as_it_does_without():
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
                with PutOff(tasks):
                    out = module(x)
        assert out.dtype is torch.bfloat16
        out.float().pow(2).sum().backward()
        for task in tasks or []:
            task()
        grads.append((x.grad.clone(), module.weight.grad.clone(), module.bias.grad.clone()))
    for whole, halves in zip(*grads, strict=True):
        torch.testing.assert_close(halves, whole, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 3), lambda: nn.Conv1d(2, 3, 2)])
def test_nothing_is_cast_that_nobody_asked_for(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 2, 5)
    with PutOff([]):
        out = module(x)
    assert out.dtype is torch.float32 and torch.equal(out, module(x))


def test_functions_of_users_can_wait_too():
    class Slow(torch.autograd.Function):
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
    with PutOff(tasks):
        y = Slow.apply(x)
    y.sum().backward()
    assert not done
    tasks[0]()
    assert done == [1]
    assert later_tasks() is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("width", [4, 7])
def test_a_checkpoint_does_its_whole_backward_at_once(reentrant, width):
    """What it computes again is saved as torch saves it, so that is how it is saved the first time."""
    inner = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
    outer = nn.Linear(4, 4)
    grads = []
    for tasks in (None, []):
        for each in (inner, outer):
            each.zero_grad()
        torch.manual_seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        with contextlib.nullcontext() if tasks is None else PutOff(tasks):
            out = outer(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant))
        out.pow(2).sum().backward()
        assert tasks is None or (len(tasks) == 1 and outer.weight.grad is None and inner[0].weight.grad is not None)
        for task in tasks or []:
            task()
        grads.append([p.grad.clone() for p in (*inner.parameters(), *outer.parameters(), x)])
    for whole, halves in zip(*grads, strict=True):
        torch.testing.assert_close(halves, whole)


def test_what_is_put_off_keeps_no_more_than_it_takes():
    """Of a hidden layer its input and its gradient, not the graph: all else is freed with the first half."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 4))
    seen = []
    module[1].register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    x = torch.randn(3, 4, requires_grad=True)
    tasks = []
    with PutOff(tasks):
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


def test_what_was_put_off_is_let_go_of_once_it_is_done():
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    with PutOff([]) as put_off:
        out = layer(x)
    out.sum().backward()
    assert len(put_off.tasks) == 1 and any(each.data_ptr() == x.data_ptr() for each in put_off.held)
    put_off.finish()
    assert not put_off.tasks and not put_off.held
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 4.0))


def test_a_forward_that_calls_autograd_is_refused():
    """Else the inner backward would leave its weight gradients too."""
    layer, tasks = nn.Linear(3, 1), []
    x = torch.randn(2, 3, requires_grad=True)
    with PutOff(tasks), pytest.raises(ArgumentError, match="calls autograd itself"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert not tasks


ODD = {
    "complex": lambda: nn.functional.linear(
        torch.ones(2, 3, dtype=torch.complex64), _parameter(4, 3, dtype=torch.complex64)
    ),
    "weight of one dim": lambda: nn.functional.linear(torch.ones(2, 3), _parameter(3)),
    "bias of one element": lambda: nn.functional.linear(torch.ones(2, 3), _parameter(4, 3), _parameter(1)),
    "no features": lambda: nn.functional.linear(torch.ones(2, 0), _parameter(4, 0)),
}


def _parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_takes_the_plain_way(name):
    tasks = []
    with PutOff(tasks):
        out = ODD[name]()
    out.abs().sum().backward()
    assert not tasks


@pytest.mark.parametrize(("args", "kwargs"), [((), {"other": 1}), ((None, None), {}), ((None,), {"weight": 1})])
def test_arguments_that_torch_does_not_know_are_refused_as_ever(args, kwargs):
    weight = _parameter(2, 3)
    with PutOff([]), pytest.raises(TypeError):
        nn.functional.linear(torch.ones(2, 3), weight, *args, **kwargs)


def test_dtypes_that_do_not_fit_are_refused_as_ever():
    with PutOff([]), pytest.raises(RuntimeError, match="dtype"):
        nn.functional.linear(torch.ones(2, 3, dtype=torch.float64), _parameter(4, 3))
    tasks = []
    with PutOff(tasks), torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.Linear(3, 4).double()(torch.ones(2, 3, dtype=torch.float64)).dtype is torch.float64
    assert not tasks
