"""Rules convert the tensors of a trainer to those of an engine that names, fuses, stacks or transposes them otherwise.

A rule is data. It maps names and regions, never values, and it has an inverse. In its patterns, ``{p}`` stands for any
text and ``{e:d}`` for a number; equal placeholders stand for equal text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, get_args

from reshard.arguments import check_fields
from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.sharding import MAX_NDIM
from reshard.weights.mapping.parts import ComposedTensor, PlacedRegion, join_tensors

Shapes = Mapping[str, tuple[int, ...]]


class _Rule:
    """Properties of every rule, with their usual values. A rule overrides the values that differ."""

    #: Whether elements of the destination may come from no element of the source.
    adds_elements: ClassVar[bool] = False
    #: Whether elements of the source may be left out.
    drops_elements: ClassVar[bool] = False

    def wanted_before(self, wanted: Shapes) -> Shapes:
        """The shapes that earlier rules look up, if later rules look up ``wanted``."""
        return wanted


@dataclass(frozen=True)
class Rename(_Rule):
    """Another name: ``Rename("transformer.{p}", "model.{p}")``."""

    source: str
    target: str

    def inverse(self) -> Rule:
        """The rule that undoes this one."""
        return Rename(self.target, self.source)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """Replace tensors by the tensors that the rule makes of them. ``wanted`` has the shapes of the destination."""
        renamed = [(fill(self.target, filled), made.pop(name)) for name, filled in match_names(self.source, made)]
        for name, tensor in renamed:
            _put(made, name, tensor, self)

    def wanted_before(self, wanted: Shapes) -> Shapes:
        """The shapes of the destination by the names that tensors have before this rule."""
        fill(self.target, dict.fromkeys(_placeholders(self.source), ""))  # raises if it does not fit
        names = dict(wanted)
        for name, filled in match_names(self.target, names):
            names[fill(self.source, filled)] = names.pop(name)
        return names


@dataclass(frozen=True)
class Concatenate(_Rule):
    """Several tensors as one: ``Concatenate(("{p}.q_proj.{t}", "{p}.k_proj.{t}"), "{p}.qk_proj.{t}")``."""

    sources: tuple[str, ...]
    target: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Split(self.target, self.sources, self.dim)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for _, filled in match_names(self.sources[0], made):
            names = [fill(source, filled) for source in self.sources]
            missing = [name for name in names if name not in made]
            if missing:
                raise ArgumentError(f"{self} lacks {', '.join(map(repr, missing))}")
            joined = join_tensors([made.pop(name) for name in names], self.dim, str(self))
            _put(made, fill(self.target, filled), joined, self)


@dataclass(frozen=True)
class Split(_Rule):
    """One tensor as several, of the sizes that the destination has; see :class:`Concatenate`."""

    source: str
    targets: tuple[str, ...]
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Concatenate(self.targets, self.source, self.dim)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, filled in match_names(self.source, made):
            names = _fill_wanted(self, self.targets, filled, wanted)
            whole, at = made.pop(name), 0
            _check_dim(self, self.dim, whole.shape, *(wanted[part] for part in names))
            for part in names:
                size = wanted[part][self.dim]
                _put(made, part, whole.cut(self.dim, range(at, at + size)), self)
                at += size
            if at != whole.shape[self.dim]:
                raise ArgumentError(
                    f"{self}: dim {self.dim} of {name!r} has {whole.shape[self.dim]} elements, and its parts have {at}"
                )


@dataclass(frozen=True)
class Stack(_Rule):
    """Numbered tensors along a new dim: ``Stack("{p}.experts.{e:d}.w1.weight", "{p}.experts.w1")``."""

    source: str
    target: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Unstack(self.target, self.source, self.dim)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        number = _number_of(self.source)
        by_target: dict[str, dict[int, str]] = {}
        for name, filled in match_names(self.source, made):
            by_target.setdefault(fill(self.target, filled), {})[int(filled[number])] = name
        for target, numbered in by_target.items():
            if sorted(numbered) != list(range(len(numbered))):
                raise ArgumentError(f"{self}: {target!r} would lack numbers below {max(numbered)}")
            layers = [made.pop(numbered[index]).with_dim(self.dim) for index in range(len(numbered))]
            _put(made, target, join_tensors(layers, self.dim, str(self)), self)


@dataclass(frozen=True)
class Unstack(_Rule):
    """The slices of a tensor along a dim as numbered tensors; see :class:`Stack`."""

    source: str
    target: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Stack(self.target, self.source, self.dim)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        number = _number_of(self.target)
        for name, filled in match_names(self.source, made):
            whole = made.pop(name)
            _check_dim(self, self.dim, whole.shape)
            for index in range(whole.shape[self.dim]):
                layer = whole.cut(self.dim, range(index, index + 1)).without_dim(self.dim)
                _put(made, fill(self.target, filled | {number: str(index)}), layer, self)


@dataclass(frozen=True)
class Transpose(_Rule):
    """A matrix with its dims exchanged, as GPT-2 stores them: ``Transpose("{p}.c_fc.weight")``."""

    name: str

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return self

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in match_names(self.name, made):
            if len(made[name].shape) != 2:
                raise ArgumentError(f"{self}: {name!r} has {len(made[name].shape)} dims, not 2")
            made[name] = made[name].transposed()


@dataclass(frozen=True)
class Pad(_Rule):
    """A dim that is longer on the destination, such as a padded vocabulary. The elements that are added hold zeros."""

    adds_elements: ClassVar[bool] = True
    name: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Trim(self.name, self.dim)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in match_names(self.name, made):
            shape = made[name].shape
            _check_dim(self, self.dim, shape)
            if name in wanted and len(wanted[name]) == len(shape) and wanted[name][self.dim] >= shape[self.dim]:
                longer = (*shape[: self.dim], wanted[name][self.dim], *shape[self.dim + 1 :])
                made[name] = ComposedTensor(longer, made[name].parts)


@dataclass(frozen=True)
class Trim(_Rule):
    """A dim that is shorter on the destination; see :class:`Pad`. The last elements of the source are not used."""

    drops_elements: ClassVar[bool] = True
    name: str
    dim: int = 0

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Pad(self.name, self.dim)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in match_names(self.name, made):
            shape = made[name].shape
            _check_dim(self, self.dim, shape)
            if name in wanted and len(wanted[name]) == len(shape) and wanted[name][self.dim] <= shape[self.dim]:
                made[name] = made[name].cut(self.dim, range(wanted[name][self.dim]))


@dataclass(frozen=True)
class Drop(_Rule):
    """Tensors of the source that the destination does not have: ``Drop("{p}.rotary_emb.inv_freq")``."""

    drops_elements: ClassVar[bool] = True
    name: str

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`. What was dropped cannot come back."""
        return self

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in match_names(self.name, made):
            del made[name]


