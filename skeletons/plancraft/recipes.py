"""Recipes, tags and tasks: what they are, and how their files are read.

Two layouts hold the same rows: a folder of `recipes.json`, `tags.json` and `tasks_SPLIT.jsonl`, and
the installed package `plancraft` with the game's own files, one a recipe and one a tag.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from skeletons.reading import STEMS, as_row, raw_rows, read_json, sha256
from splice.errors import DataError
from splice.queries import Split
from splice.records import Record

Verb: TypeAlias = Literal["craft", "smelt"]
"""How an item is made: on a crafting table or in a furnace."""


class Need(Record):
    """One ingredient of a recipe: so many items, each of any of the kinds."""

    options: tuple[str, ...]
    quantity: int


class Recipe(Record):
    """What one application uses up and makes. Where things lie in the grid is left out."""

    id: str
    verb: Verb
    item: str
    count: int
    """Items that one application makes."""
    needs: tuple[Need, ...]
    """Ingredients with the fewest options first."""


class RecipeBook(Record):
    """All recipes, in the order of their ids."""

    recipes: tuple[Recipe, ...]

    @cached_property
    def by_item(self) -> Mapping[str, tuple[Recipe, ...]]:
        """Recipes by the item that they make."""
        found: dict[str, list[Recipe]] = defaultdict(list)
        for recipe in self.recipes:
            found[recipe.item].append(recipe)
        return {item: tuple(recipes) for item, recipes in found.items()}

    def making(self, verb: Verb, item: str) -> tuple[Recipe, ...]:
        """The recipes that make `item` by `verb`; empty: there is none."""
        return tuple(recipe for recipe in self.by_item.get(item, ()) if recipe.verb == verb)


# --- rows of the files -----------------------------------------------------------------------


def _bare(value: Any) -> Any:
    return value.replace("minecraft:", "", 1) if isinstance(value, str) else value


Name: TypeAlias = Annotated[
    str, BeforeValidator(_bare), StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=100)
]
"""An item or a tag; the prefix `minecraft:` is dropped."""

TagMember: TypeAlias = Annotated[
    str, BeforeValidator(_bare), StringConstraints(pattern=r"^#?[a-z0-9_]+$", max_length=100)
]
"""An item, or another tag after `#`."""

Count: TypeAlias = Annotated[int, Field(ge=1, le=10_000)]


class TaskRow(BaseModel):
    """A task as both layouts write it; fields that nothing here needs are not read."""

    id: Annotated[str, Field(min_length=1)]
    target: Name
    impossible: bool
    complexity_split: Literal["easy", "medium", "hard", "impossible"]
    optimal_path: tuple[Name, ...] | None
    """Items to make, one entry an application of a recipe; None where no plan exists."""
    inventory: dict[Name, Count]

    @field_validator("optimal_path")
    @classmethod
    def _suits(cls, path: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if info.data.get("impossible") is (path is not None):
            raise ValueError("a path for an impossible task, or none for a possible one")
        if path is not None and (not path or path[-1] != info.data.get("target")):
            raise ValueError("does not end with the target")
        return path


class _Choice(BaseModel):
    item: Name | None = None
    tag: Name | None = None

    @model_validator(mode="after")
    def _one(self) -> _Choice:
        if (self.item is None) is (self.tag is None):
            raise ValueError("needs either an item or a tag")
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


_Ingredient: TypeAlias = Annotated[
    tuple[_Choice, ...], BeforeValidator(_listed), Field(min_length=1)
]


class _Result(BaseModel):
    item: Name
    count: Count = 1


def _counted(value: Any) -> Any:
    return {"item": value} if isinstance(value, str) else value


class _RecipeRow(BaseModel):
    id: Annotated[str, Field(min_length=1)]
    result: Annotated[_Result, BeforeValidator(_counted)]

    def slots(self) -> Iterable[_Ingredient]:
        """Each item that one application uses up."""
        raise NotImplementedError


class _Shaped(_RecipeRow):
    key: dict[str, _Ingredient]
    pattern: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=3)], ...],
        Field(min_length=1, max_length=3),
    ]

    @field_validator("pattern")
    @classmethod
    def _is_drawn(cls, pattern: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        drawn = set("".join(pattern)) - {" "}
        if not drawn:
            raise ValueError("draws nothing")
        if unknown := sorted(drawn - info.data.get("key", dict.fromkeys(drawn)).keys()):
            raise ValueError(f"draws {unknown[0]!r}, which is not in the key")
        return pattern

    def slots(self) -> Iterable[_Ingredient]:
        return [self.key[cell] for cell in "".join(self.pattern) if cell != " "]


class _Shapeless(_RecipeRow):
    ingredients: Annotated[tuple[_Ingredient, ...], Field(min_length=1, max_length=9)]

    def slots(self) -> Iterable[_Ingredient]:
        return self.ingredients


class _Smelting(_RecipeRow):
    ingredient: _Ingredient

    def slots(self) -> Iterable[_Ingredient]:
        return [self.ingredient]


_KINDS: Mapping[str, tuple[Verb, type[_RecipeRow]]] = {
    "shaped": ("craft", _Shaped),
    "shapeless": ("craft", _Shapeless),
    "smelting": ("smelt", _Smelting),
}
_GAME_KINDS = {
    "minecraft:crafting_shaped": "shaped",
    "minecraft:crafting_shapeless": "shapeless",
    "minecraft:smelting": "smelting",
}
"""What the benchmark's environment applies; the game has more kinds of recipes."""


