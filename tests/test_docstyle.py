"""Nothing in the repository speaks of the machine that it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PLACES = re.compile(r"(?<![\w./:-])/(?:home|root|Users|mnt|workspace)/|[A-Z]:\\Users\\")

EXEMPT = {"tests/test_redact.py", "tests/test_docstyle.py"}
"""What is taken out of traces has to be named where that is tested."""

KINDS = {".py", ".md", ".toml", ".txt", ".j2", ".jsonl", ".json", ".yml", ".yaml", ".sh", ""}


def texts() -> list[Path]:
    """Files of the repository: those under version control, or all of an unpacked archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [
            str(path.relative_to(ROOT))
            for folder in ("splice", "skeletons", "probes", "selector_training", "tests", "docs")
            for path in (ROOT / folder).rglob("*")
        ]
    paths = [ROOT / name for name in names if name not in EXEMPT]
    return [path for path in paths if path.is_file() and path.suffix in KINDS]


@pytest.mark.parametrize(
    "text", ["see /home/me/x", "(/root/.cache)", '"/Users/me/x"', "C:\\Users\\me"]
)
def test_the_pattern_finds_places(text: str) -> None:
    assert PLACES.search(text)


@pytest.mark.parametrize(
    "text", ["http://x.org/home/a", "frame/home/out", "at-home/x", "docs/root/"]
)
def test_the_pattern_leaves_other_paths_alone(text: str) -> None:
    assert PLACES.search(text) is None


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if PLACES.search(line)
    ]
    assert found == []


def test_every_module_opens_with_a_docstring() -> None:
    import ast

    bare = [
        str(path.relative_to(ROOT))
        for path in texts()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0]
        in ("splice", "skeletons", "probes", "selector_training")
        and path.stat().st_size
        and ast.get_docstring(ast.parse(path.read_text("utf-8"))) is None
    ]
    assert bare == []
