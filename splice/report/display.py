"""Text for terminals: widths, cuts, wrapping, and characters that could do harm made visible."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from splice.records import (
    Edge,
    NodeId,
)

if TYPE_CHECKING:
    pass

WIDTH = 100
"""Columns of a page of text."""
LABEL = 13
"""Columns of the labels at the left of a page."""
_LONGEST = 1200
"""Columns that one line of a page takes before it is wrapped, whatever a trace puts into it."""


# Everything but tab and newline that is no glyph: C0 and C1 controls, lone surrogates, line
# separators, bidirectional controls, zero-width characters and tags. The two joiners stay: Persian,
# Indic scripts and emoji need them.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Show control characters, terminal escapes and bidirectional overrides as escapes.

    Tabs and newlines stay.

    >>> print(visible("\x1b[31mred\u202e"))
    \x1b[31mred\u202e
    """
    return _UNSEEN.sub(lambda found: _escape(found.group()), text.replace("\r\n", "\n"))


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def n_cells(text: str) -> int:
    """Terminal columns that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(character) in ("Mn", "Me", "Cf")
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def _cut(text: str, width: int) -> str:
    """The longest start of `text` that fits into `width` columns; at least one character."""
    # Marks take no column, but thousands of them on one letter are no text either.
    text = text[: 4 * width]
    taken = 0
    for end, character in enumerate(text):
        taken += n_cells(character)
        if taken > width:
            return text[: max(end, 1)]
    return text


def shortened(text: str, width: int) -> str:
    """`text` as one line of at most `width` columns, cut with "..." if need be."""
    line = visible(" ".join(text[: 20 * width].split()))
    is_whole = len(text) <= 20 * width and n_cells(line) <= width
    return line if is_whole else _cut(line, width - 3).rstrip() + "..."


def wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """`text` as lines of at most `width` columns, all but the first indented by `hang`."""
    lines: list[str] = []
    line = ""
    for word in shortened(text, _LONGEST).split(" "):
        while word:
            room = width - n_cells(line) - (1 if line.strip() else 0)
            if n_cells(word) <= room:
                line = f"{line} {word}" if line.strip() else line + word
                break
            if line.strip():
                lines.append(line)
                line = " " * hang
                continue
            piece = _cut(word, room)
            lines.append(line + piece)
            line, word = " " * hang, word[len(piece) :]
    return [*lines, line] if line.strip() or not lines else lines


def labelled(label: str, lines: Iterable[str]) -> list[str]:
    """A labelled part of a page; a line that starts with `- ` hangs by its dash."""
    wrapped = [
        part
        for line in lines
        for part in wrap(line, WIDTH - LABEL, hang=2 if line.startswith("- ") else 0)
    ]
    labels = [label] + [""] * len(wrapped)
    return [f"{label:{LABEL}}{part}".rstrip() for label, part in zip(labels, wrapped, strict=False)]


def in_quotes(text: str | None, width: int = 300) -> str:
    """A text in quotation marks, or a word for what is missing."""
    if text is None:
        return "(none)"
    return f'"{shortened(text, width)}"' if text.strip() else "(empty)"


def counted(n: int, noun: str) -> str:
    """`n` things, in the singular or plural."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def joined(names: Iterable[str]) -> str:
    """Names as a list for people."""
    return ", ".join(names)


def as_percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{share:.0%}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def depth_by_node(nodes: Sequence[NodeId], edges: Sequence[Edge]) -> dict[NodeId, int]:
    """Generation by node: one more than the deepest of its parents'."""
    depths: dict[NodeId, int] = {}
    for node in nodes:
        parents = [depths[s] for s, receiver in edges if receiver == node and s in depths]
        depths[node] = 1 + max(parents, default=-1)
    return depths
