"""Computing the numbers of a pool again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from probed import WORKFLOW, content, example, make, workload
from typer.testing import CliRunner

from probes.cli import app
from probes.merge import merge
from probes.plan import ProbeSettings
from probes.pool import read_manifest, shard_path
from probes.refresh import refresh
from splice.errors import SettingsError, StoreError
from splice.workflow import Workflow
from splice.workload import Workload

N = 6


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    folder = tmp_path / "pool"
    make(folder, N, probe=ProbeSettings(control_share=1.0, resample_temperature=0.7))
    return folder


def changed(path: Path, **fields: object) -> None:
    """Set fields of all records of a file."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    path.write_text("".join(f"{json.dumps(r | fields)}\n" for r in records), "utf-8")


def of(workflow: Workflow) -> Workload:
    return workload(N).model_copy(update={"workflow": workflow})


def test_a_pool_of_this_version_stays_as_it_is(pool: Path, tmp_path: Path) -> None:
    found = refresh({"train": workload(N)}, pool, tmp_path / "new")
    assert content(tmp_path / "new") == content(pool)
    assert (found.n_bases, found.n_changed, found.n_left_out, found.damage) == (N, 0, 0, ())
    assert found.manifest == read_manifest(tmp_path / "new")
    assert found.manifest.files == read_manifest(pool).files


def test_what_an_older_version_had_computed_is_made_anew(pool: Path, tmp_path: Path) -> None:
    whole = content(pool)
    evidence = json.loads((pool / "probes-00000.jsonl").read_text("utf-8").splitlines()[0])[
        "evidence"
    ]
    changed(pool / "bases-00000.jsonl", features={"q_words": 1.0}, diagnosis=None)
    changed(
        pool / "probes-00000.jsonl",
        features={},
        p_decisive=0.5,
        evidence={**evidence, "move_w": 0.125, "uptake": 0.125},
    )
    assert content(pool) != whole
    refresh({"train": workload(N)}, pool, tmp_path / "new")
    assert content(tmp_path / "new") == whole


def test_another_wording_of_the_workflow_is_counted(pool: Path, tmp_path: Path) -> None:
    first, *others = WORKFLOW.nodes
    reworded = first.model_copy(update={"subtask": "Who made it?"})
    workflow = WORKFLOW.changed(nodes=(reworded, *others))
    assert refresh({"train": of(workflow)}, pool, tmp_path / "new").n_changed == N


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (workload(N - 1), "question 'q5' of toy in .* is not in the data"),
        (of(WORKFLOW.changed(edges=(*WORKFLOW.edges, ("a", "b")))), "other nodes or edges"),
        (
            workload(N).model_copy(
                update={
                    "examples": tuple(
                        e.model_copy(update={"query": e.query.model_copy(update={"text": "Who?"})})
                        for e in map(example, range(N))
                    )
                }
            ),
            "is another one in the data",
        ),
    ],
)
def test_other_data_are_refused_and_nothing_is_written(
    pool: Path, tmp_path: Path, other: Workload, problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        refresh({"train": other}, pool, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool"]


def test_what_lost_its_trace_is_left_out_and_said(pool: Path, tmp_path: Path) -> None:
    n_whole = len(content(pool))
    path = shard_path(pool, "traces", 0)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if '"kind":"query"' in line)
    lines[place] = lines[place][:-9] + "\n"
    path.write_text("".join(lines), "utf-8")
    found = refresh({"train": workload(N)}, pool, tmp_path / "new")
    assert found.n_bases == N - 1
    assert found.n_left_out == n_whole - len(content(tmp_path / "new")) > 1
    assert (path.name, place + 1) in {(line.file, line.line) for line in found.damage}


def test_merged_pools_and_full_folders_are_refused(pool: Path, tmp_path: Path) -> None:
    merge([pool], tmp_path / "merged")
    with pytest.raises(SettingsError, match="refresh those, then merge them"):
        refresh({"train": workload(N)}, tmp_path / "merged", tmp_path / "new")
    with pytest.raises(SettingsError, match="is not empty"):
        refresh({"train": workload(N)}, pool, tmp_path / "merged")
    with pytest.raises(StoreError, match="no probe pool"):
        refresh({"train": workload(N)}, tmp_path / "none", tmp_path / "new")


def test_the_command_reads_the_splits_that_the_pool_holds(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def loader(name: str, data: Path | None, *, split: str, **_: object) -> Workload:
        asked.append((name, split))
        return workload(N)

    monkeypatch.setattr("splice.workload.open_workload", loader)
    new = tmp_path / "new"
    found = CliRunner().invoke(app, ["refresh", str(pool), "toy", "--out", str(new)])
    assert found.exit_code == 0, found.output
    assert asked == [("toy", "train")]
    assert f"{N} questions and" in found.stdout
    assert content(new) == content(pool)
    again = [str(pool), "toy", "--out", str(tmp_path / "other"), "--json"]
    told = json.loads(CliRunner().invoke(app, ["refresh", *again]).stdout)
    assert (told["n_bases"], told["n_changed"]) == (N, 0)
