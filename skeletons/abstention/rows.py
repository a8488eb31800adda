"""Rows of the data sets: what was asked, of whom, and what was right to do.

The data set of a file is told from the fields of its first row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from skeletons.abstention.calls import read_call
from skeletons.abstention.functions import FunctionDoc, cut, documentation
from skeletons.abstention.references import Asked, RightCall, written
from skeletons.abstention.services import Service, Services, elsewhere, family
from skeletons.reading import as_row, raw_rows
from splice.abstention import SOLVABLE
from splice.errors import DataError
from splice.prompts import one_line, without_surrogates
from splice.text import words

Source: TypeAlias = Literal["when2call", "bfcl", "in3", "misrouting"]

_DEEPEST = 32
"""Levels of lists and objects in a value. The data sets have up to 4."""

_N_OPENING = 8
"""Words of a request that say what it asks for."""

_N_RATIONALE = 12
"""Words of a rationale."""


def _sane(value: Any) -> Any:
    """A JSON value that nothing after reading breaks at.

    Raises:
        ValueError: it is nested too deeply, or holds lone surrogates.
    """
    level = [value]
    for _ in range(_DEEPEST):
        if any(isinstance(item, str) and without_surrogates(item) != item for item in level):
            raise ValueError("not Unicode text: it holds lone surrogates")
        level = [inner for outer in level for inner in _inner(outer)]
    if level:
        raise ValueError("nested too deeply")
    return value


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()


Text = Annotated[str, StringConstraints(pattern=r"\S")]
"""A text that says something."""

Value = Annotated[Any, AfterValidator(_sane)]
"""Any JSON value that is not nested without end."""


class _Part(BaseModel):
    """A piece of a row; published files carry more than is read here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Row(_Part):
    """A row of one of the data sets."""

    id: Text

    @property
    def text(self) -> str:
        """What the user asks for."""
        raise NotImplementedError

    def as_request(self, services: Services) -> Asked:
        """The row in the form that everything after reading works on.

        Raises:
            DataError: fields contradict each other; the message names one, and no place.
        """
        raise NotImplementedError


def _acting(functions: Sequence[FunctionDoc]) -> str:
    if not functions:
        return "You carry out requests by calling a function. At present you have no functions."
    told = documentation(functions)
    return f"You carry out requests by calling one of your functions.\nYour functions:\n{told}"


def _no_function(text: str) -> str:
    """Says that nothing serves a request, by the words with which the request opens."""
    opening = one_line(" ".join(text.split()[:_N_OPENING]), limit=60).replace('"', "'")
    return f'no function for "{opening.rstrip(".,;:!?")}"'


# --- When2Call -------------------------------------------------------------------------------


class _Answers(_Part):
    tool_call: str


class _When2Call(Row):
    """A row of When2Call: a request that is to be carried out, asked back or declined."""

    question: Text
    tools: tuple[FunctionDoc, ...]
    target_tool: FunctionDoc | None
    correct_answer: Literal["tool_call", "request_for_info", "cannot_answer"]
    answers: _Answers
    held_out_param: Text | None = None
    """The parameter whose value was taken out of the question."""

    @property
    def text(self) -> str:
        return self.question

    def as_request(self, services: Services) -> Asked:
        common = {"id": self.id, "text": self.text, "kind": self.correct_answer}
        common |= {"agent": "assistant", "role": _acting(self.tools)}
        if self.correct_answer == "tool_call":
            call, output = self._call()
            return Asked(**common, label=SOLVABLE, call=call, gold_output=output)
        if self.correct_answer == "request_for_info":
            return Asked(**common, label="Insufficient Input", rationale=self._missing())
        return Asked(**common, label="Missing Capability", rationale=_no_function(self.text))

    def _missing(self) -> str | None:
        if self.held_out_param is None:
            return None
        name = cut(self.held_out_param.replace("_", " "), _N_RATIONALE - 3)
        return f"{name} was not given"

    def _call(self) -> tuple[RightCall, str]:
        """The reference call, of whose arguments the required ones are compared, and its JSON."""
        if self.target_tool is None:
            raise DataError("field 'target_tool': it is null although a call is right")
        call = read_call(self.answers.tool_call)
        if call is None or call.name != self.target_tool.name:
            raise DataError(
                f"field 'answers.tool_call': no call of {self.target_tool.name!r}, which is right"
            )
        try:
            _sane(call.arguments)
        except ValueError as error:
            raise DataError(f"field 'answers.tool_call': {error}") from None
        schema = self.target_tool.parameters
        accepted = dict.fromkeys((*schema.properties, *call.arguments))
        compared = [name for name in schema.required if name in call.arguments]
        exact = {name: (_exactly(call.arguments[name]),) for name in compared}
        right = RightCall(names=(call.name,), accepted={**accepted, **exact})
        return right, written(*call)