@dataclass(frozen=True)
class Rope(_Rule):
    """Rows of rotary queries or keys in another order, for example ``Rope("{p}.q_proj.weight", head_dim=128)``.

    The original Llama, and torchtitan, rotate neighbouring rows of a head: the pairs (0, 1), (2, 3) and so on. Hugging
    Face's Llama rotates row ``i`` of the first half of a head with row ``i`` of the second half.

    Attributes:
        name: name of the tensors, with heads along their first dim.
        head_dim: number of rows of a head, even.
        to: order on the destination: ``"halves"`` (Hugging Face) or ``"pairs"``; the source has the other one.
    """

    name: str
    head_dim: int
    to: str = "halves"

    def __post_init__(self) -> None:
        if self.to not in ("halves", "pairs"):
            raise ArgumentError(f'Rope: to is {self.to!r:.40}; it must be "halves" or "pairs"')
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise ArgumentError(f"Rope: head_dim is {self.head_dim!r:.40}; it must be an even number of rows")

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return Rope(self.name, self.head_dim, "pairs" if self.to == "halves" else "halves")

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, _ in match_names(self.name, made):
            whole = made[name]
            rows, half = whole.shape[0] if whole.shape else 0, self.head_dim // 2
            if rows % self.head_dim:
                raise ArgumentError(f"{self}: {name!r} has {rows} rows, not a multiple of head_dim={self.head_dim}")
            parts: list[PlacedRegion] = []
            for head in range(0, rows, self.head_dim):
                for turn in range(2):
                    pair = range(head + turn, head + self.head_dim, 2)
                    run = range(head + turn * half, head + (turn + 1) * half)
                    given, placed = (pair, run) if self.to == "halves" else (run, pair)
                    parts += whole.cut(0, given).placed(0, placed)
            made[name] = ComposedTensor(whole.shape, tuple(parts))


