"""What the nodes may read: the recipes that a task may need, and what is in the inventory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from skeletons.plancraft.recipes import Need, Recipe, RecipeBook

MAX_RECIPES: Final = 12
MAX_RECIPE_CHARACTERS: Final = 640
"""Bounds of the recipe document: a small model reads some 200 tokens well."""
MAX_KINDS: Final = 10
"""Kinds of items that the inventory document names; more only if more could be of use."""
MAX_PER_ITEM: Final = 2
"""Ways to make one item that are listed."""
MAX_OPTIONS: Final = 3
"""Kinds that are named for one ingredient."""
N_DISTRACTORS: Final = 2
"""Recipes that have nothing to do with the task, where there is room for them."""


class Cookbook:
    """Chooses the recipes of a task; what it works out for a target is kept for the next task."""

    def __init__(self, book: RecipeBook) -> None:
        self._book = book
        self._closures: dict[str, tuple[Recipe, ...]] = {}

    def closure(self, target: str) -> tuple[Recipe, ...]:
        """Every recipe that `target` could be made with, directly or through others."""
        if target not in self._closures:
            found: list[Recipe] = []
            seen, todo = {target}, [target]
            while todo:
                for recipe in self._book.by_item.get(todo.pop(), ()):
                    found.append(recipe)
                    new = {o for need in recipe.needs for o in need.options} - seen
                    seen |= new
                    todo += sorted(new)
            self._closures[target] = tuple(found)
        return self._closures[target]

    def related(self, target: str) -> frozenset[str]:
        """Every item that some way to `target` could use."""
        needs = (need for recipe in self.closure(target) for need in recipe.needs)
        return frozenset(option for need in needs for option in need.options)

    def depths(self, target: str, inventory: Iterable[str]) -> dict[str, int]:
        """Steps to each item that can be made on the way to `target`, with quantities aside.

        What the inventory holds has depth 0; what can't be made is left out.
        """
        depth = dict.fromkeys(inventory, 0)
        recipes = [recipe for recipe in self.closure(target) if recipe.item not in depth]
        is_new = True
        while is_new:
            is_new = False
            for recipe in recipes:
                below = recipe_depth(recipe, depth)
                if below is not None and below < depth.get(recipe.item, below + 1):
                    depth[recipe.item] = below
                    is_new = True
        return depth

    def recipes(self, target: str, inventory: Iterable[str], seed: str) -> list[Recipe]:
        """The recipes of a task: backwards from the target, then a few that it has no use for.

        Ways that the inventory allows come first, short ones before long ones. Recipes for what
        the inventory holds already follow after all others, as there may be too little of it.
        """
        held = set(inventory)
        depth = self.depths(target, held)
        chosen: dict[str, Recipe] = {}
        missing, more, seen = deque([target]), deque[str](), {target}
        while missing or more:
            item = missing.popleft() if missing else more.popleft()
            for recipe in self._ways(item, depth):
                if not _fits([*chosen.values(), recipe], depth):
                    return list(chosen.values())
                chosen[recipe.id] = recipe
                new = [option for need in recipe.needs for option in _pursued(need, depth)]
                for option in dict.fromkeys(new):
                    if option not in seen:
                        (more if option in held else missing).append(option)
                seen.update(new)
        return self._mixed(list(chosen.values()), depth, target, seed)

    def _ways(self, item: str, depth: Mapping[str, int]) -> list[Recipe]:
        """The best recipes for an item: those that can be applied, if it can be had at all."""
        ways = self._book.by_item.get(item, ())
        known = [(d, way) for way in ways if (d := recipe_depth(way, depth)) is not None]
        known.sort(key=lambda pair: pair[0])
        best = [way for _, way in known] if item in depth else list(ways)
        return best[:MAX_PER_ITEM]

    def _mixed(
        self, chosen: list[Recipe], depth: Mapping[str, int], target: str, seed: str
    ) -> list[Recipe]:
        """`chosen` with recipes put between that lead nowhere; the target's stays first."""
        rng = random.Random(f"plancraft:{seed}")
        related = {recipe.id for recipe in self.closure(target)}
        unrelated = [recipe for recipe in self._book.recipes if recipe.id not in related]
        for recipe in rng.sample(unrelated, min(N_DISTRACTORS, len(unrelated))):
            if _fits([*chosen, recipe], depth):
                chosen.insert(rng.randint(min(1, len(chosen)), len(chosen)), recipe)
        return chosen


def recipe_depth(recipe: Recipe, depth: Mapping[str, int]) -> int | None:
    """One more than the deepest ingredient; None: an ingredient can't be had."""
    deepest = 0
    for need in recipe.needs:
        known = [depth[option] for option in need.options if option in depth]
        if not known:
            return None
        deepest = max(deepest, min(known))
    return deepest + 1


def shown(need: Need, depth: Mapping[str, int]) -> list[str]:
    """The kinds that are named for an ingredient: those that can be had, or else the first."""
    known = sorted((o for o in need.options if o in depth), key=depth.__getitem__)
    return (known or list(need.options))[:MAX_OPTIONS]


def _pursued(need: Need, depth: Mapping[str, int]) -> list[str]:
    """The kinds whose own recipes are listed: of an ingredient that can't be had only the first."""
    return [option for option in shown(need, depth) if option in depth] or [need.options[0]]


def recipe_line(recipe: Recipe, depth: Mapping[str, int]) -> str:
    """One recipe: `craft 4 stick <- 2 oak_planks or birch_planks`."""
    needs = ", ".join(f"{need.quantity} {' or '.join(shown(need, depth))}" for need in recipe.needs)
    return f"{recipe.verb} {recipe.count} {recipe.item} <- {needs}"


def recipes_text(recipes: Iterable[Recipe], depth: Mapping[str, int]) -> str:
    """One line a recipe."""
    return "\n".join(recipe_line(recipe, depth) for recipe in recipes)


def inventory_text(inventory: Mapping[str, int], related: Collection[str], seed: str) -> str:
    """The inventory as one line: `3 oak_log, 2 stick`.

    Every kind of `related` is named, and of the others as many as there is room for.
    """
    others = [item for item in inventory if item not in related]
    room = max(0, MAX_KINDS - (len(inventory) - len(others)))
    rng = random.Random(f"plancraft:inventory:{seed}")
    left_out = set(rng.sample(others, max(0, len(others) - room)))
    kept = (item for item in inventory if item not in left_out)
    return ", ".join(f"{inventory[item]} {item}" for item in kept)


def _fits(recipes: list[Recipe], depth: Mapping[str, int]) -> bool:
    return (
        len(recipes) <= MAX_RECIPES and len(recipes_text(recipes, depth)) <= MAX_RECIPE_CHARACTERS
    )
