"""A probe pool as two tables of numbers and ids: a row for each probe, a row for each base run.

Edges and outcomes are learned from the rows of probes, base scores from the rows of base runs. Both
leave out base runs that failed, and the probes of these.

No text of a pool is in them: of questions, answers, messages and reasons there are counts at most.
What stands in columns of kind `id` are names: of nodes and workloads, and what a data set calls its
questions and their kinds. What is not known is None, never NaN or a number that stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from probes.pool import Damage, Manifest, Shard, read_manifest, read_shards
from probes.records import BaseRecord, ProbeRecord
from splice.errors import StoreError
from splice.features import (
    EDGE_FEATURES,
    EVIDENCE_FEATURES,
    QUERY_FEATURES,
    Feature,
    evidence_features,
)
from splice.ledger import Spending
from splice.records import Evidence
from splice.workload import Scores

Value: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Value]
"""Value by column, in the order of the columns."""

Kind: TypeAlias = Literal["id", "int", "float", "bool"]


class Column(NamedTuple):
    """A column of a table; each may hold None."""

    name: str
    kind: Kind
    meaning: str


_QUESTION: Final = (
    Column("base", "id", "Id of the base run."),
    Column("workload", "id", "Name of the workload."),
    Column("split", "id", "train, validation or test."),
    Column("query_id", "id", "Id of the question, as its data set has it."),
    Column("question_kind", "id", "Type of the question, as its data set names it."),
    Column("rollout", "int", "Rollout of the base run; 0 is the first."),
    Column("workflow", "id", "Fingerprint of the workflow that the question ran on."),
)

_PROBE: Final = (
    Column("arm", "id", "edge, or the control: resample, placebo."),
    Column("source", "id", "Node that the message comes from."),
    Column("receiver", "id", "Node that the message goes to; of a resample, that runs again."),
    Column("edge_kind", "id", "parallel_branch or distant_ancestor."),
    Column("outcome", "id", "done, no_message, stopped or failed."),
    Column("outcome_class", "id", "beneficial, neutral or harmful; only of a probe that is done."),
    Column("is_decisive", "bool", "The candidate answer differs from the base answer."),
    Column("is_gap", "bool", "The edge is a true gap edge."),
    Column("place", "int", "Place of the edge in the question's random order, from 0."),
    Column("p_decisive", "float", "Predicted probability that the edge changes the answer."),
)

_PREDICTED: Final = (
    Column("n_candidates", "int", "Missing forward edges of the workflow."),
    Column("n_gap_edges", "int", "True gap edges among them; null if they are not known."),
    Column("predicted_score", "float", "Predicted score of the base answer, in [0, 1]."),
    Column("headroom", "float", "1 - predicted_score."),
    Column("score_base", "float", "Score of the base answer, in [0, 1]."),
)

_CHANGED: Final = (
    Column("score_new", "float", "Score of the candidate answer, in [0, 1]."),
    Column("delta", "float", "score_new - score_base."),
)

_N_BASE_ANSWER: Final = Column("n_base_answer_words", "int", "Words of the base answer.")

_COUNTS: Final = (
    Column("n_message_words", "int", "Words of the message."),
    _N_BASE_ANSWER,
    Column("n_answer_words", "int", "Words of the candidate answer."),
    Column("n_rerun", "int", "Nodes that ran again."),
)

_LEDGER: Final = (
    Column("n_calls", "int", "Model calls of this row's run that were sent."),
    Column("n_cached_calls", "int", "Model calls that a cache answered."),
    Column("prompt_tokens", "int", "Prompt tokens; None if a call was not counted."),
    Column("completion_tokens", "int", "Generated tokens; None if a call was not counted."),
    Column("cost", "float", "Price of the calls, in the unit of the price table."),
    Column("elapsed_s", "float", "Seconds from beginning to end."),
)


def probe_columns(metrics: Sequence[str]) -> tuple[Column, ...]:
    """Columns of the rows of probes, for a workload with these metrics."""
    return (
        Column("probe", "id", "Id of the probe."),
        *_QUESTION,
        *_PROBE,
        *_PREDICTED,
        *_CHANGED,
        *_base_metrics(metrics),
        *(
            Column(f"new_{metric}", "float", f"{metric} of the candidate answer, in [0, 1].")
            for metric in metrics
        ),
        *_COUNTS,
        *_feature_columns("edge", EDGE_FEATURES),
        *_feature_columns("query", QUERY_FEATURES),
        *(Column(f"evidence_{f.name}", f.kind, f.definition) for f in EVIDENCE_FEATURES),
        *_LEDGER,
    )


def base_columns(metrics: Sequence[str]) -> tuple[Column, ...]:
    """Columns of the rows of base runs, for a workload with these metrics."""
    return (
        *_QUESTION,
        *_PREDICTED,
        *_base_metrics(metrics),
        _N_BASE_ANSWER,
        *_feature_columns("query", QUERY_FEATURES),
        *_LEDGER,
    )


def _base_metrics(metrics: Sequence[str]) -> tuple[Column, ...]:
    return tuple(
        Column(f"base_{metric}", "float", f"{metric} of the base answer, in [0, 1].")
        for metric in metrics
    )


def _feature_columns(of: str, features: Sequence[Feature]) -> Iterator[Column]:
    for feature in features:
        yield Column(f"{of}_feature_{feature.name}", "float", feature.definition)


COLUMNS: Final[Mapping[str, str]] = {
    column.name: column.meaning
    for column in (*probe_columns(("<metric>",)), *base_columns(("<metric>",)))
}
"""Meaning by column of both tables; `<metric>` stands for each metric of the workload. A feature
that was ever written to pools stays here, so that tables of old pools can be made."""


def rows(folder: str | Path, damage: list[Damage] | None = None) -> Iterator[Row]:
    """The rows of probes, of one shard after another; columns as in `probe_columns`.

    Args:
        folder: of the pool.
        damage: gets the lines that are no records; they are left out.

    Raises:
        StoreError: there is no pool, its format is newer, a file can't be read, or a record has a
            feature that is not in `COLUMNS`.
    """
    manifest = read_manifest(Path(folder))
    for shard in read_shards(folder, damage):
        yield from rows_of_probes(shard, manifest)


def base_rows(folder: str | Path, damage: list[Damage] | None = None) -> Iterator[Row]:
    """The rows of base runs, of one shard after another; columns as in `base_columns`.

    Arguments and errors are those of `rows`.
    """
    manifest = read_manifest(Path(folder))
    for shard in read_shards(folder, damage):
        yield from rows_of_bases(shard, manifest)


def rows_of_probes(shard: Shard, manifest: Manifest) -> Iterator[Row]:
    """The rows of the probes of one shard."""
    names = [column.name for column in probe_columns(manifest.metrics)]
    for probe in shard.probes.values():
        base = shard.bases[probe.base]
        if base.failure is None:
            yield _ordered(_probe_row(base, probe, manifest), names)


def rows_of_bases(shard: Shard, manifest: Manifest) -> Iterator[Row]:
    """The rows of the base runs of one shard."""
    names = [column.name for column in base_columns(manifest.metrics)]
    for base in shard.bases.values():
        if base.failure is None:
            yield _ordered(_base_row(base, manifest), names)


def _ordered(values: Mapping[str, Value], names: Sequence[str]) -> Row:
    found = {name: values[name] for name in names}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.items()
    }


def _base_row(base: BaseRecord, manifest: Manifest) -> Row:
    return {
        **_of_question(base, manifest),
        **_used(base.ledger, base.elapsed_s),
    }


def _probe_row(base: BaseRecord, probe: ProbeRecord, manifest: Manifest) -> Row:
    return {
        **_of_question(base, manifest),
        "probe": probe.id,
        "arm": probe.arm,
        "source": probe.edge.source,
        "receiver": probe.edge.receiver,
        "edge_kind": probe.edge.kind,
        "outcome": probe.outcome,
        "outcome_class": probe.outcome_class,
        "is_decisive": probe.is_decisive,
        "is_gap": probe.is_gap,
        "place": probe.place,
        "p_decisive": probe.p_decisive,
        "score_new": _score(probe.scores, manifest.metric),
        "delta": probe.delta,
        **{f"new_{name}": _score(probe.scores, name) for name in manifest.metrics},
        "n_message_words": _n_words(probe.message.text if probe.message else None),
        "n_answer_words": _n_words(probe.answer),
        "n_rerun": len(probe.rerun),
        **_features("edge", EDGE_FEATURES, probe.features),
        **_evidence(probe.evidence),
        **_used(probe.ledger, probe.elapsed_s),
    }


def _of_question(base: BaseRecord, manifest: Manifest) -> Row:
    """What the rows of a base run and of its probes have in common."""
    diagnosis = base.diagnosis
    return {
        "base": base.id,
        "workload": base.workload,
        "split": base.split,
        "query_id": base.query_id,
        "question_kind": base.question_kind,
        "rollout": base.rollout,
        "workflow": base.workflow,
        "n_candidates": base.n_candidates,
        "n_gap_edges": None if base.gap_edges is None else len(base.gap_edges),
        "predicted_score": diagnosis.base_score if diagnosis else None,
        "headroom": diagnosis.headroom if diagnosis else None,
        "score_base": base.score,
        **{f"base_{name}": _score(base.scores, name) for name in manifest.metrics},
        "n_base_answer_words": _n_words(base.answer),
        **_features("query", QUERY_FEATURES, base.features),
    }


def _score(scores: Scores | None, metric: str) -> float | None:
    return None if scores is None else scores.get(metric)


def _n_words(text: str | None) -> int | None:
    return None if text is None else len(text.split())


def _features(of: str, known: Sequence[Feature], found: Mapping[str, float]) -> Row:
    names = [feature.name for feature in known]
    if unknown := sorted(found.keys() - set(names)):
        raise StoreError(
            f"the pool holds the {of} feature {unknown[0]!r}, which this version does not know; "
            "make tables of it with the version that wrote it"
        )
    return {f"{of}_feature_{name}": found.get(name) for name in names}


def _evidence(evidence: Evidence | None) -> Row:
    if evidence is None:
        return {f"evidence_{feature.name}": None for feature in EVIDENCE_FEATURES}
    found = evidence_features(evidence)
    whole: dict[str, type] = {"int": int, "bool": bool}
    row: Row = {
        f"evidence_{f.name}": whole.get(f.kind, float)(found[f.name]) for f in EVIDENCE_FEATURES
    }
    if not evidence.survival:
        row |= {"evidence_survival_first": None, "evidence_survival_last": None}
    return row


def _used(ledger: Spending, elapsed_s: float) -> Row:
    is_counted = ledger.n_uncounted == 0
    return {
        "n_calls": ledger.n_calls,
        "n_cached_calls": ledger.n_cached,
        "prompt_tokens": ledger.prompt_tokens if is_counted else None,
        "completion_tokens": ledger.completion_tokens if is_counted else None,
        "cost": ledger.cost,
        "elapsed_s": elapsed_s,
    }
