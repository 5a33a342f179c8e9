# SPDX-License-Identifier: Apache-2.0
"""Watches the user's parameters: programs read them in place, so a replaced parameter would go unnoticed.

FP8 copies do not follow an update in place either; torch counts those, and the counts are watched.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from .errors import StaleWeightsError


class WeightWatch:
    """Remembers where every parameter lies. In-place updates are fine; a parameter that moved is not.

    Args:
        model: whose parameters.
        quantized: parameters by name that are in use as FP8 copies. Updates in place of these are not fine. What is
            written through `p.data` torch does not count.
    """

    def __init__(self, model: nn.Module, quantized: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        self._quantized = dict(quantized or {})
        self._places = self._look()
        self.refreshed()

    def refreshed(self) -> None:
        """The FP8 copies are those of the parameters as they are now."""
        self._versions = self._count()

    def check(self) -> None:
        """Raise when a parameter is not where the programs read it, or when an FP8 copy is older than its parameter.

        Raises:
            StaleWeightsError: names the first parameter that was replaced, moved, converted or updated.
        """
        self.check_places()
        counts = self._count()
        if counts == self._versions:
            return
        changed = [name for name in counts if counts[name] != self._versions[name]]
        raise StaleWeightsError(
            f"{len(changed)} parameters were updated in place, and their FP8 copies are older (first: {changed[0]}): "
            "call refresh_weights()"
        )

    def check_places(self) -> None:
        """The part of `check` about where parameters lie.

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

    def _count(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self._quantized.items()}
