"""API-Bank's files: dialogues with recorded calls, the API table, and the store of recordings."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from skeletons.reading import as_row, raw_rows, read_rows
from skeletons.replay import NotRecorded, Parameter, RecordedFailure, replay_tool
from splice.errors import DataError
from splice.prompts import one_line, without_surrogates
from splice.records import Record, digest
from splice.workflow import Tool

SEARCHER = "ToolSearcher"
"""The API by which the original finds other APIs; its keywords are in free wording."""

Text = Annotated[str, AfterValidator(without_surrogates)]
ApiName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


class Said(Record):
    """What the user or the assistant said."""

    role: Literal["User", "AI"]
    text: Text


class Result(Record):
    """What an API gave back."""

    api_name: str | None = None
    input: Any = None
    """The arguments as the API parsed them."""
    output: Any
    exception: str | None = None


class Called(Record):
    """A recorded API call."""

    role: Literal["API"]
    api_name: ApiName
    param_dict: Mapping[Text, Any]
    result: Result

    @property
    def key(self) -> str:
        """What tells this call from others of the same API."""
        return call_key(self.param_dict)


Turn = Annotated[Said | Called, Field(discriminator="role")]


class Dialogue(Record):
    """One dialogue, as its line has it."""

    id: Annotated[Text, StringConstraints(min_length=1)]
    level: int
    n_calls: int
    apis: tuple[ApiName, ...]
    turns: tuple[Turn, ...]

    @property
    def gold_calls(self) -> tuple[Called, ...]:
        """The calls that a right answer makes, each once, in order.

        Without searches for APIs, whose keywords nobody can guess, and without failed calls.
        """
        found = {
            (turn.api_name, turn.key): turn
            for turn in reversed(self.turns)
            if isinstance(turn, Called)
            and turn.api_name != SEARCHER
            and turn.result.exception is None
        }
        return tuple(reversed(found.values()))


class ApiParameter(Record):
    """An argument in the API table."""

    model_config = ConfigDict(extra="ignore")

    type: str = ""
    description: Text = ""


class Api(Record):
    """A row of the API table.

    Some rows of the original have a list or nothing in place of the parameters.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    description: Text | None = ""
    input_parameters: Mapping[str, ApiParameter] | list[str] | None = None
    output_parameters: Any = None


def call_key(arguments: Mapping[str, Any]) -> str:
    """Arguments in the form in which they are compared.

    Values are compared as text without outer spaces, since the recordings hold nothing but strings
    (`"2"`, `"['John', 'Jane']"`) where a model may write a number or a list. An argument that is
    null counts as not given.

    >>> call_key({"rooms": 2, "guests": ["Ana"], "note": None}) == call_key(
    ...     {"guests": "['Ana']", "rooms": " 2"}
    ... )
    True
    """
    texts = {name: str(value).strip() for name, value in arguments.items() if value is not None}
    return json.dumps(texts, sort_keys=True, ensure_ascii=False)


class Recordings:
    """Every recorded call of the files that were read, by API and arguments."""

    def __init__(self, calls: Iterable[tuple[str, Called]]) -> None:
        """Keep calls, each with its place.

        Raises:
            DataError: the same call has two results.
        """
        self._by_key: dict[tuple[str, str], Called] = {}
        self._by_receipt: dict[str, Called] = {}
        self._n_calls: Counter[str] = Counter()
        self._names: dict[str, Counter[str]] = defaultdict(Counter)
        for place, call in calls:
            known = self._by_key.setdefault((call.api_name, call.key), call)
            if _outcome(known) != _outcome(call):
                raise DataError(
                    f"{place}: field 'result': {call.api_name} has another result for the same "
                    "arguments elsewhere"
                )
            if known is call:
                self._by_receipt[receipt(call)] = call
                self._n_calls[call.api_name] += 1
                self._names[call.api_name].update(call.param_dict.keys())

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def apis(self) -> tuple[str, ...]:
        """Names of the APIs with a recorded call, sorted."""
        return tuple(sorted(self._n_calls))

    @property
    def version(self) -> str:
        """Digest of all recordings."""
        return digest(json.dumps([[*key, _outcome(c)] for key, c in sorted(self._by_key.items())]))

    def by_receipt(self, text: str) -> Called | None:
        """The call that has this receipt; None: there is none."""
        return self._by_receipt.get(text)

    def answer(self, api: str, arguments: Mapping[str, Any]) -> str:
        """The recorded result, with a receipt that the call was made.

        Raises:
            NotRecorded: nobody made this call. The message says nothing of the calls that are
                recorded but how many there are: they are what the workflow is scored by.
            RecordedFailure: the call failed when it was recorded.
        """
        found = self._by_key.get((api, call_key(arguments)))
        if found is None:
            shown = one_line(json.dumps(dict(arguments), ensure_ascii=False, default=str))
            raise NotRecorded(
                f"no recording of {api} with the arguments {shown}; {api} has "
                f"{self._n_calls[api]} recorded calls"
            )
        if found.result.exception is not None:
            raise RecordedFailure(found.result.exception)
        return f"receipt: {receipt(found)}\nresult: {shown_result(found)}"

    def tool(self, api: str, table: Mapping[str, Api]) -> Tool:
        """A replaying tool for an API.

        Its parameters are those of the recorded calls, because the table often has others; the
        table gives descriptions where it has the same name.
        """
        row = table.get(api)
        told = row.input_parameters if row and isinstance(row.input_parameters, Mapping) else {}
        counts = self._names[api]
        parameters = [
            Parameter(
                name=name,
                description=told[name].description if name in told else "",
                is_required=counts[name] == self._n_calls[api],
            )
            for name in sorted(counts)
        ]
        text = (row and row.description) or ""
        return replay_tool(api, text, parameters, lambda given: self.answer(api, given))


def receipt(call: Called) -> str:
    """Eight hex digits that only somebody who made the call has seen."""
    return digest(f"{call.api_name}\n{call.key}")[:8]


def shown_result(call: Called) -> str:
    """What an API gave back, as JSON on one line."""
    return json.dumps(call.result.output, ensure_ascii=False)


def _outcome(call: Called) -> str:
    return json.dumps([call.result.output, call.result.exception], sort_keys=True)


def read_dialogues(path: Path) -> tuple[tuple[str, Dialogue], ...]:
    """The dialogues of a file, each with its place.

    Raises:
        DataError: the file can't be read, or a row is no dialogue.
    """
    return tuple((place, as_row(row, Dialogue, place)) for place, row in raw_rows(path))


def read_table(path: Path) -> Mapping[str, Api]:
    """The API table by name.

    Raises:
        DataError: the file can't be read, or a row is no API.
    """
    return {row.name: row for row in read_rows(path, Api)}
