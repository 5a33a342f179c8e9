# SPDX-License-Identifier: Apache-2.0
"""What all tests share: small random models, the bundled one, and skips for what a machine does not have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm_compile
from dllm_compile.models.llada import LLaDAConfig, LLaDAForMaskedDiffusion

REMOTE_VARIABLE = "DLLM_COMPILE_REMOTE_LLADA"

# The shapes are far too small for threads to help, and workers running side by side would fight for the cores.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a card or the remote code where there is none; refuse names that differ from run to run."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        # Two processes must collect the same tests.
        raise pytest.UsageError(f"give these tests ids of their own: {unstable[:3]}")
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_remote = pytest.mark.skip(
        reason=f"set {REMOTE_VARIABLE} to one or more folders (path[:path]) with LLaDA's own modelling code"
    )
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "remote" in item.keywords and not os.environ.get(REMOTE_VARIABLE):
            item.add_marker(no_remote)


@pytest.fixture(autouse=True)
def global_flags() -> Iterator[None]:
    """Fail a test that changes a flag of the whole process and does not put it back."""

    def flags() -> dict[str, Any]:
        return {
            "default dtype": torch.get_default_dtype(),
            "grad mode": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul precision": torch.get_float32_matmul_precision(),
        }

    before = flags()
    yield
    assert flags() == before


@pytest.fixture
def rng() -> torch.Generator:
    """A CPU generator with a fixed seed."""
    return torch.Generator().manual_seed(0)


def tiny_config(**changes: Any) -> LLaDAConfig:
    """A two-layer LLaDA with grouped-query attention, small enough for any test; `changes` replace fields."""
    fields: dict[str, Any] = {
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 96,
        "vocab_size": 128,
        "max_sequence_length": 128,
        "mask_token_id": 127,
        "eos_token_id": 126,
        "pad_token_id": 126,
        "rope_theta": 10000.0,
        "init_std": 0.2,
    }
    return LLaDAConfig(**{**fields, **changes})


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LLaDAForMaskedDiffusion:
    """A random LLaDA whose every parameter matters: norm weights are not 1 and biases are not 0."""
    model = LLaDAForMaskedDiffusion(tiny_config(**changes))
    model.model.reset_parameters(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_f" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


@pytest.fixture
def make_tiny() -> Callable[..., LLaDAForMaskedDiffusion]:
    """`tiny_model`, for tests that want a shape of their own."""
    return tiny_model


@pytest.fixture
def tiny() -> LLaDAForMaskedDiffusion:
    """The tiny random model, fp32."""
    return tiny_model()


@pytest.fixture(scope="session")
def small_model() -> LLaDAForMaskedDiffusion:
    """The bundled model, fp32 on the CPU. Shared: do not change it."""
    return dllm_compile.models.load_small()


@pytest.fixture(scope="session")
def small_tokenizer() -> Any:
    """The bundled model's tokenizer."""
    return dllm_compile.models.load_small_tokenizer()


@pytest.fixture(scope="session")
def small_fast() -> dllm_compile.OptimizedModel:
    """The bundled model, rewritten and not compiled. Shared: do not change it."""
    config = dllm_compile.CompileConfig(compile=False)
    return dllm_compile.optimize(dllm_compile.models.load_small(), config)


@pytest.fixture(scope="session")
def remote_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let transformers copy the code it runs below the tests' folder and not into the user's cache.

    Once for all tests: where that package of copies lies is fixed by the first import from it.
    """
    place = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
        yield


@pytest.fixture(scope="session", params=os.environ.get(REMOTE_VARIABLE, "").split(os.pathsep), ids=os.path.basename)
def remote_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, remote_modules: None) -> Path:
    """A small random checkpoint around LLaDA's own modelling code; one for each folder that is given."""
    from tests.remote import make_checkpoint

    code = Path(request.param)
    return make_checkpoint(code, tmp_path_factory.mktemp("remote") / code.name)
