"""The tensors of a whole model, and the regions that each rank of it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, DisagreementError
from reshard.sharding import Box
from reshard.weights.mapping.rules import Rule, rules_from_json, rules_to_json
from reshard.weights.model.holdings import ModelState, Value


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor of a model.

    Attributes:
        shape, dtype: shape and dtype of the whole tensor.
        held: the ranks of the model that hold parts of it, ascending, each with its regions as in
            :attr:`reshard.weights.model.holdings.Holding.boxes`.
    """

    shape: tuple[int, ...]
    dtype: str
    held: tuple[tuple[int, tuple[Box, ...]], ...]


@dataclass(frozen=True)
class Manifest:
    """The tensors of a model on all its ranks.

    Attributes:
        size: number of ranks.
        entries: the tensors by name. Tied tensors have an entry for each name.
        tied: names of the same memory on some rank, each with the first one.
        values: what is not a tensor, by name.
        device: device type of the tensors; ``"cpu"`` unless all are elsewhere.
        rules: rules from the trainer's tensors to these; None for those of the families that fit.
        takes_all: whether each rank takes every tensor of the trainer, whole. ``entries`` is then empty, see
            :meth:`resolve`.
    """

    size: int
    entries: dict[str, ManifestEntry]
    tied: dict[str, str]
    values: dict[str, Value]
    device: str
    takes_all: bool = False
    rules: tuple[Rule, ...] | None = None

    def to_json(self) -> str:
        """The manifest as text; see :meth:`from_json`."""
        numbers: dict[Any, int] = {}
        names = {name: numbers.setdefault(entry, len(numbers)) for name, entry in self.entries.items()}
        given = {
            "size": self.size,
            "classes": [[entry.shape, entry.dtype, entry.held] for entry in numbers],
            "names": names,
            "tied": self.tied,
            "values": self.values,
            "device": self.device,
            "takes_all": self.takes_all,
            "rules": None if self.rules is None else rules_to_json(self.rules),
        }
        return json.dumps(given)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """The manifest that :meth:`to_json` wrote."""
        given = json.loads(text)
        classes = [
            ManifestEntry(tuple(shape), dtype, tuple((rank, _read_boxes(boxes)) for rank, boxes in held))
            for shape, dtype, held in given["classes"]
        ]
        entries = {name: classes[number] for name, number in given["names"].items()}
        rules = None if given["rules"] is None else rules_from_json(given["rules"])
        return cls(given["size"], entries, given["tied"], given["values"], given["device"], given["takes_all"], rules)

    def resolve(self, source: Manifest) -> Manifest:
        """The manifest of a destination, with the tensors of the trainer if it takes all of them."""
        if not self.takes_all:
            return self
        entries = {
            name: replace(entry, held=tuple((rank, _whole(entry.shape)) for rank in range(self.size)))
            for name, entry in source.entries.items()
        }
        return replace(self, entries=entries, tied=source.tied, takes_all=False)


def _whole(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return (tuple((0, size) for size in shape),) if 0 not in shape else ()


def _read_boxes(boxes: Any) -> tuple[Box, ...]:
    return tuple(tuple((lo, hi) for lo, hi in box) for box in boxes)


def state_of_rank(state: ModelState, dtype: Any = None) -> dict[str, Any]:
    """The report of a rank to the others about its model, as JSON.

    Args:
        dtype: the dtype in which floating-point tensors travel; None for their own.
    """
    classes: dict[Any, int] = {}
    names: dict[str, int] = {}
    for name, holding in state.holdings.items():
        array = holding.array
        kept = dtype if dtype is not None and array.is_floating_point() else array.dtype
        names[name] = classes.setdefault((holding.shape, dtype_name(kept), holding.boxes), len(classes))
    devices = sorted({holding.array.device.type for holding in state.holdings.values()})
    return {"classes": list(classes), "names": names, "tied": state.tied, "values": state.values, "devices": devices}


def merge_states(states: Mapping[int, Mapping[str, Any]], what: str) -> Manifest:
    """The manifest of a model, from what its ranks hold.

    Args:
        states: result of :func:`state_of_rank` of each rank.
        what: the model, in errors.

    Raises:
        DisagreementError: ranks hold a tensor of one name with different shapes or dtypes.
        ArgumentError: no rank holds a part of a tensor.
    """
    stated: dict[str, tuple[tuple[int, ...], str, int]] = {}
    held: dict[str, list[tuple[int, tuple[Box, ...]]]] = {}
    tied: dict[str, str] = {}
    values: dict[str, Value] = {}
    shared: dict[Any, tuple[tuple[int, tuple[Box, ...]], ...]] = {}
    for rank, state in sorted(states.items()):
        classes = [(tuple(shape), dtype, _read_boxes(boxes)) for shape, dtype, boxes in state["classes"]]
        tied |= state["tied"]
        values |= state["values"]
        numbers = dict(state["names"])
        numbers |= {name: numbers[first] for name, first in state["tied"].items()}
        for name, number in numbers.items():
            shape, dtype, boxes = classes[number]
            other = stated.setdefault(name, (shape, dtype, rank))
            if other[:2] != (shape, dtype):
                raise DisagreementError(
                    f"{what}: {name!r} is {dtype} {list(shape)} on rank {rank}, but {other[1]} {list(other[0])} on "
                    f"rank {other[2]}"
                )
            rows = held.setdefault(name, [])
            if boxes:
                rows.append((rank, boxes))
    entries = {}
    for name, (shape, dtype, _) in stated.items():
        holders = tuple(held[name])
        if not holders and 0 not in shape:
            raise ArgumentError(f"{what}: no rank holds a part of {name!r}")
        entries[name] = ManifestEntry(shape, dtype, shared.setdefault(holders, holders))
    devices = {device for state in states.values() for device in state["devices"]}
    return Manifest(len(states), entries, tied, values, devices.pop() if len(devices) == 1 else "cpu")
