"""The Triton kernels of the block codecs, in Triton's interpreter and compiler, neither of which needs a GPU, and on one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.devices import HAS_GPU

_COMPARED = """
import warnings
warnings.simplefilter("ignore")
import numpy as np, torch
from reshard.codecs import BlockCodec
from reshard.runtime.cuda.codec_kernels import decode_on_device, encode_on_device
from tests.codecs.test_block_codecs import DTYPES, KINDS, _hard_rows
shapes = ((128, 256), (64, 96), (32, 45))
for number, kind in enumerate(KINDS):
    for at, dtype in enumerate(DTYPES.values()):
        for values, columns in (shapes[(number + at) % 3],) if ROWS < 50 else shapes:
            codec = BlockCodec(kind, values)
            source = torch.from_numpy(_hard_rows(ROWS, columns, seed=ROWS)).to(dtype)
            wanted, encoded = (torch.full((codec.nbytes(source.shape),), 77, dtype=torch.uint8) for _ in range(2))
            codec.encode(source, wanted)
            encoded = encoded.to(DEVICE)
            assert encode_on_device(codec, source.to(DEVICE), encoded) == encoded.numel()
            assert torch.equal(encoded.cpu(), wanted), (kind, dtype, values)
            plain, found = torch.empty_like(source), torch.full_like(source, 3).to(DEVICE)
            codec.decode(wanted, plain)
            decode_on_device(codec, wanted.to(DEVICE), found)
            assert torch.equal(*(one.cpu().view(torch.uint8) for one in (found, plain))), (kind, dtype, values)
print("equal")
"""

_COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from reshard.runtime.cuda import codec_kernels as kernels
for kernel in (kernels._encode_blocks, kernels._decode_blocks):
    for name, kind in kernels._KINDS.items():
        for form, word in ((0, "*i32"), (1, "*i16"), (2, "*i16")):
            values = dict(FORMAT=form, IS_FP8=name == "fp8", BLOCKS=4, COUNT=kernels.BLOCKS_PER_PROGRAM,
                          SCALE_BYTES=kind.scale_bytes, CODE_BYTES=kind.code_bytes)
            encodes = kernel is kernels._encode_blocks
            values |= dict(LARGEST_EXPONENT=kind.largest_exponent, CARRY=kind.carry) if encodes else dict(MAX=65504.0)
            names = [one for one in kernel.arg_names if one not in values]
            types = [word, "*u8"] if encodes else ["*u8", word]
            signature = dict(zip(names, [*types, "i32", "i32", "i32"])) | {one: "constexpr" for one in values}
            constants = {(kernel.arg_names.index(one),): value for one, value in values.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
            assert "ftz" not in ptx and "fma" not in ptx, (name, form)
            assert ("div.rn.f32" in ptx) == (encodes and name == "int4-bf16"), (name, form)
print("compiled")
"""


def _run(code, **environment):
    pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return run.stdout.strip(), run.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_interpreted_kernels_equal_the_native_codecs_bit_for_bit(rows):
    out, errors = _run(f"ROWS, DEVICE = {rows}, 'cpu'\n{_COMPARED}", TRITON_INTERPRET="1")
    assert out == "equal", errors


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="this machine has no NVIDIA GPU")
def test_kernels_on_a_gpu_equal_the_native_codecs_bit_for_bit():
    out, errors = _run(f"ROWS, DEVICE = 200, 'cuda'\n{_COMPARED}")
    assert out == "equal", errors


@pytest.mark.slow  # 30 kernels
def test_kernels_compile_and_round_every_operation_as_the_native_codecs_do():
    out, errors = _run(_COMPILED)
    assert out == "compiled", errors
