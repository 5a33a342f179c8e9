# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm_compile.kernels import _launch


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton compiles for an H200 that is not there, without a cache."""
    from .sm90 import pretend_h200

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_launch, "has_tensor_descriptors", lambda device: True)
    with pretend_h200():
        yield
