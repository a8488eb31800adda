"""Feature tables of probe pools, as `splice probes export` writes them.

Reads   bases.csv and probes.csv, or both as .parquet, and manifest.json of each folder

Rows come in one order, whatever order the files have: by question, rollout and pool.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from probes.pool import Manifest, read_manifest
from probes.records import Arm, OutcomeClass
from splice.errors import DataError, SettingsError
from splice.features import BY_HAND, EDGE_FEATURES, EVIDENCE_FEATURES, QUERY_FEATURES
from splice.files import read_text
from splice.learned import TrainingPool
from splice.queries import Split
from splice.records import Edge

T = TypeVar("T")

Outcome: TypeAlias = Literal["done", "no_message", "stopped", "failed"]


class Question(NamedTuple):
    """What splits and folds go by: the rows of one question are never parted."""

    workload: str
    query_id: str


class BaseRow(NamedTuple):
    """A base run."""

    id: str
    pool: str
    """SHA-256 of its pool's manifest."""
    question: Question
    split: Split
    rollout: int
    score: float
    """Of the base answer, in [0, 1]."""
    predicted_score: float
    """What the diagnosis predicted with hand-set weights, in [0, 1]."""
    n_answer_words: int
    features: Mapping[str, float]
    """A value for each of `QUERY_FEATURES`."""

    @property
    def key(self) -> tuple[str, str]:
        """Tells it from all other base runs: ids alone repeat from pool to pool."""
        return self.pool, self.id


class TrialFacts(NamedTuple):
    """How a trial turned out."""

    outcome_class: OutcomeClass
    is_decisive: bool
    delta: float
    """Score of the candidate answer less that of the base answer."""
    n_answer_words: int
    evidence: Mapping[str, float]
    """A value for each of `EVIDENCE_FEATURES`."""


class ProbeRow(NamedTuple):
    """A probe."""

    id: str
    base: BaseRow
    arm: Arm
    edge: Edge
    outcome: Outcome
    is_gap: bool | None
    p_decisive: float
    """What the diagnosis predicted with hand-set weights."""
    epsilon: float
    """Score changes up to it are neutral."""
    features: Mapping[str, float]
    """A value for each of `EDGE_FEATURES`."""
    trial: TrialFacts | None
    """None unless the probe is done."""

    @property
    def edge_features(self) -> dict[str, float]:
        """A value for each of `EDGE_FEATURES` and `QUERY_FEATURES`, and for `BY_HAND`."""
        return {**self.base.features, **self.features, BY_HAND.name: self.p_decisive}


class Tables(NamedTuple):
    """The rows of one or several pools."""

    bases: tuple[BaseRow, ...]
    probes: tuple[ProbeRow, ...]
    pools: tuple[TrainingPool, ...]
    """With what they hold of split train."""

    def of_split(self, split: Split) -> Tables:
        """The rows of one split."""
        return self._replace(
            bases=tuple(base for base in self.bases if base.split == split),
            probes=tuple(probe for probe in self.probes if probe.base.split == split),
        )

    @property
    def questions(self) -> tuple[Question, ...]:
        """Those that have a base run, each once."""
        return tuple(dict.fromkeys(base.question for base in self.bases))


# --- what is learned from rows ---------------------------------------------------------------


class LabelledEdge(NamedTuple):
    """A probed edge of which it is known what its trial did."""

    probe: ProbeRow
    is_decisive: bool
    is_beneficial: bool
    """It made the answer better by more than its placebo did, where there is one."""

    @property
    def features(self) -> dict[str, float]:
        """A value for each of `EDGE_FEATURES` and `QUERY_FEATURES`, and for `BY_HAND`."""
        return self.probe.edge_features


