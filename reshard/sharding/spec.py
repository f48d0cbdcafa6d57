"""Reads and writes specs: which mesh axes shard which tensor dims.

Every row of this table writes the same spec on ``Mesh(dp=2, tp=4, cp=2)``, which does not shard dim 1:

==================  ==========================================  ====================================================
notation            example                                     meaning
==================  ==========================================  ====================================================
axis names          ``("dp", None, ("tp", "cp"))``              for each tensor dim, its mesh axes, major first
axis names as text  ``"(dp, -, tp+cp)"``                        the same, as printed in plans
2023 notation       ``"S0 R S12"``                              for each tensor dim; digits are positions of axes
torch placements    ``[Shard(0), Shard(2), Shard(2)]``          for each mesh axis, the dim that it shards
placements as text  ``"Shard(0), Shard(2), Shard(2)"``          the same
JAX                 ``PartitionSpec("dp", None, ("tp", "cp"))``  as axis names
==================  ==========================================  ====================================================

The 2023 notation is that of Alpa and of the cross-mesh resharding study (Zhuang et al., MLSys 2023).

All notations are converted to one normal form: for each tensor dim, a tuple of the steps that cut it, in order. A step
is an axis name, or :class:`Strided` for torch's ``_StridedShard``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import LayoutError, PartialError
from reshard.formatting import brief, count_of
from reshard.sharding.mesh import Mesh

_SPEC_2023 = re.compile(r"R|S([0-9]+)")
_HAS_PLACEMENTS = re.compile(r"(Shard|Replicate|Partial)\(")
_PLACEMENT = re.compile(r"Shard\((?:dim=)?(-?[0-9]{1,3})\)|Replicate\(\)|Partial\([^()]*\)")


@dataclass(frozen=True)
class Strided:
    """The cut that torch's ``_StridedShard`` makes.

    The elements are first cut into ``split_factor`` chunks. Each chunk is cut over ``axis``, and a rank keeps its
    piece of every chunk, in order.
    """

    axis: str
    split_factor: int

    def __str__(self) -> str:
        return f"{self.axis}~{self.split_factor}"


Step = str | Strided
Spec = tuple[tuple[Step, ...], ...]


def axis_of(step: Step) -> str:
    """The mesh axis of a step."""
    return step if isinstance(step, str) else step.axis


def split_factor_of(step: Step) -> int:
    """The split factor of a step, 1 for a plain axis."""
    return 1 if isinstance(step, str) else step.split_factor


def read_spec(mesh: Mesh, spec: Any, ndim: int | None = None) -> Spec:
    """Convert a spec in any notation to the normal form, without trailing unsharded dims.

    Args:
        ndim: number of tensor dims; needed for placements that count dims from the end, such as ``Shard(-1)``.

    Raises:
        LayoutError: the spec is malformed, or names an unknown axis or an axis twice.
        PartialError: a placement has a pending reduction.
    """
    if spec is None:
        steps: list[tuple[Step, ...]] = []
    elif isinstance(spec, str):
        if _HAS_PLACEMENTS.search(spec):
            steps = _read_placements(mesh, _parse_placements(spec), ndim)
        else:
            steps = list(parse_axis_names(spec)) if spec.lstrip().startswith("(") else _read_2023(mesh, spec)
    elif type(spec).__name__ == "PartitionSpec" or hasattr(
        spec, "UNCONSTRAINED"
    ):  # newer versions of JAX name the class P
        if getattr(spec, "unreduced", None):
            raise PartialError(_partial_error_text(f"unreduced axes {sorted(spec.unreduced)}"))
        steps = _read_axis_names(mesh, list(spec))
    elif not isinstance(spec, Sequence):
        raise LayoutError(
            f"spec {brief(spec)} must be a string such as 'S0 R' or '(dp, -)', a tuple of axis names, or placements"
        )
    elif any(_is_placement(entry) for entry in spec):
        steps = _read_placements(mesh, list(spec), ndim)
    else:
        steps = _read_axis_names(mesh, list(spec))
    seen: set[str] = set()
    for dim in steps:
        for step in dim:
            axis = axis_of(step)
            if axis not in mesh.axes:
                is_2023 = all(isinstance(item, str) and _SPEC_2023.fullmatch(item) for item in spec)
                raise LayoutError(
                    f"spec {brief(spec)} names axis {brief(axis)}, but {mesh} has axes {', '.join(mesh.axes) or 'none'}"
                    + (f"; write {brief(' '.join(spec))} as one string" if is_2023 else "")
                )
            if axis in seen:
                raise LayoutError(f"spec {brief(spec)} names axis {brief(axis)} twice; an axis shards at most one dim")
            seen.add(axis)
    while steps and not steps[-1]:
        steps.pop()
    return tuple(steps)


def _read_2023(mesh: Mesh, text: str) -> list[tuple[Step, ...]]:
    steps: list[tuple[Step, ...]] = []
    for word in text.replace(",", " ").split():
        match = _SPEC_2023.fullmatch(word)
        if not match:
            raise LayoutError(
                f"{brief(word)} in spec {brief(text)} is neither R nor S followed by axis digits; "
                "write axis names as in '(dp, -, tp)'"
            )
        for digit in match[1] or "":
            if int(digit) >= len(mesh.axes):
                raise LayoutError(
                    f"spec {brief(text)} names axis {digit}, but {mesh} has {count_of(len(mesh.axes), 'axis')}, "
                    "counted from 0"
                )
        steps.append(tuple(mesh.axes[int(digit)] for digit in match[1] or ""))
    return steps


def _read_axis_names(mesh: Mesh, entries: list[Any]) -> list[tuple[Step, ...]]:
    steps: list[tuple[Step, ...]] = []
    for entry in entries:
        if entry is None:
            steps.append(())
        elif isinstance(entry, (str, Strided)):
            steps.append((entry,))
        elif isinstance(entry, (tuple, list)) and all(isinstance(step, (str, Strided)) for step in entry):
            steps.append(tuple(entry))
        else:
            raise LayoutError(f"spec entry {brief(entry)} must be None, an axis name, or a tuple of axis names")
    for dim in steps:
        for step in dim:
            if not isinstance(split_factor_of(step), int) or split_factor_of(step) < 1:
                raise LayoutError(f"split factor of {step} must be an integer of at least 1")
    return steps


@dataclass(frozen=True)
class _TextPlacement:
    """A placement of torch that was given as text, such as ``Shard(dim=0)`` or ``Replicate()``."""

    text: str
    dim: int | None

    def __str__(self) -> str:
        return self.text

    def is_shard(self) -> bool:
        return self.dim is not None

    def is_replicate(self) -> bool:
        return self.text.startswith("Replicate")

    def is_partial(self) -> bool:
        return self.text.startswith("Partial")


def _parse_placements(text: str) -> list[Any]:
    inner = text.strip()
    if (inner[0], inner[-1]) in (("[", "]"), ("(", ")")):
        inner = inner[1:-1]
    matches = list(_PLACEMENT.finditer(inner))
    if _PLACEMENT.sub("", inner).replace(",", "").strip():
        raise LayoutError(
            f"spec {brief(text)} has text beside its placements; write one for each mesh axis: 'Shard(0), Replicate()'"
        )
    return [_TextPlacement(match[0], None if match[1] is None else int(match[1])) for match in matches]


def _is_placement(entry: Any) -> bool:
    return all(callable(getattr(entry, name, None)) for name in ("is_shard", "is_replicate", "is_partial"))


def _partial_error_text(what: str) -> str:
    return (
        f"{what}: a pending reduction is not supported; reduce it first, for example with "
        "dtensor.redistribute(placements=[Replicate()]) or Shard(dim) on its own mesh"
    )


def _read_placements(mesh: Mesh, placements: list[Any], ndim: int | None) -> list[tuple[Step, ...]]:
    if len(placements) != len(mesh.axes):
        raise LayoutError(
            f"{count_of(len(placements), 'placement')} for the {count_of(len(mesh.axes), 'axis')} of {mesh}; "
            "give one per axis"
        )
    steps: dict[int, list[Step]] = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if not _is_placement(placement):
            raise LayoutError(f"placement {placement!r} for axis {axis!r} is not a torch placement")
        if placement.is_partial():
            raise PartialError(_partial_error_text(f"placement {placement} on axis {axis!r}"))
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int):
            raise LayoutError(f"placement {placement!r} for axis {axis!r} has no tensor dim")
        if dim < 0:
            if ndim is None:
                raise LayoutError(
                    f"placement {placement} for axis {axis!r}: a negative dim needs the number of tensor dims; count "
                    "from 0, pass shape= to the call, or pass ndim= to the Layout"
                )
            if dim < -ndim:
                raise LayoutError(f"placement {placement} for axis {axis!r}: the tensor has {count_of(ndim, 'dim')}")
            dim += ndim
        factor = int(getattr(placement, "split_factor", 1))
        steps.setdefault(dim, []).append(axis if factor == 1 else Strided(axis, factor))
    return [tuple(steps.get(dim, ())) for dim in range(max(steps, default=-1) + 1)]


def write_2023(mesh: Mesh, spec: Spec, ndim: int | None = None) -> str:
    """Write a spec in the 2023 notation, padded with ``R`` to ``ndim`` tensor dims.

    Raises:
        LayoutError: the notation cannot express the spec: it has a :class:`Strided` step or an axis after the tenth.
    """
    words = []
    for dim in spec:
        for step in dim:
            if not isinstance(step, str) or mesh.axes.index(step) > 9:
                raise LayoutError(f"the 2023 notation cannot express {step}")
        words.append("S" + "".join(str(mesh.axes.index(axis_of(step))) for step in dim) if dim else "R")
    return " ".join(words + ["R"] * ((ndim or 0) - len(words)))


def write_placements(mesh: Mesh, spec: Spec) -> list[Any]:
    """Write a spec as torch placements, one per mesh axis.

    Torch applies placements in mesh order. If a spec cuts a dim in another order, say by axis 1 and then by axis 0,
    axis 0 becomes a ``_StridedShard``, as in torch's own encoding of shard orders. Its split factor is the product of
    the sizes of the later mesh axes that cut the dim before it. The placements mean the same as the spec if all sizes
    divide evenly. Otherwise the shards differ, because torch cuts strided shards by another rule.

    Raises:
        LayoutError: a dim has a :class:`Strided` step, and its steps are not in mesh order.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Any] = [Replicate() for _ in mesh.axes]
    for dim, steps in enumerate(spec):
        positions = [mesh.axes.index(axis_of(step)) for step in steps]
        strided = any(not isinstance(step, str) for step in steps)
        if strided and positions != sorted(positions):
            raise LayoutError(f"torch placements cannot express {' '.join(map(str, steps))} on dim {dim}")
        for index, (step, position) in enumerate(zip(steps, positions, strict=True)):
            factor = split_factor_of(step)
            for earlier in positions[:index]:
                if earlier > position:
                    factor *= mesh.sizes[earlier]
            placements[position] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return placements


