"""`splice diagnose`: recorded runs are explained without asking a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_learned import folder_of
from typer.testing import CliRunner

import splice
from splice import cli
from splice.errors import StoreError, TraceMismatch
from splice.models.scripted import ScriptedModel
from splice.store import TraceStore
from splice.workflow import load_workflow

WORKFLOW = """\
name = "trip"
output = "desk"
edges = [["routes", "desk"], ["visas", "desk"]]

[[nodes]]
id = "routes"
role = "You look up routes."
subtask = "Where is the stop?"

[[nodes]]
id = "visas"
role = "You look up visas."
subtask = "How many hours at the stop?"
abstention_phrase = "not found"
documents = [{ text = "Doha: 31 hours. Madrid: 9 hours." }]

[[nodes]]
id = "desk"
role = "You answer."
"""


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A workflow, and a store with a repair and a run of it."""
    path, store = tmp_path / "trip.toml", tmp_path / "traces.jsonl"
    path.write_text(WORKFLOW, "utf-8")
    workflow = load_workflow(path)
    replies = {
        "routes": ["It stops in Doha at gate 7 B"] * 2,
        "visas": ["not found", "31 hours", "9 hours"],
        "desk": ["unknown", "31 hours", "9 hours"],
    }
    model = ScriptedModel(replies)
    with TraceStore(store) as opened:
        repaired = splice.repair(
            workflow, splice.Query(id="lisbon", text="How long?"), model=model, store=opened
        )
        splice.run(
            workflow, splice.Query(id="rome", text="How long in Rome?"), model=model, store=opened
        )
    assert repaired.trial is not None
    return path, store


def diagnosed(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, ["diagnose", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def test_base_runs_are_explained_and_trials_left_out(recorded: tuple[Path, Path]) -> None:
    text = diagnosed(*recorded)
    assert text.count("in workflow trip") == 2
    lisbon, rome = text.split("Query rome")
    assert "Edge 1       routes -> visas" in lisbon
    assert "log-odds moved by bridge = 1 (+3.00)" in lisbon
    assert "visas needs and can't read:" in lisbon
    assert '"7", named in the source, held by routes' in lisbon
    assert '"9 hours"' in rome


def test_one_query_can_be_chosen(
    recorded: tuple[Path, Path],
) -> None:
    assert "Query rome" not in diagnosed(*recorded, "--query", "lisbon")


def test_json_gives_a_line_for_each_run_with_all_edges(recorded: tuple[Path, Path]) -> None:
    lines = [json.loads(line) for line in diagnosed(*recorded, "--json").splitlines()]
    assert len(lines) == 2
    first = lines[0]["edges"][0]
    assert first["contributions"][0] == {"feature": "bridge", "value": 1.0, "log_odds": 3.0}
    assert {item["text"] for item in first["gap"]["items"]} == {"B", "7"}
    assert len(lines[0]["edges"]) == len(lines[0]["diagnosis"]["edges"])


def test_learned_parts_predict_where_their_folder_is_given(
    recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    parts = folder_of(tmp_path / "parts", "headroom", "decisive", "beneficial")
    text = on_one_line(diagnosed(*recorded, "--parts", parts, "--query", "lisbon"))
    assert "log-odds moved by a_declines = 1 (-" in text
    assert "log-odds moved by w_declines = 1 (+" in text
    assert "for the better with " in text


def test_a_query_that_is_not_there_is_named_with_those_that_are(
    recorded: tuple[Path, Path],
) -> None:
    with pytest.raises(StoreError, match="'oslo'; there are: lisbon, rome"):
        diagnosed(*recorded, "--query", "oslo")


def test_runs_of_another_workflow_are_refused(recorded: tuple[Path, Path]) -> None:
    path, store = recorded
    path.write_text(WORKFLOW.replace("You answer.", "You guess."), "utf-8")
    with pytest.raises(TraceMismatch, match="desk"):
        diagnosed(path, store)
