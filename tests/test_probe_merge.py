"""Merging probe pools."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from probes.generate import generate
from probes.merge import merge
from probes.plan import ProbeSettings
from probes.pool import (
    Damage,
    Manifest,
    read_manifest,
    read_shards,
    shard_numbers,
    shard_path,
    write_manifest,
)
from probes.records import BaseRecord, ProbeRecord, base_id, probe_id
from probes.table import base_rows, rows
from splice.errors import SettingsError, StoreError
from splice.executor import RunSettings
from splice.ledger import Budget
from splice.message import MessageSettings
from splice.models.scripted import ScriptedModel
from splice.records import CandidateEdge, ModelIdentity, ModelSettings, Query, Request
from splice.store import read_store
from splice.workflow import Agent, Workflow
from splice.workload import Example, Scores, Workload

MODEL = ModelIdentity(name="scripted", provider="scripted")

EDGES = (("a", "b"), ("b", "a"), ("a", "w"))


def manifest_of(workload: str = "toy", **fields: object) -> Manifest:
    values: dict[str, object] = {
        "workload": workload,
        "about": f"questions of {workload}",
        "workflow": hashlib.sha256(workload.encode()).hexdigest()[:32],
        "metrics": ("f1",),
        "metric": "f1",
        "models": (MODEL,),
        "settings": ProbeSettings(),
        "sources": {f"{workload}.jsonl": "1" * 64},
    }
    return Manifest.model_validate(values | fields)


def base_of(query_id: str, workload: str = "toy", **fields: object) -> BaseRecord:
    rollout = fields.get("rollout", 0)
    assert isinstance(rollout, int)
    values: dict[str, object] = {
        "id": base_id(workload, query_id, rollout),
        "workload": workload,
        "split": "train",
        "query_id": query_id,
        "query": "0" * 32,
        "rollout": rollout,
        "workflow": "0" * 32,
        "answer": "yes",
        "scores": {"f1": 0.5},
        "score": 0.5,
    }
    return BaseRecord.model_validate(values | fields)


def probe_of(base: BaseRecord, n: int = 0, **fields: object) -> ProbeRecord:
    source, receiver = EDGES[n]
    values: dict[str, object] = {
        "id": probe_id(base.id, "edge", EDGES[n]),
        "base": base.id,
        "workload": base.workload,
        "split": base.split,
        "query_id": base.query_id,
        "rollout": base.rollout,
        "arm": "edge",
        "edge": CandidateEdge(source=source, receiver=receiver, kind="parallel_branch"),
        "place": n,
        "p_decisive": 0.5,
        "features": {},
        "outcome": "done",
        "answer": "no",
        "scores": {"f1": 1.0},
        "delta": 0.5,
        "outcome_class": "beneficial",
        "is_decisive": True,
    }
    return ProbeRecord.model_validate(values | fields)


Shards = Sequence[tuple[Sequence[BaseRecord], Sequence[ProbeRecord]]]


def write_pool(folder: Path, shards: Shards, manifest: Manifest | None = None) -> Path:
    """A pool by hand; its trace files hold a line that says where it is from."""
    write_manifest(folder, manifest or manifest_of())
    for number, (bases, probes) in enumerate(shards):
        for name, records in (("bases", bases), ("probes", probes)):
            text = "".join(f"{record.model_dump_json()}\n" for record in records)
            shard_path(folder, name, number).write_text(text, "utf-8")
        shard_path(folder, "traces", number).write_text(f"{folder.name} {number}\n", "utf-8")
    return folder


def simple_pool(
    folder: Path, *ids: str, manifest: Manifest | None = None, n_probes: int = 1
) -> Path:
    """A pool with one shard and some probes for each question."""
    manifest = manifest or manifest_of()
    bases = [base_of(id, manifest.workload) for id in ids]
    probes = [probe_of(base, n) for base in bases for n in range(n_probes)]
    return write_pool(folder, [(bases, probes)], manifest)


def contents(folder: Path) -> dict[str, str]:
    """All records by id, as JSON."""
    return {
        record.id: record.model_dump_json()
        for shard in read_shards(folder)
        for record in (*shard.bases.values(), *shard.probes.values())
    }


# --- pools as they are generated -------------------------------------------------------------

WORKFLOW = Workflow(
    name="w",
    nodes=(
        Agent(id="a", role="R", subtask="find the director"),
        Agent(id="b", role="R", subtask="find when this person was born"),
        Agent(id="w", role="R", subtask="Answer"),
    ),
    edges=(("a", "w"), ("b", "w")),
    output="w",
)


def score(example: Example, answer: str | None) -> Scores:
    return {"f1": float("3" in (answer or ""))}


def reply(request: Request) -> str:
    return f"Person{sum(map(len, (m.content for m in request.messages))) % 7} in 1901"


def workload_of(name: str, ids: Sequence[str]) -> Workload:
    return Workload(
        name=name,
        about=f"questions of {name}",
        workflow=WORKFLOW,
        examples=tuple(
            Example(
                query=Query(
                    id=id,
                    text=f"When was the director of {id} born?",
                    context={"a": f"{id} was directed by Person1.", "b": "Person1: born 1901."},
                )
            )
            for id in ids
        ),
        metrics=("f1",),
        score=score,
        sources={f"{name}.jsonl": "1" * 64},
    )


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two pools of different workloads, each with its traces."""
    folder = tmp_path_factory.mktemp("generated")
    for name in ("north", "south"):
        workload = workload_of(name, [f"{name}{i}" for i in range(4)])
        probe = ProbeSettings(control_share=0.5)
        model = ScriptedModel(reply)
        asyncio.run(generate({"train": workload}, model, folder / name, probe=probe))
    return folder / "north", folder / "south"


