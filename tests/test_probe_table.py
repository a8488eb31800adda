"""The tables of a probe pool, and their export."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from probes.export import export
from probes.generate import generate
from probes.plan import ProbeSettings
from probes.pool import Damage, Manifest, read_shards, shard_path, write_manifest
from probes.records import BaseRecord, ProbeRecord
from probes.table import COLUMNS, Column, Row, Value, base_columns, base_rows, probe_columns, rows
from splice.errors import ModelError, SettingsError, StoreError
from splice.ledger import Spending
from splice.models.scripted import ScriptedModel
from splice.records import (
    CandidateEdge,
    Diagnosis,
    Evidence,
    MessageLine,
    Query,
    Request,
    SpliceMessage,
)
from splice.workflow import Agent, Workflow
from splice.workload import Example, Scores, Workload

MANIFEST = Manifest(
    workload="toy",
    about="toy questions",
    workflow="0" * 32,
    metrics=("f1", "exact"),
    metric="f1",
    models=(),
    settings=ProbeSettings(),
)

EVIDENCE = Evidence(
    move_w=0.5,
    move_len=-0.25,
    n_add=3,
    n_del=1,
    msg_only=1.0,
    ctx_only=0.0,
    both=0.0,
    untraceable=0.0,
    uptake=0.5,
    is_ignored=False,
    del_supported=0.0,
    focus_new=0.0,
    focus_old=0.0,
    num_msg=0.0,
    num_ctx=0.0,
    num_untraceable=0.0,
    num_dropped=0.0,
    survival=(0.75, 0.5, 0.25),
    surv_final=0.25,
    is_absorbed=False,
    ans_change=1.0,
    ans_len_ratio=2.0,
    is_number_changed=True,
    copies_source=0.0,
    is_abstention_resolved=False,
    is_abstention_new=False,
    is_answer_refusal_resolved=False,
    is_answer_refusal_new=False,
)


def base_of(query_id: str, **fields: object) -> BaseRecord:
    values: dict[str, object] = {
        "id": f"base-{query_id}",
        "workload": "toy",
        "split": "train",
        "query_id": query_id,
        "query": "0" * 32,
        "rollout": 0,
        "question_kind": "bridge",
        "workflow": "0" * 32,
        "answer": "three short words",
        "scores": {"f1": 0.25, "exact": 0.0},
        "score": 0.25,
        "diagnosis": Diagnosis(
            base_score=0.75, base_reasons=("because",), edges=(), admission="headroom"
        ),
        "features": {"q_words": 7.0},
        "gap_edges": (("a", "b"),),
        "ledger": Spending(n_calls=2, prompt_tokens=30, completion_tokens=4, cost=None),
        "elapsed_s": 1.5,
    }
    return BaseRecord.model_validate(values | fields)


def probe_of(base: BaseRecord, **fields: object) -> ProbeRecord:
    values: dict[str, object] = {
        "id": f"probe-{base.query_id}",
        "base": base.id,
        "workload": base.workload,
        "split": base.split,
        "query_id": base.query_id,
        "rollout": base.rollout,
        "arm": "edge",
        "edge": CandidateEdge(source="a", receiver="b", kind="parallel_branch"),
        "place": 1,
        "is_gap": True,
        "p_decisive": 0.5,
        "features": {"dist_t": 2.0},
        "outcome": "done",
        "message": SpliceMessage(
            source="a",
            receiver="b",
            key=MessageLine(text="one two", spans=()),
            lines=(MessageLine(text="three", spans=()),),
            writer="extractive",
        ),
        "rerun": ("b", "w"),
        "evidence": EVIDENCE,
        "answer": "four words this time",
        "scores": {"f1": 1.0, "exact": 1.0},
        "delta": 0.75,
        "outcome_class": "beneficial",
        "is_decisive": True,
        "ledger": Spending(n_calls=3, n_cached=1, prompt_tokens=50, completion_tokens=6, cost=0.5),
        "elapsed_s": 2.5,
    }
    return ProbeRecord.model_validate(values | fields)


Shards = Sequence[tuple[Sequence[BaseRecord], Sequence[ProbeRecord]]]


def write_pool(folder: Path, shards: Shards, manifest: Manifest = MANIFEST) -> Path:
    write_manifest(folder, manifest)
    for number, (bases, probes) in enumerate(shards):
        for name, records in (("bases", bases), ("probes", probes)):
            text = "".join(f"{record.model_dump_json()}\n" for record in records)
            shard_path(folder, name, number).write_text(text, "utf-8")
    return folder


def one_of(folder: Path, **fields: object) -> Row:
    """The row of a pool of one probe."""
    base = base_of("q1")
    write_pool(folder, [([base], [probe_of(base, **fields)])])
    (row,) = rows(folder)
    return row


WORKFLOW = Workflow(
    name="w",
    nodes=(
        Agent(id="a", role="canary", subtask="find the canary director"),
        Agent(id="b", role="canary", subtask="find when this canary was born"),
        Agent(id="w", role="canary", subtask="Answer canary"),
    ),
    edges=(("a", "w"), ("b", "w")),
    output="w",
)


def score(example: Example, answer: str | None) -> Scores:
    return {"f1": float("1901" in (answer or "")), "exact": 0.0}


def reply(request: Request) -> str:
    if request.query_id == "q2":
        raise ModelError("no canary today")
    return f"canary {sum(map(len, (m.content for m in request.messages))) % 7} in 1901"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool of six questions, of which each text holds the word canary; one base run failed."""
    folder = tmp_path_factory.mktemp("generated") / "pool"
    workload = Workload(
        name="toy",
        about="toy questions",
        workflow=WORKFLOW,
        examples=tuple(
            Example(
                query=Query(
                    id=f"q{i}",
                    text=f"When was the canary director of Film{i} born?",
                    context={"a": f"Film{i}: canary Person{i}.", "b": f"canary Person{i}: 1901."},
                ),
                gap_edges=(("a", "b"),),
            )
            for i in range(6)
        ),
        metrics=("f1", "exact"),
        score=score,
    )
    probe = ProbeSettings(control_share=1.0)
    asyncio.run(generate({"train": workload}, ScriptedModel(reply), folder, probe=probe))
    return folder


