"""`splice probes` as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import probed
import pytest
from loopback import LoopbackServer, Reply
from typer.testing import CliRunner, Result

from splice import cli


def query(n: int) -> dict[str, object]:
    return {
        "id": f"q{n}",
        "text": f"How many hours may I stay on trip {n}?",
        "context": {"routes": f"The stop of trip {n} is Doha.", "visas": "Doha: 31. Madrid: 9."},
        "answers": ["31"],
    }


def respond(request: object) -> Reply:
    return Reply(text="Doha" if "Where is the stop" in json.dumps(request) else "31 hours")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    workflow, queries = tmp_path / "trip.toml", tmp_path / "queries.jsonl"
    workflow.write_text(probed.TRIP, "utf-8")
    queries.write_text("".join(json.dumps(query(n)) + "\n" for n in range(6)), "utf-8")
    return workflow, queries


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def splice(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["probes", *map(str, arguments)])


def generate(files: tuple[Path, Path], server: LoopbackServer, out: Path, *more: object) -> Result:
    workflow, queries = files
    return splice(
        "generate", workflow, "--data", queries, "--out", out,
        "--model", "m", "--endpoint", server.base_url, *more,
    )  # fmt: skip


def test_generate_look_export_and_merge(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with LoopbackServer(respond) as server:
        made = generate(files, server, pool, "--controls", "1")
        assert made.exit_code == 0, made.output
        n_requests = server.n_requests
        again = generate(files, server, pool, "--controls", "1")
        assert again.exit_code == 0
        assert server.n_requests == n_requests
    assert "done; 6 of 6 questions are complete" in made.stdout
    assert "model m (endpoint)" in made.stderr
    assert "6 base runs and 18 probes" in made.stdout
    state = json.loads(splice("status", pool, "--json").stdout)
    assert state["counts"]["by_arm"] == {"edge": 6, "placebo": 6, "resample": 6}
    assert state["counts"]["n_calls"] == n_requests
    assert state["n_by_split"] == {"train": 6}
    assert state["is_in_use"] is False
    assert "18 probes (6 edge, 6 placebo, 6 resample)" in splice("status", pool).stdout
    page = tmp_path / "pool.html"
    looked = splice("inspect", pool, "--html", page)
    assert looked.exit_code == 0, looked.output
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert json.loads(splice("inspect", pool, "--json").stdout)
    table = splice("export", pool, "--out", tmp_path / "table", "--format", "csv")
    assert table.exit_code == 0, table.output
    assert (tmp_path / "table" / "probes.csv").read_text("utf-8").count("\n") == 19
    merged = splice("merge", pool, "--out", tmp_path / "all")
    assert merged.exit_code == 0, merged.output
    assert "6 questions and 18 probes of 1 pools" in merged.stdout


def test_a_dry_run_probes_three_questions_once_and_says_what_the_rest_takes(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    price = ("--price", "1000", "2000")
    with LoopbackServer(respond) as server:
        first = generate(files, server, pool, "--dry-run", *price)
        assert first.exit_code == 0, first.output
        n_requests = server.n_requests
        assert "3 questions are left; judged by 3 that are finished" in first.stdout
        estimate = generate(files, server, pool, "--dry-run", "--json", *price)
        assert server.n_requests == n_requests
    found = json.loads(estimate.stdout)
    assert found["n_left"] == 3
    assert found["calls"]["mean"] == n_requests
    assert found["cost"]["mean"] > 0
    assert found["seconds"]["mean"] > 0


def test_an_unknown_price_is_unknown(files: tuple[Path, Path], tmp_path: Path) -> None:
    with LoopbackServer(respond) as server:
        found = generate(files, server, tmp_path / "pool", "--dry-run", "--json")
        assert json.loads(found.stdout)["cost"] is None
        refused = generate(files, server, tmp_path / "other", "--max-cost", "1")
        assert "the price of the model of node 'routes' is unknown" in str(refused.exception)


def test_limits_stop_a_command_and_the_same_command_goes_on(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    with LoopbackServer(respond) as server:
        stopped = generate(files, server, pool, "--max-calls", "9")
        assert stopped.exit_code == 0
        assert "stopped: the budget is used up" in stopped.stdout
        assert "the same command goes on" in stopped.stdout
        assert server.n_requests <= 9
        assert "done; 6 of 6" in generate(files, server, pool).stdout


def test_several_endpoints_share_the_work(files: tuple[Path, Path], tmp_path: Path) -> None:
    with LoopbackServer(respond) as one, LoopbackServer(respond) as two:
        made = generate(
            files, one, tmp_path / "pool", "--endpoint", f"{two.base_url}=2", "--concurrency", "2"
        )
        assert made.exit_code == 0, made.output
        assert one.n_requests > 0
        assert two.n_requests > 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--split", "dev"), "it is one of train, validation, test"),
        (("-o", "host"), "is not NAME=VALUE"),
        (("-o", "host=chain"), "unknown option 'host'"),
        (("--metric", "f1"), "no metric 'f1'; it has correct"),
    ],
)
def test_a_mistake_is_named_before_anything_is_asked(
    files: tuple[Path, Path], tmp_path: Path, more: tuple[str, ...], problem: str
) -> None:
    with LoopbackServer(respond) as server:
        refused = generate(files, server, tmp_path / "pool", *more)
        assert server.n_requests == 0
    assert refused.exit_code != 0
    assert problem in refused.output + str(refused.exception)


def test_queries_without_answers_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    _, queries = files
    queries.write_text(json.dumps({"id": "q0", "text": "Why?"}) + "\n", "utf-8")
    with LoopbackServer(respond) as server:
        refused = generate(files, server, tmp_path / "pool")
    assert "query 'q0' has no reference answer" in str(refused.exception)


def test_both_names_are_the_same_command(tmp_path: Path) -> None:
    for command in (["-m", "probes"], ["-m", "splice", "probes"]):
        done = subprocess.run(
            [sys.executable, *command, "status", str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stderr == f"error: {tmp_path} is no probe pool: it has no manifest.json\n"
