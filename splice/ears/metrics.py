"""How an agent did on interactions whose label is known: form, sense, and when it abstained.

A reply passes if its form is right (*syntax*: a well-formed task output or a well-formed
abstention) and it is what was wanted (*semantic*). A reply of the wrong form is not judged and
fails both, so that the share that passes overall is the share that passes semantically. All passes
are shares of all interactions (EARS 4.2).

Shares have Wilson's interval at 95%. F1 and weighted means are no shares of anything counted and
stand without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from splice.abstention import SOLVABLE, Reply, parse_reply
from splice.ears.interactions import LABELS, Interaction, Label
from splice.records import Probability, Record
from splice.report.display import WIDTH, aligned, wrap
from splice.statistics import (
    Averages,
    Counts,
    Gain,
    LabelScores,
    Share,
    classification,
    counts,
    mcnemar,
    paired_gain,
    share,
)

ABSTENTION: Final = "any abstention"
"""The four categories taken as one label."""


class Graded(Record):
    """What one reply was worth."""

    id: str
    """Of the interaction; two interactions of one source have two ids."""
    source: str
    """Data set or workload that the interaction comes from."""
    label: Label
    """What was right to do."""
    predicted: Label | None
    """What the agent did; None: it meant to abstain, in a form that can't be read. A label that is
    as right as `label` is taken for it."""
    syntax_ok: bool
    """The reply is a well-formed task output or a well-formed abstention."""
    semantic_ok: bool | None
    """The reply is what was wanted; False for the wrong form, None: nothing could check it."""
    abstention_ok: bool | None
    """It abstained with the right category and no wrong rationale; None: it should not abstain."""
    problem: str | None
    """What is wrong with the form; None: nothing."""

    @property
    def overall_ok(self) -> bool | None:
        """Right in form and sense; a reply of the wrong form is never right in sense."""
        return self.semantic_ok


def _has_text(output: str) -> bool:
    return bool(output.strip())


def grade(
    interaction: Interaction,
    reply: str,
    *,
    is_right: bool | None = None,
    is_rationale_right: bool | None = None,
    is_well_formed: Callable[[str], bool] = _has_text,
) -> Graded:
    """Grade an agent's reply to an interaction of known label.

    An abstention is right if its category is, or is as right by the interaction's `also_right`, and
    its rationale was not judged wrong. Carrying out what called for an abstention is wrong, and so
    is abstaining from what could be done, whatever the verdicts say. The interaction's own `reply`
    is not looked at.

    Args:
        interaction: what the agent was asked.
        reply: as the agent wrote it.
        is_right: whether the task output was right; None: nothing could check it.
        is_rationale_right: a judge's verdict on the rationale; None: the category alone counts.
        is_well_formed: whether a task output has the form that its reader needs, say by parsing
            it; by default, whether there is any text.

    Raises:
        ValueError: the interaction has no label.
    """
    label = interaction.label
    if label is None:
        raise ValueError(f"interaction {interaction.id!r} has no label")
    read = parse_reply(reply)
    predicted = _predicted(read)
    if predicted in interaction.also_right:
        predicted = label
    problem = read.problem
    if read.output is not None and not is_well_formed(read.output):
        problem = "the task output is not well-formed"
    abstention_ok = (
        None if label == SOLVABLE else predicted == label and is_rationale_right is not False
    )
    if label == SOLVABLE:
        semantic_ok = is_right if predicted == SOLVABLE else False
    else:
        semantic_ok = abstention_ok
    return Graded(
        id=interaction.id,
        source=interaction.source,
        label=label,
        predicted=predicted,
        syntax_ok=problem is None,
        semantic_ok=semantic_ok if problem is None else False,
        abstention_ok=abstention_ok,
        problem=problem,
    )


def _predicted(read: Reply) -> Label | None:
    if read.abstention is not None:
        return read.abstention.category
    return SOLVABLE if read.kind == "output" else None


class LabelResult(Record):
    """How well one label was told from the others; its accuracy is its recall."""

    label: str
    support: int
    """Interactions whose label it is."""
    n_predicted: int
    precision: Share | None
    """Of the replies that gave it, those that were right to; None: it was never given."""
    recall: Share | None
    """Of the interactions whose label it is, those that got it; None: there are none."""
    f1: Probability | None
    """`2 * n_right / (n_predicted + support)`; None: neither given nor right anywhere."""


class Scores(Record):
    """How an agent did on a set of interactions; a share of no interactions is None."""

    n: int
    n_abstentions: int
    """Interactions that call for an abstention."""
    n_unchecked: int
    """Right in form, wanted, and not checked by anything: they count as not passed."""
    syntax: Share | None
    semantic: Share | None
    accuracy: Share | None
    """Interactions that got their label, one of five."""
    labels: tuple[LabelResult, ...]
    """The five labels one by one, in the order of `LABELS`."""
    weighted: Averages
    """Means over the five labels by support; one that was never given counts 0 as its precision.
    The weighted recall is the accuracy."""
    abstention: LabelResult
    """The four categories as one label, against carrying out."""
    binary_accuracy: Share | None
    """Abstained where that was right and carried out where that was, whatever the category."""
    abstained: Share | None
    """Of all interactions, those in which the agent abstained."""
    abstention_ok: Share | None
    """Of the interactions that call for an abstention, those with a right one."""
    over_abstention: Share | None
    """Of the solvable interactions, those in which the agent abstained."""
    under_abstention: Share | None
    """Of the interactions that call for an abstention, those that the agent carried out."""

    @property
    def overall(self) -> Share | None:
        """Right in form and sense, of all interactions."""
        return self.semantic


def scores(graded: Sequence[Graded]) -> Scores:
    """Scores of an agent over graded replies; their order does not matter.

    An abstention that can't be read is a prediction of no label: a miss for the right one and a
    false alarm for none. It neither over-abstains nor under-abstains.

    Source: EARS 4.2, Tables 2 and 3. That averages are weighted by support is read off Table 2,
    where recall equals accuracy for every single judge.
    """
    n = len(graded)
    solvable = [row for row in graded if row.label == SOLVABLE]
    abstentions = [row for row in graded if row.label != SOLVABLE]
    five = classification([row.label for row in graded], [row.predicted for row in graded], LABELS)
    n_right: Counter[str] = Counter(row.label for row in graded if row.predicted == row.label)
    truth = [_binary(row.label) for row in graded]
    predicted = [row.predicted and _binary(row.predicted) for row in graded]
    two = classification(truth, predicted, (ABSTENTION, SOLVABLE))
    n_right_of_two = Counter(t for t, p in zip(truth, predicted, strict=True) if t == p)
    return Scores(
        n=n,
        n_abstentions=len(abstentions),
        n_unchecked=sum(row.semantic_ok is None for row in graded),
        syntax=share(sum(row.syntax_ok for row in graded), n),
        semantic=share(sum(row.semantic_ok is True for row in graded), n),
        accuracy=share(n_right.total(), n),
        labels=tuple(_label_result(row, n_right[row.label]) for row in five.labels),
        weighted=five.weighted,
        abstention=_label_result(two.labels[0], n_right_of_two[ABSTENTION]),
        binary_accuracy=share(n_right_of_two.total(), n),
        abstained=share(predicted.count(ABSTENTION), n),
        abstention_ok=share(
            sum(row.abstention_ok is True for row in abstentions), len(abstentions)
        ),
        over_abstention=share(
            sum(row.predicted not in (None, SOLVABLE) for row in solvable), len(solvable)
        ),
        under_abstention=share(
            sum(row.predicted == SOLVABLE for row in abstentions), len(abstentions)
        ),
    )


def _binary(label: Label) -> str:
    return SOLVABLE if label == SOLVABLE else ABSTENTION


def _label_result(found: LabelScores, n_right: int) -> LabelResult:
    return LabelResult(
        label=found.label,
        support=found.support,
        n_predicted=found.n_predicted,
        precision=share(n_right, found.n_predicted),
        recall=share(n_right, found.support),
        f1=found.f1,
    )


def scores_by_source(graded: Sequence[Graded]) -> dict[str, Scores]:
    """Scores of each source by itself, sources in alphabetical order."""
    return {
        source: scores([row for row in graded if row.source == source])
        for source in sorted({row.source for row in graded})
    }


class Comparison(Record):
    """Two agents on the same interactions, by what passed overall."""

    base: Share
    other: Share
    gain: Gain
    """Other minus base, as a share of the interactions."""
    counts: Counts
    """Fixed: only the other agent passed; broken: only the base did; equal: both or neither."""
    p_mcnemar: Probability
    """Exact, for fixing and breaking being equally likely."""
    n_unchecked: int
    """Interactions left out, as one of the two replies could not be checked."""

    @property
    def relative_gain(self) -> float | None:
        """Gain as a share of what the base passed; None if it passed nothing."""
        return self.gain.mean / self.base.value if self.base.n_hits else None


def compare(base: Sequence[Graded], other: Sequence[Graded], *, seed: int) -> Comparison:
    """What `other` gains over `base` on the same interactions, in whatever order they come.

    The gain and its interval are `splice.statistics.paired_gain`. Interactions that one of the two
    replies leaves unchecked are left out: counted as not passed they would make an agent better
    for what nobody looked at.

    Args:
        base: one agent's graded replies.
        other: another agent's.
        seed: of the resampling; the same seed gives the same result.

    Raises:
        ValueError: the two differ in their interactions or in a label, one is there twice, or no
            interaction was checked for both.
    """
    before, after = _by_interaction(base), _by_interaction(other)
    if unpaired := before.keys() ^ after.keys():
        raise ValueError(f"{len(unpaired)} interactions have one reply, such as {min(unpaired)}")
    for key, row in before.items():
        if row.label != after[key].label:
            raise ValueError(f"{key} is labelled {row.label!r} and {after[key].label!r}")
    pairs = [(row.overall_ok, after[key].overall_ok) for key, row in before.items()]
    checked = [(a, b) for a, b in pairs if a is not None and b is not None]
    first, second = [a for a, _ in checked], [b for _, b in checked]
    base_share, other_share = share(sum(first), len(first)), share(sum(second), len(second))
    if base_share is None or other_share is None:
        raise ValueError("no interaction was checked for both agents")
    changes = counts(first, second, eps=1e-9)
    return Comparison(
        base=base_share,
        other=other_share,
        gain=paired_gain(first, second, seed=seed),
        counts=changes,
        p_mcnemar=mcnemar(changes.n_fixed, changes.n_broken),
        n_unchecked=len(pairs) - len(checked),
    )


def _by_interaction(graded: Sequence[Graded]) -> dict[tuple[str, str], Graded]:
    rows = {(row.source, row.id): row for row in graded}
    if len(rows) < len(graded):
        ((key, _),) = Counter((row.source, row.id) for row in graded).most_common(1)
        raise ValueError(f"interaction {key} is there more than once")
    return rows


def scores_text(found: Scores, by_source: Mapping[str, Scores] | None = None) -> str:
    """Scores as a page of text; those of each source below, where they are given."""
    return "\n".join(
        [
            *_summary("all sources", found),
            "",
            *aligned([_LABEL_COLUMNS, *_label_rows(found)]),
            "",
            *_legend(found),
            *(
                line
                for source, part in (by_source or {}).items()
                for line in ("", *_summary(source, part))
            ),
        ]
    )


def _summary(name: str, found: Scores) -> Iterator[str]:
    """What was graded, and the shares of it."""
    yield from wrap(
        f"{name}: {found.n:,} interactions, {found.n_abstentions:,} of which call for abstention",
        WIDTH,
    )
    rows = (
        ("syntax pass", found.syntax),
        ("semantic pass", found.semantic),
        ("overall pass", found.overall),
        ("label right", found.accuracy),
        ("abstained or not, rightly", found.binary_accuracy),
        ("abstained", found.abstained),
        ("abstention right", found.abstention_ok),
        ("over-abstention", found.over_abstention),
        ("under-abstention", found.under_abstention),
    )
    head = ("", "of", "share", "95% interval")
    yield from aligned(
        [head, *((row, f"{part.n:,}" if part else "0", *_cells(part)) for row, part in rows)]
    )


def _cells(found: Share | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{found.value:.3f}", f"{found.interval:.3f}"


_LABEL_COLUMNS = (
    "label",
    "n",
    "given",
    "precision",
    "95% interval",
    "recall",
    "95% interval",
    "F1",
)


def _label_rows(found: Scores) -> Iterator[tuple[str, ...]]:
    for row in (*found.labels, found.abstention):
        yield (
            row.label,
            f"{row.support:,}",
            f"{row.n_predicted:,}",
            *_cells(row.precision),
            *_cells(row.recall),
            _number(row.f1),
        )
    mean = found.weighted
    given = sum(row.n_predicted for row in found.labels)
    yield (
        "weighted mean",
        f"{found.n:,}",
        f"{given:,}",
        _number(mean.precision),
        "",
        _number(mean.recall),
        "",
        _number(mean.f1),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _legend(found: Scores) -> Iterator[str]:
    yield from wrap(
        "passes: of all interactions; a reply of the wrong form is not judged and fails, so that "
        "overall and semantic pass are one share; over-abstention: of the solvable, those "
        "abstained from; under-abstention: of those that call for abstention, those carried out; "
        "given: replies that predict the label; weighted mean: over the five labels, by n; "
        "intervals: Wilson's.",
        WIDTH,
    )
    if found.n_unchecked:
        yield from wrap(
            "Semantic and overall pass are lower bounds: nothing could check "
            f"{found.n_unchecked:,} of the task outputs.",
            WIDTH,
        )


_COMPARISON_COLUMNS = (
    "agent",
    "n",
    "overall",
    "95% interval",
    "gain",
    "95% interval",
    "p",
    "fixed",
    "broken",
    "kept",
)


def comparison_text(found: Comparison) -> str:
    """A comparison of two agents as a table of one line each."""
    low, high = found.gain.interval.low, found.gain.interval.high
    relative = found.relative_gain
    rows = (
        _COMPARISON_COLUMNS,
        ("base", f"{found.base.n:,}", *_cells(found.base), *("",) * 6),
        (
            "other",
            f"{found.other.n:,}",
            *_cells(found.other),
            f"{found.gain.mean:+.3f}",
            f"[{low:+.3f}, {high:+.3f}]",
            f"{found.p_mcnemar:.3f}",
            f"{found.counts.n_fixed:,}",
            f"{found.counts.n_broken:,}",
            f"{found.counts.n_equal:,}",
        ),
    )
    about = (
        "gain: other minus base"
        + ("" if relative is None else f", {relative:+.1%} of the base")
        + "; interval: paired bootstrap over interactions; p: exact McNemar, fixed against broken; "
        "kept: both passed or neither did."
    )
    if found.n_unchecked:
        about += f" Left out, as nothing could check one of the replies: {found.n_unchecked:,}."
    return "\n".join([*aligned(rows), "", *wrap(about, WIDTH)])