def test_a_merged_pool_holds_the_files_of_its_parts_byte_for_byte(
    generated: tuple[Path, Path], tmp_path: Path
) -> None:
    merge(generated, tmp_path / "out")
    assert shard_numbers(tmp_path / "out") == [0, 1]
    for number, part in enumerate(generated):
        for name in ("bases", "probes", "traces"):
            old, new = shard_path(part, name, 0), shard_path(tmp_path / "out", name, number)
            assert old.stat().st_size > 0
            assert new.read_bytes() == old.read_bytes()


def test_traces_are_found_in_the_shard_of_the_same_number(
    generated: tuple[Path, Path], tmp_path: Path
) -> None:
    merge(generated, tmp_path / "out")
    for shard in read_shards(tmp_path / "out"):
        traces = read_store(shard_path(tmp_path / "out", "traces", shard.number)).traces
        records = (*shard.bases.values(), *shard.probes.values())
        assert len(records) > 8
        assert all(record.trace in traces for record in records)


def test_the_tables_of_a_merged_pool_are_those_of_its_parts(
    generated: tuple[Path, Path], tmp_path: Path
) -> None:
    merge(generated, tmp_path / "out")
    assert list(rows(tmp_path / "out")) == [row for part in generated for row in rows(part)]
    assert list(base_rows(tmp_path / "out")) == [
        row for part in generated for row in base_rows(part)
    ]


def test_the_manifest_says_what_is_in_the_pool_and_where_it_is_from(
    generated: tuple[Path, Path], tmp_path: Path
) -> None:
    done = merge(generated, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    north, south = map(read_manifest, generated)
    assert manifest == done.manifest
    assert manifest.parts == (north, south)
    assert (manifest.workload, manifest.metrics, manifest.metric) == ("north, south", ("f1",), "f1")
    assert manifest.about == "questions of north\nquestions of south"
    assert manifest.workflow == WORKFLOW.fingerprint
    assert manifest.sources == {"north.jsonl": "1" * 64, "south.jsonl": "1" * 64}
    assert manifest.splits == {
        "train": tuple(f"{name}{i}" for name in ("north", "south") for i in range(4))
    }
    assert manifest.counts is not None
    assert north.counts is not None
    assert south.counts is not None
    for name in ("n_questions", "n_bases", "n_probes", "n_calls", "n_tokens"):
        parts = getattr(north.counts, name) + getattr(south.counts, name)
        assert getattr(manifest.counts, name) == parts > 0
    assert manifest.files == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").glob("*.jsonl")
    }


