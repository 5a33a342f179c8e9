# SPDX-License-Identifier: Apache-2.0
"""README and docs name what exists: attributes after `import dllm_compile` alone, and the files that they link to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}


def test_names_are_reachable_after_one_import():
    names = sorted(
        {name for text in TEXTS.values() for name in re.findall(r"\bdllm_compile((?:\.[A-Za-z_]\w*)+)", text)}
    )
    assert {".bisect", ".optimize", ".presets.PRESETS"} <= set(names)
    code = "; ".join(["import dllm_compile", *(f"dllm_compile{name}" for name in names)])
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[page]):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
