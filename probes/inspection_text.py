"""What a probe pool says, in words and tables: sections, and a page of text made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from probes.inspection import (
    ARMS,
    FEW,
    Agreement,
    Auc,
    Cell,
    Comparison,
    Foresight,
    Group,
    HeatMap,
    Inspection,
    Mean,
    Origin,
    Used,
    Verdict,
)
from probes.plan import CONTROLS
from probes.records import Arm
from splice.report.display import WIDTH, aligned, counted, joined, shortened, wrap
from splice.report.facts import as_money
from splice.statistics import Bin, Gain, Interval, Share

PAPER_QUESTIONS: Final = 14_280
PAPER_PROBES: Final = 28_560
PAPER_UNCHANGED: Final = 20_106
PAPER_DECISIVE: Final = 8_454
PAPER_DECISIVE_QUESTIONS: Final = 5_143
PAPER_GAPS: Final = 613

_NAME: Final = 16
"""Columns of the longest name in a table; what is left of a page beside the widest one."""
_NODE: Final = 17
"""Columns of the name of a node; longer ones are cut."""
_MOST_EDGES: Final = 40
"""Edges of one workload that are listed."""
_MOST_LINES: Final = 10
"""Damaged lines that are listed."""

Row: TypeAlias = tuple[str, ...]
Measure: TypeAlias = Literal["answer", "score"]


class Section(NamedTuple):
    """A titled part of a page: a table between lines of words, each of which may be missing."""

    key: str
    title: str
    before: tuple[str, ...] = ()
    table: tuple[Row, ...] = ()
    """Rows, the head first."""
    after: tuple[str, ...] = ()


def inspection_text(inspection: Inspection) -> str:
    """A pool as a page of text."""
    lines: list[str] = []
    for section in sections(inspection):
        lines += ["", section.title, *_wrapped(section.before)]
        lines += aligned(section.table) if section.table else []
        lines += _wrapped(section.after)
    return "\n".join(lines[1:])


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in wrap(line, WIDTH)]


def sections(inspection: Inspection) -> list[Section]:
    """All that there is to say about a pool, the most important first."""
    return [
        _pool(inspection),
        _noise(inspection),
        _questions(inspection),
        _outcomes(inspection),
        _arms(inspection),
        _kinds(inspection),
        *map(_edges, inspection.heat_maps),
        *_foreseen(inspection),
        *_rollouts(inspection),
        _paper(inspection),
        _spending(inspection),
        *_damage(inspection),
    ]


def heading(inspection: Inspection) -> str:
    """What the pool holds, in one line."""
    names = inspection.workloads or tuple(origin.workload for origin in inspection.origins)
    return f"Probe pool: {shortened(joined(names), WIDTH // 2)}"


def _pool(inspection: Inspection) -> Section:
    failed = inspection.n_failed_bases
    lines = [
        f"{counted(inspection.n_questions, 'question')}, "
        f"{counted(inspection.n_bases, 'base run')} ({failed:,} failed), "
        f"{counted(inspection.n_probes, 'probe')}"
    ]
    if len(inspection.origins) > 1:
        lines.append(f"Merged from {len(inspection.origins)} pools that differ:")
    for origin in inspection.origins:
        lines += _origin(origin)
    return Section("pool", heading(inspection), tuple(lines))


def _origin(origin: Origin) -> Iterator[str]:
    settings = origin.settings
    models = joined(f"{model.name} ({model.provider})" for model in origin.models)
    yield f"{origin.workload}: {origin.about}"
    yield f"model: {models or 'none'}"
    yield (
        f"metric: {origin.metric}, changes up to {settings.epsilon:g} are neutral; "
        f"{counted(settings.n_edges, 'edge')} a question, controls for "
        f"{settings.control_share:.0%} of the questions, "
        f"{counted(settings.n_rollouts, 'rollout')}; seed {settings.seed}"
    )


class Answer(NamedTuple):
    """A question about the pool, with its answer in a word and why."""

    question: str
    verdict: Verdict
    reason: str


def answers(inspection: Inspection) -> tuple[Answer, Answer]:
    """Whether edges do more than noise: to the answer, and to the score."""
    overall = [c for c in inspection.comparisons if c.workload is None]
    more, better = inspection.changes_more, inspection.scores_more
    return (
        Answer(
            "Do edges change the answer more often than noise?",
            more,
            _reason(more, {c.control: c.decisive for c in overall}),
        ),
        Answer(
            "Do edges raise the score more than noise?",
            better,
            _reason(better, {c.control: c.change for c in overall}),
        ),
    )


def _reason(verdict: Verdict, gains: Mapping[Arm, Gain]) -> str:
    if verdict == "unknown":
        few = [control for control in CONTROLS if control not in gains or gains[control].n < FEW]
        return f"fewer than {FEW} questions with a {' and a '.join(few)} beside an edge"
    by_relation: dict[str, list[str]] = {}
    for control, gain in gains.items():
        if gain.n >= FEW:
            by_relation.setdefault(relation(gain), []).append(f"a {control}")
    if verdict == "no":
        by_relation.pop("more than", None)
    return "; ".join(f"{name} {' and '.join(them)}" for name, them in by_relation.items())


def relation(gain: Gain) -> str:
    """What a gain says about both sides, at 95%."""
    if gain.interval.low > 0.0:
        return "more than"
    return "less than" if gain.interval.high < 0.0 else "not told apart from"


def _noise(inspection: Inspection) -> Section:
    title = "Edges against noise"
    lead = [
        f"{question} {verdict.upper()}: {reason}."
        for question, verdict, reason in answers(inspection)
    ]
    if not inspection.comparisons:
        return Section("noise", title, tuple(lead))
    head = ("edge against", "n", "edge", "control", "difference", "95% interval", "more", "less")
    measures: tuple[Measure, ...] = ("answer", "score")
    rows = [
        _comparison_row(comparison, measure)
        for measure in measures
        for comparison in by_control(inspection)
    ]
    notes = [
        "n: pairs of an edge and a control with the same receiver in the same base run. resample: "
        "the receiver ran once more; placebo: it got a message of the same length that says "
        "nothing. answer: share of pairs in which the answer changed; score: mean score change. "
        "more, less: pairs in which the edge did more, or less, than the control. Differences: "
        "paired bootstrap over questions."
    ]
    if n := sum(c.n_left_out for c in inspection.comparisons if c.workload is None):
        notes.append(f"{counted(n, 'control')} left out: one of the two sides has no answer.")
    notes += _copies(inspection)
    return Section("noise", title, tuple(lead), (head, *rows), tuple(notes))


def by_control(inspection: Inspection) -> list[Comparison]:
    """Each control in all workloads, followed by the same in each workload."""
    return sorted(inspection.comparisons, key=lambda c: CONTROLS.index(c.control))


def _comparison_row(comparison: Comparison, measure: Measure) -> Row:
    name = _scoped(f"{measure}, {comparison.control}", comparison.workload)
    if measure == "answer":
        return (
            name,
            f"{comparison.n_pairs:,}",
            percent(comparison.decisive_edge),
            percent(comparison.decisive_control),
            f"{100 * comparison.decisive.mean:+.1f}",
            gain_interval(comparison.decisive, measure),
            f"{comparison.n_only_edge:,}",
            f"{comparison.n_only_control:,}",
        )
    return (
        name,
        f"{comparison.n_pairs:,}",
        f"{comparison.change_edge:+.3f}",
        f"{comparison.change_control:+.3f}",
        f"{comparison.change.mean:+.3f}",
        gain_interval(comparison.change, measure),
        f"{comparison.n_better:,}",
        f"{comparison.n_worse:,}",
    )


def _copies(inspection: Inspection) -> Iterator[str]:
    """A warning where a resample can't show noise."""
    overall = [group for group in inspection.arms if group.workload is None]
    for group in overall:
        if group.name == "resample" and group.decisive and not group.decisive.n_hits:
            yield (
                "No resample changed its answer: a model that always answers alike gives a copy. "
                "Then only the placebo shows noise."
            )


