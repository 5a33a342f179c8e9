# SPDX-License-Identifier: Apache-2.0
"""Figures that only a card has: generated kernels, captured steps, and that no size is compiled or captured again."""

from __future__ import annotations

import pytest

from benchmarks import gates
from tests.gates.test_gates import assert_expected

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_card():
    found = gates.measure("card")
    assert not [name for name, value in found.items() if name.endswith(("recompiles", "captured again")) and value]
    assert_expected("card", found)
