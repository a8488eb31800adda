"""Plans: how they are read from an answer, and how they are carried out on an inventory."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from skeletons.plancraft.recipes import Need, Recipe, RecipeBook, Verb
from splice.records import Record

MAX_LINES: Final = 30
"""Lines of a plan that are carried out, as in the benchmark; what follows is not looked at."""
MAX_CHARACTERS: Final = 8_000
"""Characters of an answer that are read."""
MAX_COUNT: Final = 9_999
"""Items that one line may make."""
MAX_STATES: Final = 5_000
"""Inventories that the search over choices visits before it gives a plan up."""

_VERBS: Final[Mapping[str, Verb]] = {"craft": "craft", "smelt": "smelt"}
_LABEL = re.compile(r"(?:(?:the )?(?:final |crafting )?(?:plan|answer|steps))(?: is)? ?: ?")
_NUMBERING = re.compile(r"(?:step ?)?\d{1,3} ?[.):] ?|step \d{1,3} |[-*•–>]+ ?")
_SEPARATOR = re.compile(r"->|=>|→|;|,|\b(?:and )?then\b")
_TAIL = re.compile(r" ?(?:\(|<-|\b(?:from|using|with)\b)")
_COUNT = re.compile(r"(\d+)x?")
_ITEM = re.compile(r"[a-z0-9_]+")


class Step(Record):
    """One line of a plan: make so many of an item."""

    verb: Verb
    count: int
    """Items wanted; rounded up to whole applications when it is carried out."""
    item: str


class BadStep(Record):
    """A line that is no step, and why."""

    problem: str


class Plan(Record):
    """The lines of an answer."""

    steps: tuple[Step | BadStep, ...] = ()
    is_impossible: bool = False
    """The answer says that there is no plan, and nothing else."""


class Outcome(Record):
    """What carrying out a plan gave."""

    is_success: bool
    n_valid: int
    """Lines that could be carried out, up to the first that makes the target."""
    made: tuple[str, ...]
    """Items that these lines made, in order."""
    problem: str | None
    """Which line failed, and why; None after a success."""


# --- reading ---------------------------------------------------------------------------------


def parse_plan(answer: str) -> Plan:
    """Read a plan from an answer; what is no step is kept as a `BadStep`.

    One step a line, or several with `,`, `;`, `->` or `then` between them: `craft 4 oak_planks`,
    `smelt 1 glass`. List numbers, bullets, code fences, emphasis, letter case, `minecraft:`, spaces
    in names, a label such as `Plan:` and an opening line that ends with a colon don't count. A
    missing count is 1. What follows `(`, `<-`, `from`, `using` or `with` is a remark. Item names
    are never corrected.

    >>> parse_plan("1. Craft 4 Oak Planks, then craft 4 stick").steps[1]
    Step(verb='craft', count=4, item='stick')
    """
    lines = _lines(answer)
    if len(lines) == 1 and (lines[0] == "impossible" or lines[0].startswith("impossible:")):
        return Plan(is_impossible=True)
    steps: list[Step | BadStep] = []
    for line in lines:
        has_remark = False
        for piece in filter(None, map(_unnumbered, _SEPARATOR.split(line))):
            if has_remark and piece[0].isdigit():
                continue
            has_remark = _TAIL.search(piece) is not None
            steps.append(_step(piece))
            if len(steps) > MAX_LINES:
                return Plan(steps=tuple(steps))
    return Plan(steps=tuple(steps))


def _lines(answer: str) -> list[str]:
    text = unicodedata.normalize("NFKC", answer[:MAX_CHARACTERS]).casefold()
    lines: list[str] = []
    for raw in text.replace("**", "").splitlines():
        if raw.lstrip().startswith("```"):
            continue
        line = _unnumbered(" ".join(raw.replace("`", "").split()))
        if label := _LABEL.match(line):
            line = _unnumbered(line[label.end() :])
        line = line.rstrip(" .!")
        is_heading = not lines and line.endswith(":")
        if line and not is_heading:
            lines.append(line)
    return lines


def _unnumbered(line: str) -> str:
    line = line.strip().removeprefix("and ")
    while mark := _NUMBERING.match(line):
        line = line[mark.end() :]
    return line


def _step(piece: str) -> Step | BadStep:
    shown = piece[:60]
    head, *rest = piece[: tail.start() if (tail := _TAIL.search(piece)) else None].split(" ")
    verb = _VERBS.get(head.rstrip(":"))
    if verb is None:
        return BadStep(problem=f"{shown!r} does not begin with craft or smelt")
    count = _COUNT.fullmatch(rest[0]) if rest else None
    name = "_".join(rest[1:] if count else rest).removeprefix("minecraft:").strip("'\"._")
    if not _ITEM.fullmatch(name):
        return BadStep(problem=f"{shown!r} names no item")
    # Its length is looked at first: turning very long digits into a number takes very long.
    if count and (len(count[1]) > 4 or not 1 <= int(count[1]) <= MAX_COUNT):
        return BadStep(problem=f"{shown!r}: a count is 1 to {MAX_COUNT}")
    return Step(verb=verb, count=int(count[1]) if count else 1, item=name)


# --- carrying out ----------------------------------------------------------------------------

Stock: TypeAlias = tuple[int, ...]
"""Quantities of the items that a search keeps track of."""


class _State(NamedTuple):
    """A point of a search: before an application of a recipe."""

    line: int
    left: int
    """Items that the line is still to make."""
    stock: Stock


def execute(
    steps: Sequence[Step | BadStep],
    inventory: Mapping[str, int],
    target: str,
    book: RecipeBook,
) -> Outcome:
    """Carry out a plan line by line until a line makes the target.

    A line makes its item by whole applications of recipes until at least `count` are made. Where
    several recipes or ingredients would do, every choice is tried until one carries the whole plan;
    a plan whose choices need more than `MAX_STATES` inventories fails at the line it got to.
    """
    wanted: list[Step] = []
    problem = f"no line makes {target!r}"
    for number, step in enumerate(steps, 1):
        if number > MAX_LINES:
            problem = f"line {number}: more than {MAX_LINES} lines"
        elif isinstance(step, BadStep):
            problem = f"line {number}: {step.problem}"
        elif not book.making(step.verb, step.item):
            problem = f"line {number}: no recipe to {step.verb} {step.item!r}"
        else:
            wanted.append(step)
            if step.item != target:
                continue
        break
    n_valid, failure = _Search(wanted, inventory, book).run()
    made = tuple(step.item for step in wanted[:n_valid])
    if failure is not None:
        return Outcome(is_success=False, n_valid=n_valid, made=made, problem=failure)
    is_success = target in made
    return Outcome(
        is_success=is_success, n_valid=n_valid, made=made, problem=None if is_success else problem
    )


class _Choice(NamedTuple):
    """One ingredient as a search sees it: places in the stock, and how many items are taken."""

    free: tuple[int, ...]
    """Kinds that nothing else in this line and no later line can use."""
    others: tuple[int, ...]
    quantity: int


class _Search:
    """Depth-first search over the choices of recipes and ingredients."""

    def __init__(
        self, steps: Sequence[Step], inventory: Mapping[str, int], book: RecipeBook
    ) -> None:
        self.steps = steps
        self.recipes = [book.making(step.verb, step.item) for step in steps]
        used = {option for line in self.recipes for option in _options(line)}
        there = used & (inventory.keys() | {step.item for step in steps})
        self.place = {item: place for place, item in enumerate(sorted(there))}
        self.start = tuple(inventory.get(item, 0) for item in self.place)
        self.needed_from = self._needed_from()
        self.choices = [
            [[self._choice(need, line) for need in recipe.needs] for recipe in recipes]
            for line, recipes in enumerate(self.recipes)
        ]

    def _needed_from(self) -> list[frozenset[int]]:
        """Places of the items that a line or one after it can use, by line."""
        needed: list[frozenset[int]] = [frozenset()]
        for recipes in reversed(self.recipes):
            own = {self.place[option] for option in _options(recipes) if option in self.place}
            needed.append(needed[-1] | own)
        return needed[::-1]

    def _choice(self, need: Need, line: int) -> _Choice:
        needs = [other for recipe in self.recipes[line] for other in recipe.needs]
        asked_elsewhere = {
            option for other in needs if other.options != need.options for option in other.options
        }
        free: list[int] = []
        others: list[int] = []
        for option in need.options:
            if (place := self.place.get(option)) is None:
                continue
            is_free = option not in asked_elsewhere and place not in self.needed_from[line + 1]
            (free if is_free else others).append(place)
        return _Choice(tuple(free), tuple(others), need.quantity)

    def run(self) -> tuple[int, str | None]:
        """How many lines can be carried out, and why the next one can't."""
        if not self.steps:
            return 0, None
        seen: set[_State] = set()
        reached, reason = -1, ""
        open_choices = [iter([_State(0, self.steps[0].count, self.start)])]
        while open_choices:
            state = next(open_choices[-1], None)
            if state is None:
                open_choices.pop()
                continue
            if state in seen:
                continue
            if state.line == len(self.steps):
                return state.line, None
            if len(seen) == MAX_STATES:
                return reached, f"line {reached + 1}: given up after {MAX_STATES} inventories"
            seen.add(state)
            if state.line > reached:
                reached, reason = state.line, ""
            if state.line == reached and not reason:
                reason = self._shortage(state)
            open_choices.append(self._following(state))
        return reached, f"line {reached + 1}: {reason}"

    def _following(self, state: _State) -> Iterator[_State]:
        """The states that one application of a recipe leads to."""
        step = self.steps[state.line]
        made = self.place.get(step.item)
        for recipe, choices in zip(self.recipes[state.line], self.choices[state.line], strict=True):
            line, left = state.line, state.left - recipe.count
            if left <= 0:
                line += 1
                left = self.steps[line].count if line < len(self.steps) else 0
            # What no line needs any more is forgotten, so that more inventories count as the same.
            needed = self.needed_from[line]
            for stock in _without(choices, state.stock):
                after = [quantity if p in needed else 0 for p, quantity in enumerate(stock)]
                if made in needed:
                    after[made] += recipe.count
                yield _State(line, left, tuple(after))

    def _shortage(self, state: _State) -> str:
        """What the recipe that comes nearest lacks; empty: a recipe can be applied."""
        step = self.steps[state.line]
        lacks: list[list[str]] = []
        for recipe, choices in zip(self.recipes[state.line], self.choices[state.line], strict=True):
            if next(_without(choices, state.stock), None) is not None:
                return ""
            lacks.append(
                [
                    _lack(need, there)
                    for need, choice in zip(recipe.needs, choices, strict=True)
                    if (there := _there(choice, state.stock)) < need.quantity
                ]
            )
        nearest = min(lacks, key=lambda lack: len(lack))
        # Nothing is lacking by itself where two ingredients ask for the same items.
        cause = "; ".join(nearest) or "an item is needed for two ingredients"
        return f"{step.verb} {step.item}: {cause}"


