# SPDX-License-Identifier: Apache-2.0
"""A measurement as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Bench, Contender

# Heading and figure, in the order of the table.
_RATES = (
    ("answer tok/s", "answer_tokens_per_second"),
    ("a row", "answer_tokens_per_second_per_row"),
    ("canvas tok/s", "canvas_tokens_per_second"),
    ("a row", "canvas_tokens_per_second_per_row"),
    ("answer tok/forward", "answer_tokens_per_forward"),
    ("canvas tok/forward", "canvas_tokens_per_forward"),
    ("ms/forward", "ms_per_forward"),
)


def table(found: Bench) -> str:
    """Figures of every contender, ratios, the floor, and what to keep in mind."""
    env, lengths = found.environment, sorted(set(found.prompt_lengths))
    shown = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    what = f"{found.batch} prompt{'s' if found.batch > 1 else ''} of {shown} tokens, {found.max_new_tokens} new ones"
    lines = [
        f"{env['model']}, {env['dtype']} (precision {env['precision']}) on {env['card']}, torch {env['torch']}",
        f"{what}, {found.rule} rule, cache {found.cache}; optimize took {found.optimize_seconds:.1f} s",
        "",
    ]
    headings = ("", *(heading for heading, _ in _RATES), "forwards", "rows", "s a call", "first call", "peak GiB")
    lines += _aligned([headings, *map(_row, found.contenders)])
    lines.append("")
    ours = found.contenders[0].name
    for name, ratio in found.ratios.items():
        lines.append(
            f"{ours} against {name}: {ratio['call']:.2f} times as fast a call, {ratio['forward']:.2f} a forward"
        )
    if found.floor_share is not None and found.floor_seconds is not None:
        lines.append(
            f"floor of a call on this card {found.floor_seconds:.3f} s: {100 * found.floor_share:.0f} % of the time "
            "is what its forwards must take"
        )
    lines.append(
        "answer: up to and without the first stop id; canvas: every position that was decoded. Prompts, compiling and "
        "tokenizing are in no figure."
    )
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _row(one: Contender) -> tuple[str, ...]:
    figures = one.figures()
    return (
        one.name,
        *(f"{figures[name]:.2f}" for _, name in _RATES),
        str(one.stats.forwards),
        str(one.stats.row_forwards),
        f"{one.stats.seconds:.3f} ±{50 * one.spread:.0f}%",
        f"{one.first_seconds:.1f}",
        "-" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.2f}",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
