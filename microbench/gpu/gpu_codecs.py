"""Rates of the kernels of the block codecs on a GPU, as fractions of the rate of ``copy_``. Bar: 0.75 both ways.

Rates count the bytes that a kernel reads and writes.
"""

from __future__ import annotations

import argparse

import torch

from microbench.gpu.gpu_packing import seconds_of
from microbench.harness.case_options import add_number
from microbench.harness.table import Table
from reshard.codecs import BLOCK_CODECS, BlockCodec, parse_codec

NUM_VALUES = 2**28
ROW = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--repeats", 5, "timed calls of each kernel")


def run(options: argparse.Namespace) -> None:
    """Print a row per codec and dtype."""
    from reshard.runtime.cuda.codec_kernels import decode_on_device, encode_on_device  # imports Triton

    print(torch.cuda.get_device_name())
    source = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds_of(lambda: target.copy_(source), options.repeats)
    print(f"copy_ of 256 MiB: {copy / 1e9:.0f} GB/s read and written")
    columns = {"codec": "<14", "dtype": "<9", "encode GB/s": ">.0f", "encode / copy_": ">.2f"}
    table = Table(columns | {"decode GB/s": ">.0f", "decode / copy_": ">.2f"})
    for name in BLOCK_CODECS:
        codec = parse_codec(name)
        assert isinstance(codec, BlockCodec)
        for dtype in (torch.float32, torch.bfloat16):
            plain = torch.randn(NUM_VALUES // ROW, ROW, device="cuda").to(dtype)
            shape = (plain.shape[0], codec.num_elements(plain.shape[1:], 0), codec.element[1])
            encoded = torch.empty(shape, dtype=torch.uint8, device="cuda")
            nbytes = plain.numel() * plain.element_size() + encoded.numel()
            rates = [
                nbytes / seconds_of(work, options.repeats)
                for work in (
                    lambda plain=plain, encoded=encoded, codec=codec: encode_on_device(codec, plain, encoded, 1),
                    lambda plain=plain, encoded=encoded, codec=codec: decode_on_device(codec, encoded, plain, 1),
                )
            ]
            cells = [cell for rate in rates for cell in (rate / 1e9, rate / copy)]
            table.add(name, str(dtype).removeprefix("torch."), *cells)
