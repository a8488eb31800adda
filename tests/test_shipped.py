"""The parts that come with the package: where they come from, and that they can be made again."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selector_training.cli import app
from splice.learned import shipped
from splice.selectors import SHIPPED, open_parts

ROOT = Path(__file__).parents[1]
TABLES = [str(ROOT / "selector_training" / "pools" / name) for name in ("multihop", "plancraft")]
SHIPPED_FOLDER = ROOT / "splice" / "shipped"


def test_they_are_opened_by_their_name_and_only_by_it() -> None:
    assert open_parts(SHIPPED) is shipped()
    assert open_parts(None) is None
    assert open_parts("rules") is None


def test_the_card_says_what_they_were_fitted_on() -> None:
    card = shipped().card
    workloads = {name for pool in card.pools for name in pool.workloads}
    assert {"multihop/2wiki/parallel/form", "plancraft"} <= workloads
    assert {model for pool in card.pools for model in pool.models} == {"qwen2.5-coder-1.5b"}
    assert sum(pool.n_questions for pool in card.pools) == 300


@pytest.mark.slow
def test_the_committed_tables_give_the_same_bytes_again(tmp_path: Path) -> None:
    packages = {n: v for n, v in shipped().card.packages.items() if n != "splice-repair"}
    installed = {name: version(name) for name in packages}
    if installed != packages:
        pytest.skip(f"they were fitted with {packages}, and {installed} is installed")
    made = CliRunner().invoke(app, ["fit", *TABLES, "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in SHIPPED_FOLDER.iterdir()}
    for name in names - {"README.md"}:
        assert (tmp_path / name).read_bytes() == (SHIPPED_FOLDER / name).read_bytes(), name