# --- columns ---------------------------------------------------------------------------------


def test_each_column_is_documented_and_nothing_else_is(generated: Path) -> None:
    metrics = ("f1", "exact")
    found = {*next(rows(generated)), *next(base_rows(generated))}
    documented = {
        name.replace("<metric>", metric) for name in COLUMNS for metric in ("f1", "exact")
    }
    assert found == documented
    assert all(meaning and "\n" not in meaning for meaning in COLUMNS.values())
    for columns in (probe_columns(metrics), base_columns(metrics)):
        assert len({column.name for column in columns}) == len(columns)


def test_rows_have_the_columns_in_their_order(generated: Path) -> None:
    for row in rows(generated):
        assert list(row) == [column.name for column in probe_columns(("f1", "exact"))]
    for row in base_rows(generated):
        assert list(row) == [column.name for column in base_columns(("f1", "exact"))]


def test_each_feature_that_the_engine_computes_has_a_column(generated: Path) -> None:
    (shard,) = read_shards(generated)
    probe = next(iter(shard.probes.values()))
    base = shard.bases[probe.base]
    for prefix, names in (
        ("edge_feature_", set(probe.features)),
        ("query_feature_", set(base.features)),
        (
            "evidence_",
            {*Evidence.model_fields, "survival_first", "survival_last", "n_depths"} - {"survival"},
        ),
    ):
        columns = {name.removeprefix(prefix) for name in COLUMNS if name.startswith(prefix)}
        assert columns == names


def test_each_value_is_of_its_columns_kind(generated: Path) -> None:
    types = {"id": str, "int": int, "float": float, "bool": bool}

    def check(columns: Sequence[Column], row: Row) -> None:
        for column in columns:
            value = row[column.name]
            assert value is None or type(value) is types[column.kind], column.name

    for row in rows(generated):
        check(probe_columns(("f1", "exact")), row)
    for row in base_rows(generated):
        check(base_columns(("f1", "exact")), row)


# --- rows ------------------------------------------------------------------------------------


