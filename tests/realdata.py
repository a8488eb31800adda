"""Real data sets for tests: read where they are, never from the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("SPLICE_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
"""Folder with one folder a data set; by default `shared/data` beside the repository."""


def data_set(name: str) -> Path:
    """The folder of a data set; the test is skipped, by the data set's name, without it."""
    folder = FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"the data set {name} is not there (set SPLICE_TEST_DATA)")
    return folder
