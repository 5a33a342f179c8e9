# SPDX-License-Identifier: Apache-2.0
"""FP8 products of integers on the CPU and in Triton's interpreter: equal, not near."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from dllm_compile.kernels.fp8_linear import fp8_linear
from dllm_compile.kernels.fp8_linear_add_rms_norm import fp8_linear_add_rms_norm

from .fp8_exact_cases import exact_inputs, exact_product
from .test_interpreter import ROOT
from .test_interpreter import pytestmark as interpreter

CODE = """
import json, torch
torch.set_num_threads(1)
from dllm_compile.kernels.fp8_linear_triton import Tiling, fp8_linear_parts, fp8_linear_triton
from tests.kernels.fp8_exact_cases import exact_inputs, exact_product
found = {}
for rows, outs, width, tiling in (
    (1, 128, 384, Tiling(16, 128, 1, 2, 4, True, 0)),
    (21, 256, 640, Tiling(16, 64, 1, 2, 4, True, 3)),
    (37, 256, 384, Tiling(32, 128, 1, 2, 4, False, 3)),
):
    arguments = exact_inputs(rows, outs, width)
    got = fp8_linear_triton(*arguments, torch.float32, tiling)
    found[f"{rows} rows"] = int((got != exact_product(*arguments)).sum())
for rows, outs, width, tiling in (
    (5, 128, 896, Tiling(16, 128, 4, 3, 4, True, 3)),
    (40, 128, 512, Tiling(16, 64, 2, 2, 4, False, 1)),
):
    arguments = exact_inputs(rows, outs, width)
    got = fp8_linear_parts(*arguments, tiling).sum(0)
    found[f"{rows} rows in parts"] = int((got != exact_product(*arguments)).sum())
print(json.dumps(found))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "outs", "width"), [(1, 128, 128), (5, 256, 640), (17, 384, 1024)])
def test_reference(rows, outs, width, dtype):
    arguments = exact_inputs(rows, outs, width)
    expected = exact_product(*arguments)
    assert torch.equal(fp8_linear(*arguments, dtype), expected.to(dtype))
    residual = torch.randint(-99, 100, (rows, outs)).to(dtype)
    total, _ = fp8_linear_add_rms_norm(*arguments, residual, torch.ones(outs, dtype=dtype), 1e-5)
    assert torch.equal(total, residual + expected.to(dtype))


@interpreter
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 5
    assert set(found.values()) == {0}
