"""Topologies by name: workflows of generic agents to start from."""

from __future__ import annotations

from importlib.resources import as_file, files

from splice.errors import WorkflowError
from splice.workflow import Workflow, load_workflow

_TOPOLOGIES = files("skeletons") / "topologies"
_SUFFIX = ".toml"


def names() -> tuple[str, ...]:
    """Names of the topologies, sorted."""
    found = (item.name for item in _TOPOLOGIES.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def load(name: str) -> Workflow:
    """Load a topology.

    Raises:
        WorkflowError: there is no topology of this name.
    """
    if name not in names():
        raise WorkflowError(f"there is no topology {name!r}; there are {', '.join(names())}")
    with as_file(_TOPOLOGIES / f"{name}{_SUFFIX}") as path:
        return load_workflow(path)
