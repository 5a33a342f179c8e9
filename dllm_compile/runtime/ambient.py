# SPDX-License-Identifier: Apache-2.0
"""The state of the process in which programs run, whatever state the caller is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """No gradients, no inference mode and no autocast, for this thread and for the length of the block.

    Autocast would round what was certified in the model's own dtype. Inference mode is left as well, since results of
    decoding may be trained on, and because each of these states would compile a program once more.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