def test_a_merged_pool_is_not_generated_into(generated: tuple[Path, Path], tmp_path: Path) -> None:
    merge(generated, tmp_path / "out")
    workload = workload_of("north", ["north0"])
    with pytest.raises(SettingsError, match="was merged"):
        asyncio.run(generate({"train": workload}, ScriptedModel(reply), tmp_path / "out"))


# --- what goes together ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("epsilon", ProbeSettings(epsilon=0.02)),
        ("resample_temperature", ProbeSettings(resample_temperature=1.0)),
        ("message.writer", ProbeSettings(message=MessageSettings(writer="model"))),
        ("message.max_words", ProbeSettings(message=MessageSettings(max_words=60))),
        ("message.model", ProbeSettings(message=MessageSettings(model=ModelSettings(seed=1)))),
        ("run.max_output_bytes", ProbeSettings(run=RunSettings(max_output_bytes=1000))),
        ("run.rollout", ProbeSettings(run=RunSettings(rollout=1))),
    ],
)
def test_settings_that_change_what_a_probe_means_are_compared(
    tmp_path: Path, name: str, settings: ProbeSettings
) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    two = simple_pool(tmp_path / "two", "q2", manifest=manifest_of("other", settings=settings))
    with pytest.raises(SettingsError, match=rf"one and .*two can't be merged: {name} is"):
        merge([one, two], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ProbeSettings(n_edges=3),
        ProbeSettings(control_share=1.0),
        ProbeSettings(n_rollouts=2),
        ProbeSettings(seed=1),
        ProbeSettings(metric="f1"),
        ProbeSettings(run=RunSettings(node_timeout_s=5.0)),
        ProbeSettings(run=RunSettings(run_timeout_s=5.0)),
        ProbeSettings(run=RunSettings(budget=Budget(max_calls=9))),
    ],
    ids=lambda settings: ",".join(settings.model_fields_set),
)
def test_settings_that_only_say_which_probes_there_are_may_differ(
    tmp_path: Path, settings: ProbeSettings
) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    two = simple_pool(tmp_path / "two", "q2", manifest=manifest_of(settings=settings))
    merge([one, two], tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {*contents(one), *contents(two)}


def test_of_what_may_be_raised_the_merged_pool_states_the_least(tmp_path: Path) -> None:
    wide = ProbeSettings(n_edges=3, control_share=0.25, n_rollouts=2)
    one = simple_pool(tmp_path / "one", "q1", manifest=manifest_of(settings=wide))
    two = simple_pool(tmp_path / "two", "q2")
    settings = merge([one, two], tmp_path / "out").manifest.settings
    assert (settings.n_edges, settings.control_share, settings.n_rollouts) == (2, 0.25, 1)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("metric", {"metrics": ("f1", "exact"), "metric": "exact"}),
        ("models", {"models": (ModelIdentity(name="other", provider="scripted"),)}),
        ("models", {"models": (MODEL.model_copy(update={"digest": "f" * 64}),)}),
    ],
)
def test_all_pools_have_one_metric_and_one_model(
    tmp_path: Path, name: str, fields: dict[str, object]
) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    two = simple_pool(tmp_path / "two", "q2", manifest=manifest_of("other", **fields))
    with pytest.raises(SettingsError, match=rf"one and .*two can't be merged: {name} is"):
        merge([one, two], tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "fields"),
    [("workflow", {"workflow": "e" * 32}), ("metrics", {"metrics": ("f1", "x")})],
)
def test_one_workload_is_one_thing_in_all_pools(
    tmp_path: Path, name: str, fields: dict[str, object]
) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    two = simple_pool(tmp_path / "two", "q2", manifest=manifest_of(**fields))
    with pytest.raises(SettingsError, match=rf"one and .*two can't be merged: {name} is"):
        merge([one, two], tmp_path / "out")