def labelled_edges(tables: Tables) -> list[LabelledEdge]:
    """The probed edges with their labels.

    An edge that had nothing to deliver is neither decisive nor beneficial. Trials that stopped or
    failed say nothing about their edges and are left out.
    """
    placebos = {
        (probe.base.key, probe.edge): probe.trial.delta
        for probe in tables.probes
        if probe.arm == "placebo" and probe.trial is not None
    }
    found = []
    for probe in tables.probes:
        if probe.arm != "edge" or probe.outcome not in ("done", "no_message"):
            continue
        trial = probe.trial
        gain = trial.delta - placebos.get((probe.base.key, probe.edge), 0.0) if trial else 0.0
        is_decisive = trial is not None and trial.is_decisive
        found.append(LabelledEdge(probe, is_decisive, gain > probe.epsilon))
    return found


class DecisiveProbe(NamedTuple):
    """A probe whose trial changed the answer."""

    probe: ProbeRow
    trial: TrialFacts

    def features(self, base_score: float) -> dict[str, float]:
        """A value for each of `CASE_FEATURES`, as `splice.features.case_features` has them."""
        base, evidence = self.probe.base, self.trial.evidence
        declined = bool(base.features["a_declines"])
        declines = evidence["is_answer_refusal_new"] or (
            declined and not evidence["is_answer_refusal_resolved"]
        )
        return {
            **evidence,
            "base_score": base_score,
            "base_declines": float(declined),
            "base_words": float(base.n_answer_words),
            "new_declines": float(bool(declines)),
            "new_words": float(self.trial.n_answer_words),
        }


def decisive_probes(tables: Tables, arms: Sequence[Arm]) -> list[DecisiveProbe]:
    """The decisive probes of some arms."""
    return [
        DecisiveProbe(probe, probe.trial)
        for probe in tables.probes
        if probe.arm in arms and probe.trial is not None and probe.trial.is_decisive
    ]


# --- reading ---------------------------------------------------------------------------------


def read_tables(folders: Iterable[str | Path]) -> Tables:
    """Read exported tables of one or several pools together.

    Raises:
        DataError: a file is missing or malformed, a base run is there twice, or a question belongs
            to different splits; the message names file, line and column.
        SettingsError: the tables are Parquet, and what reads it is not installed.
        StoreError: a manifest can't be read.
    """
    bases: list[BaseRow] = []
    probes: list[ProbeRow] = []
    pools: list[TrainingPool] = []
    seen = _Seen()
    for folder in map(Path, folders):
        manifest, digest = _manifest(folder)
        own = {base.id: base for base in _bases(folder, digest)}
        for base in own.values():
            seen.add(folder, manifest, base)
        tried = list(_probes(folder, own, manifest.settings.epsilon))
        bases += own.values()
        probes += tried
        pools.append(_pool(manifest, digest, own.values(), tried))
    return Tables(
        bases=tuple(sorted(bases, key=_place)),
        probes=tuple(sorted(probes, key=lambda probe: (*_place(probe.base), probe.id))),
        pools=tuple(sorted(pools, key=lambda pool: (pool.name, pool.sha256))),
    )


def _place(base: BaseRow) -> tuple[Question, int, str, str]:
    return base.question, base.rollout, base.pool, base.id


class _Seen:
    """What was read before, over all folders."""

    def __init__(self) -> None:
        self._runs: dict[object, Path] = {}
        self._splits: dict[Question, tuple[Split, Path]] = {}

    def add(self, folder: Path, manifest: Manifest, base: BaseRow) -> None:
        """Refuse a base run that was there before, and a question that changes its split."""
        name = f"question {base.question.query_id!r} of {base.question.workload!r}"
        earlier = self._runs.setdefault((base.id, manifest.models), folder)
        if earlier != folder:
            raise DataError(
                f"{folder}: {name} has a base run that is in {earlier} too: same rollout, same "
                "models"
            )
        split, where = self._splits.setdefault(base.question, (base.split, folder))
        if split != base.split:
            raise DataError(
                f"{folder}: column 'split': {name} is of split {base.split!r}, and of {split!r} in "
                f"{where}"
            )


