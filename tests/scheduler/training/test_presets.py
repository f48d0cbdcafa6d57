"""Presets: their sizes equal the closed formula and the papers, and shrunk ones keep the ratios of their edges."""

from __future__ import annotations

import math

import pytest
import torch

from reshard.errors import ArgumentError
from reshard.scheduler.training.counts import count_edges
from reshard.scheduler.training.models.making import find_cuts, make_model
from reshard.scheduler.training.models.model_presets import (
    NUM_U_LAYERS,
    PRESETS,
    GPTConfig,
    UTransformerConfig,
    find_preset,
)

MIB = 2**20
MILLIONS = {name: float(name.split("-")[-1][:-1]) * (1e6 if name[-1] == "m" else 1e9) for name in PRESETS}


def count_parameters(config):
    return sum(parameter.numel() for parameter in make_model(config).parameters())


@pytest.mark.parametrize("name", [name for name in PRESETS if "gpt" in name])
def test_gpt_has_the_parameters_of_the_formula_and_of_its_name(name):
    config = PRESETS[name].config
    assert count_parameters(config) == config.num_parameters
    assert config.num_parameters == pytest.approx(MILLIONS[name], rel=0.02)


def test_an_untied_head_counts_too():
    config = GPTConfig(2, 2, 4, sequence=8, vocabulary=11, is_tied=False)
    assert count_parameters(config) == config.num_parameters


@pytest.mark.parametrize(("name", "more"), [("470m", 0.063), ("1b", 0.124), ("2b", 0.101)])
def test_u_transformer_has_more_parameters_than_its_name_says(name, more):
    preset = PRESETS[f"u-transformer-{name}"]
    assert sum(preset.layers) == NUM_U_LAYERS == 13
    assert count_parameters(preset.config) / MILLIONS[f"u-transformer-{name}"] - 1 == pytest.approx(more, abs=1e-3)


@pytest.mark.slow
def test_edges_have_the_bytes_of_the_study():
    gpt = PRESETS["study-gpt-2.6b"]
    (edge,) = count_edges(gpt, gpt.divide_layers(2))
    assert edge.nbytes * gpt.num_samples / gpt.num_microbatches == 40 * MIB  # float16, 8 samples in a microbatch
    largest = PRESETS["u-transformer-2b"]
    (edge,) = count_edges(largest, largest.layers)
    config, num_samples = largest.config, largest.num_samples // largest.num_microbatches
    assert num_samples == 64
    down = [config.width(level) * (config.side >> level) ** 2 for level in range(4)]
    halved = [config.width(level) * (config.side >> (level + 1)) ** 2 for level in range(3)]
    assert (down[0] + sum(down) + sum(halved)) * 4 * num_samples / MIB == 546  # all skips
    # cut before the fifth up layer: the output of layer 8, and the skips of layers 9 to 12
    sizes_sent = [config.width(3) * 16**2, down[1], halved[0], down[0], down[0]]
    assert edge.nbytes == 4 * sum(sizes_sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "divisor", "num_stages"),
    [
        ("gpt3-125m", 4, 3),
        pytest.param("gpt3-1.3b", 8, 3, marks=pytest.mark.slow),
        pytest.param("gpt3-13b", 10, 4, marks=pytest.mark.slow),
        pytest.param("u-transformer-470m", 4, 2, marks=pytest.mark.slow),
        ("u-transformer-1b", 12, 3),
        pytest.param("u-transformer-2b", 21, 4, marks=pytest.mark.slow),
    ],
)
def test_shrinking_multiplies_bytes_per_operation_of_all_edges_alike(name, divisor, num_stages):
    whole = PRESETS[name]
    small = whole.shrunk(divisor, num_stages)
    factor = whole.config.shrink_factor(divisor)
    assert factor == (divisor**2 if "gpt" in name else divisor)
    pairs = list(zip(*(count_edges(item, item.divide_layers(num_stages)) for item in (whole, small)), strict=True))
    assert pairs
    for edge, shrunk in pairs:
        assert (edge.src, edge.dst) == (shrunk.src, shrunk.dst)
        assert shrunk.ratio / edge.ratio == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_shrunk_to_any_size(name):
    for divisor in (2, 7, 64, 1000):
        small = PRESETS[name].shrunk(divisor, 3)
        config = small.config
        model = make_model(config)
        layers = small.divide_layers(3)
        assert sum(layers) == config.num_layers
        for path in find_cuts(config, layers):
            model.get_submodule(path)
        if isinstance(config, GPTConfig):
            assert config.vocabulary >= 256
            assert config.num_heads == PRESETS[name].config.num_heads
        assert small.num_samples >= small.num_microbatches
    assert PRESETS[name].shrunk(1, 3) is PRESETS[name]


def test_errors_name_the_rule():
    with pytest.raises(ArgumentError, match=r"there is no preset 'gpt4'; presets are gpt3-125m"):
        find_preset("gpt4")
    with pytest.raises(ArgumentError, match="12 layers, too few for 13 stages"):
        PRESETS["gpt3-125m"].divide_layers(13)
    with pytest.raises(ArgumentError, match="13 layers, too few for 14 stages"):
        PRESETS["u-transformer-1b"].shrunk(2, 14)


def test_first_values_are_those_of_gpt2():
    torch.manual_seed(0)
    model = make_model(GPTConfig(8, 4, 32, sequence=64, vocabulary=512), "cpu")
    assert model.head.weight is model.embed.tokens.weight
    block = model.blocks[0]
    assert float(block.q.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    for projection in (block.out, block.down):
        assert float(projection.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
        assert not projection.bias.any()
    tokens, targets = torch.randint(512, (2, 2, 64))
    assert float(model(tokens, targets).detach()) == pytest.approx(math.log(512), rel=0.05)


def test_u_transformer_maps_pictures_to_a_loss():
    model = make_model(UTransformerConfig(8, side=16, num_heads=2, groups=4), "cpu")
    pictures = torch.randn(2, 3, 16, 16)
    assert model(pictures, pictures).shape == ()
