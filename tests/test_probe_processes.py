"""Several processes at one pool: the same pool, and no trace of a process that died."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import probed
import pytest
from loopback import LoopbackServer, Reply

from probes.pool import is_in_use, read_manifest, read_shards
from probes.processes import _divided
from splice.ledger import Budget


def respond(request: object) -> Reply:
    return Reply(text="Doha" if "Where is the stop" in json.dumps(request) else "31 hours")


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(respond) as running:
        yield running


class Command:
    """`splice probes generate` in a process of its own, as forks of a test's process would not do."""

    def __init__(self, folder: Path, server: LoopbackServer, n_queries: int = 12) -> None:
        (folder / "trip.toml").write_text(probed.TRIP, "utf-8")
        queries = [
            {
                "id": f"q{n}",
                "text": f"How many hours may I stay on trip {n}?",
                "context": {"routes": f"The stop of trip {n} is Doha.", "visas": "Doha: 31."},
                "answers": ["31"],
            }
            for n in range(n_queries)
        ]
        (folder / "queries.jsonl").write_text("".join(json.dumps(q) + "\n" for q in queries))
        self.folder = folder
        self.server = server

    def __call__(self, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.line(out, *more), capture_output=True, text=True)

    def line(self, out: Path, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "probes", "generate", str(self.folder / "trip.toml"),
            "--data", str(self.folder / "queries.jsonl"), "--out", str(out), "--model", "m",
            "--endpoint", self.server.base_url, "--controls", "0.5", *more,
        ]  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, server: LoopbackServer) -> Command:
    return Command(tmp_path, server)


def test_a_pool_of_three_processes_is_the_pool_of_one(command: Command, tmp_path: Path) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    assert command(one).returncode == 0
    made = command(three, "--processes", "3")
    assert made.returncode == 0, made.stderr
    assert "done; 12 of 12 questions are complete" in made.stdout
    assert probed.content(three) == probed.content(one)
    assert len(list(read_shards(three))) == 3
    manifest = read_manifest(three)
    assert manifest.counts == read_manifest(one).counts
    assert manifest.splits == read_manifest(one).splits


def test_a_pool_goes_on_with_another_number_of_processes(command: Command, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    assert command(pool, "--processes", "2", "--limit", "5").returncode == 0
    n_requests = command.server.n_requests
    assert command(pool, "--processes", "3").returncode == 0
    assert command.server.n_requests > n_requests
    n_requests = command.server.n_requests
    assert command(pool).returncode == 0
    assert command.server.n_requests == n_requests
    assert command(tmp_path / "whole").returncode == 0
    assert probed.content(pool) == probed.content(tmp_path / "whole")


def test_what_one_process_raises_ends_all_of_them(tmp_path: Path) -> None:
    with LoopbackServer(lambda request: Reply(status=401)) as server:
        made = Command(tmp_path, server, n_queries=60)(tmp_path / "pool", "--processes", "2")
    assert made.returncode == 1
    assert "failures one after another" in made.stderr
    assert not is_in_use(tmp_path / "pool")


def test_processes_end_when_the_one_that_began_them_is_killed(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with LoopbackServer(lambda request: Reply(text="31", latency_s=0.02)) as server:
        command = Command(tmp_path, server, n_queries=60)
        with subprocess.Popen(
            command.line(pool, "--processes", "2", "--concurrency", "1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while not any(path.stat().st_size for path in pool.glob("probes-*.jsonl")):
                assert process.poll() is None
                time.sleep(0.005)
            process.kill()
        while is_in_use(pool):
            time.sleep(0.005)
        n_requests = server.n_requests
        assert 0 < n_requests < 60 * 4
        assert command(pool).returncode == 0
        assert command(tmp_path / "whole").returncode == 0
    assert probed.content(pool) == probed.content(tmp_path / "whole")


def test_a_budget_is_divided_and_never_exceeded(command: Command, tmp_path: Path) -> None:
    made = command(tmp_path / "pool", "--processes", "2", "--max-calls", "15")
    assert "stopped: the budget is used up" in made.stdout
    assert command.server.n_requests <= 15
    assert _divided(Budget(max_calls=15, max_tokens=9, max_cost=3.0), 2) == Budget(
        max_calls=7, max_tokens=4, max_cost=1.5
    )
    assert _divided(Budget(), 4) == Budget()
