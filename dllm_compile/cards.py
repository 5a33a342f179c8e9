# SPDX-License-Identifier: Apache-2.0
"""What known cards can do, and the shortest time in which one could do given work.

Dense rates without sparsity. Of the H200 they are what large copies and products were measured to reach; of the others
what their makers state, which a kernel does not reach: a floor from such a row is a little too low.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """One kind of accelerator.

    Attributes:
        name: what `torch.cuda.get_device_name` contains.
        bytes_per_second: reading memory.
        flops: of 16-bit products, a second.
        fp8_flops: of FP8 products, a second; None where there are none.
        measured: whether the rates were measured, else they are the maker's.
    """

    name: str
    bytes_per_second: float
    flops: float
    fp8_flops: float | None
    measured: bool = False

    def floor(self, bytes_moved: int, flops: int, fp8_flops: int = 0) -> float | None:
        """Seconds that moving and computing take at least, the slower of the two; None: FP8 on a card without it.

        Args:
            bytes_moved: every operand once.
            flops: all of them, FP8 included.
            fp8_flops: those of FP8 products.
        """
        if fp8_flops and self.fp8_flops is None:
            return None
        computing = (flops - fp8_flops) / self.flops + (fp8_flops / self.fp8_flops if self.fp8_flops else 0.0)
        return max(bytes_moved / self.bytes_per_second, computing)


# The first whose name occurs in the device's is taken: longer names come first.
CARDS = (
    Card("H200", 4.35e12, 800e12, 1350e12, measured=True),
    Card("H100 PCIe", 2.0e12, 756e12, 1513e12),
    Card("H100 NVL", 3.9e12, 835e12, 1671e12),
    Card("H100", 3.35e12, 989e12, 1979e12),
    Card("A100-SXM4-80GB", 2.04e12, 312e12, None),
    Card("A100 80GB PCIe", 1.94e12, 312e12, None),
    Card("A100", 1.56e12, 312e12, None),
    Card("L40S", 0.864e12, 362e12, 733e12),
    Card("NVIDIA L4", 0.3e12, 121e12, 242e12),
    Card("RTX 4090", 1.01e12, 165e12, 330e12),
    Card("B200", 8.0e12, 2250e12, 4500e12),
)


def card_named(name: str) -> Card | None:
    """The card of a device name; None where it is not known."""
    # "NVIDIA L4" is a part of "NVIDIA L40S", which stands in front of it, and of "NVIDIA L40", which is not known.
    found = next((card for card in CARDS if card.name in name), None)
    return None if found is not None and found.name == "NVIDIA L4" and name.rstrip() != "NVIDIA L4" else found


def card_of(device: torch.device) -> Card | None:
    """The card behind a device; None for a CPU and for cards that are not known."""
    return card_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
