# SPDX-License-Identifier: Apache-2.0
"""Watches the user's parameters: programs read them in place, so a replaced parameter would go unnoticed."""

from __future__ import annotations

from torch import nn

from .errors import StaleWeightsError


class WeightWatch:
    """Remembers where every parameter lies. In-place updates are fine; a parameter that moved is not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = self._look()

    def check(self) -> None:
        """Raise when a parameter is not where the programs read it.

        Raises:
            StaleWeightsError: names the first parameter that was replaced, moved or converted.
        """
        places = self._look()
        if places == self._places:
            return
        changed = sorted(name for name in {*places, *self._places} if places.get(name) != self._places.get(name))
        raise StaleWeightsError(
            f"{len(changed)} parameters were replaced, moved or converted after optimize (first: {changed[0]}). "
            "Update weights in place (p.copy_(...), load_state_dict) or call optimize again. A later optimize() of the "
            "same model with fewer passes in `disable` moves parameters as well: use the newest result"
        )

    def _look(self) -> dict[str, tuple[int, int]]:
        return {name: (id(p), p.data_ptr()) for name, p in self._model.named_parameters()}