def _manifest(folder: Path) -> tuple[Manifest, str]:
    path = folder / "manifest.json"
    if not path.exists():
        raise DataError(f"{folder} holds no exported tables: it has no manifest.json")
    return read_manifest(folder), sha256(read_text(path, DataError).encode()).hexdigest()


def _pool(
    manifest: Manifest, digest: str, bases: Iterable[BaseRow], probes: Iterable[ProbeRow]
) -> TrainingPool:
    questions = {base.question for base in bases if base.split == "train"}
    return TrainingPool(
        name=manifest.workload,
        sha256=digest,
        workloads=tuple(sorted({question.workload for question in questions})),
        models=tuple(model.name for model in manifest.models),
        n_questions=len(questions),
        n_probes=sum(probe.base.split == "train" for probe in probes),
    )


_BASE_COLUMNS: Final = (
    "base",
    "workload",
    "split",
    "query_id",
    "rollout",
    "predicted_score",
    "score_base",
    "n_base_answer_words",
    *(f"query_feature_{feature.name}" for feature in QUERY_FEATURES),
)

_PROBE_COLUMNS: Final = (
    "probe",
    "base",
    "arm",
    "source",
    "receiver",
    "outcome",
    "outcome_class",
    "is_decisive",
    "is_gap",
    "p_decisive",
    "delta",
    "n_answer_words",
    *(f"edge_feature_{feature.name}" for feature in EDGE_FEATURES),
    *(f"evidence_{feature.name}" for feature in EVIDENCE_FEATURES),
)

_MAY_LACK: Final = frozenset({"survival_first", "survival_last"})
"""Evidence that a receiver without descendants does not have; `evidence_features` gives 0."""


def _bases(folder: Path, pool: str) -> Iterator[BaseRow]:
    ids: set[str] = set()
    for cells in _rows(folder, "bases", _BASE_COLUMNS):
        yield BaseRow(
            id=cells.new("base", ids),
            pool=pool,
            question=Question(cells.text("workload"), cells.text("query_id")),
            split=cast(Split, cells.one_of("split", get_args(Split))),
            rollout=cells.whole("rollout"),
            score=cells.number("score_base", 0.0, 1.0),
            predicted_score=cells.number("predicted_score", 0.0, 1.0),
            n_answer_words=cells.known_whole("n_base_answer_words") or 0,
            features={f.name: cells.number(f"query_feature_{f.name}") for f in QUERY_FEATURES},
        )


def _probes(folder: Path, bases: Mapping[str, BaseRow], epsilon: float) -> Iterator[ProbeRow]:
    ids: set[str] = set()
    for cells in _rows(folder, "probes", _PROBE_COLUMNS):
        base = bases.get(cells.text("base"))
        if base is None:
            raise cells.wrong("base", f"no base run {cells.text('base')!r}")
        outcome = cells.one_of("outcome", get_args(Outcome))
        is_gap = cells.known_whole("is_gap", 1)
        yield ProbeRow(
            id=cells.new("probe", ids),
            base=base,
            arm=cast(Arm, cells.one_of("arm", get_args(Arm))),
            edge=(cells.text("source"), cells.text("receiver")),
            outcome=cast(Outcome, outcome),
            is_gap=None if is_gap is None else bool(is_gap),
            p_decisive=cells.number("p_decisive", 0.0, 1.0),
            epsilon=epsilon,
            features={f.name: cells.number(f"edge_feature_{f.name}") for f in EDGE_FEATURES},
            trial=_trial(cells) if outcome == "done" else None,
        )


def _trial(cells: _Cells) -> TrialFacts:
    return TrialFacts(
        outcome_class=cast(OutcomeClass, cells.one_of("outcome_class", get_args(OutcomeClass))),
        is_decisive=bool(cells.whole("is_decisive", 1)),
        delta=cells.number("delta", -1.0, 1.0),
        n_answer_words=cells.known_whole("n_answer_words") or 0,
        evidence={
            f.name: cells.known(f"evidence_{f.name}") or 0.0
            if f.name in _MAY_LACK
            else cells.number(f"evidence_{f.name}")
            for f in EVIDENCE_FEATURES
        },
    )


