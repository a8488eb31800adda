"""What an ensemble of judges made of interactions: its card, and how right it is for each `k`.

Raising `k` accepts fewer abstentions, and more of those that are accepted are right: precision is
bought with recall. The table shows what each `k`, and each judge alone, would have accepted on
interactions whose label is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from splice._version import __version__
from splice.abstention import SOLVABLE
from splice.ears.curation import (
    Curated,
    Curation,
    CurationSettings,
    Disposition,
    Reason,
    Tally,
    agreed,
)
from splice.ears.interactions import LABELS, Interaction, Label
from splice.ears.judging import Verdict
from splice.ledger import Spending, spending
from splice.records import ModelIdentity, Record
from splice.report.display import WIDTH, aligned, visible, wrap
from splice.statistics import Share, share

# --- how right it is -------------------------------------------------------------------------


class AbstentionScore(Record):
    """How right one way of accepting abstentions is, where the label is known."""

    way: str
    """`k = 2`, or the name of a judge alone."""
    n_accepted: int
    """Interactions for which an abstention is accepted, whatever its category."""
    precision: Share | None
    """Of the accepted abstentions, those with a right category; None: none is accepted."""
    recall: Share | None
    """Of the interactions that call for an abstention, those accepted with a right category."""
    any_precision: Share | None
    """Of the accepted abstentions, those where an abstention is right, whatever its category."""
    any_recall: Share | None
    """Of the interactions that call for an abstention, those with an accepted one."""


class EnsembleTable(Record):
    """How right an ensemble is for each `k`, and each of its judges alone."""

    n: int
    """Interactions with a known label."""
    n_abstentions: int
    """Those of them that call for an abstention."""
    by_k: tuple[AbstentionScore, ...]
    """For k = 1, 2, ... as many as there are judges."""
    judges: tuple[AbstentionScore, ...]
    """By name."""

    def text(self) -> str:
        """The table for people."""
        rows = [("judges", "accepted", *_SHARES), *map(_cells, (*self.by_k, *self.judges))]
        about = (
            f"On {self.n:,} interactions with a known label, {self.n_abstentions:,} of which call "
            "for abstention. precision and recall: of abstentions with their category; any: "
            "whatever the category; intervals: Wilson's, at 95%."
        )
        return "\n".join([*aligned(rows), "", *wrap(about, WIDTH)])


def ensemble_table(rows: Sequence[Curated]) -> EnsembleTable | None:
    """Precision and recall of abstentions for each `k`; None if no label is known.

    What is accepted with one `k` is what `curate` accepts with it: the label that most judges give,
    if as many as `k` give it and no other has as many. So recall never rises with `k`.
    """
    known = [row for row in rows if row.interaction.label is not None]
    if not known:
        return None
    judges = [vote.judge for vote in known[0].votes]
    return EnsembleTable(
        n=len(known),
        n_abstentions=sum(SOLVABLE not in _right(row.interaction) for row in known),
        by_k=tuple(
            abstention_score(f"k = {k}", [(row.interaction, agreed(row.votes, k)) for row in known])
            for k in range(1, len(judges) + 1)
        ),
        judges=tuple(
            abstention_score(judge, [(row.interaction, row.votes[place].label) for row in known])
            for place, judge in enumerate(judges)
        ),
    )


def abstention_score(
    way: str, decided: Sequence[tuple[Interaction, Label | None]]
) -> AbstentionScore:
    """Score the labels that were accepted for labelled interactions; None: there was none.

    A label that is as right as the known one counts as right. Where carrying out is as right,
    nothing calls for an abstention.
    """
    n: Counter[str] = Counter()
    for interaction, label in decided:
        right = _right(interaction)
        is_accepted = label not in (None, SOLVABLE)
        is_right = is_accepted and label in right
        is_wanted = SOLVABLE not in right
        n["accepted"] += is_accepted
        n["right"] += is_right
        n["right at all"] += is_accepted and bool(right - {SOLVABLE})
        n["wanted"] += is_wanted
        n["found"] += is_wanted and is_right
        n["found at all"] += is_wanted and is_accepted
    return AbstentionScore(
        way=way,
        n_accepted=n["accepted"],
        precision=share(n["right"], n["accepted"]),
        recall=share(n["found"], n["wanted"]),
        any_precision=share(n["right at all"], n["accepted"]),
        any_recall=share(n["found at all"], n["wanted"]),
    )


def _right(interaction: Interaction) -> set[Label | None]:
    return {interaction.label, *interaction.also_right}


_SHARES = (
    "precision",
    "95% interval",
    "recall",
    "95% interval",
    "any precision",
    "any recall",
)


def _cells(found: AbstentionScore) -> tuple[str, ...]:
    return (
        visible(found.way),
        f"{found.n_accepted:,}",
        _value(found.precision),
        _interval(found.precision),
        _value(found.recall),
        _interval(found.recall),
        f"{_value(found.any_precision)} {_interval(found.any_precision)}",
        f"{_value(found.any_recall)} {_interval(found.any_recall)}",
    )


def _value(found: Share | None) -> str:
    return "-" if found is None else f"{found.value:.3f}"


def _interval(found: Share | None) -> str:
    return "" if found is None else f"{found.interval:.3f}"


# --- the card --------------------------------------------------------------------------------


class JudgeCard(Record):
    """One judge of an ensemble: what it is, and what its verdicts cost."""

    name: str
    model: ModelIdentity
    guideline: str
    """Digest of the guideline that it judged by."""
    n_unreadable: int
    """Replies that can't be read; they count for no label."""
    spending: Spending
    elapsed_s: float
    """From asking to the reply, waiting for a free place included, summed over the calls."""