def test_metrics_of_other_workloads_are_added(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1", manifest=manifest_of(metrics=("f1", "exact")))
    two = simple_pool(tmp_path / "two", "q2", manifest=manifest_of("other", metrics=("f1", "em")))
    manifest = merge([one, two], tmp_path / "out").manifest
    assert manifest.metrics == ("f1", "exact", "em")
    assert [row["base_em"] for row in rows(tmp_path / "out")] == [None, None]


def test_a_pool_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    pool = simple_pool(tmp_path / "one", "q1")
    path = pool / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2', 1))
    with pytest.raises(StoreError, match="pool format 2"):
        merge([pool], tmp_path / "out")


# --- records that meet -----------------------------------------------------------------------


def test_what_is_in_two_pools_is_kept_once(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1", "q2")
    two = simple_pool(tmp_path / "two", "q2", "q3")
    done = merge([one, two], tmp_path / "out")
    assert done.n_repeated == 1
    assert done.manifest.counts is not None
    assert (done.manifest.counts.n_bases, done.manifest.counts.n_probes) == (3, 3)
    assert [
        sorted(b.query_id for b in s.bases.values()) for s in read_shards(tmp_path / "out")
    ] == [
        ["q1", "q2"],
        ["q3"],
    ]
    assert contents(tmp_path / "out") == contents(one) | contents(two)


def test_a_shard_that_adds_nothing_is_left_out(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    other = simple_pool(tmp_path / "other", "q2")
    done = merge([one, copy, other], tmp_path / "out")
    assert shard_numbers(tmp_path / "out") == [0, 1]
    assert shard_path(tmp_path / "out", "traces", 1).read_text() == "other 0\n"
    assert len(done.manifest.parts) == 1  # three manifests that are the same


def test_a_question_is_taken_from_where_most_of_its_probes_are(tmp_path: Path) -> None:
    early = simple_pool(tmp_path / "early", "q1", "q2")
    late = simple_pool(tmp_path / "late", "q1", n_probes=3)
    for pools in ([early, late], [late, early]):
        out = tmp_path / f"out-{pools[0].name}"
        merge(pools, out)
        assert contents(out) == contents(early) | contents(late)
        for shard in read_shards(out):
            taken = {base.query_id for base in shard.bases.values()}
            traces = shard_path(out, "traces", shard.number).read_text()
            assert (taken, traces) in [({"q1"}, "late 0\n"), ({"q2"}, "early 0\n")]


@pytest.mark.parametrize("kind", ["base", "probe"])
def test_one_id_with_two_contents_is_refused(tmp_path: Path, kind: str) -> None:
    base = base_of("q1")
    one = write_pool(tmp_path / "one", [([base], [probe_of(base)])])
    other = base_of("q1", answer="maybe") if kind == "base" else base
    probe = probe_of(base, answer="maybe") if kind == "probe" else probe_of(base)
    two = write_pool(tmp_path / "two", [([other], [probe])])
    id = base.id if kind == "base" else probe.id
    with pytest.raises(
        SettingsError, match=rf"one and .*two differ in record {id} of question 'q1'"
    ):
        merge([one, two], tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []


def test_pools_that_each_went_on_with_a_question_are_refused(tmp_path: Path) -> None:
    base = base_of("q1")
    one = write_pool(tmp_path / "one", [([base], [probe_of(base, 0), probe_of(base, 1)])])
    two = write_pool(tmp_path / "two", [([base], [probe_of(base, 0), probe_of(base, 2)])])
    with pytest.raises(SettingsError, match=r"one and .*two each have probes of question 'q1'"):
        merge([one, two], tmp_path / "out")


@pytest.mark.parametrize("rollout", [0, 100])
def test_a_question_in_two_splits_is_refused(tmp_path: Path, rollout: int) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    leaked = base_of("q1", split="test", rollout=rollout)
    two = write_pool(tmp_path / "two", [([leaked], [])])
    with pytest.raises(
        SettingsError,
        match=r"'q1' of toy stands in split train in .*one and in split test in .*two",
    ):
        merge([one, two], tmp_path / "out")


def test_a_question_in_two_splits_of_one_pool_is_refused_too(tmp_path: Path) -> None:
    bases = [base_of("q1"), base_of("q1", split="validation", rollout=100)]
    pool = write_pool(tmp_path / "one", [(bases, [])])
    with pytest.raises(SettingsError, match="split validation"):
        merge([pool], tmp_path / "out")


def test_another_question_under_the_same_id_is_refused(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    other = base_of("q1", query="f" * 32, rollout=100)
    two = write_pool(tmp_path / "two", [([other], [])])
    with pytest.raises(SettingsError, match=r"'q1' of toy is one question in .*one, another in"):
        merge([one, two], tmp_path / "out")


def test_workloads_may_use_the_same_question_ids(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    other = base_of("q1", "other", split="test")
    two = write_pool(tmp_path / "two", [([other], [])], manifest_of("other"))
    done = merge([one, two], tmp_path / "out")
    assert done.manifest.splits == {"train": ("q1",), "test": ("q1",)}
    assert done.manifest.counts is not None
    assert done.manifest.counts.n_questions == 2


def test_further_rollouts_of_a_question_are_put_together(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    two = write_pool(tmp_path / "two", [([base_of("q1", rollout=100)], [])])
    merge([one, two], tmp_path / "out")
    assert [row["rollout"] for row in base_rows(tmp_path / "out")] == [0, 100]


# --- the new pool ----------------------------------------------------------------------------


def test_shards_are_numbered_anew_in_the_order_of_the_pools(tmp_path: Path) -> None:
    ids = map(str, count())
    pools = [
        write_pool(tmp_path / name, [([base_of(next(ids))], []) for _ in range(n)])
        for name, n in (("one", 2), ("two", 1), ("three", 2))
    ]
    merge(pools, tmp_path / "out")
    assert shard_numbers(tmp_path / "out") == [0, 1, 2, 3, 4]
    traces = [shard_path(tmp_path / "out", "traces", n).read_text() for n in range(5)]
    assert traces == ["one 0\n", "one 1\n", "two 0\n", "three 0\n", "three 1\n"]
    found = [base.query_id for s in read_shards(tmp_path / "out") for base in s.bases.values()]
    assert found == ["0", "1", "2", "3", "4"]


def test_a_pool_without_its_traces_is_merged_without_them(tmp_path: Path) -> None:
    pool = simple_pool(tmp_path / "one", "q1")
    shard_path(pool, "traces", 0).unlink()
    merge([pool], tmp_path / "out")
    assert not shard_path(tmp_path / "out", "traces", 0).exists()
    assert contents(tmp_path / "out") == contents(pool)


def test_damaged_and_unfinished_lines_are_left_out_and_damage_is_told(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    clean = {path.name: path.read_bytes() for path in one.glob("[bp]*.jsonl")}
    with shard_path(one, "bases", 0).open("a") as file:
        file.write("{}\n")
    with shard_path(one, "probes", 0).open("a") as file:
        file.write('{"schema_version":1,"id":')
    done = merge([one], tmp_path / "out")
    assert [(line.file, line.line) for line in done.damage] == [(f"{one}/bases-00000.jsonl", 2)]
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").glob("[bp]*.jsonl")} == clean
    damage: list[Damage] = []
    list(read_shards(tmp_path / "out", damage))
    assert damage == []


def test_data_files_of_one_name_say_of_which_part_they_are(tmp_path: Path) -> None:
    pools = [
        simple_pool(
            tmp_path / name,
            f"q-{name}",
            manifest=manifest_of(name, sources={"train.jsonl": file, "table.json": "0" * 64}),
        )
        for name, file in (("north", "1" * 64), ("south", "2" * 64))
    ]
    assert merge(pools, tmp_path / "out").manifest.sources == {
        "part1/train.jsonl": "1" * 64,
        "part2/train.jsonl": "2" * 64,
        "table.json": "0" * 64,
    }


def test_merging_in_two_steps_gives_the_same_as_in_one(tmp_path: Path) -> None:
    pools = [
        simple_pool(tmp_path / name, f"q-{name}", manifest=manifest_of(name))
        for name in ("north", "south", "west")
    ]
    merge(pools, tmp_path / "at-once")
    merge(pools[:2], tmp_path / "two")
    merge([tmp_path / "two", pools[2]], tmp_path / "three")
    at_once, in_steps = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("at-once", "three")
    )
    assert at_once == in_steps
    assert len(read_manifest(tmp_path / "three").parts) == 3


def test_a_part_of_a_merged_pool_is_compared_like_any_pool(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    two = simple_pool(tmp_path / "two", "q2", manifest=manifest_of("other"))
    merge([one, two], tmp_path / "merged")
    three = simple_pool(tmp_path / "three", "q3", manifest=manifest_of("other", workflow="e" * 32))
    with pytest.raises(SettingsError, match=r"merged and .*three can't be merged: workflow is"):
        merge([tmp_path / "merged", three], tmp_path / "out")


def test_without_pools_there_is_nothing_to_merge(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at least one"):
        merge([], tmp_path / "out")


def test_what_is_no_pool_is_named(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    with pytest.raises(StoreError, match="none is no probe pool"):
        merge([one, tmp_path / "none"], tmp_path / "out")


def test_the_new_folder_may_be_there_if_it_is_empty(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    (tmp_path / "out").mkdir()
    merge([one], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(one)
    with pytest.raises(SettingsError, match="out is not empty"):
        merge([one], tmp_path / "out")
    with pytest.raises(SettingsError, match="one is not empty"):
        merge([one], one)


def test_the_new_folder_is_as_open_as_any_other(tmp_path: Path) -> None:
    one = simple_pool(tmp_path / "one", "q1")
    merge([one], tmp_path / "deep" / "out")
    (tmp_path / "deep" / "beside").mkdir()
    modes = {path.stat().st_mode for path in (tmp_path / "deep").iterdir()}
    assert len(modes) == 1


def test_what_goes_wrong_while_writing_leaves_nothing(tmp_path: Path) -> None:
    one, two = simple_pool(tmp_path / "one", "q1"), simple_pool(tmp_path / "two", "q2")
    shard_path(two, "traces", 0).unlink()
    shard_path(two, "traces", 0).mkdir()
    with pytest.raises(StoreError, match=r"traces-00000.jsonl: Is a directory"):
        merge([one, two], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


DIES = """
import os, shutil, sys
from probes.merge import merge
copy, left = shutil.copyfile, [1]
def dying(old, new):
    left[0] or os.kill(os.getpid(), 9)
    left[0] -= 1
    copy(old, new)
shutil.copyfile = dying
merge(sys.argv[1:-1], sys.argv[-1])
"""


def test_a_merge_that_is_killed_leaves_no_pool_and_can_be_made_again(tmp_path: Path) -> None:
    pools = [simple_pool(tmp_path / name, f"q-{name}") for name in ("one", "two")]
    out = tmp_path / "out"
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", DIES, *map(str, pools), str(out)],
        env=os.environ | {"PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == -9
    assert not out.exists()
    merge(pools, out)
    assert contents(out) == contents(pools[0]) | contents(pools[1])
