"""Tasks, documents, labels and scores of PlanCraft as a workload."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from string import Template
from typing import Final

from skeletons.plancraft.documents import Cookbook, inventory_text, recipes_text, shown
from skeletons.plancraft.plans import execute, parse_plan
from skeletons.plancraft.recipes import RecipeBook, TaskRow, read_source
from splice.errors import DataError
from splice.queries import Split
from splice.records import Document, Edge, Query
from splice.workflow import Workflow, load_workflow
from splice.workload import Example, Options, Workload, choose

METRICS: Final = ("success", "progress")
PARTIAL: Final = 0.5
"""Most that `progress` gives without success: every item but the target was made."""

TO_INVENTORY: Final[Edge] = ("recipes", "inventory")
RECIPES_TO_CHECKER: Final[Edge] = ("recipes", "checker")
INVENTORY_TO_CHECKER: Final[Edge] = ("inventory", "checker")

QUERY = (
    "How is 1 $target made from the inventory? One step a line, in the order in which the steps "
    "are carried out, as the recipes are written. If it can't be made: impossible"
)

ABOUT = (
    "PlanCraft: make one item from an inventory by crafting and smelting, or say that it is "
    "impossible. Node recipes reads the recipes that the task may need, inventory reads what is "
    "there; a planner hears both and a checker hears the planner. Subtasks are the same for every "
    "task but for the target's name. A plan is carried out on the recipes; positions in the grid "
    "are not asked for."
)


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """Load one split of PlanCraft.

    Args:
        data: folder with `recipes.json`, `tags.json` and `tasks_SPLIT.jsonl`; None: the files of
            the installed package `plancraft`, which is not imported.
        split: `validation` reads the file named `val`.
        options: `tasks=all` or `tasks=easy` (one-step and impossible tasks).

    Raises:
        DataError: a file is missing or malformed; it names file, line and field.
        SettingsError: an option that does not exist.
    """
    chosen = choose(options, {"tasks": ("all", "easy")})
    source = read_source(data, split)
    workflow = load_workflow(Path(__file__).with_name("host.toml"))
    cookbook = Cookbook(source.book)
    examples = tuple(
        example_of(row, workflow, cookbook)
        for row in source.tasks
        if chosen["tasks"] == "all" or row.complexity_split in ("easy", "impossible")
    )
    if not examples:
        raise DataError(f"no {chosen['tasks']} tasks in the {split} split")
    return Workload(
        name="plancraft",
        about=ABOUT,
        workflow=workflow,
        examples=examples,
        metrics=METRICS,
        score=PlanScorer(source.book),
        sources=source.sources,
    )


def example_of(row: TaskRow, workflow: Workflow, cookbook: Cookbook) -> Example:
    """A task with the documents of its nodes and what a scorer needs."""
    recipes = cookbook.recipes(row.target, row.inventory, row.id)
    depth = cookbook.depths(row.target, row.inventory)
    held = inventory_text(row.inventory, cookbook.related(row.target), row.id)
    context = {
        "recipes": (Document(text=recipes_text(recipes, depth)),) if recipes else (),
        "inventory": (Document(text=held),) if held else (),
    }
    named = {option for r in recipes for need in r.needs for option in shown(need, depth)}
    return Example(
        query=Query(
            id=row.id,
            text=Template(QUERY).substitute(target=row.target),
            context={node: documents for node, documents in context.items() if documents},
            subtasks={
                node.id: Template(node.subtask).safe_substitute(target=row.target)
                for node in workflow.nodes
            },
        ),
        reference={
            "target": row.target,
            "inventory": row.inventory,
            "optimal_path": row.optimal_path,
        },
        kind=row.complexity_split,
        gap_edges=gap_edges(row, named, {recipe.item for recipe in recipes}),
    )


def gap_edges(
    row: TaskRow, ingredients: Collection[str], products: Collection[str]
) -> tuple[Edge, ...] | None:
    """Missing edges that hold back what their receiver needs; README.md gives the reasons.

    Args:
        row: the task; its gold path is looked at here and in the scorer only.
        ingredients: items that the listed recipes use.
        products: items that the listed recipes make.
    """
    edges = []
    if row.inventory.keys() - set(ingredients):
        edges.append(TO_INVENTORY)
    if row.optimal_path is None:
        return (*edges, INVENTORY_TO_CHECKER)
    intermediate = set(row.optimal_path) - {row.target}
    if intermediate and not intermediate & set(products):
        return None
    if intermediate:
        edges.append(RECIPES_TO_CHECKER)
    return tuple(edges)


class PlanScorer:
    """Carries out the plan in an answer.

    `success` is 1 if the plan makes the target, or if the answer says of an impossible task that it
    is one. `progress` gives a failed plan up to `PARTIAL` for the items of the gold path that its
    valid lines made.
    """

    def __init__(self, book: RecipeBook) -> None:
        self._book = book

    def __call__(self, example: Example, answer: str | None) -> Mapping[str, float]:
        """Both scores of an answer."""
        plan = parse_plan(answer or "")
        path = example.reference["optimal_path"]
        if path is None or plan.is_impossible:
            success = float(path is None and plan.is_impossible)
            return {"success": success, "progress": success}
        target = example.reference["target"]
        outcome = execute(plan.steps, example.reference["inventory"], target, self._book)
        if outcome.is_success:
            return {"success": 1.0, "progress": 1.0}
        share = len(set(path) & set(outcome.made)) / len(set(path))
        return {"success": 0.0, "progress": PARTIAL * share}
