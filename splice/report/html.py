"""A result as HTML: a piece for notebooks, and a page of its own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from splice.records import (
    Decision,
    NodeId,
    NodeRun,
    RepairResult,
    Trace,
    Trial,
    digest,
)
from splice.report.display import visible
from splice.report.drawing import draw
from splice.report.facts import (
    Side,
    base_lines,
    both_sides,
    cost_lines,
    cost_rows,
    edge_lines,
    evidence_lines,
    finished_trial,
    message_heading,
    message_lines,
    message_remarks,
    note_lines,
    stop_text,
    trial_lines,
    trouble,
    trouble_lines,
    verdict_lines,
)
from splice.report.text import result_text

if TYPE_CHECKING:
    import jinja2

_SHOWN = 2000
"""Characters of a text that the page shows; the JSON has all of them."""


class _Piece(NamedTuple):
    """A part of an output."""

    text: str
    is_changed: bool


class _Change(NamedTuple):
    """A node that ran again, before and after."""

    node: NodeId
    before: list[_Piece]
    after: list[_Piece]
    why_before: str | None
    """Why there is no ordinary output; None if there is one."""
    why_after: str | None


def result_html(result: RepairResult) -> str:
    """A repaired query as one self-contained piece of HTML, for notebooks.

    It has no script, loads nothing, and its styles reach nothing outside of it.
    """
    return _environment().get_template("result.html.j2").render(_context(result))


def result_page(result: RepairResult) -> str:
    """A repaired query as an HTML document of its own."""
    return _environment().get_template("page.html.j2").render(_context(result))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return environment("splice", _clipped)


def environment(package: str, clip: Callable[[str], str]) -> jinja2.Environment:
    """The templates of a package, with every text escaped, visible and short.

    Texts are made so on their way into a page, so that no field is forgotten.

    Args:
        package: whose folder `templates` is read.
        clip: shortens a text.
    """
    import jinja2

    def finalize(value: object) -> object:
        if not isinstance(value, str) or hasattr(value, "__html__"):
            return value
        return visible(clip(value))

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _context(result: RepairResult) -> dict[str, object]:
    trial, decision = result.trial, result.decision
    finished = finished_trial(result)
    return {
        # Several results on one page must not share ids; a result's text may hold lone
        # surrogates, so its JSON can't be digested.
        "uid": digest(result_text(result))[:12],
        "result": result,
        "drawing": draw(result),
        "answers": _answer_cards(result, finished),
        "base_lines": base_lines(result.diagnosis),
        "trouble_lines": trouble_lines(result),
        "notes": note_lines(result.diagnosis),
        "edge_lines": edge_lines(result),
        "message_lines": [] if result.message is None else message_lines(result, result.message),
        "message_heading": None if result.message is None else message_heading(result.message),
        "message_remarks": [] if result.message is None else message_remarks(result.message),
        "trial_lines": [f"none: {stop_text(result)}"] if trial is None else trial_lines(trial),
        "changes": [] if trial is None else _changes(result.base, trial),
        "evidence_lines": []
        if result.evidence is None or trial is None
        else evidence_lines(result.evidence, trial.message.receiver),
        "verdict_lines": verdict_lines(decision),
        "bars": _bars(decision),
        "cost_lines": cost_lines(result.calls),
        "cost_rows": cost_rows(result.calls),
    }


def _answer_cards(result: RepairResult, finished: Trial | None) -> list[tuple[str, str | None]]:
    candidate = [] if finished is None else [("Candidate answer", finished.trace.answer)]
    return [("Base answer", result.base.answer), *candidate, ("Final answer", result.answer)]


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _bars(decision: Decision) -> list[tuple[Side, float]]:
    """Both sides of the rule with their lengths in percent of the longer one."""
    sides = both_sides(decision)
    if sides is None:
        return []
    longest = max(side.value for side in sides) or 1.0
    return [(side, 100 * max(side.value, 0.0) / longest) for side in sides]


def _changes(base: Trace, trial: Trial) -> list[_Change]:
    """The nodes that ran again, in canonical order."""
    changes = []
    for node in trial.rerun:
        old, new = base.by_node.get(node), trial.trace.by_node.get(node)
        before, after = _word_changes(_output(old), _output(new))
        changes.append(_Change(node, before, after, _why_no_output(old), _why_no_output(new)))
    return changes


def _output(run: NodeRun | None) -> str:
    return "" if run is None or run.output is None else _clipped(run.output)


def _why_no_output(run: NodeRun | None) -> str | None:
    if run is None:
        return "not reached"
    return None if run.status == "ok" else trouble(run)


def _word_changes(before: str, after: str) -> tuple[list[_Piece], list[_Piece]]:
    """Both texts in pieces, told apart by whether the other one has them too."""
    old, new = (re.findall(r"\s*\S+", text) for text in (before, after))
    matcher = difflib.SequenceMatcher(None, [w.strip() for w in old], [w.strip() for w in new])
    old_pieces: list[_Piece] = []
    new_pieces: list[_Piece] = []
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        old_pieces += _pieces(old[old_start:old_end], tag != "equal")
        new_pieces += _pieces(new[new_start:new_end], tag != "equal")
    return old_pieces, new_pieces


def _pieces(words: Sequence[str], is_changed: bool) -> list[_Piece]:
    """Words as a piece, after the space before them: a marked space looks like a word."""
    text = "".join(words)
    marked = text.lstrip()
    pieces = _Piece(text[: len(text) - len(marked)], False), _Piece(marked, is_changed)
    return [piece for piece in pieces if piece.text]
