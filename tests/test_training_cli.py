"""`splice selector` as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import probed
import pytest
from test_training_fit import planted, write_tables
from typer.testing import CliRunner, Result

from probes.export import export
from selector_training.cli import app
from splice.errors import DataError
from splice.learned import load_learned


def selector(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.slow
def test_fit_and_evaluate(tmp_path: Path) -> None:
    tables = write_tables(tmp_path / "tables", planted(55, 20), lambda places: None)
    made = selector("fit", tables, "--out", tmp_path / "parts", "--jobs", "2")
    assert made.exit_code == 0, made.output
    assert "fitting on 55 training questions with 110 probes" in made.stderr
    assert "wrote the parts headroom, decisive, beneficial, selector into" in made.stderr
    assert "Learned parts on split validation: 20 questions" in made.stdout
    assert "First edge is a true gap edge: 20 questions" in made.stdout
    assert load_learned(tmp_path / "parts", rank_by="beneficial").selector is not None
    card = (tmp_path / "parts" / "README.md").read_text("utf-8")
    assert made.stdout.strip() in card

    shown = selector("evaluate", tmp_path / "parts", tables)
    assert shown.stdout == made.stdout
    report = json.loads(selector("evaluate", tmp_path / "parts", tables, "--json").stdout)
    assert (report["split"], report["n_questions"]) == ("validation", 20)


def test_a_small_pool_gives_what_it_can(tmp_path: Path) -> None:
    workloads = {"train": probed.workload(6), "validation": probed.workload(4, begin=6)}
    probed.make(tmp_path / "pool", 10, workloads=workloads)
    export(tmp_path / "pool", tmp_path / "tables", format="csv")
    made = selector("fit", tmp_path / "tables", "--out", tmp_path / "parts")
    assert made.exit_code == 0, made.output
    assert "no part 'selector': too few training questions" in made.stderr
    assert load_learned(tmp_path / "parts").card.pools[0].n_questions == 6
    shown = selector("evaluate", tmp_path / "parts", tmp_path / "tables", "--split", "train")
    assert "fitted on these questions" in shown.stdout


def test_tables_that_are_none_are_refused(tmp_path: Path) -> None:
    made = selector("fit", tmp_path, "--out", tmp_path / "parts")
    assert isinstance(made.exception, DataError)
    assert not (tmp_path / "parts").exists()


def test_it_runs_as_a_module_and_its_errors_are_one_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "selector_training", "fit", tmp_path, "--out", tmp_path / "parts"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert "holds no exported tables" in run.stderr
    assert "Traceback" not in run.stderr
