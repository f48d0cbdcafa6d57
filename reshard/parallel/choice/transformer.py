"""Sizes of a transformer, for choosing its grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError

from .grid_layer_cost import LayerSizes


@dataclass(frozen=True)
class TransformerSizes:
    """A stack of equal transformer layers between an embedding and an output layer.

    Args:
        hidden: width of the hidden states.
        num_layers: number of layers.
        num_heads, num_kv_heads: query heads and key/value heads.
        head_size: features of one head.
        mlp_hidden: width inside the MLP.
        num_mlp_inputs: 2 if a gate shares the input of the MLP, else 1.
        vocabulary: entries of the embedding.
        sequence: tokens of one row.

    Raises:
        ArgumentError: a size is not a positive integer.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_hidden: int
    num_mlp_inputs: int
    vocabulary: int
    sequence: int

    def __post_init__(self) -> None:
        check_fields(self, **dict.fromkeys(self.__dataclass_fields__, (1, 2**40)))

    @classmethod
    @check_arguments(sequence=(1, 2**40))
    def of(cls, model: Any, sequence: int | None = None) -> TransformerSizes:
        """The sizes of a GPT of ``reshard train``, or of a GPT-2 or Llama of ``transformers``, from its ``config``.

        Args:
            model: the model, or its config.
            sequence: tokens of one row; default: the longest that the model can take.

        Raises:
            ArgumentError: the config is of another kind.
        """
        config = getattr(model, "config", model)

        def first(*names: str, default: Any = None) -> Any:
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
            if default is None:
                raise ArgumentError(
                    f"choose_grid needs the sizes of {type(model).__name__}, but its config has none of "
                    f"{', '.join(names)}; pass TransformerSizes"
                )
            return default

        hidden, heads = first("hidden_size", "hidden"), first("num_attention_heads", "num_heads")
        is_gated = getattr(config, "model_type", None) == "llama"
        return cls(
            hidden=hidden,
            num_layers=first("num_hidden_layers", "num_layers"),
            num_heads=heads,
            num_kv_heads=first("num_key_value_heads", default=heads),
            head_size=first("head_dim", "head_size", default=hidden // heads),
            mlp_hidden=first("intermediate_size", "n_inner", default=4 * hidden),
            num_mlp_inputs=2 if is_gated else 1,
            vocabulary=first("vocab_size", "vocabulary"),
            sequence=sequence or first("max_position_embeddings", "sequence"),
        )

    @property
    def layer(self) -> LayerSizes:
        """One of the equal layers."""
        attended = self.num_heads * self.head_size
        products = (
            (self.hidden, attended + 2 * self.num_kv_heads * self.head_size),
            (attended, self.hidden),
            (self.hidden, self.num_mlp_inputs * self.mlp_hidden),
            (self.mlp_hidden, self.hidden),
        )
        return LayerSizes(self.hidden, self.sequence, products, self.num_heads, self.head_size, num_norms=2)

    @property
    def output(self) -> LayerSizes:
        """The output layer."""
        return LayerSizes(self.hidden, self.sequence, ((self.hidden, self.vocabulary),))
