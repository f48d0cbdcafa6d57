"""Values that several kinds of calls take."""

from __future__ import annotations

import functools
from dataclasses import fields

from torch import nn

import reshard
from reshard import Layout, Mesh


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@functools.cache
def plans():
    rows, columns = Layout(Mesh.of(2), "S0 R"), Layout(Mesh.of(2, first_rank=2), "R S0")
    plan = reshard.make_plan(rows, columns, (6, 4), "float32")
    return rows, columns, plan


def fields_of(value):
    """The arguments that make a dataclass again."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
