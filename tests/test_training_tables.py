"""Exported tables as training reads them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import probed
import pytest
from test_probe_table import MANIFEST, base_of, probe_of, write_pool

from probes.export import Format, export
from probes.plan import ProbeSettings
from probes.pool import read_shards
from probes.records import BaseRecord, ProbeRecord
from selector_training.tables import (
    DecisiveProbe,
    LabelledEdge,
    Question,
    labelled_edges,
    read_tables,
)
from splice.errors import DataError
from splice.features import EDGE_FEATURES, QUERY_FEATURES, case_features
from splice.records import CandidateEdge

QUERY = {feature.name: 0.0 for feature in QUERY_FEATURES}
EDGE = {feature.name: 0.0 for feature in EDGE_FEATURES}


def exported(
    folder: Path,
    bases: Sequence[BaseRecord],
    probes: Sequence[ProbeRecord],
    form: Format = "csv",
) -> Path:
    export(write_pool(folder / "pool", [(bases, probes)]), folder / "tables", format=form)
    return folder / "tables"


def base(query_id: str = "q1", **fields: object) -> BaseRecord:
    return base_of(query_id, **{"features": QUERY, **fields})


def probe(of: BaseRecord, **fields: object) -> ProbeRecord:
    return probe_of(of, **{"features": EDGE, **fields})


def rewritten(path: Path, change: Callable[[list[list[str]]], None]) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    change(lines)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


# --- what is read ----------------------------------------------------------------------------


def test_a_row_has_the_numbers_of_its_record(tmp_path: Path) -> None:
    asked = base(features={**QUERY, "q_words": 7.0})
    tables = read_tables([exported(tmp_path, [asked], [probe(asked)])])
    (own,), (tried,) = tables.bases, tables.probes
    assert own.question == Question("toy", "q1")
    assert (own.split, own.score, own.predicted_score) == ("train", 0.25, 0.75)
    assert (own.n_answer_words, own.features["q_words"]) == (3, 7.0)
    assert tried.base is own
    assert (tried.arm, tried.edge, tried.is_gap, tried.epsilon) == ("edge", ("a", "b"), True, 0.01)
    assert tried.trial is not None
    assert (tried.trial.outcome_class, tried.trial.delta) == ("beneficial", 0.75)
    assert (tried.trial.evidence["n_add"], tried.trial.evidence["survival_last"]) == (3.0, 0.25)
    (pool,) = tables.pools
    assert (pool.name, pool.n_questions, pool.n_probes) == ("toy", 1, 1)


def test_a_trial_that_was_not_made_has_no_facts(tmp_path: Path) -> None:
    asked = base()
    silent = probe(
        asked, outcome="no_message", evidence=None, delta=None, outcome_class=None,
        is_decisive=None, answer=None, scores=None,
    )  # fmt: skip
    tables = read_tables([exported(tmp_path, [asked], [silent])])
    assert tables.probes[0].trial is None


def test_csv_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    probed.make(tmp_path / "pool", 6, probe=ProbeSettings(control_share=1.0))
    for form in ("csv", "parquet"):
        export(tmp_path / "pool", tmp_path / form, format=form)
    tables = read_tables([tmp_path / "csv"])
    assert tables == read_tables([tmp_path / "parquet"])
    assert len(tables.questions) == 6
    assert {row.arm for row in tables.probes} == {"edge", "placebo", "resample"}


def test_features_of_a_case_are_those_that_a_selector_gets(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 8, probe=ProbeSettings(control_share=1.0))
    export(tmp_path / "pool", tmp_path / "tables", format="csv")
    rows = {row.id: row for row in read_tables([tmp_path / "tables"]).probes}
    n_compared = 0
    for shard in read_shards(tmp_path / "pool"):
        for record in shard.probes.values():
            row = rows[record.id]
            if row.trial is None or record.evidence is None:
                continue
            asked = shard.bases[record.base]
            wanted = case_features(0.3, asked.answer, record.answer, record.evidence)
            assert DecisiveProbe(row, row.trial).features(0.3) == wanted
            n_compared += 1
    assert n_compared > 8


@pytest.mark.parametrize(
    ("old", "resolved", "new", "declines"),
    [(1, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1), (0, 0, 0, 0)],
)
def test_whether_the_new_answer_declines_follows_from_the_old_one_and_the_evidence(
    tmp_path: Path, old: int, resolved: int, new: int, declines: int
) -> None:
    asked = base(features={**QUERY, "a_declines": float(old)})
    tried = probe(asked)
    assert tried.evidence is not None
    evidence = tried.evidence.model_copy(
        update={"is_answer_refusal_resolved": bool(resolved), "is_answer_refusal_new": bool(new)}
    )
    tables = read_tables([exported(tmp_path, [asked], [probe(asked, evidence=evidence)])])
    row = tables.probes[0]
    assert row.trial is not None
    found = DecisiveProbe(row, row.trial).features(0.5)
    assert (found["base_declines"], found["new_declines"]) == (old, declines)


def test_the_order_of_rows_and_folders_does_not_matter(tmp_path: Path) -> None:
    folders = []
    for name, begin in (("x", 0), ("y", 4)):
        probed.make(tmp_path / name, 4, workloads={"train": probed.workload(4, begin)})
        export(tmp_path / name, tmp_path / f"{name}-tables", format="csv")
        folders.append(tmp_path / f"{name}-tables")
    tables = read_tables(folders)
    for table in ("bases", "probes"):
        rewritten(
            folders[0] / f"{table}.csv",
            lambda lines: lines.__setitem__(slice(1, None), lines[:0:-1]),
        )
    assert read_tables(reversed(folders)) == tables
    assert len(tables.questions) == 8


# --- labels ----------------------------------------------------------------------------------


def labels(folder: Path, *probes: ProbeRecord) -> list[tuple[bool, bool]]:
    tables = read_tables([exported(folder, [base()], probes)])
    found: list[LabelledEdge] = labelled_edges(tables)
    return [(edge.is_decisive, edge.is_beneficial) for edge in found]


def test_an_edge_is_beneficial_if_it_gains_more_than_its_placebo(tmp_path: Path) -> None:
    alone = probe(base(), id="p1")
    assert labels(tmp_path / "alone", alone) == [(True, True)]
    matched = probe(base(), id="p2", arm="placebo")
    assert labels(tmp_path / "matched", alone, matched) == [(True, False)]
    weaker = probe(base(), id="p2", arm="placebo", delta=0.5)
    assert labels(tmp_path / "weaker", alone, weaker) == [(True, True)]
    other = CandidateEdge(source="c", receiver="b", kind="parallel_branch")
    elsewhere = probe(base(), id="p2", arm="placebo", edge=other)
    assert labels(tmp_path / "elsewhere", alone, elsewhere) == [(True, True)]


def test_an_edge_without_a_message_changes_nothing_and_a_failed_trial_says_nothing(
    tmp_path: Path,
) -> None:
    nothing: dict[str, object] = {
        name: None for name in ("evidence", "delta", "outcome_class", "is_decisive", "answer")
    }
    found = labels(
        tmp_path,
        probe(base(), id="p1", outcome="no_message", **nothing),
        probe(base(), id="p2", outcome="stopped", **nothing),
        probe(base(), id="p3", outcome="failed", **nothing),
    )
    assert found == [(False, False)]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "column", "value", "problem"),
    [
        ("bases", "score_base", "", "missing"),
        ("bases", "score_base", "1.5", "not in"),
        ("bases", "score_base", "nan", "not finite"),
        ("bases", "split", "dev", "none of train, validation, test"),
        ("bases", "rollout", "0.5", "no whole number"),
        ("bases", "query_id", "", "missing"),
        ("bases", "query_feature_q_words", "", "missing"),
        ("bases", "query_feature_q_words", "many", "no number: 'many'"),
        ("probes", "base", "elsewhere", "no base run 'elsewhere'"),
        ("probes", "arm", "eval", "none of edge, resample, placebo"),
        ("probes", "outcome", "fine", "none of done"),
        ("probes", "outcome_class", "", "missing"),
        ("probes", "is_decisive", "2", "not in"),
        ("probes", "delta", "", "missing"),
        ("probes", "evidence_uptake", "", "missing"),
        ("probes", "edge_feature_novel", "inf", "not finite"),
    ],
)
def test_a_malformed_cell_is_named_with_file_line_and_column(
    tmp_path: Path, table: str, column: str, value: str, problem: str
) -> None:
    folder = exported(tmp_path, [base()], [probe(base())])
    path = folder / f"{table}.csv"
    rewritten(path, lambda lines: lines[1].__setitem__(lines[0].index(column), value))
    with pytest.raises(DataError, match=f"{table}.csv:2: column '{column}': .*{problem}"):
        read_tables([folder])


def test_an_unknown_survival_counts_as_none(tmp_path: Path) -> None:
    folder = exported(tmp_path, [base()], [probe(base())])
    rewritten(
        folder / "probes.csv",
        lambda lines: lines[1].__setitem__(lines[0].index("evidence_survival_first"), ""),
    )
    trial = read_tables([folder]).probes[0].trial
    assert trial is not None
    assert trial.evidence["survival_first"] == 0.0


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = exported(tmp_path, [base()], [])
    path = folder / "bases.csv"
    path.write_text(path.read_text("utf-8").replace("query_feature_agree", "x"), "utf-8")
    with pytest.raises(DataError, match=r"bases.csv:1: no column 'query_feature_agree'"):
        read_tables([folder])


def test_a_row_of_another_length_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, [base()], [])
    with (folder / "bases.csv").open("a", encoding="utf-8") as file:
        file.write("one,two\n")
    with pytest.raises(DataError, match=r"bases.csv:3: 2 cells instead of"):
        read_tables([folder])


@pytest.mark.parametrize("data", [b"\xff\xfe", b'"open'])
def test_bytes_that_are_no_table_are_refused(tmp_path: Path, data: bytes) -> None:
    folder = exported(tmp_path, [base()], [])
    (folder / "bases.csv").write_bytes(data)
    with pytest.raises(DataError, match=r"bases\.csv"):
        read_tables([folder])


def test_parquet_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = exported(tmp_path, [base()], [], "parquet")
    (folder / "bases.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bases\.parquet: not Parquet"):
        read_tables([folder])


def test_a_folder_without_tables_or_with_two_kinds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json"):
        read_tables([tmp_path])
    pool = write_pool(tmp_path / "pool", [([base()], [])])
    with pytest.raises(DataError, match=r"neither bases\.csv nor bases\.parquet"):
        read_tables([pool])
    folder = exported(tmp_path, [base()], [])
    (folder / "bases.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="keep one"):
        read_tables([folder])


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, [base()], [probe(base())])
    rewritten(folder / "probes.csv", lambda lines: lines.append(lines[1]))
    with pytest.raises(DataError, match=r"probes.csv:3: column 'probe': .* is there twice"):
        read_tables([folder])


def test_a_question_in_two_splits_is_refused(tmp_path: Path) -> None:
    first = exported(tmp_path / "x", [base()], [])
    other = base(rollout=1, id="base-again", split="validation")
    second = exported(tmp_path / "y", [other], [])
    with pytest.raises(DataError, match=r"'q1' of 'toy' is of split 'validation', and of 'train'"):
        read_tables([first, second])


def test_the_same_base_run_from_two_folders_is_refused(tmp_path: Path) -> None:
    first = exported(tmp_path / "x", [base()], [])
    second = exported(tmp_path / "y", [base(), base("q2")], [])
    with pytest.raises(DataError, match="same rollout, same models"):
        read_tables([first, second])
    assert MANIFEST.models == ()
