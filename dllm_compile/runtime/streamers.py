# SPDX-License-Identifier: Apache-2.0
"""Show a canvas while it is denoised.

A streamer is any object of the transformers protocol: `put(tokens)` for what is final (the prompt first, then each
finished block) and `end()`. One that also has `put_draft(value=...)` gets the unfinished rest of the canvas, masks
included, after each step.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from typing import Any, Protocol, TextIO, runtime_checkable

import torch
from torch import Tensor

from ..errors import ConfigError

_MASK_SYMBOL = "░"
_UP, _CLEAR = "\x1b[{}A", "\r\x1b[J"


@runtime_checkable
class Streamer(Protocol):
    """The part of the protocol that every streamer has (`transformers.generation.streamers.BaseStreamer`)."""

    def put(self, value: Tensor) -> None:
        """Take tokens that will not change, on the CPU: (1, P) for the prompt, then (n,)."""
        ...

    def end(self) -> None:
        """The last token has been given."""
        ...


class CanvasStreamer:
    r"""Draws the canvas in a terminal while it is denoised; masks are light blocks.

    In a terminal the unfinished part is redrawn in place. Elsewhere (a file, a pipe) one line is printed for each
    finished block, with line breaks written as `\n`.

    Args:
        tokenizer: anything with `decode(ids, **kwargs) -> str`.
        skip_prompt: do not show the prompt.
        file: where to write; standard output by default.
        mask_token_id: id that is drawn as a block; None takes the tokenizer's, else the model's.
        **decode_kwargs: passed to `tokenizer.decode`; `skip_special_tokens=True` by default.

    Raises:
        ConfigError: `tokenizer` has no `decode`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_prompt: bool = True,
        file: TextIO | None = None,
        mask_token_id: int | None = None,
        **decode_kwargs: Any,
    ) -> None:
        if isinstance(tokenizer, type) or not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError(
                f"CanvasStreamer takes the model's tokenizer, an object with decode(ids), not {tokenizer!r}"
            )
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.mask_token_id: int | None = (
            mask_token_id if mask_token_id is not None else getattr(tokenizer, "mask_token_id", None)
        )
        self._file = file if file is not None else sys.stdout
        self._in_place = self._file.isatty()
        self._decode_kwargs = {"skip_special_tokens": True, **decode_kwargs}
        self._reset()

    def _reset(self) -> None:
        self._prompt_is_next = True
        self._tail = ""  # final text behind the last line break, redrawn together with the draft
        self._drawn = 0  # lines of the terminal that the draft occupies

    def put(self, value: Tensor) -> None:
        """Show final tokens: the prompt at the first call, a finished block afterwards."""
        ids = _one_row(value)
        is_prompt, self._prompt_is_next = self._prompt_is_next, False
        if is_prompt and self.skip_prompt:
            return
        text = self._text(ids)
        if not self._in_place:
            print(text.replace("\n", "\\n"), file=self._file, flush=True)
            return
        width, _ = self._size()
        *final, self._tail = _wrap(self._tail + text, width)
        self._redraw([self._tail], final)

    def put_draft(self, value: Tensor) -> None:
        """Show the unfinished rest of the canvas."""
        ids = _one_row(value)
        if not self._in_place or (self._prompt_is_next and self.skip_prompt):
            return
        width, height = self._size()
        self._redraw(_wrap(self._tail + self._text(ids), width)[: height - 1], [])

    def end(self) -> None:
        """Leave the final text standing and start anew for the next call."""
        if self._in_place:
            self._redraw([], [self._tail])
        self._reset()

    def _redraw(self, lines: list[str], final: list[str]) -> None:
        """Replace the drawn lines: `final` ones stay for good, `lines` are replaced by the next call."""
        up = _UP.format(self._drawn - 1) if self._drawn > 1 else ""
        text = "".join(f"{line}\n" for line in final) + "\n".join(lines)
        print(f"{up}{_CLEAR}{text}", end="", file=self._file, flush=True)
        self._drawn = len(lines)

    def _text(self, ids: list[int]) -> str:
        """Decode; each mask is one symbol, and what lies between masks is decoded by itself."""
        parts: list[str] = []
        run: list[int] = []
        for one in [*ids, None]:
            if one is not None and one != self.mask_token_id:
                run.append(one)
                continue
            if run:
                parts.append(self.tokenizer.decode(run, **self._decode_kwargs))
                run = []
            if one is not None:
                parts.append(_MASK_SYMBOL)
        return "".join(parts)

    def _size(self) -> tuple[int, int]:
        size = shutil.get_terminal_size()
        return max(size.columns, 2), max(size.lines, 2)


def _one_row(value: Tensor) -> list[int]:
    if value.dim() > 1 and value.shape[0] > 1:
        raise ConfigError(
            f"CanvasStreamer shows one canvas, not {value.shape[0]}: decode one prompt at a time, or without a streamer"
        )
    ids: list[int] = value.to(torch.int64).flatten().tolist()
    return ids


def _wrap(text: str, width: int) -> list[str]:
    """Lines of `text` as they fit into `width` columns; wide characters take two, control characters none."""
    lines, column = [""], 0
    for char in text:
        if char == "\n":
            lines.append("")
            column = 0
            continue
        if unicodedata.category(char) == "Cc":
            char = " "
        taken = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if column + taken > width:
            lines.append("")
            column = 0
        lines[-1] += char
        column += taken
    return lines
