"""A model as a chain of layers and the tensors between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from reshard.arguments import check_arguments
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.parallel.choice.grid_layer_cost import LayerSizes

from .text_files import explain_refusal, read_object

#: Largest size, count or amount of work of a layer.
MAX = 1e21
#: Limit on the layers of a transformer that is described by its sizes.
MAX_LAYERS = 10_000
#: Largest number of bytes of a tensor for one sample.
MAX_SAMPLE_BYTES = 10**12


@dataclass(frozen=True)
class Layer:
    """One layer: the smallest part of a model that a stage may begin with.

    Args:
        name: path of the module that the layer begins with, as ``Pipe(cut_before=)`` takes it. The first layer may have
            any name.
        key: name of the layer's class. Layers of one class take equally long, so a profile has one entry for all.
        forward_flops: floating point operations of the forward of one sample.
        num_params: parameters of the layer.
        saved_bytes: bytes that autograd saves for the backward of one sample.
        input_bytes: bytes of one sample that recomputation keeps in place of ``saved_bytes``: the inputs, and tensors
            that it does not compute again.
        tp_limit: largest number of ranks over which tensor parallelism may divide the layer.
        tp_params: parameters that tensor parallelism divides. The others have a copy on each rank.
        tp_saved_bytes: the part of ``saved_bytes`` that tensor parallelism divides.
        tp_all_reduces: all-reduces over tensor-parallel ranks in a forward. A backward has as many.
        tp_all_reduce_bytes: bytes of one such all-reduce for one sample.
        grid_sizes: matrix products, heads and norms of the layer, if :mod:`reshard.parallel` can cut it over a grid.
        grid_refusal: the reason why it cannot.

    Raises:
        ArgumentError: a number is negative or not finite, or a part is larger than the whole.
    """

    name: str
    key: str
    forward_flops: float
    num_params: int
    saved_bytes: float
    input_bytes: float = 0.0
    tp_limit: int = 1
    tp_params: int = 0
    tp_saved_bytes: float = 0.0
    tp_all_reduces: int = 0
    tp_all_reduce_bytes: float = 0.0
    grid_sizes: LayerSizes | None = None
    grid_refusal: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.grid_sizes, Mapping):
            try:
                object.__setattr__(self, "grid_sizes", LayerSizes(**self.grid_sizes))
            except TypeError as error:
                raise ArgumentError(f"grid_sizes of layer {self.name!r} are no LayerSizes: {error}") from None
        if not isinstance(self.grid_sizes, LayerSizes | None):
            raise ArgumentError(f"grid_sizes of layer {self.name!r} is {brief(self.grid_sizes)}; it must be LayerSizes")
        for name in ("name", "key", "grid_refusal"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"the {name} of a layer must be a string, not {brief(getattr(self, name))}")
        for name, value in vars(self).items():
            if name not in ("name", "key", "grid_sizes", "grid_refusal"):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not is_number or not 0 <= value <= MAX:
                    raise ArgumentError(
                        f"{name} of layer {self.name!r} is {brief(value)}; it must be from 0 to {MAX:g}"
                    )
        if self.tp_limit < 1:
            raise ArgumentError(f"tp_limit of layer {self.name!r} is {self.tp_limit}; it must be at least 1")
        for part, whole in (("tp_params", "num_params"), ("tp_saved_bytes", "saved_bytes")):
            if getattr(self, part) > getattr(self, whole):
                raise ArgumentError(
                    f"layer {self.name!r}: {part} is {getattr(self, part):g}, but {whole} is only "
                    f"{getattr(self, whole):g}"
                )


@dataclass(frozen=True)
class Tensor:
    """A tensor that one layer writes and later layers read.

    Args:
        name, dtype: name and dtype of the tensor.
        shape: shape of one sample, the dim of the samples first: ``(1, 1024, 768)`` has 1024 x 768 elements a sample.
        writer: index of the layer that writes it.
        readers: indices of the layers that read it, ascending.
        has_gradient: whether a backward returns a gradient of the same size.

    Raises:
        ArgumentError: it is read before it is written, or an argument has a wrong type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    writer: int
    readers: tuple[int, ...]
    has_gradient: bool = True

    def __post_init__(self) -> None:
        for name in ("shape", "readers"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or not all(type(value) is int for value in values):
                raise ArgumentError(f"{name} of tensor {self.name!r} is {brief(values)}; it must be a list of integers")
        if type(self.writer) is not int:
            raise ArgumentError(f"writer of tensor {self.name!r} is {brief(self.writer)}; it must be an integer")
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "readers", tuple(sorted(self.readers)))
        if not self.readers or self.readers[0] <= self.writer or self.writer < 0:
            raise ArgumentError(
                f"tensor {self.name!r} is written by layer {brief(self.writer)} and read by "
                f"{brief(list(self.readers))}; layers read only what earlier layers have written"
            )
        if not self.shape or not all(type(size) is int and size > 0 for size in self.shape):
            raise ArgumentError(
                f"tensor {self.name!r} has shape {brief(self.shape)}; it needs positive sizes, the samples first"
            )
        dtype_name(self.dtype)
        if not isinstance(self.has_gradient, bool):
            raise ArgumentError(
                f"has_gradient of tensor {self.name!r} is {brief(self.has_gradient)}; it must be a bool"
            )
        if self.sample_bytes > MAX_SAMPLE_BYTES:
            raise ArgumentError(
                f"tensor {self.name!r} has {brief(self.sample_bytes)} bytes a sample; it may have {MAX_SAMPLE_BYTES}"
            )

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * ITEMSIZE[dtype_name(self.dtype)]