def _exactly(value: Any) -> Any:
    """A value as the one that is accepted."""
    if isinstance(value, dict):
        return {key: [_exactly(inner)] for key, inner in value.items()}
    return [_exactly(inner) for inner in value] if isinstance(value, list) else value


# --- BFCL ------------------------------------------------------------------------------------


class _Message(_Part):
    role: str
    content: Annotated[str, AfterValidator(without_surrogates)]


class _Bfcl(Row):
    """A row of the Berkeley Function-Calling Leaderboard, single turn."""

    category: Literal[
        "irrelevance", "live_irrelevance", "live_relevance", "multiple", "live_simple"
    ]
    question: Annotated[tuple[tuple[_Message, ...], ...], Field(min_length=1)]
    function: Annotated[tuple[FunctionDoc, ...], Field(min_length=1)]
    possible_answer: (
        Annotated[
            tuple[Mapping[str, Mapping[Text, tuple[Value, ...]]], ...],
            Field(min_length=1, max_length=1),
        ]
        | None
    ) = None

    @property
    def text(self) -> str:
        """The last thing that the user says; what was said before is left out."""
        said = (turn.content for turn in reversed(self.question[-1]) if turn.role == "user")
        return next(said, "")

    def as_request(self, services: Services) -> Asked:
        if not self.text.strip():
            raise DataError("field 'question': the user says nothing")
        common = {"id": self.id, "text": self.text, "kind": self.category}
        common |= {"agent": "assistant", "role": _acting(self.function)}
        if self.category in ("irrelevance", "live_irrelevance"):
            lacks_value = any(map(self._may_be_meant, self.function))
            return Asked(
                **common,
                label="Missing Capability",
                also_right=("Insufficient Input",) if lacks_value else (),
                rationale=_no_function(self.text),
            )
        call, output = self._call()
        return Asked(**common, label=SOLVABLE, call=call, gold_output=output)

    def _may_be_meant(self, function: FunctionDoc) -> bool:
        """Whether a request that no function serves speaks of one that needs a value."""
        name = _HUMP.sub(" ", function.name.replace("_", " ").replace(".", " "))
        return bool(function.parameters.required and _things(name) & _things(self.text))

    def _call(self) -> tuple[RightCall, str | None]:
        """The calls that are right, and one of them as JSON, where arguments are known."""
        if self.category == "live_relevance":
            return RightCall(names=tuple(function.name for function in self.function)), None
        if self.possible_answer is None:
            raise DataError("field 'possible_answer' is missing")
        if len(self.possible_answer[0]) != 1:
            raise DataError("field 'possible_answer': not one call")
        ((name, values),) = self.possible_answer[0].items()
        if name not in [function.name for function in self.function]:
            raise DataError(f"field 'possible_answer': {name!r} is not offered")
        accepted = {parameter: _accepted(value) for parameter, value in values.items()}
        return RightCall(names=(name,), accepted=accepted), written(name, _first_of(accepted))


_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ANYWHERE = frozenset({"calculate", "check", "create", "find", "need", "search", "tool"})
"""Words that functions of any kind have in their names."""


def _things(text: str) -> frozenset[str]:
    """Content words that may say what a text is about, without the plural."""
    return frozenset(word.removesuffix("s") for word in words(text)) - _ANYWHERE


def _accepted(values: Sequence[Any]) -> list[Any]:
    """Accepted values of one parameter, in the form that calls are compared with.

    The source writes "may be left out" as `""` or null, and a list that stays empty as no value.
    """
    if not values:
        return ["", []]
    return ["" if value is None else _inside(value) for value in values]


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _accepted(inner if isinstance(inner, list) else [inner])
            for key, inner in value.items()
        }
    return [_inside(inner) for inner in value] if isinstance(value, list) else value


