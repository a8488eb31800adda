"""The PlanCraft workload: recipes and tasks as read, plans as carried out, labels and scores."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from realdata import data_set

from skeletons.plancraft import load
from skeletons.plancraft.documents import (
    MAX_KINDS,
    MAX_RECIPE_CHARACTERS,
    MAX_RECIPES,
    Cookbook,
    inventory_text,
    recipes_text,
)
from skeletons.plancraft.load import PARTIAL, gap_edges
from skeletons.plancraft.plans import (
    MAX_LINES,
    MAX_STATES,
    BadStep,
    Step,
    execute,
    parse_plan,
)
from skeletons.plancraft.recipes import (
    Need,
    Recipe,
    RecipeBook,
    TaskRow,
    members,
    read_source,
)
from splice.errors import DataError, SettingsError
from splice.workload import Example, Workload

TAGS = {
    "planks": ["oak_planks", "birch_planks"],
    "oak_logs": ["oak_log", "oak_wood"],
    "birch_logs": ["birch_log"],
    "logs": ["#oak_logs", "#birch_logs"],
}

RECIPES: list[dict[str, Any]] = [
    {
        "id": "oak_planks",
        "type": "shapeless",
        "ingredients": [{"tag": "oak_logs"}],
        "result": {"item": "oak_planks", "count": 4},
    },
    {
        "id": "birch_planks",
        "type": "shapeless",
        "ingredients": [{"tag": "birch_logs"}],
        "result": {"item": "birch_planks", "count": 4},
    },
    {
        "id": "stick",
        "type": "shaped",
        "pattern": ["#", "#"],
        "key": {"#": {"tag": "planks"}},
        "result": {"item": "stick", "count": 4},
    },
    {
        "id": "torch",
        "type": "shaped",
        "pattern": ["C", "S"],
        "key": {"C": [{"item": "coal"}, {"item": "charcoal"}], "S": {"item": "stick"}},
        "result": {"item": "torch", "count": 4},
    },
    {
        "id": "charcoal",
        "type": "smelting",
        "ingredient": {"tag": "logs"},
        "result": {"item": "charcoal", "count": 1},
    },
    {
        "id": "iron_ingot",
        "type": "smelting",
        "ingredient": {"item": "iron_ore"},
        "result": {"item": "iron_ingot", "count": 1},
    },
    {
        "id": "iron_ingot_from_block",
        "type": "shapeless",
        "ingredients": [{"item": "iron_block"}],
        "result": {"item": "iron_ingot", "count": 9},
    },
    {
        "id": "oak_fence",
        "type": "shaped",
        "pattern": ["W#W", "W#W"],
        "key": {"W": {"item": "oak_planks"}, "#": {"item": "stick"}},
        "result": {"item": "oak_fence", "count": 3},
    },
    {
        "id": "bucket",
        "type": "shaped",
        "pattern": ["# #", " # "],
        "key": {"#": {"item": "iron_ingot"}},
        "result": {"item": "bucket", "count": 1},
    },
    {
        "id": "bone_meal",
        "type": "shapeless",
        "ingredients": [{"item": "bone"}],
        "result": {"item": "bone_meal", "count": 3},
    },
    {
        "id": "bone_meal_from_block",
        "type": "shapeless",
        "ingredients": [{"item": "bone_block"}],
        "result": {"item": "bone_meal", "count": 9},
    },
]


def task(target: str, inventory: Mapping[str, int], path: list[str] | None) -> dict[str, Any]:
    return {
        "id": f"T-{target}",
        "target": target,
        "impossible": path is None,
        "complexity_split": "impossible" if path is None else "easy" if len(path) == 1 else "hard",
        "optimal_path": path,
        "inventory": inventory,
        "num_distractors": 0,
    }


TASKS = [
    task("torch", {"oak_log": 1, "coal": 1, "dirt": 3}, ["oak_planks", "stick", "torch"]),
    task("stick", {"birch_planks": 2}, ["stick"]),
    task("bucket", {"iron_ore": 2, "dirt": 1}, None),
]


def write_folder(
    folder: Path,
    *,
    recipes: object = RECIPES,
    tags: object = TAGS,
    tasks: list[Any] = TASKS,
) -> Path:
    (folder / "recipes.json").write_text(json.dumps(recipes), "utf-8")
    (folder / "tags.json").write_text(json.dumps(tags), "utf-8")
    for name in ("train", "val", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in tasks)
        (folder / f"tasks_{name}.jsonl").write_text(lines, "utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


@pytest.fixture
def book(folder: Path) -> RecipeBook:
    return read_source(folder, "train").book


@pytest.fixture
def workload(folder: Path) -> Workload:
    return load(folder, split="train", options={})


def scores(workload: Workload, example: Example, answer: str | None) -> tuple[float, float]:
    found = workload.score(example, answer)
    assert isinstance(found, dict)
    return found["success"], found["progress"]


# --- reading plans ---------------------------------------------------------------------------

CRAFT_4_PLANKS = Step(verb="craft", count=4, item="oak_planks")
CRAFT_4_STICKS = Step(verb="craft", count=4, item="stick")
TWO = (CRAFT_4_PLANKS, CRAFT_4_STICKS)


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        ("craft 4 oak_planks\ncraft 4 stick", TWO),
        ("1. craft 4 oak_planks\n2) craft 4 stick", TWO),
        ("Step 1: craft 4 oak_planks\nStep 2: craft 4 stick", TWO),
        ("step 1 craft 4 oak_planks\nstep 2 craft 4 stick", TWO),
        ("- craft 4 oak_planks\n* craft 4 stick", TWO),
        ("• craft 4 oak_planks\n\n• craft 4 stick.", TWO),
        ("CRAFT 4 Oak_Planks\nCraft 4 STICK", TWO),
        ("craft 4 minecraft:oak_planks\ncraft 4 minecraft:stick", TWO),
        ("craft 4 oak planks\ncraft 4 stick", TWO),
        ("Plan: craft 4 oak_planks\ncraft 4 stick", TWO),
        ("Answer:\ncraft 4 oak_planks\ncraft 4 stick", TWO),
        ("The final plan is: craft 4 oak_planks, craft 4 stick", TWO),
        ("Here is what to do:\ncraft 4 oak_planks\ncraft 4 stick", TWO),
        ("craft 4 oak_planks, craft 4 stick", TWO),
        ("craft 4 oak_planks; craft 4 stick;", TWO),
        ("craft 4 oak_planks -> craft 4 stick", TWO),
        ("craft 4 oak_planks → craft 4 stick", TWO),
        ("craft 4 oak_planks then craft 4 stick", TWO),
        ("craft 4 oak_planks, and then craft 4 stick", TWO),
        ("craft 4 oak_planks, and craft 4 stick", TWO),
        ("1. craft 4 oak_planks, 2. craft 4 stick", TWO),
        ("```text\ncraft 4 oak_planks\ncraft 4 stick\n```", TWO),
        ("**craft 4 `oak_planks`**\ncraft 4x stick", TWO),
        ("craft 4 oak_planks <- 1 oak_log\ncraft 4 stick (from 2 oak_planks, 0 coal)", TWO),
        ("craft 4 oak_planks from 1 oak_log, 2 dirt\ncraft 4 stick using oak_planks", TWO),
        ("craft oak_planks", (Step(verb="craft", count=1, item="oak_planks"),)),
        ("smelt ２ iron_ingot", (Step(verb="smelt", count=2, item="iron_ingot"),)),
        ("", ()),
        (" \n\t\n```\n", ()),
    ],
)
def test_a_plan_is_read(answer: str, steps: tuple[Step, ...]) -> None:
    assert parse_plan(answer).steps == steps
    assert not parse_plan(answer).is_impossible


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("mine 2 stone", "'mine 2 stone' does not begin with craft or smelt"),
        ("4 oak_planks", "'4 oak_planks' does not begin with craft or smelt"),
        ("craft", "'craft' names no item"),
        ("craft 4", "'craft 4' names no item"),
        ("craft 4 ⛏", "'craft 4 ⛏' names no item"),
        ("craft 0 stick", "'craft 0 stick': a count is 1 to 9999"),
        ("craft 10000 stick", "'craft 10000 stick': a count is 1 to 9999"),
        (f"craft {'9' * 5000} stick", "a count is 1 to 9999"),
        ("craft -4 stick", "'craft -4 stick' names no item"),
        ("I would first make some sticks.", "does not begin with craft or smelt"),
    ],
)
def test_what_is_no_step_says_why(answer: str, problem: str) -> None:
    (step,) = parse_plan(answer).steps
    assert isinstance(step, BadStep)
    assert problem in step.problem


@pytest.mark.parametrize(
    ("answer", "is_impossible"),
    [
        ("impossible", True),
        ("Impossible.", True),
        ("Answer: impossible", True),
        ("Final answer:\nImpossible!", True),
        ("impossible: there is no coal, and no charcoal", True),
        ("**impossible**", True),
        ("impossible\ncraft 4 stick", False),
        ("craft 4 stick\nimpossible", False),
        ("it is not impossible", False),
        ("impossible craft 4 stick", False),
        ("craft 1 impossible", False),
        ("", False),
    ],
)
def test_impossible_counts_only_alone(answer: str, is_impossible: bool) -> None:
    assert parse_plan(answer).is_impossible is is_impossible


@pytest.mark.parametrize(
    "piece",
    ["1.", "-", "craft 4 stick,", "step 1 ", "->", "(", "``", "the final ", "\n", "ﷺ", "1) craft "],
)
def test_long_answers_are_read_in_bounded_time_and_length(piece: str) -> None:
    plan = parse_plan(piece * 200_000)
    assert len(plan.steps) <= MAX_LINES + 1


# --- carrying plans out ----------------------------------------------------------------------

NASTY = [
    # name, inventory, target, plan, success, valid lines, problem
    ("tag, pattern, alternative", {"oak_log": 1, "coal": 1}, "torch",
     "craft 4 oak_planks\ncraft 4 stick\ncraft 4 torch", True, 3, None),
    ("steps between commas", {"oak_log": 1, "coal": 1}, "torch",
     "craft 4 oak_planks, craft 4 stick, craft 4 torch", True, 3, None),
    ("the other alternative", {"oak_log": 2, "stick": 1}, "torch",
     "smelt 1 charcoal\ncraft 4 torch", True, 2, None),
    ("a tag inside a tag", {"birch_log": 1}, "charcoal", "smelt 1 charcoal", True, 1, None),
    ("two members make one ingredient", {"oak_planks": 1, "birch_planks": 1}, "stick",
     "craft 4 stick", True, 1, None),
    ("one ingredient used twice over", {"oak_log": 1}, "charcoal",
     "craft 4 oak_planks\nsmelt 1 charcoal", False, 1,
     "line 2: smelt charcoal: 1 oak_log or 2 others needed, 0 there"),
    ("planks used twice over", {"oak_planks": 4, "stick": 1}, "oak_fence",
     "craft 4 stick\ncraft 3 oak_fence", False, 1,
     "line 2: craft oak_fence: 4 oak_planks needed, 2 there"),
    ("the choice matters later", {"oak_planks": 4, "birch_planks": 2}, "oak_fence",
     "craft 4 stick\ncraft 3 oak_fence", True, 2, None),
    ("the plentiful kind is wanted later", {"oak_log": 1, "birch_log": 1, "stick": 2}, "oak_fence",
     "smelt 1 charcoal\ncraft 4 oak_planks\ncraft 3 oak_fence", True, 3, None),
    ("a typo", {"oak_log": 1}, "stick", "craft 4 oak_plank\ncraft 4 stick", False, 0,
     "line 1: no recipe to craft 'oak_plank'"),
    ("the wrong verb", {"iron_ore": 3}, "bucket", "smelt 3 oak_planks", False, 0,
     "line 1: no recipe to smelt 'oak_planks'"),
    ("an unknown verb", {"oak_log": 1}, "stick", "craft 4 oak_planks\nuse 4 stick", False, 1,
     "line 2: 'use 4 stick' does not begin with craft or smelt"),
    ("prose", {"oak_log": 1}, "stick", "You should cut the log and make sticks.", False, 0,
     "line 1: 'you should cut the log and make sticks' does not begin with craft or smelt"),
    ("a missing ingredient", {"stick": 1}, "torch", "craft 4 torch", False, 0,
     "line 1: craft torch: 1 coal or 1 others needed, 0 there"),
    ("smelting one for one", {"iron_ore": 3}, "bucket", "smelt 3 iron_ingot\ncraft 1 bucket",
     True, 2, None),
    ("too little smelted", {"iron_ore": 3}, "bucket", "smelt 2 iron_ingot\ncraft 1 bucket",
     False, 1, "line 2: craft bucket: 3 iron_ingot needed, 2 there"),
    ("more smelted than there is", {"iron_ore": 2}, "bucket", "smelt 3 iron_ingot", False, 0,
     "line 1: smelt iron_ingot: 1 iron_ore needed, 0 there"),
    ("a count rounded up", {"oak_log": 1, "coal": 1}, "torch",
     "craft 2 oak_planks\ncraft 1 stick\ncraft 1 torch", True, 3, None),
    ("a count rounded up to two applications", {"oak_log": 2, "stick": 2}, "oak_fence",
     "craft 5 oak_planks\ncraft 1 oak_fence", True, 2, None),
    ("a count that needs more than there is", {"oak_log": 1}, "stick",
     "craft 5 oak_planks\ncraft 4 stick", False, 0,
     "line 1: craft oak_planks: 1 oak_log or 1 others needed, 0 there"),
    ("cells of a pattern are counted", {"oak_planks": 3, "stick": 2}, "oak_fence",
     "craft 3 oak_fence", False, 0, "line 1: craft oak_fence: 4 oak_planks needed, 3 there"),
    ("spaces of a pattern are no cells", {"iron_ingot": 3}, "bucket", "craft 1 bucket",
     True, 1, None),
    ("two recipes for one line", {"bone": 1, "bone_block": 1}, "bone_meal", "craft 12 bone_meal",
     True, 1, None),
    ("nothing after the target is looked at", {"birch_planks": 2}, "stick",
     "craft 4 stick\nand that is all", True, 1, None),
    ("a plan that stops short", {"oak_log": 1}, "stick", "craft 4 oak_planks", False, 1,
     "no line makes 'stick'"),
    ("no line", {"oak_log": 1}, "stick", "", False, 0, "no line makes 'stick'"),
    ("30 lines", {"oak_log": 29, "birch_planks": 2}, "stick",
     "craft 4 oak_planks\n" * 29 + "craft 4 stick", True, 30, None),
    ("31 lines", {"oak_log": 30, "birch_planks": 2}, "stick",
     "craft 4 oak_planks\n" * 30 + "craft 4 stick", False, 30, "line 31: more than 30 lines"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("inventory", "target", "plan", "is_success", "n_valid", "problem"),
    [row[1:] for row in NASTY],
    ids=[str(row[0]) for row in NASTY],
)
def test_a_plan_is_carried_out(
    book: RecipeBook,
    inventory: dict[str, int],
    target: str,
    plan: str,
    is_success: bool,
    n_valid: int,
    problem: str | None,
) -> None:
    outcome = execute(parse_plan(plan).steps, inventory, target, book)
    assert (outcome.is_success, outcome.n_valid, outcome.problem) == (is_success, n_valid, problem)


def test_an_item_that_two_ingredients_ask_for_is_taken_once() -> None:
    both = Recipe(
        id="x",
        verb="craft",
        item="x",
        count=1,
        needs=(Need(options=("a",), quantity=1), Need(options=("a", "b"), quantity=1)),
    )
    steps = (Step(verb="craft", count=1, item="x"),)
    book = RecipeBook(recipes=(both,))
    assert execute(steps, {"a": 1, "b": 1}, "x", book).is_success
    problem = execute(steps, {"a": 1}, "x", book).problem
    assert problem == "line 1: craft x: an item is needed for two ingredients"


def naive(steps: list[Step], inventory: dict[str, int], book: RecipeBook) -> int:
    """Most lines that any sequence of choices can carry out, by trying all of them."""
    stocks = [inventory]
    for number, step in enumerate(steps):
        done: list[dict[str, int]] = []
        todo = [(step.count, stock) for stock in stocks]
        while todo:
            left, stock = todo.pop()
            for recipe in book.making(step.verb, step.item):
                slots = [need.options for need in recipe.needs for _ in range(need.quantity)]
                for kinds in set(itertools.product(*slots)):
                    after = dict(stock)
                    for kind in kinds:
                        after[kind] = after.get(kind, 0) - 1
                    if min(after.values()) < 0:
                        continue
                    after[step.item] = after.get(step.item, 0) + recipe.count
                    rest = left - recipe.count
                    if rest > 0:
                        todo.append((rest, after))
                    elif after not in done:
                        done.append(after)
        if not done:
            return number
        stocks = done
    return len(steps)


@pytest.mark.parametrize("seed", range(60))
def test_the_search_gets_as_far_as_trying_everything(seed: int) -> None:
    rng = random.Random(seed)
    raw, made = ["a", "b", "c"], ["p", "q", "r"]
    recipes = tuple(
        Recipe(
            id=f"{item}{way}",
            verb="craft",
            item=item,
            count=rng.randint(1, 2),
            needs=tuple(
                Need(options=tuple(rng.sample(raw + made, rng.randint(1, 3))), quantity=1 + extra)
                for extra in rng.choices((0, 0, 1), k=rng.randint(1, 2))
            ),
        )
        for item in made
        for way in range(rng.randint(1, 2))
    )
    book = RecipeBook(recipes=recipes)
    for _ in range(5):
        inventory = {item: rng.randint(0, 3) for item in raw}
        steps = [
            Step(verb="craft", count=rng.randint(1, 3), item=rng.choice(made)) for _ in range(4)
        ]
        outcome = execute(steps, inventory, "never", book)
        assert outcome.n_valid == naive(steps, inventory, book)


def test_a_plan_with_too_many_choices_is_given_up_and_says_so() -> None:
    kinds = [f"kind_{number}" for number in range(12)]
    mix = Recipe(
        id="mix",
        verb="craft",
        item="mix",
        count=1,
        needs=(Need(options=tuple(kinds), quantity=4),),
    )
    # Each kind is wanted again by the last line, which lacks what nothing gives.
    need_all = (*(Need(options=(kind,), quantity=3) for kind in kinds), NEVER)
    end = Recipe(id="end", verb="craft", item="end", count=1, needs=need_all)
    steps = [Step(verb="craft", count=4, item="mix"), Step(verb="craft", count=1, item="end")]
    book = RecipeBook(recipes=(mix, end))
    outcome = execute(steps, dict.fromkeys(kinds, 4), "end", book)
    assert not outcome.is_success
    assert outcome.problem is not None
    assert outcome.problem.endswith(f"given up after {MAX_STATES} inventories")


NEVER = Need(options=("never",), quantity=1)


# --- scores ----------------------------------------------------------------------------------

TORCH, STICK, BUCKET = range(3)


@pytest.mark.parametrize(
    ("place", "answer", "success", "progress"),
    [
        (TORCH, "craft 4 oak_planks\ncraft 4 stick\ncraft 4 torch", 1.0, 1.0),
        (TORCH, "craft 4 oak_planks\ncraft 4 stick\ncraft 4 torches", 0.0, PARTIAL * 2 / 3),
        (TORCH, "craft 4 oak_planks\ncraft 4 torch", 0.0, PARTIAL / 3),
        (TORCH, "smelt 1 charcoal\ncraft 4 torch", 0.0, 0.0),
        (TORCH, "impossible", 0.0, 0.0),
        (TORCH, "I can't say.", 0.0, 0.0),
        (TORCH, None, 0.0, 0.0),
        (STICK, "craft 4 stick", 1.0, 1.0),
        (BUCKET, "impossible", 1.0, 1.0),
        (BUCKET, "smelt 2 iron_ingot\ncraft 1 bucket", 0.0, 0.0),
        (BUCKET, "It is impossible, I think", 0.0, 0.0),
        (BUCKET, "impossible\nsmelt 2 iron_ingot", 0.0, 0.0),
        (BUCKET, "", 0.0, 0.0),
        (BUCKET, None, 0.0, 0.0),
    ],
)
def test_answers_are_scored(
    workload: Workload, place: int, answer: str | None, success: float, progress: float
) -> None:
    found = scores(workload, workload.examples[place], answer)
    assert found == pytest.approx((success, progress))


# --- what the nodes see ----------------------------------------------------------------------


def test_the_three_missing_edges_are_the_candidates(workload: Workload) -> None:
    found = {(edge.source, edge.receiver) for edge in workload.workflow.candidate_edges}
    assert found == {("recipes", "inventory"), ("recipes", "checker"), ("inventory", "checker")}


def test_documents_are_the_recipes_backwards_and_the_inventory_as_one_line(
    workload: Workload,
) -> None:
    context = workload.examples[TORCH].query.context
    lines = context["recipes"][0].text.split("\n")
    assert lines[0] == "craft 4 torch <- 1 stick, 1 coal or charcoal"
    assert "craft 4 stick <- 2 oak_planks" in lines
    assert "craft 4 oak_planks <- 1 oak_log" in lines
    assert context["inventory"][0].text == "1 oak_log, 1 coal, 3 dirt"


def test_every_example_fits_its_workflow_and_fills_in_the_target(workload: Workload) -> None:
    for example in workload.examples:
        workload.workflow.check_query(example.query)
        text = example.query.model_dump_json()
        assert "$" not in text
        assert len(example.query.text.split()) <= 40
        assert example.query.context.keys() == {"recipes", "inventory"}


def test_documents_do_not_depend_on_the_gold_path(tmp_path: Path) -> None:
    tasks = [dict(row) for row in TASKS]
    tasks[TORCH] |= {"optimal_path": ["torch"], "complexity_split": "easy"}
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    plain.mkdir()
    changed.mkdir()
    first = load(write_folder(plain), split="train", options={})
    second = load(write_folder(changed, tasks=tasks), split="train", options={})
    assert [e.query for e in first.examples] == [e.query for e in second.examples]


def test_recipe_documents_stay_within_their_bounds() -> None:
    wide = tuple(
        Recipe(
            id=f"item_{n}",
            verb="craft",
            item=f"item_{n}",
            count=1,
            needs=(Need(options=tuple(f"item_{n + step}" for step in range(1, 9)), quantity=1),),
        )
        for n in range(60)
    )
    cookbook = Cookbook(RecipeBook(recipes=wide))
    chosen = cookbook.recipes("item_0", {"item_60": 1}, "seed")
    text = recipes_text(chosen, cookbook.depths("item_0", {"item_60": 1}))
    assert 2 <= len(chosen) <= MAX_RECIPES
    assert len(text) <= MAX_RECIPE_CHARACTERS


def row(target: str, inventory: dict[str, int], path: list[str] | None) -> TaskRow:
    return TaskRow.model_validate(task(target, inventory, path))


ASK = ("recipes", "inventory")
CHECK_RECIPES = ("recipes", "checker")
CHECK_STOCK = ("inventory", "checker")


@pytest.mark.parametrize(
    ("task_row", "ingredients", "products", "edges"),
    [
        (row("stick", {"oak_planks": 2}, ["stick"]), {"oak_planks"}, {"stick"}, ()),
        (row("stick", {"oak_planks": 2, "dirt": 1}, ["stick"]), {"oak_planks"}, {"stick"}, (ASK,)),
        (
            row("stick", {"oak_log": 1}, ["oak_planks", "stick"]),
            {"oak_log", "oak_planks"},
            {"oak_planks", "stick"},
            (CHECK_RECIPES,),
        ),
        (row("stick", {"oak_log": 1}, ["oak_planks", "stick"]), {"oak_log"}, {"stick"}, None),
        (row("torch", {"coal": 1}, None), {"coal", "stick"}, {"torch"}, (CHECK_STOCK,)),
        (row("torch", {"dirt": 1}, None), {"coal"}, {"torch"}, (ASK, CHECK_STOCK)),
        # The target made twice over is no other item.
        (row("torch", {"coal": 1}, ["torch", "torch"]), {"coal"}, {"torch"}, ()),
    ],
)
def test_gap_edges_follow_from_the_data(
    task_row: TaskRow, ingredients: set[str], products: set[str], edges: object
) -> None:
    assert gap_edges(task_row, ingredients, products) == edges


# --- files -----------------------------------------------------------------------------------


def test_rows_keep_the_order_of_the_file_and_files_are_hashed(folder: Path) -> None:
    found = load(folder, split="validation", options={})
    assert [example.query.id for example in found.examples] == ["T-torch", "T-stick", "T-bucket"]
    assert [example.kind for example in found.examples] == ["hard", "easy", "impossible"]
    assert found.sources.keys() == {"recipes.json", "tags.json", "tasks_val.jsonl"}
    assert all(len(value) == 64 for value in found.sources.values())
    assert found.metrics == ("success", "progress")


def test_easy_tasks_leave_out_longer_ones(folder: Path) -> None:
    found = load(folder, split="train", options={"tasks": "easy"})
    assert [example.query.id for example in found.examples] == ["T-stick", "T-bucket"]


def test_an_unknown_option_names_the_choices(folder: Path) -> None:
    with pytest.raises(SettingsError, match="all, easy"):
        load(folder, split="train", options={"tasks": "some"})


def test_tags_within_tags_end_even_in_a_circle() -> None:
    tags = {"a": ("#b", "x"), "b": ("y", "#a", "x")}
    assert members("a", tags) == ("y", "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None}, r"tasks_train\.jsonl:2: field 'target'"),
        ({"inventory": {"oak_log": 0}}, r"tasks_train\.jsonl:2: field 'inventory\.oak_log'"),
        ({"inventory": {"Oak Log": 1}}, r"tasks_train\.jsonl:2: field 'inventory\.Oak Log"),
        ({"complexity_split": "huge"}, r"tasks_train\.jsonl:2: field 'complexity_split'"),
        ({"optimal_path": None}, r"tasks_train\.jsonl:2: field 'optimal_path'"),
        ({"optimal_path": []}, r"tasks_train\.jsonl:2: field 'optimal_path'.*end with the target"),
        ({"optimal_path": ["oak_planks"]}, r":2: field 'optimal_path'.*end with the target"),
        ({"impossible": True}, r"tasks_train\.jsonl:2: field 'optimal_path'"),
        ({"target": "soup", "optimal_path": ["soup"]}, r":2: .*no recipe makes 'soup'"),
        ({"id": "T-torch"}, r"tasks_train\.jsonl:2: field 'id': there is a task 'T-torch' already"),
    ],
)
def test_a_bad_task_is_named_by_file_line_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tasks = [TASKS[0], TASKS[1] | change, TASKS[2]]
    with pytest.raises(DataError, match=message):
        load(write_folder(tmp_path, tasks=tasks), split="train", options={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "stonecutting"}, r"recipes\.json: row 3: field 'type'"),
        ({"type": ["shaped"]}, r"recipes\.json: row 3: field 'type'"),
        ({"pattern": ["#?"]}, r"row 3: field 'pattern'.*draws '\?', which is not in the key"),
        ({"pattern": ["  "]}, r"row 3: field 'pattern'.*draws nothing"),
        ({"pattern": ["####"]}, r"row 3: field 'pattern\.0'"),
        ({"key": {"#": {"tag": "stones"}}}, r"row 3: field 'tag': there is no tag 'stones'"),
        ({"key": {"#": {}}}, r"row 3: field 'key\.#\.0'.*either an item or a tag"),
        ({"key": {"#": []}}, r"row 3: field 'key\.#'"),
        ({"result": {"item": "stick", "count": 0}}, r"row 3: field 'result\.count'"),
        ({"result": None}, r"row 3: field 'result'"),
    ],
)
def test_a_bad_recipe_is_named_by_file_row_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    recipes = [*RECIPES[:2], RECIPES[2] | change, *RECIPES[3:]]
    with pytest.raises(DataError, match=message):
        load(write_folder(tmp_path, recipes=recipes), split="train", options={})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tags": []}, r"tags\.json: not an object of tags"),
        ({"tags": TAGS | {"logs": ["#gone"]}}, r"tag 'logs': field 'values': .*no tag 'gone'"),
        ({"tags": TAGS | {"logs": [7]}}, r"tags\.json: tag 'logs': field 'values\.0'"),
        ({"recipes": {}}, r"recipes\.json: not a list"),
        ({"recipes": [5]}, r"recipes\.json: row 1: field 'type'"),
        ({"tasks": []}, r"tasks_train\.jsonl: no rows"),
        ({"tasks": [7]}, r"tasks_train\.jsonl:1: not a row"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write_folder(tmp_path, **files), split="train", options={})


def test_a_missing_file_and_a_missing_folder_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match="not a folder; it is to hold"):
        load(folder / "nowhere", split="train", options={})
    (folder / "tags.json").unlink()
    with pytest.raises(DataError, match=r"tags\.json: No such file"):
        load(folder, split="train", options={})


# --- the installed package -------------------------------------------------------------------


def game_recipe(row: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as the game writes it."""

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(item) for item in value]
        return {name: f"minecraft:{item}" for name, item in value.items()}

    raw: dict[str, Any] = {"group": "things", **row}
    del raw["id"]
    kind = row["type"]
    raw["type"] = "minecraft:smelting" if kind == "smelting" else f"minecraft:crafting_{kind}"
    raw["result"] = {"item": f"minecraft:{row['result']['item']}", "count": row["result"]["count"]}
    if raw["result"]["count"] == 1:
        del raw["result"]["count"]
    if kind == "shaped":
        raw["key"] = {cell: named(value) for cell, value in row["key"].items()}
    elif kind == "shapeless":
        raw["ingredients"] = named(row["ingredients"])
    else:
        raw |= {"ingredient": named(row["ingredient"]), "result": raw["result"]["item"]}
        raw |= {"experience": 0.1, "cookingtime": 200}
    return raw


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "site" / "plancraft"
    for part in ("data", "environment/recipes", "environment/tags"):
        (root / part).mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')\n", "utf-8")
    for recipe in RECIPES:
        text = json.dumps(game_recipe(recipe))
        (root / "environment" / "recipes" / f"{recipe['id']}.json").write_text(text, "utf-8")
    for name in ("stonecutting", "crafting_special_firework_star"):
        text = json.dumps({"type": f"minecraft:{name}"})
        (root / "environment" / "recipes" / f"{name}.json").write_text(text, "utf-8")
    for tag, values in TAGS.items():
        full = [value.replace("#", "#minecraft:") for value in values]
        full = [value if value.startswith("#") else f"minecraft:{value}" for value in full]
        text = json.dumps({"replace": False, "values": full})
        (root / "environment" / "tags" / f"{tag}.json").write_text(text, "utf-8")
    rows = [{**row, "optimal_path_length": 1.0, "items_used": None} for row in TASKS]
    for name in ("train", "val", "test"):
        (root / "data" / f"{name}.json").write_text(json.dumps(rows), "utf-8")
    monkeypatch.syspath_prepend(str(root.parent))
    return root