def _options(recipes: Iterable[Recipe]) -> set[str]:
    return {option for recipe in recipes for need in recipe.needs for option in need.options}


def _there(choice: _Choice, stock: Stock) -> int:
    return sum(stock[place] for place in (*choice.free, *choice.others))


def _lack(need: Need, there: int) -> str:
    others = f" or {len(need.options) - 1} others" if len(need.options) > 1 else ""
    return f"{need.quantity} {need.options[0]}{others} needed, {there} there"


def _without(choices: Sequence[_Choice], stock: Stock) -> Iterator[Stock]:
    """What is left of `stock` after the ingredients were taken, in each way that matters."""
    if not choices:
        yield stock
        return
    first, *rest = choices
    quantity, changed = first.quantity, list(stock)
    # Kinds that nothing else asks for go first: to keep them can't help.
    for place in first.free:
        taken = min(quantity, changed[place])
        changed[place] -= taken
        quantity -= taken
    others = sorted((p for p in first.others if stock[p]), key=lambda place: -stock[place])
    for left in _spread(others, quantity, tuple(changed)):
        yield from _without(rest, left)


def _spread(places: Sequence[int], quantity: int, stock: Stock) -> Iterator[Stock]:
    """Each way to take `quantity` from `places`, as much as possible from the first ones first."""
    if quantity == 0:
        yield stock
        return
    if sum(stock[place] for place in places) < quantity:
        return
    first, *rest = places
    for taken in range(min(quantity, stock[first]), -1, -1):
        left = (*stock[:first], stock[first] - taken, *stock[first + 1 :])
        yield from _spread(rest, quantity - taken, left)