@dataclass(frozen=True)
class GroupHeads(_Rule):
    """Queries, keys and values as one tensor, one group after the other.

    A group has the queries of one head of keys, then the key, then the value.

    Megatron's ``linear_qkv`` is ``GroupHeads(("{p}.q_proj.{t}", "{p}.k_proj.{t}", "{p}.v_proj.{t}"), ..., groups=8)``
    for 8 heads of keys. With as many groups as heads, each head has its query, key and value together.

    Attributes:
        sources, target: names.
        groups: number of groups along the first dim of each source.
    """

    sources: tuple[str, ...]
    target: str
    groups: int

    def __post_init__(self) -> None:
        _check_groups(self, self.groups)

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return UngroupHeads(self.target, self.sources, self.groups)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for _, filled in match_names(self.sources[0], made):
            names = [fill(source, filled) for source in self.sources]
            missing = [name for name in names if name not in made]
            if missing:
                raise ArgumentError(f"{self} lacks {', '.join(map(repr, missing))}")
            tensors = [made.pop(name) for name in names]
            sizes = [
                _group_size(self, self.groups, name, tensor.shape) for name, tensor in zip(names, tensors, strict=True)
            ]
            runs = [
                tensor.cut(0, range(group * size, (group + 1) * size))
                for group in range(self.groups)
                for tensor, size in zip(tensors, sizes, strict=True)
            ]
            _put(made, fill(self.target, filled), join_tensors(runs, 0, str(self)), self)


@dataclass(frozen=True)
class UngroupHeads(_Rule):
    """One tensor of groups of heads as several; see :class:`GroupHeads`. The destination has their sizes."""

    source: str
    targets: tuple[str, ...]
    groups: int

    def __post_init__(self) -> None:
        _check_groups(self, self.groups)

    def inverse(self) -> Rule:
        """See :meth:`Rename.inverse`."""
        return GroupHeads(self.targets, self.source, self.groups)

    def apply(self, made: dict[str, ComposedTensor], wanted: Shapes) -> None:
        """See :meth:`Rename.apply`."""
        for name, filled in match_names(self.source, made):
            names = _fill_wanted(self, self.targets, filled, wanted)
            whole, at = made.pop(name), 0
            sizes = [_group_size(self, self.groups, part, wanted[part]) for part in names]
            rows = whole.shape[0] if whole.shape else 0
            if rows != sum(sizes) * self.groups:
                raise ArgumentError(f"{self}: {name!r} has {rows} rows, and its parts have {sum(sizes) * self.groups}")
            for part, size in zip(names, sizes, strict=True):
                begins = range(at, rows, sum(sizes))
                runs = [whole.cut(0, range(begin, begin + size)) for begin in begins]
                _put(made, part, join_tensors(runs, 0, str(self)), self)
                at += size


Rule = Rename | Concatenate | Split | Stack | Unstack | Transpose | Pad | Trim | Drop | Rope | GroupHeads | UngroupHeads
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Rule)}


def check_rules(rules: Any) -> tuple[Rule, ...] | None:
    """The rules of a caller.

    Raises:
        ArgumentError: they are not a list of rules, or a field of one has a wrong type, is empty or no pattern.
    """
    if rules is None:
        return None
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, Rule) for rule in rules):
        raise ArgumentError(f"rules is {brief(rules)}; it must be a list of rules of reshard.weights, or None")
    for rule in rules:
        check_fields(rule, dim=(0, MAX_NDIM - 1))
        for field in fields(rule):
            value = getattr(rule, field.name)
            patterns = (value,) if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ("-",)
            names = [name for pattern in patterns if isinstance(pattern, str) for name in _placeholders(pattern)]
            if not patterns or not all(name.isascii() and name.isidentifier() for name in names):
                raise ArgumentError(
                    f"{field.name} of a {type(rule).__name__} is {brief(value)}; it must not be empty, and its "
                    "placeholders must be names"
                )
    return tuple(rules)