def _questions(inspection: Inspection) -> Section:
    title = "Questions and base runs"
    if not inspection.splits:
        return Section("questions", title, ("No base run yet.",))
    head = ("workload", "split", "questions", "base runs", "failed", "base score", "95% interval")
    rows = [
        (
            shortened(split.workload, _NAME),
            split.split,
            f"{split.n_questions:,}",
            f"{split.n_bases:,}",
            f"{split.n_failed:,}",
            *_mean(split.score, ".3f"),
        )
        for split in inspection.splits
    ]
    return Section("questions", title, (), (head, *rows))


def _outcomes(inspection: Inspection) -> Section:
    title = "What became of the probes"
    if not inspection.n_probes:
        return Section("outcomes", title, ("No probe yet.",))
    head = ("arm", "begun", "done", "no message", "stopped", "failed")
    rows = [
        (
            _scoped(group.name, group.workload),
            f"{group.n:,}",
            f"{group.n_done:,}",
            f"{group.n_no_message:,}",
            f"{group.n_stopped:,}",
            f"{group.n_failed:,}",
            f"{group.n_beneficial:,}",
            f"{group.n_neutral:,}",
            f"{group.n_harmful:,}",
        )
        for group in _by_arm(inspection)
    ]
    note = (
        "no message: the source holds nothing that the receiver lacks. stopped: the trial ended "
        "without an answer. Probes that are done are beneficial, neutral or harmful; all that "
        "follows is about them."
    )
    classes = ("beneficial", "neutral", "harmful")
    return Section("outcomes", title, (), ((*head, *classes), *rows), (note,))