class _TagRow(BaseModel):
    values: Annotated[tuple[TagMember, ...], Field(min_length=1)]


Tags: TypeAlias = Mapping[str, tuple[str, ...]]


# --- from rows to recipes --------------------------------------------------------------------


def members(tag: str, tags: Tags) -> tuple[str, ...]:
    """The items of a tag and of the tags in it, in their order, each once.

    >>> members("logs", {"logs": ("#oak", "stem"), "oak": ("oak_log", "#logs")})
    ('oak_log', 'stem')

    Raises:
        KeyError: a tag that does not exist.
    """
    opened = {tag}
    items: dict[str, None] = {}
    todo = list(reversed(tags[tag]))
    while todo:
        member = todo.pop()
        if not member.startswith("#"):
            items[member] = None
        elif member[1:] not in opened:
            opened.add(member[1:])
            todo += reversed(tags[member[1:]])
    return tuple(items)


def _recipe(row: Any, kind: str, tags: Tags, place: str) -> Recipe:
    verb, model = _KINDS[kind]
    parsed = as_row(row, model, place)
    uses: Counter[tuple[str, ...]] = Counter()
    for choices in parsed.slots():
        options: dict[str, None] = {}
        for choice in choices:
            try:
                kinds = members(choice.tag, tags) if choice.tag else (str(choice.item),)
            except KeyError as error:
                raise DataError(f"{place}: field 'tag': there is no tag {error}") from None
            options.update(dict.fromkeys(kinds))
        uses[tuple(options)] += 1
    needs = [Need(options=options, quantity=quantity) for options, quantity in uses.items()]
    return Recipe(
        id=parsed.id,
        verb=verb,
        item=parsed.result.item,
        count=parsed.result.count,
        needs=tuple(sorted(needs, key=lambda need: len(need.options))),
    )


class Source(NamedTuple):
    """What was read: recipes, tasks in the order of their file, and hashes of the files."""

    book: RecipeBook
    tasks: tuple[TaskRow, ...]
    sources: Mapping[str, str]


def read_source(data: Path | None, split: Split) -> Source:
    """Recipes and the tasks of one split, from a folder or else from the installed package.

    Raises:
        DataError: a file is missing or malformed, or there is neither folder nor package.
    """
    if data is None:
        return _read_package(_package_folder(), split)
    if not data.is_dir():
        raise DataError(
            f"{data}: not a folder; it is to hold recipes.json, tags.json and "
            f"tasks_{STEMS[split]}.jsonl"
        )
    return _read_folder(data, split)