def test_a_probe_is_a_row(tmp_path: Path) -> None:
    row = one_of(tmp_path)
    known = {name: value for name, value in row.items() if "_feature_" not in name}
    assert {name: value for name, value in known.items() if not name.startswith("evidence_")} == {
        "probe": "probe-q1",
        "base": "base-q1",
        "workload": "toy",
        "split": "train",
        "query_id": "q1",
        "question_kind": "bridge",
        "rollout": 0,
        "workflow": "0" * 32,
        "arm": "edge",
        "source": "a",
        "receiver": "b",
        "edge_kind": "parallel_branch",
        "outcome": "done",
        "outcome_class": "beneficial",
        "is_decisive": True,
        "is_gap": True,
        "place": 1,
        "p_decisive": 0.5,
        "n_candidates": 0,
        "n_gap_edges": 1,
        "predicted_score": 0.75,
        "headroom": 0.25,
        "score_base": 0.25,
        "score_new": 1.0,
        "delta": 0.75,
        "base_f1": 0.25,
        "base_exact": 0.0,
        "new_f1": 1.0,
        "new_exact": 1.0,
        "n_message_words": 3,
        "n_base_answer_words": 3,
        "n_answer_words": 4,
        "n_rerun": 2,
        "n_calls": 3,
        "n_cached_calls": 1,
        "prompt_tokens": 50,
        "completion_tokens": 6,
        "cost": 0.5,
        "elapsed_s": 2.5,
    }
    assert row["edge_feature_dist_t"] == 2.0
    assert row["query_feature_q_words"] == 7.0
    assert row["evidence_n_add"] == 3
    assert row["evidence_is_number_changed"] is True


def test_a_base_run_is_a_row_also_without_a_probe(tmp_path: Path) -> None:
    write_pool(tmp_path, [([base_of("q1")], [])])
    (row,) = base_rows(tmp_path)
    assert list(rows(tmp_path)) == []
    assert {name: value for name, value in row.items() if "_feature_" not in name} == {
        "base": "base-q1",
        "workload": "toy",
        "split": "train",
        "query_id": "q1",
        "question_kind": "bridge",
        "rollout": 0,
        "workflow": "0" * 32,
        "n_candidates": 0,
        "n_gap_edges": 1,
        "predicted_score": 0.75,
        "headroom": 0.25,
        "score_base": 0.25,
        "base_f1": 0.25,
        "base_exact": 0.0,
        "n_base_answer_words": 3,
        "n_calls": 2,
        "n_cached_calls": 0,
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "cost": None,
        "elapsed_s": 1.5,
    }


def test_base_runs_that_failed_and_their_probes_are_left_out(tmp_path: Path) -> None:
    failed, fine = base_of("q1", failure="no model"), base_of("q2")
    write_pool(tmp_path, [([failed, fine], [probe_of(failed), probe_of(fine)])])
    assert [row["query_id"] for row in base_rows(tmp_path)] == ["q2"]
    assert [row["query_id"] for row in rows(tmp_path)] == ["q2"]


def test_what_a_probe_did_not_find_out_is_none(tmp_path: Path) -> None:
    nothing = dict.fromkeys(
        ("message", "evidence", "answer", "scores", "delta", "outcome_class", "is_decisive")
    )
    row = one_of(tmp_path, outcome="no_message", rerun=(), **nothing)
    unknown = {name for name, value in row.items() if value is None and "_feature_" not in name}
    assert unknown == {
        *("outcome_class", "is_decisive", "score_new", "delta", "new_f1", "new_exact"),
        *("n_message_words", "n_answer_words"),
        *(name for name in row if name.startswith("evidence_")),
    }
    assert row["n_rerun"] == 0


def test_survival_is_given_for_the_nearest_and_the_farthest_depth(tmp_path: Path) -> None:
    row = one_of(tmp_path)
    assert row["evidence_survival_first"] == 0.75
    assert row["evidence_survival_last"] == 0.25
    assert row["evidence_n_depths"] == 3


def test_a_receiver_without_descendants_has_no_survival(tmp_path: Path) -> None:
    row = one_of(tmp_path, evidence=EVIDENCE.model_copy(update={"survival": ()}))
    assert row["evidence_survival_first"] is None
    assert row["evidence_survival_last"] is None
    assert row["evidence_n_depths"] == 0