@dataclass(frozen=True)
class LayerGraph:
    """The layers of a model in the order of its forward, and the tensors between them.

    A tensor that only the next layer reads is an ordinary edge. Any other tensor is a skip connection.

    Args:
        layers, tensors: see :class:`Layer` and :class:`Tensor`.
        dtype: dtype of computations. A profile of another dtype is refused.
        name: name of the model.
        ties: ``(layers, num_params)``: these layers, in ascending order, share this many parameters. Each of the
            layers counts them; a stage with several of the layers keeps them once.

    Raises:
        ArgumentError: there is no layer, two tensors have one name, a tensor or a tie names an unknown layer, or a tie
            has more parameters than one of its layers.
    """

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...] = ()
    dtype: str = "float32"
    name: str = "model"
    ties: tuple[tuple[tuple[int, ...], int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentError(f"the name of a LayerGraph must be a string, not {brief(self.name)}")
        object.__setattr__(self, "ties", _read_ties(self.ties))
        for what, kind in (("layers", Layer), ("tensors", Tensor)):
            values = getattr(self, what)
            is_list = isinstance(values, Iterable) and getattr(values, "ndim", 1) != 0
            if not is_list or not all(isinstance(value, kind) for value in values):
                raise ArgumentError(f"{what} of a LayerGraph must be a list of {kind.__name__}s, not {brief(values)}")
            object.__setattr__(self, what, tuple(values))
        if not self.layers:
            raise ArgumentError("a LayerGraph needs at least one layer")
        dtype_name(self.dtype)
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) < len(names):
            raise ArgumentError(f"two tensors have one name; they are {sorted(names)}")
        for tensor in self.tensors:
            if tensor.readers[-1] >= len(self.layers):
                raise ArgumentError(
                    f"tensor {tensor.name!r} is read by layer {tensor.readers[-1]}, but there are only "
                    f"{len(self.layers)} layers"
                )

        for tied, number in self.ties:
            if not tied or list(tied) != sorted(set(tied)) or not 0 <= tied[0] <= tied[-1] < len(self.layers):
                raise ArgumentError(f"a tie names layers {list(tied)}; it needs some of 0 to {len(self.layers) - 1}")
            if not 0 <= number <= min(self.layers[layer].num_params for layer in tied):
                raise ArgumentError(
                    f"a tie of layers {list(tied)} has {number} parameters, but one of them has only "
                    f"{min(self.layers[layer].num_params for layer in tied)}"
                )

    @classmethod
    @check_arguments()
    def chain(cls, layers: Sequence[Layer], shapes: Sequence[Sequence[int]], **options: Any) -> LayerGraph:
        """Layers that each pass one tensor to the next.

        Args:
            layers: the layers.
            shapes: shape of one sample of the tensor after each layer but the last, the samples first.
            options: further arguments of :class:`LayerGraph`.
        """
        if not all(isinstance(shape, Sequence) for shape in shapes):
            raise ArgumentError(f"shapes of a chain must be a list of shapes of samples, not {shapes!r:.100}")
        if len(shapes) != len(layers) - 1:
            raise ArgumentError(f"{len(layers)} layers have {len(layers) - 1} tensors between them, not {len(shapes)}")
        dtype = options.get("dtype", "float32")
        tensors = [Tensor(f"x{i}", tuple(shape), dtype, i, (i + 1,)) for i, shape in enumerate(shapes)]
        return cls(tuple(layers), tuple(tensors), **options)

    @classmethod
    @check_arguments()
    def transformer(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        sequence: int,
        vocabulary: int = 0,
        tied: bool = False,
        dtype: str = "bfloat16",
        name: str = "transformer",
    ) -> LayerGraph:
        """A decoder of equal layers, with an embedding before them, and the head and its loss after them.

        Work and memory follow Korthikanti et al. ("Reducing Activation Recomputation in Large Transformer Models",
        2022) for 2-byte activations, without the memory of attention scores, which a fused kernel does not keep. With
        ``vocabulary=0`` there is neither an embedding nor a head. With ``tied``, both share one table. Layers are named
        as those of ``GPT`` in ``reshard.scheduler.training``.
        """
        _check_sizes(layers, hidden, heads, sequence, vocabulary, tied)
        size = ITEMSIZE[dtype_name(dtype)]
        stream = sequence * hidden * size
        block = Layer(
            "",
            f"transformer hidden={hidden} heads={heads} sequence={sequence}",
            24.0 * sequence * hidden**2 + 4.0 * sequence**2 * hidden,
            12 * hidden**2 + 13 * hidden,
            17.0 * stream,
            float(stream),
            heads & -heads,
            12 * hidden**2 + 7 * hidden,
            12.0 * stream,
            2,
            float(stream),
            LayerSizes(
                hidden,
                sequence,
                ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)),
                heads,
                hidden // heads,
                num_norms=2,
            ),
        )
        made = [replace(block, name=f"blocks.{number}") for number in range(layers)]
        if vocabulary:
            sizes = f"hidden={hidden} sequence={sequence} vocabulary={vocabulary}"
            table = LayerSizes(hidden, sequence, num_entries=vocabulary)
            first = Layer(
                "embed", f"embedding {sizes}", 0.0, (vocabulary + sequence) * hidden, 8.0 * sequence, grid_sizes=table
            )
            logits = 6.0 * sequence * vocabulary + stream
            work = 2.0 * sequence * hidden * vocabulary
            shared = vocabulary * hidden
            last = Layer(
                "norm", f"head {sizes}", work, shared, logits, float(stream), block.tp_limit, shared, logits - stream,
                1, float(stream), LayerSizes(hidden, sequence, ((hidden, vocabulary),), num_norms=1),
            )  # fmt: skip
            made = [first, *made, last]
        graph = cls.chain(made, [(1, sequence, hidden)] * (len(made) - 1), dtype=dtype, name=name)
        return replace(graph, ties=(((0, layers + 1), vocabulary * hidden),)) if tied else graph

    @property
    def num_params(self) -> int:
        """Parameters of the model, shared ones once."""
        shared = sum((len(tied) - 1) * number for tied, number in self.ties)
        return sum(layer.num_params for layer in self.layers) - shared

    @cached_property
    def is_chain(self) -> bool:
        """Whether no tensor skips a layer."""
        return all(tensor.readers == (tensor.writer + 1,) for tensor in self.tensors)

    @cached_property
    def is_sequential(self) -> bool:
        """Whether each layer reads a tensor of the layer before it and returns its gradient."""
        linked = {reader for t in self.tensors if t.has_gradient for reader in t.readers if reader == t.writer + 1}
        return linked == set(range(1, len(self.layers)))

    @cached_property
    def key(self) -> str:
        """Hash of the layers' classes and the dtype, for which a profile is measured."""
        classes = sorted({layer.key for layer in self.layers})
        return hashlib.sha256(json.dumps([self.dtype, classes]).encode()).hexdigest()[:16]

    @cached_property
    def hash(self) -> str:
        """Hash of the whole graph."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @check_arguments()
    def between(self, first: int, cut: int, end: int) -> tuple[Tensor, ...]:
        """Tensors that a stage of layers ``first`` to ``cut - 1`` sends to one of layers ``cut`` to ``end - 1``.

        A tensor that several stages read is passed on from one reader to the next. So the sender may be a reader.
        """
        if (first, cut, end) not in self._known_between:
            tensors = []
            for tensor in self.tensors:
                holders = (tensor.writer, *tensor.readers)
                reads = any(cut <= reader < end for reader in tensor.readers)
                holds = max((layer for layer in holders if layer < cut), default=-1)
                if reads and first <= holds < cut:
                    tensors.append(tensor)
            self._known_between[first, cut, end] = tuple(tensors)
        return self._known_between[first, cut, end]

    @cached_property
    def _known_between(self) -> dict[tuple[int, int, int], tuple[Tensor, ...]]:
        """Results of :meth:`between`."""
        return {}

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    @check_arguments()
    def from_json(cls, text: str) -> LayerGraph:
        """The inverse of :meth:`to_json`.

        Raises:
            ArgumentError: the text is not a graph.
        """
        try:
            data = read_object(text)
            layers = tuple(Layer(**layer) for layer in data.pop("layers"))
            return cls(layers, tuple(Tensor(**tensor) for tensor in data.pop("tensors")), **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"this is not a LayerGraph: {explain_refusal(error)}") from error


def _check_sizes(layers: Any, hidden: Any, heads: Any, sequence: Any, vocabulary: Any, tied: bool) -> None:
    """Raise ArgumentError unless a transformer can have these sizes."""
    if type(layers) is int and layers > MAX_LAYERS:
        raise ArgumentError(f"layers of a transformer is {brief(layers)}; at most {MAX_LAYERS:,} can be searched")
    for what, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("sequence", sequence)):
        if type(value) is not int or not 1 <= value <= MAX:
            raise ArgumentError(
                f"{what} of a transformer is {brief(value)}; it must be a positive integer of at most {MAX:g}"
            )
    if type(vocabulary) is not int or not 0 <= vocabulary <= MAX:
        raise ArgumentError(f"vocabulary of a transformer is {brief(vocabulary)}; it must be an integer of at least 0")
    if tied and not vocabulary:
        raise ArgumentError("a transformer with a tied head needs a vocabulary of at least 1; it is 0")
    if hidden % heads:
        raise ArgumentError(f"{heads} heads do not divide hidden={hidden} of a transformer evenly")


def _read_ties(ties: Any) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The ties of a graph. Raises ArgumentError if they are not ``((layers, num_params), ...)`` of integers."""
    ties_read = []
    for layers_of_tie in ties if isinstance(ties, Sequence) else (ties,):
        is_pair = (
            isinstance(layers_of_tie, Sequence)
            and len(layers_of_tie) == 2
            and isinstance(layers_of_tie[0], Sequence)
            and type(layers_of_tie[1]) is int
        )
        if not is_pair or not all(type(layer) is int for layer in layers_of_tie[0]):
            raise ArgumentError(
                f"a tie is {brief(layers_of_tie)}; it must be (layers, number of parameters), all integers"
            )
        ties_read.append((tuple(layers_of_tie[0]), layers_of_tie[1]))
    return tuple(ties_read)


def own_layer(tied: Sequence[int], first: int, end: int) -> int | None:
    """The last of some tied layers in a stage of layers ``first`` to ``end - 1``; None if it has none.

    Its backward comes first, so it creates the gradient. The stage counts the parameters once, with this layer.
    """
    return max((layer for layer in tied if first <= layer < end), default=None)


def is_shared(tied: Sequence[int], first: int, end: int) -> bool:
    """Whether layers ``first`` to ``end - 1`` have some of the tied layers, but not all."""
    return own_layer(tied, first, end) is not None and not first <= tied[0] <= tied[-1] < end
