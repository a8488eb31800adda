"""Tools that answer from recordings, strictly: a call that nobody recorded is an error.

The engine reads a tool's parameters from the signature of its function. Here they are known only
once data has been read, so the callable brings a signature of its own. Replaying changes nothing
outside, whatever the recorded API did: every tool made here has the effects `read`.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel

from splice.errors import SpliceError
from splice.records import Record, ToolSpec
from splice.workflow import Tool

Answer: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Gives the recorded result for arguments under their recorded names, or raises `NotRecorded`."""

_LEGAL = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,59}")
_PREFIX = "arg_"


class NotRecorded(SpliceError):
    """Raised if a replayed tool is called as nobody called it in the recordings."""


class RecordedFailure(SpliceError):
    """Raised if a replayed call failed when it was recorded."""


class Parameter(Record):
    """An argument of a replayed tool, as its documentation has it."""

    name: str
    type: str = "string"
    """Type of JSON Schema; it is told to the model and not enforced."""
    description: str = ""
    is_required: bool = False
    """As the model is told. A call without it is looked up all the same."""


class Replayed:
    """The callable of a replayed tool."""

    def __init__(self, names: Mapping[str, str], answer: Answer) -> None:
        """Take arguments under the keys of `names` and look them up under its values."""
        self._names = dict(names)
        self._answer = answer
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=object | None
                )
                for name in names
            ]
        )

    # Async, as the engine would take a worker thread for a look-up in memory.
    async def __call__(self, /, **arguments: object) -> str:
        """The recorded result; an argument that is null counts as not given."""
        return self._answer(
            {self._names[name]: value for name, value in arguments.items() if value is not None}
        )


def replay_tool(
    name: str, description: str, parameters: Iterable[Parameter], answer: Answer
) -> Tool:
    """A tool named `name` that answers from recordings."""
    by_name = {parameter.name: parameter for parameter in parameters}
    names = legal_names(by_name)
    properties = {
        legal: {"type": by_name[told].type, "description": by_name[told].description}
        for legal, told in names.items()
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": [legal for legal, told in names.items() if by_name[told].is_required],
    }
    spec = ToolSpec(name=name, description=description, parameters=schema)
    return Tool(spec=spec, call=Replayed(names, answer), effects="read")


def legal_names(names: Iterable[str]) -> dict[str, str]:
    """Each name by the one under which a model may give it.

    A tool's arguments are keywords and fields of a pydantic model; what can't be one is spelled
    anew.

    >>> legal_names(["city", "from", "x-units", "x units"])
    {'city': 'city', 'arg_from': 'from', 'arg_x_units': 'x-units', 'arg_x_units_2': 'x units'}
    """
    legal: dict[str, str] = {}
    for name in names:
        wanted = name if _is_legal(name) else _PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", name)[:48]
        place, free = 2, wanted
        while free in legal:
            free, place = f"{wanted}_{place}", place + 1
        legal[free] = name
    return legal


def _is_legal(name: str) -> bool:
    return not (
        _LEGAL.fullmatch(name) is None
        or keyword.iskeyword(name)
        or hasattr(BaseModel, name)
        or name.startswith(("model_", _PREFIX))
    )
