"""Many repaired queries as a table, with totals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from splice.ledger import spending
from splice.records import (
    CallRecord,
    Record,
    RepairBatch,
    RepairResult,
)
from splice.report.abstentions import abstention_table, abstentions_by_node
from splice.report.display import LABEL, as_percent, joined, labelled, shortened
from splice.report.facts import as_money, cost_lines, cost_table, finished_trial, model_lines

if TYPE_CHECKING:
    from rich.table import Table

IsCorrect: TypeAlias = Callable[[str | None, str], bool]
"""Whether an answer (None: there is none) is right for the query with this id."""


class ScoredRow(Record):
    """One query of a batch, scored where its reference is known."""

    query_id: str
    question: str
    base: str | None
    edge: str | None
    """The edge that was tried, as `source -> receiver`; None if there was no trial."""
    candidate: str | None
    """The trial's answer; None if there is none."""
    decision: Literal["adopt", "retain"]
    base_correct: bool | None
    candidate_correct: bool | None
    """None if the reference is unknown or there was no finished trial."""
    final_correct: bool | None

    @property
    def outcome(self) -> Literal["fixed", "broken", "changed", "kept"] | None:
        """What the repair did to the query; None if it adopted and the reference is unknown."""
        if self.decision == "retain":
            return "kept"
        if self.base_correct is None or self.final_correct is None:
            return None
        if self.base_correct == self.final_correct:
            return "changed"
        return "fixed" if self.final_correct else "broken"


def result_rows(batch: RepairBatch, is_correct: IsCorrect | None) -> tuple[ScoredRow, ...]:
    """The queries of a batch, scored by `is_correct`; None: no reference is known."""
    return tuple(_scored(result, is_correct) for result in batch.results)


def _scored(result: RepairResult, is_correct: IsCorrect | None) -> ScoredRow:
    finished = finished_trial(result)

    def score(answer: str | None) -> bool | None:
        return None if is_correct is None else is_correct(answer, result.query.id)

    edge = None if result.trial is None else result.trial.message
    return ScoredRow(
        query_id=result.query.id,
        question=result.query.text,
        base=result.base.answer,
        edge=None if edge is None else f"{edge.source} -> {edge.receiver}",
        candidate=None if finished is None else finished.trace.answer,
        decision=result.decision.action,
        base_correct=score(result.base.answer),
        candidate_correct=None if finished is None else score(finished.trace.answer),
        final_correct=score(result.answer),
    )


_OUTCOME_STYLES: Mapping[str | None, str] = {"fixed": "green", "broken": "red", "changed": "yellow"}


def batch_table(rows: Sequence[ScoredRow]) -> Table:
    """A batch as a table, one row for each query."""
    from rich.table import Table
    from rich.text import Text

    table = Table("query", "base", "edge", "candidate", "decision", "outcome")
    for row in rows:
        texts = (row.question, row.base, row.edge, row.candidate, row.decision)
        # Text and not str: rich would read square brackets in an answer as markup.
        cells = [Text("-" if text is None else shortened(text, 80)) for text in texts]
        style = _OUTCOME_STYLES.get(row.outcome, "")
        table.add_row(*cells, Text(row.outcome or "unknown", style=style))
    return table


def batch_totals(
    rows: Sequence[ScoredRow],
    batch: RepairBatch,
    parts: Mapping[str, Collection[str]] | None = None,
) -> str:
    """What a batch gained, what it broke, and what it cost.

    Args:
        rows: of `result_rows`.
        batch: the batch.
        parts: query ids by name of the part that is counted apart as well.
    """
    decisive = sum(_is_decisive(result) for result in batch.results)
    stopped = "" if batch.stop_reason == "done" else f", stopped by: {batch.stop_reason}"
    calls = tuple(call for result in batch.results for call in result.calls)
    lines = [
        *labelled("Queries", [f"{len(batch.results)}{stopped}"]),
        *labelled(
            "Trials",
            [
                f"{batch.n_trials} (at most {as_percent(batch.budget_fraction)} of the queries), "
                f"{decisive} decisive"
            ],
        ),
        *labelled("Right", [_right_line(rows)]),
        *labelled("Outcomes", [_outcome_line(rows)]),
        *_part_lines(rows, parts or {}),
        *_abstention_lines(rows, batch),
        *labelled("Models", model_lines(result.base for result in batch.results)),
        *labelled("Cost", [*cost_lines(calls), _net_line(rows, calls)]),
    ]
    return "\n".join([*lines, *(" " * LABEL + row for row in cost_table(calls))])


def _part_lines(rows: Sequence[ScoredRow], parts: Mapping[str, Collection[str]]) -> Iterator[str]:
    for name, ids in parts.items():
        own = [row for row in rows if row.query_id in ids]
        yield from labelled(f"- {name}"[: LABEL - 1], [_right_line(own), _outcome_line(own)])


def _abstention_lines(rows: Sequence[ScoredRow], batch: RepairBatch) -> Iterator[str]:
    """How often each node of the base runs abstained; nothing if none did."""
    is_right = {row.query_id: row.base_correct for row in rows}
    nodes = abstentions_by_node((r.base, is_right.get(r.query.id)) for r in batch.results)
    for place, line in enumerate(abstention_table(nodes)):
        yield f"{'' if place else 'Abstained':{LABEL}}{line}"


def _is_decisive(result: RepairResult) -> bool:
    trial = finished_trial(result)
    return trial is not None and trial.trace.answer != result.base.answer


def _right_line(rows: Sequence[ScoredRow]) -> str:
    known = [row for row in rows if row.base_correct is not None]
    if not known:
        return "unknown: no references were given"
    base = [bool(row.base_correct) for row in known]
    always = [
        bool(row.base_correct if row.candidate_correct is None else row.candidate_correct)
        for row in known
    ]
    counts = (
        ("base", sum(base)),
        ("final", sum(bool(row.final_correct) for row in known)),
        ("always adopt", sum(always)),
        ("oracle", sum(map(max, base, always))),
    )
    return f"{joined(f'{name} {n}' for name, n in counts)} of {len(known)}"


def _outcome_line(rows: Sequence[ScoredRow]) -> str:
    outcomes = [row.outcome for row in rows]
    counts = [f"{outcomes.count(o)} {o}" for o in ("fixed", "broken", "changed", "kept")]
    unknown = outcomes.count(None)
    return joined([*counts, f"{unknown} unknown"] if unknown else counts)


def _net_line(rows: Sequence[ScoredRow], calls: Sequence[CallRecord]) -> str:
    """What one net fixed query cost beyond the base run."""
    outcomes = [row.outcome for row in rows]
    net = outcomes.count("fixed") - outcomes.count("broken")
    if net <= 0:
        return f"cost per net fixed query: undefined, net fixed is {net}"
    spent = spending(tuple(call for call in calls if call.stage != "run"))
    tokens = "unknown" if spent.n_uncounted else f"{spent.tokens / net:,.0f}"
    money = as_money(None if spent.cost is None else spent.cost / net)
    return f"cost per net fixed query, beyond the base run: {tokens} tokens, money {money}"