def _first_of(accepted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Arguments that are accepted: the first value of each parameter that can't be left out."""
    return {name: _plain(values[0]) for name, values in accepted.items() if "" not in values}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _first_of(value)
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


# --- IN3 -------------------------------------------------------------------------------------


class _Detail(_Part):
    description: Text
    importance: Literal["1", "2", "3"]


class _In3(Row):
    """A row of IN3: a task for an agent that is clear, or lacks details."""

    task: Text
    vague: bool
    missing_details: tuple[_Detail, ...]

    @property
    def text(self) -> str:
        return self.task

    def as_request(self, services: Services) -> Asked:
        common = {"id": self.id, "text": self.text, "agent": "intake", "role": _INTAKE}
        if not self.vague:
            return Asked(
                **common,
                kind="clear",
                label=SOLVABLE,
                call=RightCall(names=(_START.name,)),
                gold_output=written(_START.name, {"task": self.text}),
            )
        # The first of the most important ones.
        worst = max(self.missing_details, key=lambda detail: detail.importance, default=None)
        return Asked(
            **common,
            kind="vague",
            label="Ambiguous Query",
            also_right=("Insufficient Input",),
            rationale=cut(worst.description, _N_RATIONALE) if worst else None,
        )


_START: Final = FunctionDoc.model_validate(
    {
        "name": "start",
        "description": "have a task done that is clear enough to be done as the user wants it",
        "parameters": {
            "properties": {"task": {"type": "string", "description": "the task"}},
            "required": ["task"],
        },
    }
)
_INTAKE: Final = (
    "You are an intake desk. You pass tasks of users on to agents that carry them out and can't "
    f"ask back.\nYour function:\n{documentation([_START])}"
)


# --- misrouted requests ----------------------------------------------------------------------


class _Misrouted(Row):
    """A request with the service that received it and the one that should have."""

    query: Text
    received_by: Text
    should_go_to: Text
    gold_intent: Text
    """Service and intent, with a full stop between them."""
    label: Literal["misrouted", "correctly_routed"]

    @property
    def text(self) -> str:
        return self.query

    def as_request(self, services: Services) -> Asked:
        own = self._service("received_by", services)
        gold = self._service("should_go_to", services)
        is_misrouted = own.name != gold.name
        if is_misrouted != (self.label == "misrouted"):
            raise DataError(f"field 'label': {self.label} does not fit the two services")
        intents = [f"{gold.name}.{intent.name}" for intent in gold.intents]
        if self.gold_intent not in intents:
            known = ", ".join(intents)
            raise DataError(f"field 'gold_intent': {self.gold_intent!r} is none of {known}")
        name = self.gold_intent.removeprefix(f"{gold.name}.")
        return Asked(
            id=self.id,
            text=self.text,
            kind=self.label,
            agent=own.name,
            role=_service_role(own),
            abilities=tuple(intent.told for intent in own.intents),
            elsewhere=elsewhere(self.id, own.name, gold.name, services),
            label="Misrouting" if is_misrouted else SOLVABLE,
            call=None if is_misrouted else RightCall(names=(name,)),
            gold_output=None if is_misrouted else written(name, {}),
            rationale=f"{gold.name} handles this" if is_misrouted else None,
            # One service of a family is listed at most, so that the family says which.
            rationale_has=family(gold.name) if is_misrouted else None,
        )

    def _service(self, field: str, services: Services) -> Service:
        name: str = getattr(self, field)
        if name not in services:
            raise DataError(f"field {field!r}: no service {name!r} is described")
        return services[name]


def _service_role(service: Service) -> str:
    return (
        f"You are the service {service.name}: {cut(service.description, 24)}\n"
        "You carry out requests by calling one of your functions. What else a function needs is "
        "asked for later: call it with empty arguments."
    )


# --- files -----------------------------------------------------------------------------------

_FORMATS: Mapping[Source, type[Row]] = {
    "when2call": _When2Call,
    "bfcl": _Bfcl,
    "in3": _In3,
    "misrouting": _Misrouted,
}

_TELLING: Mapping[str, Source] = {
    "target_tool": "when2call",
    "function": "bfcl",
    "missing_details": "in3",
    "received_by": "misrouting",
}
"""Data sets by a field that no other one has."""


def source_of(row: Any) -> Source | None:
    """The data set that a row is of, by its fields; None: of none of them."""
    found = [source for field, source in _TELLING.items() if isinstance(row, dict) and field in row]
    return found[0] if len(found) == 1 else None


def no_format(place: str) -> DataError:
    """What is raised for a row of no known format."""
    return DataError(
        f"{place}: no known format: it has none of the fields {', '.join(_TELLING)}, or several"
    )


def read_requests(path: Path, source: Source, services: Services) -> Iterator[Asked]:
    """The requests of a file, in its order.

    Raises:
        DataError: the file can't be read, a row does not keep to the format, or two rows have the
            same id; the message names file, line and field.
    """
    seen: set[str] = set()
    for place, value in raw_rows(path):
        row = as_row(value, _FORMATS[source], place)
        if row.id in seen:
            raise DataError(f"{place}: field 'id': {row.id!r} was there before")
        seen.add(row.id)
        try:
            yield row.as_request(services)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
