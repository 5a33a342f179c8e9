# SPDX-License-Identifier: Apache-2.0
"""A bar over the stages of `optimize`."""

from __future__ import annotations

from typing import Any


class Stages:
    """Shows nothing unless enabled; `stage(name)` enters the next one."""

    def __init__(self, enabled: bool) -> None:
        self._bar: Any = None
        if enabled:
            from tqdm import tqdm

            self._bar = tqdm(total=4, bar_format="{desc:<20}{bar} {elapsed}")

    def __enter__(self) -> Stages:
        return self

    def __call__(self, name: str) -> None:
        """Enter the next stage."""
        if self._bar is not None:
            self._bar.set_description(name)
            self._bar.update()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
