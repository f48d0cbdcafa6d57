"""The tensors of a model of transformers, by name, without their values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.cli.progress_bars import show_elapsed
from reshard.errors import ArgumentError
from reshard.formatting import did_you_mean

#: Styles of transformers' tensor-parallel plans that cut the rows of a weight, and its columns.
BY_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_rowwise")
BY_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise")
#: Beginnings and endings by which a path differs from a name on the Hugging Face Hub.
_PATH = re.compile(r"^[./~]|\.(js\w*|ya?ml)$", flags=re.IGNORECASE)
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model.

    Attributes:
        name: its name in the state dict.
        shape: its global shape.
        dtype: its dtype.
        tp_style: how transformers shards it by tensor parallelism; "" if it does not.
        is_expert: whether its first dim counts the experts of a layer.
        is_parameter: whether it is a parameter; FSDP shards no buffers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tp_style: str
    is_expert: bool
    is_parameter: bool


@dataclass(frozen=True)
class ModelShapes:
    """The tensors of a model, in order, and the number of its heads.

    Attributes:
        name: name of the class in transformers.
        tensors: parameters and persistent buffers; tied ones once.
        num_heads: attention heads; 0 if the config does not say. If layers have different numbers, this and the next
            number are the largest that divide those of all layers.
        num_kv_heads: heads of keys and values.
        tied: for each name of a tied tensor that is not in ``tensors``, the name of the tensor.
        config: its config, or the part of it that describes the language model.
    """

    name: str
    tensors: tuple[ModelTensor, ...]
    num_heads: int
    num_kv_heads: int
    tied: Mapping[str, str]
    config: Any


def read_model(source: str, dtype: str | None) -> ModelShapes:
    """The tensors of a model, without its weights.

    Args:
        source: a ``config.json``, its folder, or a name that transformers knows.
        dtype: dtype of the parameters; None: the dtype in the config, or bfloat16.

    Raises:
        ArgumentError: transformers is not installed, or has no causal language model for the config; or a path names
            no file.
    """
    _check_source(source)
    is_local = Path(source).expanduser().exists()
    place = f"reading {source}" if is_local else f"asking the Hugging Face Hub for the config of {source}"
    with show_elapsed(f"{place} with transformers"):
        return _read_model(source, dtype)


def _read_model(source: str, dtype: str | None) -> ModelShapes:
    try:
        import torch
        import transformers
    except ImportError:
        raise ArgumentError("--model needs torch and transformers: pip install torch transformers") from None
    try:
        config = _read_config(source)
        config_dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
        with torch.device("meta"):
            make: Any = transformers.AutoModelForCausalLM.from_config
            model = make(config, dtype=getattr(torch, dtype or config_dtype))
    except Exception as error:  # transformers raises many types for a config that it does not know
        raise ArgumentError(
            f"transformers {transformers.__version__} has no model for {source}: {type(error).__name__}: {error}"
        ) from error
    text = config.get_text_config()
    num_layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    num_heads, num_kv_heads = (
        math.gcd(*(int(read_field(text, name, layer) or 0) for layer in range(max(1, num_layers))))
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    name_of = {id(value): name for name, value in model.named_parameters()}
    parameters = set(name_of.values())
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: name_of[id(value)] for name, value in every if name not in parameters}
    tp_plan, ep_plan = model.tp_plan, model.ep_plan  # each access merges those of all modules
    tensors = [
        ModelTensor(
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            _style_of(name, tp_plan),
            _style_of(name, ep_plan) == "grouped_gemm",
            name in parameters,
        )
        for name, value in model.state_dict().items()
        if name not in tied
    ]
    return ModelShapes(
        type(model).__name__,
        tuple(tensors),
        num_heads,
        num_kv_heads or num_heads,
        tied,
        text,
    )


def _check_source(source: str) -> None:
    """Raise ArgumentError if the source is a path of no file, or of no config. Transformers looks names up."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ArgumentError(f"--model {source}: the folder has no config.json")
    elif path.is_file():
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:
            raise ArgumentError(
                f"--model {source} is not JSON: {error}; pass the config.json of a model of the Hub"
            ) from None
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise ArgumentError(f'--model {source} has no model_type, such as "llama"; pass the config.json of a model')
    elif not path.is_file() and (_PATH.search(source) or source.count("/") > 1):
        near = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ArgumentError(
            f"--model {source}: there is no such file or folder; it is a config.json, its folder, or a name on the "
            f"Hugging Face Hub{did_you_mean(path.name, near)}"
        )


def _read_config(source: str) -> Any:
    from transformers import AutoConfig

    path = Path(source).expanduser()
    if path.is_file():
        fields = json.loads(path.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    if path.is_dir():
        return AutoConfig.from_pretrained(path)
    return AutoConfig.from_pretrained(source)


def read_field(config: Any, name: str, layer: int) -> Any:
    """A field of a config for one layer; None if it has none. Layers of some models have different values."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises AmbiguousGlobalPerLayerAttributeError if the layers differ
        return getattr(config.per_layer_config[layer], name, None)


def _style_of(name: str, plan: Mapping[str, str] | None) -> str:
    """The style that a plan of transformers gives a tensor, by the name of the tensor or of its module."""
    for candidate in (name, name.rpartition(".")[0]):
        style = (plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", candidate))
        if style is not None:
            return style
    return ""


def layer_of(tensor: ModelTensor) -> tuple[str, int] | None:
    """The name of the stack of layers, and the number in it; None for a tensor outside of layers."""
    match = _LAYER.search(tensor.name)
    return None if match is None else (tensor.name[: match.start()], int(match[1]))