class _Cells:
    """One row, whose cells are read with errors that name the column."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self._values = values

    def wrong(self, column: str, problem: str) -> DataError:
        """The error for a cell."""
        return DataError(f"{self._where}: column {column!r}: {problem}")

    def text(self, column: str) -> str:
        """A text that is not empty."""
        value = self._values[column]
        if value is not None and not isinstance(value, str):
            raise self.wrong(column, f"no text: {value!r}")
        return self._present(column, value or None)

    def new(self, column: str, seen: set[str]) -> str:
        """A text that is not among those seen, to which it is added."""
        text = self.text(column)
        if text in seen:
            raise self.wrong(column, f"{text!r} is there twice")
        seen.add(text)
        return text

    def one_of(self, column: str, allowed: Sequence[str]) -> str:
        """A text out of a closed list."""
        text = self.text(column)
        if text not in allowed:
            raise self.wrong(column, f"{text!r} is none of {', '.join(allowed)}")
        return text

    def number(self, column: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        return self._present(column, self.known(column, low, high))

    def whole(self, column: str, high: float = math.inf) -> int:
        """A whole number from 0 to `high`."""
        return self._present(column, self.known_whole(column, high))

    def known_whole(self, column: str, high: float = math.inf) -> int | None:
        """The same; None if the cell is empty."""
        number = self.known(column, 0.0, high)
        if number is not None and not number.is_integer():
            raise self.wrong(column, f"{number} is no whole number")
        return None if number is None else int(number)

    def known(self, column: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """A finite number in [low, high]; None if the cell is empty."""
        value = self._values[column]
        if value is None or value == "":
            return None
        try:
            number = float(cast(Any, value))
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(column, f"no number: {str(value)[:80]!r}") from None
        if not math.isfinite(number) or not low <= number <= high:
            raise self.wrong(column, f"{number} is not finite or not in [{low:g}, {high:g}]")
        return number

    def _present(self, column: str, value: T | None) -> T:
        if value is None:
            raise self.wrong(column, "missing")
        return value


def _rows(folder: Path, name: str, columns: Sequence[str]) -> Iterator[_Cells]:
    """The rows of a table, which is CSV or Parquet."""
    as_csv, as_parquet = folder / f"{name}.csv", folder / f"{name}.parquet"
    if as_csv.exists() == as_parquet.exists():
        both = as_csv.exists()
        raise DataError(
            f"{folder} holds {'both' if both else 'neither'} {as_csv.name} "
            f"{'and' if both else 'nor'} {as_parquet.name}; "
            f"{'keep one' if both else 'splice probes export writes them'}"
        )
    return _csv_rows(as_csv, columns) if as_csv.exists() else _parquet_rows(as_parquet, columns)


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[_Cells]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            try:
                names = next(reader, [])
                _require(path, names, columns)
                for cells in reader:
                    where = f"{path}:{reader.line_num}"
                    if len(cells) != len(names):
                        raise DataError(f"{where}: {len(cells)} cells instead of {len(names)}")
                    yield _Cells(where, dict(zip(names, cells, strict=True)))
            except csv.Error as error:
                raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start})") from None


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[_Cells]:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise SettingsError(
            "reading Parquet needs pyarrow: pip install 'splice-repair[parquet]'; or export CSV"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            _require(path, file.schema_arrow.names, columns)
            rows = file.read(columns=list(columns)).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path}: not Parquet: {error}") from None
    for number, values in enumerate(rows, 1):
        yield _Cells(f"{path}: row {number}", values)


def _require(path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in names]:
        raise DataError(
            f"{path}:1: no column {', '.join(map(repr, missing))}; export the pool again with this "
            "version"
        )
