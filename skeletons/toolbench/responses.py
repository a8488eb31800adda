"""Recorded responses: a local copy of StableToolBench's cache, or recorded runs.

A call without a recorded response is an error. Nothing here makes a response up.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, StringConstraints

from skeletons.reading import as_row, raw_rows, read_json, sha256
from skeletons.replay import NotRecorded, Parameter
from skeletons.toolbench.apis import Api, Row, Text, parameter_name, standard
from skeletons.toolbench.requests import Asked
from splice.errors import DataError, SettingsError
from splice.prompts import one_line, without_surrogates
from splice.records import digest

MOST_CHARS = 2048
"""Characters of a response that a model is shown: enough for what the recorded runs hold, which
were cut when they were recorded."""

_LONGEST_LITERAL = 20_000

Function = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


def argument_key(arguments: str | Mapping[str, Any]) -> str:
    """Arguments in the form in which they are compared.

    As JSON, so that order and spacing don't count; nothing at all is no arguments, and an argument
    that is null counts as not given. StableToolBench's server writes the keys of its cache as
    Python spells a dictionary; they are read as well. Other text stands for itself.

    >>> argument_key('{"b": 1, "a": "x"}') == argument_key("{'a': 'x', 'b': 1}")
    True
    """
    value = _parsed(arguments) if isinstance(arguments, str) else dict(arguments)
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if item is not None}
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(arguments)


def _parsed(text: str) -> object:
    try:
        return json.loads(text.strip() or "{}")
    except (ValueError, RecursionError):
        pass
    if not text.lstrip().startswith("{") or len(text) > _LONGEST_LITERAL:
        return text
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


class Recorded(NamedTuple):
    """One recorded response."""

    place: tuple[str, ...]
    """The API's, as in `Api`."""
    arguments: str
    response: str


class Responses:
    """Recorded responses by API and arguments."""

    def __init__(self, recorded: Iterable[Recorded]) -> None:
        """Keep responses; of several to the same call the first."""
        self._by_call: dict[tuple[tuple[str, ...], str], str] = {}
        for place, arguments, response in recorded:
            self._by_call.setdefault((place, argument_key(arguments)), response)

    def __len__(self) -> int:
        return len(self._by_call)

    def answer(self, api: Api, arguments: Mapping[str, Any]) -> str:
        """The recorded response, cut to `MOST_CHARS`.

        Raises:
            NotRecorded: there is none; the message names category, tool, API and arguments.
        """
        found = self._by_call.get((api.place, argument_key(arguments)))
        if found is None:
            shown = one_line(json.dumps(dict(arguments), ensure_ascii=False, default=str))
            raise NotRecorded(f"no recorded response of {_named(api)} to the arguments {shown}")
        return found if len(found) <= MOST_CHARS else f"{found[:MOST_CHARS]}..."


def _named(api: Api) -> str:
    if len(api.place) == 1:
        return f"function {api.function!r}"
    category, tool, name = api.place
    return f"category {category!r}, tool {tool!r}, API {name!r}"


# --- the cache --------------------------------------------------------------------------------


def read_cache(folder: Path, apis: Iterable[Api]) -> tuple[Responses, str]:
    """The responses that a copy of the cache holds for `apis`, and a digest of the files read.

    Raises:
        DataError: a file is malformed, or there is none for any of the APIs.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder")
    recorded: list[Recorded] = []
    hashes = []
    for api in apis:
        path = cache_file(folder, api)
        if path is None:
            continue
        held = read_json(path)
        if not isinstance(held, dict):
            raise DataError(f"{path}: not an object of responses by arguments")
        recorded += [Recorded(api.place, key, _text(value)) for key, value in held.items()]
        hashes.append(f"{path.relative_to(folder)} {sha256(path)}")
    if not hashes:
        raise DataError(
            f"{folder}: no file CATEGORY/TOOL_for_CATEGORY/API.json for any of the offered APIs"
        )
    return Responses(recorded), digest("\n".join(sorted(hashes)))


def cache_file(folder: Path, api: Api) -> Path | None:
    """The file of an API's responses; None if there is none or its names lead out of the folder."""
    category, tool, name = api.place
    category = "_".join(category.replace("/", " ").replace(",", " ").replace("_", " ").split())
    path = folder / category / f"{standard(tool)}_for_{category}" / f"{parameter_name(name)}.json"
    try:
        is_held = path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if is_held else None


def _text(value: object) -> str:
    """A response as text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return without_surrogates(text)


# --- recorded runs ----------------------------------------------------------------------------


class _Property(Row):
    type: str = "string"
    description: Text | None = ""
    example_value: Any = ""


class _Schema(Row):
    properties: Mapping[Text, _Property] = {}
    required: tuple[Text, ...] = ()


class _Function(Row):
    name: Function
    description: Text = ""
    parameters: _Schema = _Schema()


class _Call(Row):
    name: Text
    arguments: str
    response: str


def _distinct(functions: tuple[_Function, ...]) -> tuple[_Function, ...]:
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"there are two functions named {name!r}")
    return functions


class _Run(Row):
    id: Text
    source: Text
    subset: Text
    query: Annotated[Text, Field(min_length=1, pattern=r"\S")]
    functions: Annotated[tuple[_Function, ...], AfterValidator(_distinct)]
    calls: tuple[_Call, ...]


def read_runs(path: Path, source: str | None) -> tuple[tuple[Asked, ...], Responses, str]:
    """The requests of recorded runs from one source, their responses, and the source's name.

    Runs of the same request share an example: the first run gives its id and functions.

    Raises:
        DataError: the file is malformed, or holds several sources and none was chosen.
        SettingsError: `source` is not in the file.
    """
    rows = [as_row(raw, _Run, place) for place, raw in raw_rows(path)]
    sources = list(dict.fromkeys(row.source for row in rows))
    known = ", ".join(sources)
    if source is None and len(sources) > 1:
        raise DataError(
            f"{path}: field 'source': runs from {known}, whose responses must not be mixed; choose "
            "one by the option source"
        )
    chosen = source or sources[0]
    if chosen not in sources:
        raise SettingsError(f"option source={chosen!r}; {path} has {known}")
    runs = [row for row in rows if row.source == chosen]
    first = {row.query: row for row in reversed(runs)}
    responses = Responses(
        Recorded((call.name,), call.arguments, without_surrogates(call.response))
        for row in runs
        for call in row.calls
    )
    return tuple(_asked(row) for row in runs if first[row.query] is row), responses, chosen


def _asked(run: _Run) -> Asked:
    apis = tuple(
        Api(
            place=(function.name,),
            function=function.name,
            description=function.description,
            parameters=tuple(
                _parameter(name, told, is_required=name in function.parameters.required)
                for name, told in function.parameters.properties.items()
            ),
        )
        for function in run.functions
    )
    return Asked(id=run.id, text=run.query, kind=run.subset, apis=apis)


def _parameter(name: str, told: _Property, *, is_required: bool) -> Parameter:
    text = told.description or ""
    if told.example_value not in ("", None):
        example = one_line(without_surrogates(str(told.example_value)), 100)
        text = f"{text} For example: {example}".strip()
    return Parameter(name=name, type=told.type, description=text, is_required=is_required)