def _by_arm(inspection: Inspection) -> list[Group]:
    """Each arm of all workloads, followed by the same of each workload."""
    return [group for arm in ARMS for group in inspection.arms if group.name == arm]


def _arms(inspection: Inspection) -> Section:
    title = "Edges, and the noise floor: what a resample and a placebo do alone"
    if not any(group.n_done for group in inspection.arms):
        return Section("arms", title, ("No probe is done yet.",))
    head = ("arm", "n", "decisive", "95% interval", "moved", "95% interval", *_CHANGE_HEAD)
    rows = [
        (
            _scoped(group.name, group.workload),
            f"{group.n_done:,}",
            percent(group.decisive),
            _share_interval(group.decisive),
            percent(group.moved),
            _share_interval(group.moved),
            *_mean(group.change),
        )
        for group in _by_arm(inspection)
    ]
    note = (
        "decisive: the answer changed, byte for byte. moved: the score changed. change: mean score "
        "change. Shares are of probes, with Wilson's interval at the effective number of probes, "
        "as those of one question resemble each other; changes are means over questions, with an "
        f"interval from {FEW} questions on."
    )
    return Section("arms", title, (), (head, *rows), (note,))


_CHANGE_HEAD: Final = ("change", "95% interval")
_GROUP_HEAD: Final = (
    "n",
    "decisive",
    "95% interval",
    "ben.",
    "neutral",
    "harm.",
    *_CHANGE_HEAD,
)


def _group_row(name: str, group: Group) -> Row:
    return (
        name,
        f"{group.n_done:,}",
        percent(group.decisive),
        _share_interval(group.decisive),
        f"{group.n_beneficial:,}",
        f"{group.n_neutral:,}",
        f"{group.n_harmful:,}",
        *_mean(group.change),
    )


_GAP_NAMES: Final = {"gap": "true gap edge", "other": "no gap edge", "unknown": "not known"}


def _kinds(inspection: Inspection) -> Section:
    title = "Kinds of edges, and true gap edges"
    kinds = [group for group in inspection.kinds if group.n_done]
    if not kinds:
        return Section("kinds", title, ("No edge is tried yet.",))
    share = inspection.gap_share
    gaps = [group for group in inspection.gaps if group.n_done and share is not None]
    rows = [
        *(_group_row(group.name.replace("_", " "), group) for group in kinds),
        *(_group_row(_GAP_NAMES[group.name], group) for group in gaps),
    ]
    notes = ["Which edges are true gap edges is not known for these questions."]
    if share is not None:
        notes = [f"True gap edges: {_in_full(share)} of the edges for which it is known."]
    silent = next(group for group in inspection.gaps if group.name == "gap")
    if silent.n_no_message:
        notes.append(
            f"For {silent.n_no_message:,} of {silent.n:,} true gap edges nothing was found to "
            "deliver."
        )
    return Section("kinds", title, (), (("edges", *_GROUP_HEAD), *rows), tuple(notes))


def most_probed(heat_map: HeatMap) -> tuple[Cell, ...]:
    """The edges that are shown: as many as fit, those with most probes, in their order."""
    ranked = sorted(heat_map.cells, key=lambda cell: -cell.probes.n)[:_MOST_EDGES]
    shown = {(cell.source, cell.receiver) for cell in ranked}
    return tuple(cell for cell in heat_map.cells if (cell.source, cell.receiver) in shown)


