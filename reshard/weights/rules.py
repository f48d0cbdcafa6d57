"""Rules: how the tensors of a trainer become those of an engine that names, fuses, stacks or transposes them otherwise.

A rule is data. It maps names and regions, never values, and it has an inverse. In its patterns, ``{p}`` stands for any
text and ``{e:d}`` for a number; equal placeholders stand for equal text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reshard.errors import ArgumentError
from reshard.sharding import Box

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A region of a source tensor, and where it lies in a tensor that rules have made.

    Attributes:
        source: name of the source tensor. box: the region of it.
        start: where the region begins in the made tensor, one number per dim of that.
        dims: the dim of the made tensor along which each dim of the source runs; -1 for a dim of which the region has
            one slice. Other dims of the made tensor have size 1.
    """

    source: str
    box: Box
    start: tuple[int, ...]
    dims: tuple[int, ...]

    def stop(self) -> tuple[int, ...]:
        """Where the region ends in the made tensor."""
        sizes = dict(zip(self.dims, (hi - lo for lo, hi in self.box), strict=True))
        return tuple(at + sizes.get(dim, 1) for dim, at in enumerate(self.start))


@dataclass(frozen=True)
class Made:
    """A tensor that rules have made, from parts of source tensors."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Made:
        """A source tensor itself."""
        whole = tuple((0, size) for size in shape)
        return cls(shape, (Part(name, whole, (0,) * len(shape), tuple(range(len(shape)))),))

    def cut(self, dim: int, lo: int, hi: int) -> Made:
        """The slice ``lo`` to ``hi`` along a dim."""
        parts = []
        for part in self.parts:
            first, last = max(part.start[dim], lo), min(part.stop()[dim], hi)
            if first < last:
                box = list(part.box)
                if dim in part.dims:
                    source = part.dims.index(dim)
                    begin = box[source][0] + first - part.start[dim]
                    box[source] = begin, begin + last - first
                start = (*part.start[:dim], first - lo, *part.start[dim + 1 :])
                parts.append(replace(part, box=tuple(box), start=start))
        return Made((*self.shape[:dim], hi - lo, *self.shape[dim + 1 :]), tuple(parts))

    def moved(self, dim: int, by: int) -> tuple[Part, ...]:
        """The parts, further along a dim."""
        return tuple(
            replace(part, start=(*part.start[:dim], part.start[dim] + by, *part.start[dim + 1 :]))
            for part in self.parts
        )

    def with_dim(self, dim: int) -> Made:
        """The same with a new dim of size 1."""
        parts = tuple(
            replace(
                part,
                start=(*part.start[:dim], 0, *part.start[dim:]),
                dims=tuple(other + (other >= dim) for other in part.dims),
            )
            for part in self.parts
        )
        return Made((*self.shape[:dim], 1, *self.shape[dim:]), parts)

    def transposed(self) -> Made:
        """The same with its two dims exchanged."""
        parts = tuple(
            replace(part, start=part.start[::-1], dims=tuple(1 - dim if dim >= 0 else dim for dim in part.dims))
            for part in self.parts
        )
        return Made(self.shape[::-1], parts)


@dataclass(frozen=True)
class Rename:
    """Another name: ``Rename("transformer.{p}", "model.{p}")``."""

    source: str
    target: str

    def inverse(self) -> Rule:
        """The rule that undoes this one."""
        return Rename(self.target, self.source)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """Replace tensors by what the rule makes of them; ``wanted`` has the shapes of the destination."""
        for name, filled in _matches(self.source, made):
            made[_fill(self.target, filled)] = made.pop(name)


@dataclass(frozen=True)
class Concatenate:
    """Several tensors as one: ``Concatenate(("{p}.q_proj.{t}", "{p}.k_proj.{t}"), "{p}.qk_proj.{t}")``."""

    sources: tuple[str, ...]
    target: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Split(self.target, self.sources, self.dim)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for _, filled in _matches(self.sources[0], made):
            names = [_fill(source, filled) for source in self.sources]
            missing = [name for name in names if name not in made]
            if missing:
                raise ArgumentError(f"{self} lacks {', '.join(map(repr, missing))}")
            made[_fill(self.target, filled)] = _join([made.pop(name) for name in names], self.dim, str(self))


@dataclass(frozen=True)
class Split:
    """One tensor as several, of the sizes that the destination has; see :class:`Concatenate`."""

    source: str
    targets: tuple[str, ...]
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Concatenate(self.targets, self.source, self.dim)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, filled in _matches(self.source, made):
            names = [_fill(target, filled) for target in self.targets]
            missing = [each for each in names if each not in wanted]
            if missing:
                raise ArgumentError(f"{self}: the destination lacks {', '.join(map(repr, missing))}")
            whole, at = made.pop(name), 0
            for each in names:
                size = wanted[each][self.dim]
                made[each], at = whole.cut(self.dim, at, at + size), at + size
            if at != whole.shape[self.dim]:
                raise ArgumentError(
                    f"{self}: dim {self.dim} of {name!r} has {whole.shape[self.dim]} elements, and its parts have {at}"
                )


@dataclass(frozen=True)
class Stack:
    """Numbered tensors along a new dim: ``Stack("{p}.experts.{e:d}.w1.weight", "{p}.experts.w1")``."""

    source: str
    target: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Unstack(self.target, self.source, self.dim)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        number = _number_of(self.source)
        found: dict[str, dict[int, str]] = {}
        for name, filled in _matches(self.source, made):
            found.setdefault(_fill(self.target, filled), {})[int(filled[number])] = name
        for target, numbered in found.items():
            if sorted(numbered) != list(range(len(numbered))):
                raise ArgumentError(f"{self}: {target!r} would lack numbers below {max(numbered)}")
            layers = [made.pop(numbered[index]).with_dim(self.dim) for index in range(len(numbered))]
            made[target] = _join(layers, self.dim, str(self))


@dataclass(frozen=True)
class Unstack:
    """The slices of a tensor along a dim as numbered tensors; see :class:`Stack`."""

    source: str
    target: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Stack(self.target, self.source, self.dim)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        number = _number_of(self.target)
        for name, filled in _matches(self.source, made):
            whole = made.pop(name)
            for index in range(whole.shape[self.dim]):
                layer = _split_dim(whole.cut(self.dim, index, index + 1), self.dim)
                made[_fill(self.target, filled | {number: str(index)})] = layer


@dataclass(frozen=True)
class Transpose:
    """A matrix with its dims exchanged, as GPT-2 stores them: ``Transpose("{p}.c_fc.weight")``."""

    name: str

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return self

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in _matches(self.name, made):
            if len(made[name].shape) != 2:
                raise ArgumentError(f"{self}: {name!r} has {len(made[name].shape)} dims, not 2")
            made[name] = made[name].transposed()


@dataclass(frozen=True)
class Pad:
    """A dim that is longer on the destination, such as a padded vocabulary. The elements that are added hold zeros."""

    name: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Trim(self.name, self.dim)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in _matches(self.name, made):
            shape = made[name].shape
            if name in wanted and len(wanted[name]) == len(shape) and wanted[name][self.dim] >= shape[self.dim]:
                longer = (*shape[: self.dim], wanted[name][self.dim], *shape[self.dim + 1 :])
                made[name] = Made(longer, made[name].parts)


@dataclass(frozen=True)
class Trim:
    """A dim that is shorter on the destination; see :class:`Pad`. The last elements of the source are not used."""

    name: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Pad(self.name, self.dim)

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in _matches(self.name, made):
            if name in wanted and wanted[name][self.dim] <= made[name].shape[self.dim]:
                made[name] = made[name].cut(self.dim, 0, wanted[name][self.dim])


@dataclass(frozen=True)
class Drop:
    """Tensors of the source that the destination does not have: ``Drop("{p}.rotary_emb.inv_freq")``."""

    name: str

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`. What was dropped cannot come back."""
        return self

    def apply(self, made: dict[str, Made], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in _matches(self.name, made):
            del made[name]


Rule = Rename | Concatenate | Split | Stack | Unstack | Transpose | Pad | Trim | Drop
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Rename, Concatenate, Split, Stack, Unstack, Transpose, Pad, Trim, Drop)
}


