"""What a probe pool says: the numbers that one looks at before training on it.

Probes of one question resemble each other. So the interval of a share is Wilson's at the number of
independent probes that the pool is worth (`share_by_question`), and means and differences are taken
over questions (`splice.statistics.paired_gain`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from probes.plan import CONTROLS, ProbeSettings
from probes.pool import Damage, Manifest, Shard, read_manifest, read_shards
from probes.records import Arm, BaseRecord, OutcomeClass, ProbeRecord
from splice.ledger import Spending
from splice.queries import Split
from splice.records import Edge, ModelIdentity, NodeId, Record
from splice.statistics import Bin, Gain, Interval, Share, auc, calibration, cohen_kappa, paired_gain

FEW: Final = 20
"""Below so many questions a mean gets no interval and no verdict: a bootstrap of few says little
(see `splice.statistics.paired_gain`)."""

ARMS: Final[tuple[Arm, ...]] = ("edge", *CONTROLS)

_SEED: Final = 0
_N_RESAMPLES: Final = 2000
"""Of means and AUCs: enough for what is only shown, in seconds for a pool of the paper's size.
Comparisons, which decide something, have the default of `paired_gain`."""
_SAME: Final = 1e-9
"""Differences of scores up to this size are rounding."""
_Z: Final = 1.959963984540054
"""Half a standard normal 95% interval."""

Question: TypeAlias = tuple[str, str]
"""Workload and id of the query."""

Stage: TypeAlias = Literal["base", "edge", "resample", "placebo"]
"""Base runs, or the probes of one arm."""

Verdict: TypeAlias = Literal["yes", "no", "unknown"]


class Origin(Record):
    """One pool that the pool was merged from; the pool itself if it was not."""

    workload: str
    about: str
    metric: str
    models: tuple[ModelIdentity, ...]
    settings: ProbeSettings


class Mean(Record):
    """A mean over questions; repeats of a question are averaged first."""

    value: float
    interval: Interval | None
    """At 95%, by bootstrap over questions; None: fewer than `FEW` questions."""
    n: int
    """Questions."""


class Auc(Record):
    """How well a prediction tells true rows from false ones; 0.5 is chance."""

    value: float
    interval: Interval | None
    """At 95%, by bootstrap over questions; None: fewer than `FEW` questions."""
    n_true: int
    n: int


class SplitResult(Record):
    """The base runs of one split of one workload."""

    workload: str
    split: Split
    n_questions: int
    n_bases: int
    n_failed: int
    """Base runs that failed; they have no score."""
    score: Mean | None


class Used(Record):
    """What base runs or the probes of one arm used."""

    stage: Stage
    n: int
    """Records."""
    ledger: Spending
    elapsed_s: float
    """Added up over the records, which ran side by side."""


class Group(Record):
    """Probes that have something in common."""

    name: str
    workload: str | None
    """None: of all workloads."""
    n: int
    """Probes that were begun; the next four add up to it."""
    n_done: int
    n_no_message: int
    n_stopped: int
    n_failed: int
    n_questions: int
    """Questions with a probe that is done."""
    decisive: Share | None
    """Of the probes that are done: the answer changed."""
    moved: Share | None
    """Of the probes that are done: the score changed."""
    n_beneficial: int
    n_neutral: int
    n_harmful: int
    change: Mean | None
    """Score change of the probes that are done."""


class Comparison(Record):
    """Edges against a control, with the same receiver and in the same base run."""

    control: Arm
    workload: str | None
    n_pairs: int
    n_left_out: int
    """Controls without a partner, or of which one side has no answer."""
    decisive_edge: Share
    decisive_control: Share
    n_only_edge: int
    """Pairs in which the edge alone changed the answer."""
    n_only_control: int
    decisive: Gain
    """Share of decisive probes, edge less control."""
    change_edge: float
    change_control: float
    """Mean score change over questions."""
    n_better: int
    """Pairs in which the edge changed the score more for the better than the control."""
    n_worse: int
    change: Gain
    """Score change, edge less control."""


class HeatMap(Record):
    """Probed edges of one workload."""

    workload: str
    nodes: tuple[NodeId, ...]
    """Sources before their receivers, where all workflows agree on an order."""
    cells: tuple[Cell, ...]


class Cell(Record):
    """One edge, whatever question it was tried for."""

    source: NodeId
    receiver: NodeId
    probes: Group


class Foresight(Record):
    """What the diagnosis foresaw."""

    workload: str | None
    edge: Auc | None
    """Of `p_decisive` for a decisive probe, on the edge arm."""
    calibration: tuple[Bin, ...]
    """Of `p_decisive`, by quintile."""
    headroom: Auc | None
    """Of headroom for a base score below 1."""


class Agreement(Record):
    """The first two rollouts of the same questions."""

    n_questions: int
    answers: Share
    """Questions whose base answers are equal, byte for byte."""
    n_probes: int
    """Edges that were tried in both, with an answer each time."""
    classes: Share | None
    """Of these, those of equal class."""
    kappa: float | None
    """Of the classes; None: undefined."""


class Inspection(Record):
    """What a probe pool holds and says."""

    schema_version: Literal[1] = 1
    origins: tuple[Origin, ...]
    workloads: tuple[str, ...]
    """Those that have a record."""
    n_questions: int
    n_bases: int
    n_failed_bases: int
    n_probes: int
    splits: tuple[SplitResult, ...]
    used: tuple[Used, ...]
    arms: tuple[Group, ...]
    """By arm: of all workloads, then, if there are several, of each."""
    comparisons: tuple[Comparison, ...]
    """Of all workloads, then, if there are several, of each."""
    changes_more: Verdict
    """Whether edges change the answer more often than either control, at 95% each."""
    scores_more: Verdict
    """Whether edges change the score more for the better than either control, at 95% each."""
    kinds: tuple[Group, ...]
    """Edge arm by kind of edge."""
    gaps: tuple[Group, ...]
    """Edge arm: `gap` and `other`, and `unknown` where the workload does not tell."""
    gap_share: Share | None
    """Of the probes of the edge arm that are done and for which it is known: true gap edges."""
    decisive_questions: Share | None
    """Of the questions with an edge probe that is done: those with a decisive one."""
    heat_maps: tuple[HeatMap, ...]
    foresight: tuple[Foresight, ...]
    """Of all workloads, then, if there are several, of each."""
    agreement: Agreement | None
    """None: no question has two rollouts."""
    n_unusable: int
    """Records that call themselves done but lack a number, or hold one that is not finite."""
    damage: tuple[Damage, ...]
    """Lines that are no records."""


def inspect(folder: str | Path) -> Inspection:
    """Read a pool shard by shard, also one that is being written, and say what is in it.

    Raises:
        StoreError: there is no pool, its format is newer, or a file can't be read.
    """
    damage: list[Damage] = []
    manifest = read_manifest(Path(folder))
    kept = _Kept()
    for shard in read_shards(folder, damage):
        kept.add(shard)
    scopes = (None, *(kept.workloads if len(kept.workloads) > 1 else ()))
    comparisons = [
        comparison
        for workload in scopes
        for comparison in _comparisons(workload, _of(kept.probes, workload))
    ]
    edges = [probe for probe in kept.probes if probe.arm == "edge"]
    done = [probe for probe in edges if probe.is_done]
    overall = [comparison for comparison in comparisons if comparison.workload is None]
    return Inspection(
        origins=_origins(manifest),
        workloads=kept.workloads,
        n_questions=len({base.question for base in kept.bases.values()}),
        n_bases=len(kept.bases),
        n_failed_bases=sum(base.is_failed for base in kept.bases.values()),
        n_probes=len(kept.probes),
        splits=tuple(_splits(kept.bases.values())),
        used=tuple(used.total(stage) for stage, used in kept.used.items()),
        arms=tuple(
            group_of(arm, (p for p in _of(kept.probes, workload) if p.arm == arm), workload)
            for workload in scopes
            for arm in ARMS
        ),
        comparisons=tuple(comparisons),
        changes_more=_verdict({c.control: c.decisive for c in overall}),
        scores_more=_verdict({c.control: c.change for c in overall}),
        kinds=tuple(
            group_of(kind, (probe for probe in edges if probe.kind == kind))
            for kind in ("parallel_branch", "distant_ancestor")
        ),
        gaps=tuple(_gaps(edges)),
        gap_share=share_by_question(
            (probe.question, probe.is_gap) for probe in done if probe.is_gap is not None
        ),
        decisive_questions=_any_decisive(done),
        heat_maps=tuple(_heat_map(workload, edges) for workload in _workloads_of(edges)),
        foresight=tuple(_foresight(kept, workload) for workload in scopes),
        agreement=_agreement(kept),
        n_unusable=kept.n_unusable,
        damage=tuple(damage),
    )


class _Base(NamedTuple):
    """What is kept of a base record."""

    question: Question
    split: Split
    rollout: int
    answer: int
    """Hash of the answer."""
    score: float | None
    headroom: float | None
    is_failed: bool


class Probe(NamedTuple):
    """What is kept of a probe record."""

    question: Question
    base: str
    rollout: int
    arm: Arm
    ends: Edge
    kind: str
    is_gap: bool | None
    p_decisive: float
    outcome: str
    is_decisive: bool | None
    outcome_class: OutcomeClass | None
    delta: float | None

    @property
    def is_done(self) -> bool:
        """Whether there is a candidate answer with its score."""
        return self.outcome == "done"


class _Sum:
    """Adds up what records used."""

    def __init__(self) -> None:
        self.n = 0
        self.elapsed_s = 0.0
        self.counts: Counter[str] = Counter()
        self.cost: float | None = 0.0

    def add(self, record: BaseRecord | ProbeRecord) -> None:
        ledger = record.ledger
        self.n += 1
        self.elapsed_s += record.elapsed_s
        self.counts.update(ledger.model_dump(exclude={"cost"}))
        is_known = self.cost is not None and ledger.cost is not None
        self.cost = (self.cost or 0.0) + (ledger.cost or 0.0) if is_known else None

    def total(self, stage: Stage) -> Used:
        ledger = Spending(**self.counts, cost=self.cost)
        return Used(stage=stage, n=self.n, ledger=ledger, elapsed_s=self.elapsed_s)


class _Kept:
    """What stays in memory of the shards that were read: a small tuple for each record."""

    def __init__(self) -> None:
        self.bases: dict[str, _Base] = {}
        self.probes: list[Probe] = []
        self.used: dict[Stage, _Sum] = {stage: _Sum() for stage in get_args(Stage)}
        self.n_unusable = 0

    @property
    def workloads(self) -> tuple[str, ...]:
        return tuple(sorted({base.question[0] for base in self.bases.values()}))

    def add(self, shard: Shard) -> None:
        for record in shard.bases.values():
            self.used["base"].add(record)
            self._add_base(record)
        for probe in shard.probes.values():
            self.used[probe.arm].add(probe)
            self._add_probe(probe)

    def _add_base(self, record: BaseRecord) -> None:
        is_failed = record.failure is not None
        score = _finite(record.score)
        self.n_unusable += not is_failed and score is None
        self.bases[record.id] = _Base(
            question=(record.workload, record.query_id),
            split=record.split,
            rollout=record.rollout,
            answer=hash(record.answer),
            score=None if is_failed else score,
            headroom=None if record.diagnosis is None else 1.0 - record.diagnosis.base_score,
            is_failed=is_failed,
        )

    def _add_probe(self, record: ProbeRecord) -> None:
        delta, outcome = _finite(record.delta), record.outcome
        if outcome == "done" and None in (delta, record.outcome_class, record.is_decisive):
            self.n_unusable += 1
            outcome = "failed"
        self.probes.append(
            Probe(
                question=(record.workload, record.query_id),
                base=record.base,
                rollout=record.rollout,
                arm=record.arm,
                ends=record.edge.ends,
                kind=record.edge.kind,
                is_gap=record.is_gap,
                p_decisive=record.p_decisive,
                outcome=outcome,
                is_decisive=record.is_decisive,
                outcome_class=record.outcome_class,
                delta=delta,
            )
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _of(probes: Iterable[Probe], workload: str | None) -> list[Probe]:
    """Probes of one workload; None: of all."""
    return [probe for probe in probes if workload in (None, probe.question[0])]


def _workloads_of(probes: Iterable[Probe]) -> list[str]:
    return sorted({probe.question[0] for probe in probes})


def _origins(manifest: Manifest) -> tuple[Origin, ...]:
    """What was merged, without repeats: parts of one workload often differ in their questions."""
    if manifest.parts:
        found = [origin for part in manifest.parts for origin in _origins(part)]
        return tuple({origin.model_dump_json(): origin for origin in found}.values())
    return (
        Origin(
            workload=manifest.workload,
            about=manifest.about,
            metric=manifest.metric,
            models=manifest.models,
            settings=manifest.settings,
        ),
    )


def _splits(bases: Iterable[_Base]) -> Iterator[SplitResult]:
    by_split: defaultdict[tuple[str, Split], list[_Base]] = defaultdict(list)
    for base in bases:
        by_split[base.question[0], base.split].append(base)
    order: tuple[Split, ...] = ("train", "validation", "test")
    for workload, split in sorted(by_split, key=lambda key: (key[0], order.index(key[1]))):
        own = by_split[workload, split]
        yield SplitResult(
            workload=workload,
            split=split,
            n_questions=len({base.question for base in own}),
            n_bases=len(own),
            n_failed=sum(base.is_failed for base in own),
            score=_mean((base.question, base.score) for base in own if base.score is not None),
        )


def group_of(name: str, probes: Iterable[Probe], workload: str | None = None) -> Group:
    """What became of some probes."""
    probes = list(probes)
    done = [probe for probe in probes if probe.is_done]
    outcomes = Counter(probe.outcome for probe in probes)
    classes = Counter(probe.outcome_class for probe in done)
    return Group(
        name=name,
        workload=workload,
        n=len(probes),
        n_done=len(done),
        n_no_message=outcomes["no_message"],
        n_stopped=outcomes["stopped"],
        n_failed=outcomes["failed"],
        n_questions=len({probe.question for probe in done}),
        decisive=share_by_question((probe.question, probe.is_decisive) for probe in done),
        moved=share_by_question(
            (probe.question, probe.outcome_class != "neutral") for probe in done
        ),
        n_beneficial=classes["beneficial"],
        n_neutral=classes["neutral"],
        n_harmful=classes["harmful"],
        change=_mean((probe.question, probe.delta) for probe in done),
    )


def _gaps(edges: Sequence[Probe]) -> Iterator[Group]:
    names: tuple[tuple[str, bool | None], ...] = (("gap", True), ("other", False))
    if any(probe.is_gap is None for probe in edges):
        names = (*names, ("unknown", None))
    for name, is_gap in names:
        yield group_of(name, (probe for probe in edges if probe.is_gap is is_gap))


def _any_decisive(done: Iterable[Probe]) -> Share | None:
    found: dict[Question, bool] = {}
    for probe in done:
        found[probe.question] = found.get(probe.question, False) or bool(probe.is_decisive)
    return share_by_question(found.items())


def _pairs(probes: Sequence[Probe], control: Arm) -> tuple[list[tuple[Probe, Probe]], int]:
    """Edge and control of the same edge and base run, and how many controls have no such edge."""
    edges = {(probe.base, probe.ends): probe for probe in probes if probe.arm == "edge"}
    controls = [probe for probe in probes if probe.arm == control]
    pairs = [
        (edge, probe)
        for probe in controls
        if (edge := edges.get((probe.base, probe.ends))) is not None
        and edge.is_done
        and probe.is_done
    ]
    return pairs, len(controls) - len(pairs)


def _comparisons(workload: str | None, probes: Sequence[Probe]) -> Iterator[Comparison]:
    for control in CONTROLS:
        pairs, n_left_out = _pairs(probes, control)
        if not pairs:
            continue
        edges, controls = ([pair[side] for pair in pairs] for side in (0, 1))
        change_edge, change_control = (
            _by_question((probe.question, probe.delta) for probe in side)
            for side in (edges, controls)
        )
        gains = [(edge.delta or 0.0) - (other.delta or 0.0) for edge, other in pairs]
        yield Comparison(
            control=control,
            workload=workload,
            n_pairs=len(pairs),
            n_left_out=n_left_out,
            decisive_edge=_decisive(edges),
            decisive_control=_decisive(controls),
            n_only_edge=sum(bool(e.is_decisive) > bool(c.is_decisive) for e, c in pairs),
            n_only_control=sum(bool(e.is_decisive) < bool(c.is_decisive) for e, c in pairs),
            decisive=paired_gain(
                *(
                    _by_question((probe.question, probe.is_decisive) for probe in side)
                    for side in (controls, edges)
                ),
                seed=_SEED,
            ),
            change_edge=math.fsum(change_edge) / len(change_edge),
            change_control=math.fsum(change_control) / len(change_control),
            n_better=sum(gain > _SAME for gain in gains),
            n_worse=sum(gain < -_SAME for gain in gains),
            change=paired_gain(change_control, change_edge, seed=_SEED),
        )


def _decisive(probes: Sequence[Probe]) -> Share:
    found = share_by_question((probe.question, probe.is_decisive) for probe in probes)
    assert found is not None
    return found


def _verdict(gains: Mapping[Arm, Gain]) -> Verdict:
    """Whether a gain over each control is shown.

    Each is held against its own 95% interval: to ask for both needs no correction.
    """
    known = [gain for gain in gains.values() if gain.n >= FEW]
    if any(gain.interval.low <= 0.0 for gain in known):
        return "no"
    return "yes" if len(known) == len(CONTROLS) else "unknown"


def _heat_map(workload: str, edges: Iterable[Probe]) -> HeatMap:
    by_ends: defaultdict[Edge, list[Probe]] = defaultdict(list)
    for probe in edges:
        if probe.question[0] == workload:
            by_ends[probe.ends].append(probe)
    nodes = _in_order(by_ends)
    place = {node: index for index, node in enumerate(nodes)}
    cells = [
        Cell(
            source=source,
            receiver=receiver,
            probes=group_of(f"{source} -> {receiver}", by_ends[source, receiver], workload),
        )
        for source, receiver in sorted(by_ends, key=lambda ends: (place[ends[0]], place[ends[1]]))
    ]
    return HeatMap(workload=workload, nodes=nodes, cells=tuple(cells))


def _in_order(edges: Iterable[Edge]) -> tuple[NodeId, ...]:
    """Nodes with each source before its receivers; by name if workflows order them differently."""
    nodes = sorted({node for edge in edges for node in edge})
    sorter = TopologicalSorter({node: [] for node in nodes})
    for source, receiver in sorted(edges):
        sorter.add(receiver, source)
    try:
        return tuple(sorter.static_order())
    except CycleError:
        return tuple(nodes)


def _foresight(kept: _Kept, workload: str | None) -> Foresight:
    done = [p for p in _of(kept.probes, workload) if p.arm == "edge" and p.is_done]
    bases = [
        (base.question, base.headroom, base.score)
        for base in kept.bases.values()
        if workload in (None, base.question[0])
    ]
    predicted = [probe.p_decisive for probe in done]
    return Foresight(
        workload=workload,
        edge=auc_by_question(
            [(probe.question, probe.p_decisive, bool(probe.is_decisive)) for probe in done]
        ),
        calibration=calibration(predicted, [float(bool(probe.is_decisive)) for probe in done]),
        headroom=auc_by_question(
            [
                (question, headroom, score < 1.0)
                for question, headroom, score in bases
                if headroom is not None and score is not None
            ]
        ),
    )


def _agreement(kept: _Kept) -> Agreement | None:
    by_question: defaultdict[Question, list[tuple[str, _Base]]] = defaultdict(list)
    for id, base in kept.bases.items():
        if not base.is_failed:
            by_question[base.question].append((id, base))
    partner: dict[str, str] = {}
    same: list[tuple[Question, bool]] = []
    for question, own in by_question.items():
        if len(own) > 1:
            (first, one), (second, other) = sorted(own, key=lambda entry: entry[1].rollout)[:2]
            partner[first] = second
            same.append((question, one.answer == other.answer))
    answers = share_by_question(same)
    if answers is None:
        return None
    edges = {(p.base, p.ends): p for p in kept.probes if p.arm == "edge" and p.is_done}
    twice = [
        (probe, again)
        for (base, ends), probe in edges.items()
        if base in partner and (again := edges.get((partner[base], ends))) is not None
    ]
    return Agreement(
        n_questions=len(same),
        answers=answers,
        n_probes=len(twice),
        classes=share_by_question(
            (one.question, one.outcome_class == other.outcome_class) for one, other in twice
        ),
        kappa=cohen_kappa(
            [one.outcome_class for one, _ in twice], [other.outcome_class for _, other in twice]
        ),
    )


def _by_question(values: Iterable[tuple[Question, float | None]]) -> list[float]:
    """Mean of each question, in the order of the questions."""
    found: defaultdict[Question, list[float]] = defaultdict(list)
    for question, value in values:
        if value is not None:
            found[question].append(float(value))
    return [math.fsum(found[question]) / len(found[question]) for question in sorted(found)]


def _mean(values: Iterable[tuple[Question, float | None]]) -> Mean | None:
    means = _by_question(values)
    if len(means) >= FEW:
        gain = paired_gain([0.0] * len(means), means, seed=_SEED, n_resamples=_N_RESAMPLES)
        return Mean(value=gain.mean, interval=gain.interval, n=gain.n)
    return Mean(value=math.fsum(means) / len(means), interval=None, n=len(means)) if means else None


def share_by_question(marks: Iterable[tuple[Question, bool | None]]) -> Share | None:
    """Share of true marks, with an interval for marks that resemble each other within a question.

    The interval is Wilson's at the effective number of marks: their number times what a share of
    independent marks would vary by, over what this one varies by between questions; never more
    than their number. Where all marks are equal the variation is not known, and each question
    counts as one. With one mark a question it is Wilson's interval itself.

    Source: Franco, Little, Louis and Slud 2019, Comparative Study of Confidence Intervals for
    Proportions in Complex Sample Surveys.
    """
    sizes: Counter[Question] = Counter()
    hits: Counter[Question] = Counter()
    for question, mark in marks:
        sizes[question] += 1
        hits[question] += bool(mark)
    n, n_hits = sizes.total(), hits.total()
    if not n:
        return None
    value = n_hits / n
    independent = n * value * (1.0 - value)
    spread = math.fsum((hits[question] - value * size) ** 2 for question, size in sizes.items())
    n_effective = n * min(1.0, independent / spread) if spread else float(n)
    if n_hits in (0, n):
        n_effective = float(len(sizes))
    return Share(value=value, interval=_wilson(value, n_effective), n_hits=n_hits, n=n)


def _wilson(value: float, n: float) -> Interval:
    square = _Z * _Z / n
    centre = (value + square / 2) / (1 + square)
    half = math.sqrt(value * (1.0 - value) * square + square * square / 4) / (1 + square)
    # At the ends the formula gives the share itself, but for rounding.
    low = 0.0 if value == 0.0 else centre - half
    return Interval(low=low, high=1.0 if value == 1.0 else centre + half)


def auc_by_question(rows: Sequence[tuple[Question, float, bool]]) -> Auc | None:
    """AUC of predictions for marks, with a bootstrap over questions; None without both marks."""
    scores, marks = [score for _, score, _ in rows], [mark for _, _, mark in rows]
    value = auc(scores, marks)
    if value is None:
        return None
    return Auc(value=value, interval=_auc_interval(rows), n_true=sum(marks), n=len(rows))


def _auc_interval(rows: Sequence[tuple[Question, float, bool]]) -> Interval | None:
    import numpy as np

    number = {question: i for i, question in enumerate(sorted({row[0] for row in rows}))}
    n = len(number)
    if n < FEW:
        return None
    question_of = np.array([number[question] for question, _, _ in rows])
    is_true = np.array([mark for _, _, mark in rows], dtype=np.float64)
    # Rows of equal score count together, so that a resample needs no sorting.
    level = np.unique([score for _, score, _ in rows], return_inverse=True)[1]
    rng = np.random.default_rng(_SEED)
    values = []
    for _ in range(_N_RESAMPLES):
        weights = np.bincount(rng.integers(0, n, n), minlength=n)[question_of]
        true = np.bincount(level, weights * is_true)
        false = np.bincount(level, weights * (1.0 - is_true))
        if true.any() and false.any():
            below = np.cumsum(false) - false / 2
            values.append(float(true @ below) / float(true.sum() * false.sum()))
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(low=float(low), high=float(high))