def _package_folder() -> Path:
    # The package is found and not imported: importing it would load vision libraries.
    found = find_spec("plancraft")
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "no data: give a folder that holds recipes.json, tags.json and tasks_SPLIT.jsonl, or "
            "install the package with the original files: pip install --no-deps plancraft==0.4.9"
        )
    return Path(next(iter(found.submodule_search_locations)))


def _read_folder(folder: Path, split: Split) -> Source:
    paths = [folder / name for name in ("recipes.json", "tags.json", f"tasks_{STEMS[split]}.jsonl")]
    recipe_path, tag_path, task_path = paths
    tags = _checked_tags(_folder_tags(tag_path))
    recipes = []
    for place, row in raw_rows(recipe_path):
        kind = row.get("type") if isinstance(row, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise DataError(f"{place}: field 'type': {kind!r} is not one of {', '.join(_KINDS)}")
        recipes.append(_recipe(row, kind, tags, place))
    book = _book(recipes, f"{recipe_path}")
    return Source(book, _tasks(task_path, book), {path.name: sha256(path) for path in paths})


def _folder_tags(path: Path) -> dict[str, tuple[str, _TagRow]]:
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise DataError(f"{path}: not an object of tags")
    return {
        name: (place, as_row({"values": values}, _TagRow, place))
        for name, values in raw.items()
        for place in (f"{path}: tag {name!r}",)
    }


def _read_package(folder: Path, split: Split) -> Source:
    tag_paths = _json_files(folder / "environment" / "tags")
    recipe_paths = _json_files(folder / "environment" / "recipes")
    task_path = folder / "data" / f"{STEMS[split]}.json"
    tags = _checked_tags(
        {path.stem: (f"{path}", as_row(read_json(path), _TagRow, f"{path}")) for path in tag_paths}
    )
    recipes = []
    for path in recipe_paths:
        row = read_json(path)
        if not isinstance(row, dict) or not isinstance(row.get("type"), str):
            raise DataError(f"{path}: field 'type' is missing")
        if row["type"] in _GAME_KINDS:
            kind = _GAME_KINDS[row["type"]]
            recipes.append(_recipe({**row, "id": path.stem}, kind, tags, f"{path}"))
    book = _book(recipes, f"{folder / 'environment' / 'recipes'}")
    tasks = _tasks(task_path, book)
    sources = {
        f"data/{task_path.name}": sha256(task_path),
        "environment/recipes/*.json": _folder_hash(recipe_paths),
        "environment/tags/*.json": _folder_hash(tag_paths),
    }
    return Source(book, tasks, sources)


def _json_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(f"{folder}: no JSON files")
    return paths


def _folder_hash(paths: Iterable[Path]) -> str:
    """SHA-256 over one line a file: its SHA-256, two spaces, its name."""
    lines = "".join(f"{sha256(path)}  {path.name}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()


def _checked_tags(rows: Mapping[str, tuple[str, _TagRow]]) -> Tags:
    tags = {name: row.values for name, (_, row) in rows.items()}
    for place, row in rows.values():
        for member in row.values:
            if member.startswith("#") and member[1:] not in tags:
                raise DataError(f"{place}: field 'values': there is no tag {member[1:]!r}")
    return tags


def _book(recipes: Iterable[Recipe], place: str) -> RecipeBook:
    book = RecipeBook(recipes=tuple(sorted(recipes, key=lambda recipe: recipe.id)))
    if not book.recipes:
        raise DataError(f"{place}: no recipes")
    return book


def _tasks(path: Path, book: RecipeBook) -> tuple[TaskRow, ...]:
    tasks = []
    seen: set[str] = set()
    for place, raw in raw_rows(path):
        row = as_row(raw, TaskRow, place)
        if row.id in seen:
            raise DataError(f"{place}: field 'id': there is a task {row.id!r} already")
        seen.add(row.id)
        for item in row.optimal_path or ():
            if item not in book.by_item:
                raise DataError(f"{place}: field 'optimal_path': no recipe makes {item!r}")
        tasks.append(row)
    return tuple(tasks)