def judge_card(
    name: str, model: ModelIdentity, guideline: str, verdicts: Sequence[Verdict]
) -> JudgeCard:
    """What a judge's verdicts cost, each counted once however many interactions it is about."""
    distinct = {verdict.key: verdict for verdict in verdicts}.values()
    calls = tuple(call for verdict in distinct for call in verdict.calls)
    return JudgeCard(
        name=name,
        model=model,
        guideline=guideline,
        n_unreadable=sum(verdict.label is None for verdict in distinct),
        spending=spending(calls),
        elapsed_s=sum(call.elapsed_s or 0.0 for call in calls),
    )


class CurationCard(Record):
    """Where curated instances come from: `card.json`."""

    schema_version: Literal[1] = 1
    engine_version: str
    source: str
    """File, store or workload of the interactions."""
    n_interactions: int
    settings: CurationSettings
    k: int
    """Judges that had to give a label for it to be accepted."""
    judges: tuple[JudgeCard, ...]
    """By name."""
    tallies: tuple[Tally, ...]
    """What became of the interactions, by the category that most judges gave."""
    reasons: Mapping[Reason, int]
    """Number of interactions by why they got their disposition."""
    instances: Mapping[Label, int]
    """Number of instances by the label that they teach."""
    table: EnsembleTable | None
    """None: no label is known."""
    files: Mapping[str, str]
    """SHA-256 by name of each file of rows."""

    def text(self) -> str:
        """The card for people."""
        return "\n".join(
            [
                *wrap(
                    f"{self.n_interactions:,} interactions of {self.source}; accepted with "
                    f"{self.k} of {len(self.judges)} judges, without an accepted label: "
                    f"{self.settings.on_disagreement}",
                    WIDTH,
                ),
                "",
                *_tally_table(self.tallies),
                "",
                *_judge_table(self.judges),
                *(["", self.table.text()] if self.table is not None else []),
            ]
        )


def curation_card(
    source: str, curation: Curation, judges: Sequence[JudgeCard], files: Mapping[str, str]
) -> CurationCard:
    """The card of a curation.

    Args:
        source: where the interactions come from, for people.
        curation: what was made of them.
        judges: of the ensemble.
        files: SHA-256 by name of each file of rows that was written.
    """
    labels = Counter(row.label for row in curation.instances)
    return CurationCard(
        engine_version=__version__,
        source=source,
        n_interactions=len(curation.rows),
        settings=curation.settings,
        k=curation.k,
        judges=tuple(sorted(judges, key=lambda judge: judge.name)),
        tallies=curation.tallies,
        reasons=Counter(row.reason for row in curation.rows),
        instances={label: labels[label] for label in LABELS if labels[label]},
        table=ensemble_table(curation.rows),
        files=files,
    )


def _tally_table(tallies: Sequence[Tally]) -> Iterator[str]:
    dispositions = get_args(Disposition)
    yield from aligned(
        [
            ("most judges say", *dispositions),
            *(
                (
                    tally.category or "no one label",
                    *(f"{getattr(tally, disposition):,}" for disposition in dispositions),
                )
                for tally in tallies
            ),
        ]
    )


def _judge_table(judges: Sequence[JudgeCard]) -> Iterator[str]:
    yield from aligned(
        [
            ("judge", "model", "guideline", "unreadable", "calls", "tokens", "seconds"),
            *(
                (
                    visible(judge.name),
                    visible(judge.model.name),
                    judge.guideline[:12],
                    f"{judge.n_unreadable:,}",
                    f"{judge.spending.n_calls:,}",
                    f"{judge.spending.tokens:,}" + ("+" if judge.spending.n_uncounted else ""),
                    f"{judge.elapsed_s:,.0f}",
                )
                for judge in judges
            ),
        ]
    )
