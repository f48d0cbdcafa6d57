"""The layers of a language model of transformers, from its shapes and its config.

Work counts two operations for each element of a matrix and token; of the experts, only the ones that a token chooses
count. Memory counts what autograd keeps in the modules of transformers with fused attention: the inputs and outputs of
norms, what attention reads and writes, and each hidden feature of the MLP.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.cli.model_shapes import BY_COLUMNS, BY_ROWS, ModelShapes, ModelTensor, layer_of, read_field
from reshard.dtypes import ITEMSIZE
from reshard.errors import ArgumentError
from reshard.formatting import format_names
from reshard.parallel.choice.grid_layer_cost import LayerSizes

from .layer_graph import Layer, LayerGraph

#: Names of the number of experts in configs, and of the number that a token chooses.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k")
#: The last matrix of an MLP: its input is the hidden features.
_LAST_OF_MLP = re.compile(r"(down_proj|c_proj|fc2|fc_out|w2|wo|dense_4h_to_h|output_linear|output\.dense)(\.weight)?$")
_ATTENTION = re.compile("attn|attention")
_NORM = re.compile(r"norm|\.ln_|layer_norm")
#: Bytes of a value that a norm converts to float32.
_FLOAT32 = 4


def make_model_graph(model: ModelShapes, sequence: int) -> LayerGraph:
    """The layers of a model: the embedding, each layer, and the head with its loss.

    Tensor parallelism divides what the plan of transformers divides. Grids divide layers of GPT-2 and Llama.

    Args:
        model: the model.
        sequence: tokens of a sample.

    Raises:
        ArgumentError: the model has no layers or several stacks of them, takes no such sequence, or does not say how
            many experts a token chooses.
    """
    stacks = {layer[0] for layer in map(layer_of, model.tensors) if layer is not None}
    if len(stacks) != 1:
        description = f"the stacks {format_names(stacks)}" if stacks else "no numbered layers"
        raise ArgumentError(f"{model.name} has {description}; --model needs a model with one stack of layers")
    longest = getattr(model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < sequence:
        raise ArgumentError(f"--sequence is {sequence}, but {model.name} takes at most {longest} tokens")
    return _Maker(model, sequence).make()


class _Heads(NamedTuple):
    """The attention heads of a layer: numbers, and features of a query or key and of a value."""

    number: int
    num_kv: int
    key_size: int
    value_size: int


class _Maker:
    """Makes the graph of one model."""

    def __init__(self, model: ModelShapes, sequence: int) -> None:
        config = model.config
        self._model, self._config, self._sequence = model, config, sequence
        self._hidden = int(config.hidden_size)
        self._vocabulary = int(config.vocab_size)
        dtype = next(tensor.dtype for tensor in model.tensors if len(tensor.shape) > 1)
        self._dtype = dtype if ITEMSIZE[dtype] >= 2 else "bfloat16"  # matrix products of 8-bit weights return 16 bits
        self._size = ITEMSIZE[self._dtype]
        self._stream = float(sequence * self._hidden * self._size)
        heads = math.gcd(model.num_heads, model.num_kv_heads)
        self._num_experts = next((n for name in _EXPERTS if isinstance(n := getattr(config, name, None), int)), 0)
        has_plan = any(_is_divided(tensor) for tensor in model.tensors if layer_of(tensor) is not None)
        self._tp_limit = max(1, heads & -heads) if has_plan else 1

    def make(self) -> LayerGraph:
        """The graph."""
        model = self._model
        before: list[ModelTensor] = []
        after: list[ModelTensor] = []
        of_layer: dict[int, list[ModelTensor]] = {}
        for tensor in model.tensors:
            layer = layer_of(tensor)
            if layer is not None:
                of_layer.setdefault(layer[1], []).append(tensor)
            else:
                (after if of_layer else before).append(tensor)
        stack = next(layer[0] for layer in map(layer_of, model.tensors) if layer is not None)
        table = next((tensor for tensor in before if tensor.name in model.tied.values()), None)
        head = [] if table is None else [table]
        layers = [
            self._make_embedding(before),
            *(self._make_layer(f"{stack}.{number}", number, tensors) for number, tensors in sorted(of_layer.items())),
            self._make_head([*after, *head]),
        ]
        ties = () if table is None else (((0, len(layers) - 1), math.prod(table.shape)),)
        shapes = [(1, self._sequence, self._hidden)] * (len(layers) - 1)
        return LayerGraph.chain(layers, shapes, dtype=self._dtype, name=model.name, ties=ties)

    def _make_embedding(self, tensors: Sequence[ModelTensor]) -> Layer:
        tables = [t for t in tensors if t.tp_style == "embedding_rowwise"]
        layer = Layer("embed", _key("embedding", tensors, self._sequence), 0.0, _count(tensors), 8.0 * self._sequence)
        if not tables or self._tp_limit == 1:
            return layer
        # an all-reduce in the forward alone
        return replace(
            layer,
            tp_limit=self._tp_limit,
            tp_params=_count(tables),
            tp_all_reduces=1,
            tp_all_reduce_bytes=self._stream / 2,
        )

    def _make_head(self, tensors: Sequence[ModelTensor]) -> Layer:
        tied = self._model.tied
        matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
        work = sum(2.0 * self._sequence * math.prod(tensor.shape) for tensor in matrices)
        logits = float(self._sequence * self._vocabulary)
        saved = logits * (self._size + _FLOAT32) + self._stream
        first = next(iter([*(tensor.name for tensor in tensors if tensor.name not in tied.values()), *tied]), "head")
        key = _key("head", tensors, self._sequence)
        layer = Layer(first.rpartition(".")[0] or first, key, work, _count(tensors), saved, self._stream)
        style = next((tensor.tp_style for tensor in matrices if tensor.tp_style in BY_ROWS), "")
        if not style or self._tp_limit == 1:
            return layer
        # the forward gathers the logits, which takes half as long as an all-reduce; the backward sums the gradient
        gathers = self._stream / 2 + logits * self._size / 4
        return replace(
            layer,
            tp_limit=self._tp_limit,
            tp_params=_count(matrices),
            tp_all_reduces=1,
            tp_all_reduce_bytes=gathers,
        )

    def _make_layer(self, name: str, number: int, tensors: Sequence[ModelTensor]) -> Layer:
        divided = [tensor for tensor in tensors if _is_divided(tensor)]
        heads = self._heads_of(number)
        is_attention = self._span(number) > 0 and any(_ATTENTION.search(tensor.name) for tensor in tensors)
        work = saved = tp_saved = 0.0
        if is_attention:
            work += 2.0 * self._sequence * self._span(number) * heads.number * (heads.key_size + heads.value_size)
            # queries, keys and values for each query head; the output and its copy for the projection
            kept = float(self._sequence * heads.number * (2 * heads.key_size + 3 * heads.value_size) * self._size)
            saved += kept
            tp_saved += kept if any(_ATTENTION.search(tensor.name) for tensor in divided) else 0
        for tensor in tensors:
            if not tensor.is_parameter:
                continue
            if _is_matrix(tensor):
                chosen = self._chosen_part(tensor)
                work += 2.0 * self._sequence * math.prod(tensor.shape) * chosen
                if not is_attention or not _ATTENTION.search(tensor.name):
                    kept = self._kept_of(tensor, tensors) * chosen
                    saved += kept
                    tp_saved += kept if _is_divided(tensor) else 0
                if chosen < 1 and _LAST_OF_MLP.search(tensor.name):
                    saved += 2 * self._stream * chosen * tensor.shape[0]  # tokens in the order of experts, and outputs
            elif _NORM.search(tensor.name) and tensor.name.endswith("weight"):
                saved += self._kept_of_norm(tensor, tensors, heads)
        key = _key(self._model.name, tensors, self._sequence, str(self._span(number)))
        layer = Layer(name, key, work, _count(tensors), saved, self._stream)
        num_sums = sum(tensor.tp_style in BY_COLUMNS and len(tensor.shape) > 1 for tensor in divided)
        if num_sums and self._tp_limit > 1:
            layer = replace(
                layer,
                tp_limit=self._tp_limit,
                tp_params=_count(divided),
                tp_saved_bytes=tp_saved,
                tp_all_reduces=num_sums,
                tp_all_reduce_bytes=self._stream,
            )
        kind = getattr(self._config, "model_type", "")
        if kind not in ("gpt2", "llama"):
            return replace(layer, grid_refusal=f"reshard.parallel divides GPT-2 and Llama, not {kind}")
        return replace(layer, grid_sizes=self._grid_sizes(tensors, heads))

    def _heads_of(self, number: int) -> _Heads:
        """The attention heads of a layer."""

        def read(name: str) -> int:
            return int(read_field(self._config, name, number) or 0)

        heads = read("num_attention_heads")
        size = read("head_dim") or self._hidden // max(1, heads)
        num_kv = read("num_key_value_heads") or heads
        return _Heads(heads, num_kv, read("qk_head_dim") or size, read("v_head_dim") or size)

    def _span(self, number: int) -> int:
        """The tokens that a token may attend to in a layer; 0 without attention."""
        kinds = getattr(self._config, "layer_types", None)
        kind = kinds[number] if kinds and number < len(kinds) else "full_attention"
        if kind == "sliding_attention":
            return min(self._sequence, int(read_field(self._config, "sliding_window", number) or self._sequence))
        return self._sequence if "attention" in kind and not kind.startswith("linear") else 0

    def _chosen_part(self, tensor: ModelTensor) -> float:
        """The part of a tensor that works for one token: less than 1 for experts."""
        is_stack = len(tensor.shape) == 3 and (tensor.shape[0] == self._num_experts or ".experts." in tensor.name)
        if not (tensor.is_expert or is_stack):
            return 1.0
        for name in _CHOSEN:
            chosen = getattr(self._config, name, None)
            if isinstance(chosen, int):
                return min(1.0, chosen / tensor.shape[0])
        raise ArgumentError(
            f"{self._model.name} has experts, but its config does not say how many a token chooses; it has none of "
            f"{', '.join(_CHOSEN)}"
        )

    def _kept_of(self, tensor: ModelTensor, others: Sequence[ModelTensor]) -> float:
        """Bytes that a matrix of an MLP makes autograd keep, for experts if each token chose all of them."""
        features = math.prod(tensor.shape) / self._hidden
        if _LAST_OF_MLP.search(tensor.name):
            block = _LAST_OF_MLP.sub("", tensor.name)
            inner = [other for other in others if other.name.startswith(block) and _is_matrix(other)]
            gated = sum(math.prod(other.shape) for other in inner if not _LAST_OF_MLP.search(other.name))
            features *= 2 if gated == 2 * math.prod(tensor.shape) else 1  # what the gate's activation returns, too
        return self._sequence * features * self._size

    def _kept_of_norm(self, norm: ModelTensor, others: Sequence[ModelTensor], heads: _Heads) -> float:
        """Bytes that a norm makes autograd keep: its input and its output; in RMSNorm also the input in float32."""
        features = norm.shape[0]
        if features == heads.key_size != self._hidden:  # of each head
            features *= heads.num_kv if "k_" in norm.name else heads.number
        has_bias = any(other.name == norm.name.removesuffix("weight") + "bias" for other in others)
        return float(self._sequence * features * (2 * self._size + (0 if has_bias else _FLOAT32)))

    def _grid_sizes(self, tensors: Sequence[ModelTensor], heads: _Heads) -> LayerSizes:
        """The matrix products of a layer; matrices that share an input are one."""
        ends = [tensor for tensor in tensors if len(tensor.shape) > 1 and _ends_block(tensor)]
        products = []
        for end in ends:
            block = end.name.rpartition(".")[0].rpartition(".")[0]
            firsts = [t for t in tensors if len(t.shape) > 1 and t.name.startswith(block) and t is not end]
            size = math.prod(end.shape) // self._hidden
            products += [(self._hidden, sum(math.prod(t.shape) for t in firsts) // self._hidden), (size, self._hidden)]
        return LayerSizes(self._hidden, self._sequence, tuple(products), heads.number, heads.key_size, num_norms=2)


def _ends_block(tensor: ModelTensor) -> bool:
    return bool(_LAST_OF_MLP.search(tensor.name)) or tensor.name.endswith("o_proj.weight")


def _is_matrix(tensor: ModelTensor) -> bool:
    """Whether a tensor is a matrix, or a stack of them; biases of experts are stacked, too."""
    return len(tensor.shape) > 1 and not tensor.name.endswith("bias")


def _is_divided(tensor: ModelTensor) -> bool:
    return tensor.tp_style in (*BY_ROWS, *BY_COLUMNS)


def _count(tensors: Sequence[ModelTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors if tensor.is_parameter)


def _key(kind: str, tensors: Sequence[ModelTensor], sequence: int, more: str = "") -> str:
    """A name of the class of a layer, by its shapes."""
    shapes = [(tensor.shape, tensor.dtype, tensor.is_expert, tensor.tp_style) for tensor in tensors]
    return f"{kind} {hashlib.sha256(repr((shapes, sequence, more)).encode()).hexdigest()[:10]}"
