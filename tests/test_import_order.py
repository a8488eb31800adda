"""Reading order is import order: each module imports only what stands before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "splice"

ORDER = (
    "_version",
    "errors",
    "files",
    "lines",
    "concurrency",
    "sandbox",
    "records",
    "text",
    "prompts",
    "workflow",
    "models.protocol",
    "models.limits",
    "models.scripted",
    "models.cache",
    "models.endpoint",
    "models.spread",
    "models.weights",
    "models.local",
    "models.default",
    "ledger",
    "abstention",
    "rendering",
    "registry",
    "tools",
    "executor",
    "redact",
    "store",
    "material",
    "features",
    "diagnosis",
    "message",
    "trial",
    "evidence",
    "selector",
    "learned",
    "language",
    "selectors",
    "line",
    "resolving",
    "coordination",
    "report",
    "statistics",
    "api",
    "code",
    "queries",
    "workload",
    "ears",
    "policies",
    "evaluation",
    "evaluation_table",
    "worlds",
    "selfcheck",
    "sample",
    "models_cli",
    "diagnose_cli",
    "evaluate_cli",
    "ears_cli",
    "selfcheck_cli",
    "cli",
    "__main__",
)

BACKWARDS = {("records", "report")}
"""A result shows itself as a page: `RepairResult.__str__` imports the report when it is called."""

SIBLINGS = ("skeletons", "probes", "selector_training", "tests", "benchmarks")


def stage(module: str) -> str | None:
    """The entry of `ORDER` that a module of this package belongs to."""
    while module and module not in ORDER:
        module = module.rpartition(".")[0]
    return module or None


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text("utf-8"))


def imported(tree: ast.AST, package: str = "splice") -> Iterator[str]:
    """Modules of this package that a piece of code imports, without `splice.` before them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == package:
                yield name.removeprefix(f"{package}").removeprefix(".")


def at_module_level(tree: ast.Module) -> ast.Module:
    """The code that runs at import: no function bodies, no `if TYPE_CHECKING`."""
    return ast.Module(
        body=[
            node
            for node in tree.body
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ],
        type_ignores=[],
    )


TREES = dict(modules())
PARTS = [name for name in TREES if name not in ("", "__init__", "models")]


def test_each_module_has_a_place_in_the_order() -> None:
    assert [name for name in PARTS if stage(name) is None] == []
    assert [name for name in ORDER if not any(stage(part) == name for part in PARTS)] == []


@pytest.mark.parametrize("name", PARTS)
def test_a_module_imports_only_what_stands_before_it(name: str) -> None:
    own = ORDER.index(stage(name) or "")
    for target in imported(at_module_level(TREES[name])):
        other = stage(target)
        assert other is None or other == ORDER[own] or ORDER.index(other) < own, target


@pytest.mark.parametrize("name", PARTS)
def test_an_import_inside_a_function_goes_the_same_way_with_one_stated_exception(
    name: str,
) -> None:
    own = ORDER.index(stage(name) or "")
    backwards = {
        (name, other)
        for target in imported(TREES[name])
        if (other := stage(target)) is not None and ORDER.index(other) > own
    }
    assert backwards <= BACKWARDS


def test_the_stated_exception_is_still_needed() -> None:
    assert "report" in {stage(target) for target in imported(TREES["records"])}


@pytest.mark.parametrize("name", list(TREES))
def test_the_library_imports_nothing_that_is_built_on_it(name: str) -> None:
    for sibling in SIBLINGS:
        assert list(imported(TREES[name], sibling)) == []