def test_tokens_of_calls_that_were_not_counted_are_unknown(tmp_path: Path) -> None:
    ledger = Spending(n_calls=2, prompt_tokens=50, completion_tokens=6, n_uncounted=1)
    row = one_of(tmp_path, ledger=ledger)
    assert (row["n_calls"], row["prompt_tokens"], row["completion_tokens"]) == (2, None, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_none(tmp_path: Path, number: str) -> None:
    one_of(tmp_path)
    path = shard_path(tmp_path, "probes", 0)
    text = path.read_text("utf-8")
    assert '"delta":0.75' in text
    path.write_text(text.replace('"delta":0.75', f'"delta":{number}'), "utf-8")
    (shard,) = read_shards(tmp_path)
    (probe,) = shard.probes.values()
    assert probe.delta is not None
    assert not math.isfinite(probe.delta)
    (row,) = rows(tmp_path)
    assert row["delta"] is None


def test_a_metric_that_a_workload_lacks_is_none(tmp_path: Path) -> None:
    base = base_of("q1", scores={"f1": 0.25})
    write_pool(tmp_path, [([base], [probe_of(base)])])
    (row,) = rows(tmp_path)
    assert (row["base_f1"], row["base_exact"], row["new_exact"]) == (0.25, None, 1.0)


def test_a_feature_without_a_column_is_refused_rather_than_dropped(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"edge feature 'zeal'.*version that wrote it"):
        one_of(tmp_path, features={"dist_t": 2.0, "zeal": 1.0})


def test_shards_are_read_one_after_another(tmp_path: Path) -> None:
    bases = [base_of(f"q{i}") for i in range(4)]
    probes = [probe_of(base) for base in bases]
    write_pool(tmp_path, [(bases[:2], probes[:2]), (bases[2:], probes[2:])])
    found = rows(tmp_path)
    first = next(found)
    # Whoever had read the second shard already would go on with it.
    shard_path(tmp_path, "bases", 1).unlink()
    shard_path(tmp_path, "probes", 1).unlink()
    assert [row["query_id"] for row in (first, *found)] == ["q0", "q1"]


def test_damaged_lines_are_told(tmp_path: Path) -> None:
    one_of(tmp_path)
    with shard_path(tmp_path, "probes", 0).open("a") as file:
        file.write("{}\n")
    damage: list[Damage] = []
    assert len(list(rows(tmp_path, damage))) == 1
    assert [(line.file, line.line) for line in damage] == [("probes-00000.jsonl", 2)]


# --- no text ---------------------------------------------------------------------------------


def test_no_text_of_a_pool_is_in_its_tables(generated: Path, tmp_path: Path) -> None:
    pool = [path.read_bytes() for path in sorted(generated.glob("*-*.jsonl"))]
    assert all(b"canary" in data for data in pool)
    failed = [base.failure for shard in read_shards(generated) for base in shard.bases.values()]
    assert any("no canary today" in (failure or "") for failure in failed)
    export(generated, tmp_path, format="csv")
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(written) == {"bases.csv", "probes.csv", "manifest.json"}
    for name, data in written.items():
        assert b"canary" not in data.lower(), name
        assert b"in 1901" not in data, name


def test_each_word_in_the_tables_is_a_name_or_comes_from_a_short_list(generated: Path) -> None:
    names = {"train", "toy", *"abw", *(f"q{i}" for i in range(6)), WORKFLOW.fingerprint}
    words = {"edge", "resample", "placebo", "parallel_branch", "distant_ancestor"}
    words |= {"done", "no_message", "stopped", "failed", "beneficial", "neutral", "harmful"}
    for shard in read_shards(generated):
        names |= {*shard.bases, *shard.probes}
    found = {
        value
        for row in (*rows(generated), *base_rows(generated))
        for value in row.values()
        if isinstance(value, str)
    }
    assert found
    assert found <= names | words


# --- export ----------------------------------------------------------------------------------


def two_shards(folder: Path) -> Path:
    bases = [base_of(f"q{i}") for i in range(5)]
    probes = [probe_of(base) for base in bases]
    return write_pool(folder, [(bases[:2], probes[:2]), (bases[2:], probes[2:])])


def in_csv(value: Value) -> str:
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)