def inverted(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules from the destination back to the source."""
    return tuple(rule.inverse() for rule in reversed(rules))


def rules_to_json(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Rules as JSON."""
    return [{"kind": type(rule).__name__, **asdict(rule)} for rule in rules]


def rules_from_json(given: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """The rules that :func:`rules_to_json` wrote."""
    found = []
    for entry in given:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        kind = _KINDS[str(fields.pop("kind"))]
        found.append(kind(**fields))
    return tuple(found)


def apply_rules(rules: Sequence[Rule], shapes: Shapes, wanted: Shapes) -> dict[str, Made]:
    """What rules make of the tensors of a source.

    Args:
        rules: in the order in which they apply.
        shapes: of the source, by name. wanted: of the destination.

    Raises:
        ArgumentError: a rule does not fit the tensors.
    """
    made = {name: Made.of(name, shape) for name, shape in shapes.items()}
    wanted_after = [wanted]  # by the names before later rules rename them
    for rule in reversed(rules):
        if not isinstance(rule, Rule):
            raise ArgumentError(f"{rule!r:.60} is not a rule of reshard.weights.rules")
        names = dict(wanted_after[-1])
        if isinstance(rule, Rename):
            _fill(rule.target, dict.fromkeys(_placeholders(rule.source), ""))  # raises if it does not fit
            for name, filled in _matches(rule.target, names):
                names[_fill(rule.source, filled)] = names.pop(name)
        wanted_after.append(names)
    for rule, after in zip(rules, reversed(wanted_after[:-1]), strict=True):
        rule.apply(made, after)
    return made


def _join(tensors: Sequence[Made], dim: int, what: str) -> Made:
    """Tensors one after the other along a dim."""
    parts: list[Part] = []
    size, first = 0, tensors[0].shape
    for tensor in tensors:
        if len(tensor.shape) <= dim or (
            (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :])
        ):
            raise ArgumentError(f"{what}: shapes {list(first)} and {list(tensor.shape)} do not join along dim {dim}")
        parts += tensor.moved(dim, size)
        size += tensor.shape[dim]
    return Made((*first[:dim], size, *first[dim + 1 :]), tuple(parts))


def _split_dim(layer: Made, dim: int) -> Made:
    """A slice of size 1 without its dim: that dim of the source gets no dim of the destination."""
    parts = []
    for part in layer.parts:
        dims = tuple(-1 if other == dim else other - (other > dim) for other in part.dims)
        parts.append(replace(part, start=(*part.start[:dim], *part.start[dim + 1 :]), dims=dims))
    return Made((*layer.shape[:dim], *layer.shape[dim + 1 :]), tuple(parts))


_PLACEHOLDER = re.compile(r"\{(\w+)(:d)?\}")


def _matches(pattern: str, made: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The names that a pattern matches, each with what its placeholders stand for."""
    at, text, seen = 0, "", set()
    for found in _PLACEHOLDER.finditer(pattern):
        text += re.escape(pattern[at : found.start()])
        name = found[1]
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{'[0-9]+' if found[2] else '.+'})"
        seen.add(name)
        at = found.end()
    compiled = re.compile(text + re.escape(pattern[at:]))
    matches = ((name, compiled.fullmatch(name)) for name in made)
    return [(name, match.groupdict()) for name, match in matches if match is not None]


def _placeholders(pattern: str) -> list[str]:
    return [found[1] for found in _PLACEHOLDER.finditer(pattern)]


def _fill(pattern: str, filled: Mapping[str, str]) -> str:
    try:
        return _PLACEHOLDER.sub(lambda found: filled[found[1]], pattern)
    except KeyError as error:
        raise ArgumentError(f"the pattern {pattern!r} has a placeholder {error} that the other side lacks") from None


def _number_of(pattern: str) -> str:
    """The name of the placeholder for a number."""
    found = [match[1] for match in _PLACEHOLDER.finditer(pattern) if match[2]]
    if len(found) != 1:
        raise ArgumentError(f"the pattern {pattern!r} needs one placeholder for a number, such as {{e:d}}")
    return found[0]