def write_jax(spec: Spec) -> Any:
    """Write a spec as a ``jax.sharding.PartitionSpec``.

    Raises:
        LayoutError: the spec has a :class:`Strided` step.
    """
    from jax.sharding import PartitionSpec

    for dim in spec:
        for step in dim:
            if not isinstance(step, str):
                raise LayoutError(f"a PartitionSpec cannot express {step}")
    return PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in spec))


def write_axis_names(spec: Spec) -> str:
    """Write a spec with axis names, as text: ``(dp, -, tp+pp)``."""
    return "(" + ", ".join("+".join(map(str, dim)) or "-" for dim in spec) + ")"


def parse_axis_names(text: str) -> Spec:
    """The inverse of :func:`write_axis_names`."""
    match = re.fullmatch(r"\s*\((.*)\)\s*", text)
    if not match:
        raise LayoutError(f"spec {brief(text)} is not of the form (dp, -, tp+pp)")
    spec: list[tuple[Step, ...]] = []
    for entry in match[1].split(",") if match[1].strip() else []:
        steps: list[Step] = []
        for word in entry.strip().split("+") if entry.strip() != "-" else []:
            part = re.fullmatch(r"([A-Za-z0-9_.]+)(?:~([0-9]{1,9}))?", word.strip())
            if not part:
                raise LayoutError(f"{brief(word)} in spec {brief(text)} is not an axis name")
            steps.append(part[1] if part[2] is None else Strided(part[1], int(part[2])))
        spec.append(tuple(steps))
    return tuple(spec)
