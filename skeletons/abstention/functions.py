"""Functions as an agent is told of them: compact, since JSON documentation buries small models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, StringConstraints

from splice.prompts import one_line

N_WORDS = 300
"""Words for all functions of an agent; where there are many, each is told in fewer."""


class _Detail(NamedTuple):
    function: int
    """Words of a function's description."""
    parameter: int
    """Words of a parameter's description."""


_DETAILS = (_Detail(24, 20), _Detail(20, 12), _Detail(16, 6), _Detail(12, 0))
"""How much is told, the most first; the last is taken whether it fits or not."""

_MOST_CHOICES = 12
_DEEPEST = 3
"""Levels of parameters inside parameters that are shown."""

_TYPES: Final[Mapping[str, str]] = {
    "dict": "object",
    "float": "number",
    "array": "list",
    "tuple": "list",
}
"""Types of the function-calling sets by their plainer names; others stand for themselves."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$")]


class Schema(BaseModel):
    """What a parameter takes, in the dialect of JSON Schema that function-calling sets have."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str = "any"
    description: str | None = None
    enum: tuple[Any, ...] | None = None
    items: Schema | None = None
    properties: Mapping[str, Schema] = {}
    required: tuple[str, ...] = ()


class FunctionDoc(BaseModel):
    """A function's documentation as the data sets have it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Name
    description: str | None = None
    parameters: Schema = Schema()


def documentation(functions: Sequence[FunctionDoc]) -> str:
    """What an agent reads of its functions: a line each, and a line for each parameter.

    Descriptions are cut at a word, the shorter the more functions there are.

    >>> cab = {"properties": {"to": {"type": "string"}, "seats": {"type": "integer"}}}
    >>> print(documentation([FunctionDoc(name="get_cab", parameters={**cab, "required": ["to"]})]))
    get_cab
      to (string, required)
      seats (integer)
    """
    text = ""
    for detail in _DETAILS:
        text = "\n".join(line for function in functions for line in _told(function, detail))
        if len(text.split()) <= N_WORDS:
            break
    return text


def cut(text: str, n_words: int) -> str:
    """One line of at most `n_words` words, with an ellipsis where some are left out.

    >>> cut("the  city in which to look", 3)
    'the city in…'
    """
    words = one_line(text, limit=4000).split()
    if len(words) <= n_words:
        return " ".join(words)
    return " ".join(words[:n_words]).rstrip(".,;:") + "…"


def _told(function: FunctionDoc, detail: _Detail) -> Iterator[str]:
    yield _described(function.name, function.description, detail.function)
    yield from _parameters(function.parameters, detail, depth=1)


def _parameters(schema: Schema, detail: _Detail, depth: int) -> Iterator[str]:
    for name, parameter in schema.properties.items():
        facts = [_type(parameter)]
        if name in schema.required:
            facts.append("required")
        item = parameter.items
        if choices := parameter.enum or (item.enum if item else None):
            facts.append(f"one of {_listed(choices)}")
        shown = f"{'  ' * depth}{one_line(name, limit=60)} ({', '.join(facts)})"
        yield _described(shown, parameter.description, detail.parameter)
        if depth < _DEEPEST:
            yield from _parameters(item or parameter, detail, depth + 1)


def _described(shown: str, description: str | None, n_words: int) -> str:
    told = cut(description, n_words) if description and n_words else ""
    return f"{shown}: {told}" if told else shown


def _type(schema: Schema) -> str:
    name = _TYPES.get(schema.type, one_line(schema.type, limit=20))
    return f"{name} of {_type(schema.items)}" if name == "list" and schema.items else name


def _listed(choices: Sequence[Any]) -> str:
    shown = [one_line(str(choice), limit=40) for choice in choices[:_MOST_CHOICES]]
    # With spaces: "<" and "|" side by side open the control tokens of chat formats.
    return " | ".join([*shown, "…"] if len(choices) > _MOST_CHOICES else shown)