def _edges(heat_map: HeatMap) -> Section:
    cells = most_probed(heat_map)
    head = ("source -> receiver", "begun", "n", "decisive", "95% interval", *_CHANGE_HEAD)
    rows = [
        (
            f"{shortened(cell.source, _NODE)} -> {shortened(cell.receiver, _NODE)}",
            f"{cell.probes.n:,}",
            f"{cell.probes.n_done:,}",
            percent(cell.probes.decisive),
            _share_interval(cell.probes.decisive),
            *_mean(cell.probes.change),
        )
        for cell in cells
    ]
    n_more = len(heat_map.cells) - len(cells)
    notes = (f"{counted(n_more, 'edge')} with fewer probes left out.",) if n_more else ()
    title = f"Edge by edge: {shortened(heat_map.workload, WIDTH // 2)}"
    return Section("edges", title, (), (head, *rows), notes)


def _foreseen(inspection: Inspection) -> Iterator[Section]:
    title = "Does the diagnosis foresee it?"
    known = [found for found in inspection.foresight if found.edge or found.headroom]
    if not known:
        yield Section("foresight", title, ("Not known yet: it takes probes of both outcomes.",))
        return
    head = ("AUC", "edge decisive", "95% interval", "n", "base score < 1", "95% interval", "n")
    note = (
        "0.5 is chance. edge decisive: foreseen by p_decisive; base score < 1: foreseen by "
        "headroom. Bootstrap over questions."
    )
    yield Section("foresight", title, (), (head, *map(_foresight_row, known)), (note,))
    if inspection.foresight[0].calibration:
        yield _calibration(inspection.foresight[0].calibration)


def _calibration(bins: Sequence[Bin]) -> Section:
    rows: list[Row] = [("quintile of p_decisive", "n", "from", "to", "predicted", "decisive")]
    for place, quintile in enumerate(bins, 1):
        rows.append(
            (
                f"{place}",
                f"{quintile.n:,}",
                f"{quintile.low:.2f}",
                f"{quintile.high:.2f}",
                f"{100 * quintile.mean_predicted:.1f}%",
                f"{100 * quintile.mean_actual:.1f}%",
            )
        )
    note = "Equal predictions share a quintile, so that there are fewer than five."
    notes = (note,) if len(bins) < 5 else ()
    title = "Predicted and actual share of decisive edges"
    return Section("calibration", title, (), tuple(rows), notes)


def _foresight_row(found: Foresight) -> Row:
    return (
        shortened(found.workload or "all", _NAME),
        *_auc(found.edge),
        *_auc(found.headroom),
    )


def _auc(found: Auc | None) -> Row:
    if found is None:
        return ("-", "-", "-")
    return (f"{found.value:.2f}", _interval(found.interval, 1, ".2f"), f"{found.n:,}")


def _rollouts(inspection: Inspection) -> Iterator[Section]:
    found: Agreement | None = inspection.agreement
    if found is None:
        return
    rows: list[Row] = [
        ("", "n", "equal", "95% interval", "kappa"),
        (
            "base answers",
            f"{found.answers.n:,}",
            percent(found.answers),
            _share_interval(found.answers),
            "-",
        ),
        (
            "classes of the same edge",
            f"{found.n_probes:,}",
            percent(found.classes),
            _share_interval(found.classes),
            "-" if found.kappa is None else f"{found.kappa:+.2f}",
        ),
    ]
    note = (
        "Of questions with several base runs, the first two. kappa: agreement beyond chance, 0 at "
        "chance and 1 at most."
    )
    yield Section("rollouts", "Do two rollouts agree?", (), tuple(rows), (note,))


def _paper(inspection: Inspection) -> Section:
    edges = inspection.arms[0]
    decisive, questions, gaps = (
        edges.decisive,
        inspection.decisive_questions,
        inspection.gap_share,
    )
    unchanged = "-"
    if decisive is not None:
        n = decisive.n - decisive.n_hits
        unchanged = f"{n:,} ({n / decisive.n:.1%})"
    rows: list[Row] = [
        ("", "this pool", "95% interval", "paper"),
        ("questions", f"{edges.n_questions:,}", "", f"{PAPER_QUESTIONS:,}"),
        ("edges that ran", f"{edges.n_done:,}", "", f"{PAPER_PROBES:,}"),
        ("answer unchanged", unchanged, "", _of_paper(PAPER_UNCHANGED, PAPER_PROBES)),
        (
            "decisive",
            _counted_share(decisive),
            _share_interval(decisive),
            _of_paper(PAPER_DECISIVE, PAPER_PROBES),
        ),
        (
            "questions with a decisive edge",
            _counted_share(questions),
            _share_interval(questions),
            _of_paper(PAPER_DECISIVE_QUESTIONS, PAPER_QUESTIONS),
        ),
        (
            "true gap edges",
            _counted_share(gaps, 2),
            _share_interval(gaps),
            _of_paper(PAPER_GAPS, PAPER_PROBES, 2),
        ),
    ]
    note = (
        "Edge arm, probes that are done. The paper's workloads and models are others, so the "
        "numbers need not agree; true gap edges meet all of its four conditions there, and are "
        "what the workload marks as such here."
    )
    return Section("paper", "Beside the paper", (), tuple(rows), (note,))


