"""The workflows that the questions are put to."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from splice.workflow import Workflow, load_workflow

Host: TypeAlias = Literal["parallel", "chain"]

RESEARCHERS = ("first", "second", "third")
"""Nodes with private paragraphs; what the first one finds the others may need."""

WRITER = "writer"
"""The only node that reads the question."""


@cache
def workflow(host: Host) -> Workflow:
    """The workflow of a host, the same object at each call."""
    return load_workflow(Path(__file__).with_name(f"{host}.toml"))