def test_the_package_gives_the_same_as_a_folder_and_is_not_imported(
    package: Path, tmp_path: Path
) -> None:
    ours = load(write_folder(tmp_path), split="validation", options={})
    theirs = load(None, split="validation", options={})
    assert theirs.examples == ours.examples
    assert read_source(None, "train").book == read_source(tmp_path, "train").book
    assert "plancraft" not in sys.modules
    assert theirs.sources.keys() == {
        "data/val.json",
        "environment/recipes/*.json",
        "environment/tags/*.json",
    }


def test_without_data_and_package_both_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DataError, match=r"recipes\.json, .*pip install --no-deps plancraft"):
        load(None, split="train", options={})


def test_a_bad_file_of_the_package_is_named(package: Path) -> None:
    path = package / "environment" / "recipes" / "stick.json"
    whole = path.read_text("utf-8")
    path.write_text(json.dumps(json.loads(whole) | {"pattern": 7}), "utf-8")
    with pytest.raises(DataError, match=r"stick\.json: field 'pattern'"):
        load(None, split="train", options={})
    path.write_text("{}", "utf-8")
    with pytest.raises(DataError, match=r"stick\.json: field 'type' is missing"):
        load(None, split="train", options={})
    path.write_text(whole, "utf-8")
    (package / "data" / "train.json").write_text('[{"id": "x"}]', "utf-8")
    with pytest.raises(DataError, match=r"train\.json: row 1: field 'target' is missing"):
        load(None, split="train", options={})
    (package / "data" / "train.json").unlink()
    with pytest.raises(DataError, match=r"train\.json: No such file"):
        load(None, split="train", options={})