def _of_paper(n: int, whole: int, digits: int = 1) -> str:
    return f"{n:,} ({100 * n / whole:.{digits}f}%)"


def _counted_share(share: Share | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share.n_hits:,} ({100 * share.value:.{digits}f}%)"


def _spending(inspection: Inspection) -> Section:
    head = ("", "records", "calls", "cached", "tokens", "per record", "money", "hours")
    names = {"base": "base runs", "edge": "edge", "resample": "resample", "placebo": "placebo"}
    rows = [_used_row(names[used.stage], [used]) for used in inspection.used]
    notes = ["hours: added up over records that were made side by side."]
    if n := sum(used.ledger.n_uncounted for used in inspection.used):
        notes.append(f"Tokens are a lower bound: {counted(n, 'call')} gave no count.")
    rows.append(_used_row("all", inspection.used))
    return Section("spending", "What it took", (), (head, *rows), tuple(notes))


def _used_row(name: str, parts: Sequence[Used]) -> Row:
    n = sum(used.n for used in parts)
    n_tokens = sum(used.ledger.tokens for used in parts)
    costs = [used.ledger.cost for used in parts]
    known = [cost for cost in costs if cost is not None]
    return (
        name,
        f"{n:,}",
        f"{sum(used.ledger.n_calls for used in parts):,}",
        f"{sum(used.ledger.n_cached for used in parts):,}",
        f"{n_tokens:,}",
        f"{n_tokens / n:,.0f}" if n else "-",
        as_money(sum(known) if len(known) == len(costs) else None),
        f"{sum(used.elapsed_s for used in parts) / 3600:,.2f}",
    )


def _damage(inspection: Inspection) -> Iterator[Section]:
    lines = [
        f"{damage.file}:{damage.line}: {damage.reason}"
        for damage in inspection.damage[:_MOST_LINES]
    ]
    if n := len(inspection.damage):
        lines.insert(0, f"{counted(n, 'line')} can't be read and are left out:")
    if n > _MOST_LINES:
        lines.append(f"and {n - _MOST_LINES:,} more.")
    if n := inspection.n_unusable:
        lines.append(
            f"{counted(n, 'record')} without a finite score counted as failed, though not marked so."
        )
    if lines:
        yield Section("damage", "Out of order", tuple(lines))


def percent(share: Share | None) -> str:
    """A share in percent; `-` for none."""
    return "-" if share is None else f"{100 * share.value:.1f}%"


def _scoped(name: str, workload: str | None) -> str:
    """Name of a row: of all workloads, or, below it, of one of them."""
    return name if workload is None else f"  {shortened(workload, _NAME - 2)}"


def _interval(interval: Interval | None, scale: float, form: str) -> str:
    if interval is None:
        return "-"
    return f"[{scale * interval.low:{form}}, {scale * interval.high:{form}}]"


def _in_full(share: Share) -> str:
    """A share with what it is of and its interval."""
    return f"{share.n_hits:,} of {share.n:,} ({percent(share)}, interval {_share_interval(share)})"


def _share_interval(share: Share | None) -> str:
    return "-" if share is None else _interval(share.interval, 100, ".1f")


def gain_interval(gain: Gain, measure: Measure) -> str:
    """Interval of a difference of shares, in percent, or of scores; `-` for few questions."""
    interval = gain.interval if gain.n >= FEW else None
    return (
        _interval(interval, 100, "+.1f") if measure == "answer" else _interval(interval, 1, "+.3f")
    )


def _mean(mean: Mean | None, form: str = "+.3f") -> tuple[str, str]:
    """A mean and its interval."""
    if mean is None:
        return "-", "-"
    return f"{mean.value:{form}}", _interval(mean.interval, 1, form)
