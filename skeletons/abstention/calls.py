"""A call as an agent writes it: read from its reply, and compared with the calls that are right.

Replies are hostile text. Nothing in them is evaluated, and no reply makes reading slow.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple, NoReturn

_LONGEST_SYNTAX = 4000
"""Characters; a longer reply is not read as Python syntax."""

_MOST_STARTS = 8
_MOST_ENDS = 8
"""Places in a reply at which a call is tried to begin, and to end."""

_BRACE = re.compile(r"\{")
_OPENING = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*\(")
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?")


class Call(NamedTuple):
    """A function that is called, and with what."""

    name: str
    arguments: Mapping[str, Any]


def is_well_formed(output: str) -> bool:
    """Whether a task output is a call that can be read, right or not."""
    return read_call(output) is not None


def read_call(output: str) -> Call | None:
    r"""The call that a task output makes; None if there is none that can be read.

    It is the first JSON object, with a string `name` and an object `arguments`, which may be left
    out where it is empty; whatever stands around it (code fences, a sentence) is passed over. An
    output without any JSON object may write a call as Python does, with literal keyword arguments.
    An argument that is null counts as not given.

    >>> read_call('Sure:\n```json\n{"name": "functions.find", "arguments": {"city": "Rome"}}\n```')
    Call(name='find', arguments={'city': 'Rome'})
    >>> read_call("find(city='Rome', seats=2)")
    Call(name='find', arguments={'city': 'Rome', 'seats': 2})
    >>> print(read_call("find(city=input())"), read_call('{"city": "Rome"}'))
    None None
    """
    found = _first_object(output)
    if found is None:
        return _by_syntax(output)
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return _call(name, arguments)


def _call(name: str, arguments: Mapping[str, Any]) -> Call | None:
    name = name.strip().removeprefix("functions.")
    given = {key: value for key, value in arguments.items() if value is not None}
    return Call(name, given) if name else None


def _first_object(text: str) -> dict[str, Any] | None:
    decoder = json.JSONDecoder(parse_constant=_refuse)
    for brace in islice(_BRACE.finditer(text), _MOST_STARTS):
        try:
            found, _ = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _by_syntax(text: str) -> Call | None:
    if len(text) > _LONGEST_SYNTAX:
        return None
    place = 0
    for _ in range(_MOST_STARTS):
        opening = _OPENING.search(text, place)
        if opening is None:
            break
        place = opening.end()
        for end in islice(_ends(text, opening.end()), _MOST_ENDS):
            tree = _parsed(text[opening.start() : end])
            if tree is None:
                continue
            if found := _written(tree):
                return found
            # A call inside one that can't be read is none of the agent's.
            place = end
            break
    return None


def _ends(text: str, start: int) -> Iterator[int]:
    place = text.find(")", start)
    while place >= 0:
        yield place + 1
        place = text.find(")", place + 1)


def _parsed(source: str) -> ast.expr | None:
    try:
        with warnings.catch_warnings():
            # An escape that Python does not know is worth a warning in programs, not here.
            warnings.simplefilter("ignore")
            return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _written(tree: ast.expr) -> Call | None:
    """The call that an expression is, if all of its arguments are literal and named."""
    if not isinstance(tree, ast.Call) or tree.args:
        return None
    try:
        given = {word.arg: _plain_value(word.value) for word in tree.keywords}
        name = ast.unparse(tree.func)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
    # `**rest` has no name.
    arguments = {word: value for word, value in given.items() if word is not None}
    return _call(name, arguments) if len(arguments) == len(given) else None


def _plain_value(tree: ast.expr) -> Any:
    """The value of a literal that JSON could write as well.

    Raises:
        ValueError: it is no such literal.
    """
    value = ast.literal_eval(tree)
    return json.loads(json.dumps(value), parse_constant=_refuse)


def arguments_match(given: Mapping[str, Any], accepted: Mapping[str, Sequence[Any] | None]) -> bool:
    """Whether each argument is one that is accepted, and none is missing.

    Args:
        given: the arguments of a call.
        accepted: values by parameter. With `""` among them the parameter may be left out; None
            in place of them: any value, or none. Objects among the values have accepted values by
            key in their turn. A parameter that is not here may not be given.
    """
    if not given.keys() <= accepted.keys():
        return False
    for name, values in accepted.items():
        if values is None:
            continue
        if name not in given:
            if "" not in values:
                return False
        elif not any(_is_same(given[name], value) for value in values):
            return False
    return True


def _is_same(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(given, Mapping) and arguments_match(given, wanted)
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(given, (list, tuple))
            and len(given) == len(wanted)
            and all(_is_same(one, other) for one, other in zip(given, wanted, strict=True))
        )
    if isinstance(given, (Mapping, list, tuple)):
        return False
    return _folded(given) == _folded(wanted)


def _folded(value: Any) -> str | Decimal:
    """What is compared of a value: of a number the value, of a text what is read aloud.

    >>> _folded("Berkeley,  CA") == _folded("berkeley ca"), _folded("2.0") == _folded(2)
    (True, True)
    """
    text = str(value).strip()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Decimal(text)
    if _NUMBER.fullmatch(text):
        return Decimal(text)
    text = unicodedata.normalize("NFKC", text).casefold()
    kinds = ((c, unicodedata.category(c)) for c in text)
    spoken = "".join(" " if kind[0] == "P" else c for c, kind in kinds if kind != "Cf")
    # A text of nothing but punctuation stands for itself.
    return " ".join(spoken.split()) or text