def test_the_inventory_names_all_that_could_be_of_use_and_few_others() -> None:
    inventory = {f"useless_{n}": n + 1 for n in range(30)} | {"oak_log": 3}
    text = inventory_text(inventory, {"oak_log"}, "a")
    entries = text.split(", ")
    assert entries[-1] == "3 oak_log"
    assert len(entries) == MAX_KINDS
    assert text == inventory_text(inventory, {"oak_log"}, "a")
    assert text != inventory_text(inventory, {"oak_log"}, "b")
    assert inventory_text(inventory, set(inventory), "a").count(",") == 30
    assert inventory_text({"stick": 2}, set(), "a") == "2 stick"


# --- the real data ---------------------------------------------------------------------------


N_GOLD_STEPS = {"folder": 3752, "package": 4118}
"""The folder holds two thirds of the test split, the package all of it."""


def real_data(place: str) -> Path | None:
    """The folder, or None for the package; the test is skipped without it."""
    if place == "folder":
        return data_set("plancraft")
    if find_spec("plancraft") is None:
        pytest.skip("the package plancraft is not installed (pip install --no-deps plancraft)")
    return None


"""Steps of the 1,729 possible tasks of the subset; the package's 1,895 have 4,118."""


def gold_plans(path: tuple[str, ...], book: RecipeBook) -> Iterator[str]:
    """The gold path as plans: it does not say whether an item is crafted or smelted."""
    ways = [{recipe.verb for recipe in book.by_item[item]} for item in path]
    for verbs in itertools.product(*map(sorted, ways)):
        yield "\n".join(f"{verb} 1 {item}" for verb, item in zip(verbs, path, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("place", N_GOLD_STEPS)
def test_every_gold_path_is_a_plan_that_succeeds_and_every_example_is_well_formed(
    place: str,
) -> None:
    folder = real_data(place)
    n_steps = 0
    for split in ("train", "validation", "test"):
        found = load(folder, split=split, options={})
        book = read_source(folder, split).book
        for example in found.examples:
            found.workflow.check_query(example.query)
            assert len(example.query.context["recipes"][0].text) <= MAX_RECIPE_CHARACTERS
            path = example.reference["optimal_path"]
            if path is None:
                assert scores(found, example, "impossible") == (1.0, 1.0)
                continue
            n_steps += len(path)
            plans = gold_plans(path, book)
            assert any(scores(found, example, plan) == (1.0, 1.0) for plan in plans), example
    assert n_steps == N_GOLD_STEPS[place]
