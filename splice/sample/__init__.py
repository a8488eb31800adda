"""The sample that `splice init` writes: a small, real workflow with its documents and questions."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from splice.errors import SettingsError


def write_sample(folder: Path) -> None:
    """Copy the sample into a new or empty folder.

    Raises:
        SettingsError: the folder holds something already, or can't be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} is not an empty folder; nothing was written")
    try:
        _copy(files(__name__), folder)
    except OSError as error:
        raise SettingsError(f"{folder}: {error.strerror}") from None


def _copy(source: Traversable, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_dir() and item.name != "__pycache__":
            _copy(item, target / item.name)
        elif item.is_file() and not item.name.endswith((".py", ".pyc")):
            (target / item.name).write_text(item.read_text("utf-8"), "utf-8")