def test_csv_holds_the_rows(tmp_path: Path) -> None:
    pool = two_shards(tmp_path / "pool")
    done = export(pool, tmp_path / "out", format="csv")
    assert (done.n_bases, done.n_probes, done.damage) == (5, 5, ())
    for name, expected in (("probes", rows(pool)), ("bases", base_rows(pool))):
        with (tmp_path / "out" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        written = [{name: in_csv(value) for name, value in row.items()} for row in expected]
        assert found == written


def test_the_manifest_is_copied_as_it_is(tmp_path: Path) -> None:
    pool = two_shards(tmp_path / "pool")
    write_manifest(pool, MANIFEST.model_copy(update={"files": {"bases-00000.jsonl": "f" * 64}}))
    export(pool, tmp_path / "out", format="csv")
    copy = (tmp_path / "out" / "manifest.json").read_bytes()
    assert copy == (pool / "manifest.json").read_bytes()


def test_the_manifest_names_questions_and_files_and_holds_no_text(generated: Path) -> None:
    fields = json.loads((generated / "manifest.json").read_text("utf-8"))
    assert fields["splits"] == {"train": [f"q{i}" for i in range(6)]}
    assert "canary" not in json.dumps(fields)


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_the_same_pool_gives_the_same_bytes(tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    pool = two_shards(tmp_path / "pool")
    for name in ("one", "two"):
        export(pool, tmp_path / name, format=format)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_parquet_holds_the_rows_of_each_shard_as_a_group(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pool = two_shards(tmp_path / "pool")
    done = export(pool, tmp_path / "out", format="parquet")
    assert (done.n_bases, done.n_probes) == (5, 5)
    for name, expected in (("probes", rows(pool)), ("bases", base_rows(pool))):
        file = parquet.ParquetFile(tmp_path / "out" / f"{name}.parquet")
        assert file.read().to_pylist() == list(expected)
        assert file.num_row_groups == 2
        assert file.metadata.row_group(0).num_rows == 2
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_parquet_names_kinds_meanings_and_versions(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pool = write_pool(tmp_path / "pool", [])
    export(pool, tmp_path / "out", format="parquet")
    schema = parquet.read_schema(tmp_path / "out" / "probes.parquet")
    types = {"id": "string", "int": "int64", "float": "double", "bool": "bool"}
    assert [(field.name, str(field.type)) for field in schema] == [
        (column.name, types[column.kind]) for column in probe_columns(("f1", "exact"))
    ]
    assert schema.field("delta").metadata[b"meaning"] == COLUMNS["delta"].encode()
    assert schema.metadata[b"splice.pool_version"] == b"1"
    assert schema.metadata[b"splice.engine_version"] == MANIFEST.engine_version.encode()


def test_no_text_of_a_pool_is_in_parquet(generated: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(generated, tmp_path, format="parquet")
    for name in ("probes", "bases"):
        path = tmp_path / f"{name}.parquet"
        assert b"canary" not in path.read_bytes()
        table = parquet.read_table(path)
        assert table.num_rows > 0
        assert "canary" not in json.dumps(table.to_pylist())


def test_without_pyarrow_the_extra_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    pool = two_shards(tmp_path / "pool")
    with pytest.raises(SettingsError, match=r"pip install 'splice-repair\[parquet\]'"):
        export(pool, tmp_path / "out", format="parquet")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    pool, out = two_shards(tmp_path / "pool"), tmp_path / "out"
    export(pool, out, format=format)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    strange = base_of("q9", features={"zeal": 1.0})
    write_pool(pool, [([base_of("q8")], []), ([strange], [])])
    with pytest.raises(StoreError, match="zeal"):
        export(pool, out, format=format)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_export_over_a_pool_is_refused(tmp_path: Path) -> None:
    pool = two_shards(tmp_path / "pool")
    with pytest.raises(SettingsError, match="is a probe pool"):
        export(pool, pool, format="csv")


def test_an_export_into_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    pool = two_shards(tmp_path / "pool")
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match="out"):
        export(pool, tmp_path / "out", format="csv")


def test_an_export_tells_what_was_damaged(tmp_path: Path) -> None:
    pool = two_shards(tmp_path / "pool")
    with shard_path(pool, "bases", 0).open("a") as file:
        file.write("not a record\n")
    done = export(pool, tmp_path / "out", format="csv")
    assert [(line.file, line.line) for line in done.damage] == [("bases-00000.jsonl", 3)]
    assert done.n_bases == 5