def inverted(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules from the destination back to the source."""
    return tuple(rule.inverse() for rule in reversed(rules))


def rules_to_json(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Rules as JSON."""
    return [{"kind": type(rule).__name__, **asdict(rule)} for rule in rules]


def rules_from_json(given: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """The rules that :func:`rules_to_json` wrote."""
    rules = []
    for entry in given:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        kind = _KINDS[str(values.pop("kind"))]
        rules.append(kind(**values))
    return tuple(rules)


def apply_rules(rules: Sequence[Rule], shapes: Shapes, wanted: Shapes) -> dict[str, ComposedTensor]:
    """The tensors that rules make from the tensors of a source.

    Args:
        rules: rules in the order in which they apply.
        shapes: shapes of the source, by name.
        wanted: shapes of the destination.

    Raises:
        ArgumentError: a rule does not fit the tensors.
    """
    made = {name: ComposedTensor.of(name, shape) for name, shape in shapes.items()}
    for rule, after in _with_wanted(rules, wanted):
        rule.apply(made, after)
    return made


def find_idle_rules(rules: Sequence[Rule], shapes: Shapes, wanted: Shapes) -> list[Rule]:
    """The rules that change nothing, for example because their patterns fit no tensor; see :func:`apply_rules`."""
    made, idle = {name: ComposedTensor.of(name, shape) for name, shape in shapes.items()}, []
    for rule, after in _with_wanted(rules, wanted):
        before = dict(made)
        rule.apply(made, after)
        if made.keys() == before.keys() and all(made[name] is before[name] for name in made):
            idle.append(rule)
    return idle


def _with_wanted(rules: Sequence[Rule], wanted: Shapes) -> list[tuple[Rule, Shapes]]:
    """Each rule with the shapes of the destination, by the names before later rules rename them."""
    wanted_after = [wanted]
    for rule in reversed(rules):
        if not isinstance(rule, Rule):
            raise ArgumentError(f"{rule!r:.60} is not a rule of reshard.weights.mapping.rules")
        wanted_after.append(rule.wanted_before(wanted_after[-1]))
    return list(zip(rules, reversed(wanted_after[:-1]), strict=True))


def _put(made: dict[str, ComposedTensor], name: str, tensor: ComposedTensor, rule: Any) -> None:
    """Add a tensor under a name that no other one has."""
    if name in made:
        raise ArgumentError(f"{rule}: there is a tensor {name!r} already")
    made[name] = tensor


def _check_dim(rule: Any, dim: int, *shapes: Sequence[int]) -> None:
    for shape in shapes:
        if not 0 <= dim < len(shape):
            raise ArgumentError(f"{rule}: a tensor of shape {list(shape)} has no dim {dim}")


def _check_groups(rule: Any, groups: Any) -> None:
    if not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"{type(rule).__name__}: groups is {groups!r:.40}; it must be a positive integer")


def _group_size(rule: Any, groups: int, name: str, shape: Sequence[int]) -> int:
    """Number of rows of one group."""
    rows = shape[0] if shape else 0
    if not rows or rows % groups:
        raise ArgumentError(f"{rule}: {groups} groups do not divide the {rows} rows of {name!r}")
    return rows // groups


_PLACEHOLDER = re.compile(r"\{(\w+)(:d)?\}")


def match_names(pattern: str, made: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The names that a pattern matches, each with what its placeholders stand for."""
    at, text, seen = 0, "", set()
    for placeholder in _PLACEHOLDER.finditer(pattern):
        text += re.escape(pattern[at : placeholder.start()])
        name = placeholder[1]
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{'[0-9]+' if placeholder[2] else '.+'})"
        seen.add(name)
        at = placeholder.end()
    end = pattern[at:]
    compiled = re.compile(text + re.escape(end))
    matches = ((name, compiled.fullmatch(name)) for name in made if name.endswith(end))
    return [(name, match.groupdict()) for name, match in matches if match is not None]


def _placeholders(pattern: str) -> list[str]:
    return [match[1] for match in _PLACEHOLDER.finditer(pattern)]


def _fill_wanted(rule: Rule, targets: Sequence[str], filled: Any, wanted: Shapes) -> list[str]:
    """The names that a rule makes, all of which the destination must have."""
    names = [fill(target, filled) for target in targets]
    missing = [name for name in names if name not in wanted]
    if missing:
        raise ArgumentError(f"{rule}: the destination lacks {', '.join(map(repr, missing))}")
    return names


def fill(pattern: str, filled: Mapping[str, str]) -> str:
    """The name that a pattern gives with these values of its placeholders."""
    try:
        return _PLACEHOLDER.sub(lambda match: filled[match[1]], pattern)
    except KeyError as error:
        raise ArgumentError(f"the pattern {pattern!r} has a placeholder {error} that the other side lacks") from None


def _number_of(pattern: str) -> str:
    """The name of the placeholder for a number."""
    numbers = [match[1] for match in _PLACEHOLDER.finditer(pattern) if match[2]]
    if len(numbers) != 1:
        raise ArgumentError(f"the pattern {pattern!r} needs one placeholder for a number, such as {{e:d}}")
    return numbers[0]
