"""How a node says that it can't act: the wire format, its strict parser, and the prompt for it.

An abstention is a JSON object with exactly two keys (EARS section 3.1):

    {"Response": "Insufficient Input", "Reasoning": "the year of the report was not given"}

Everything in it is data. A rationale that holds instructions, markup or another abstention is a
rationale still.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal, get_args

from splice.prompts import render
from splice.records import Abstention, AbstentionCategory, Record
from splice.text import bare, is_refusal

MAX_RATIONALE_WORDS = 40
MAX_RATIONALE_CHARS = 400
"""Ten characters a word: a word may be a megabyte, and not every script puts spaces."""

SOLVABLE: Literal["Solvable"] = "Solvable"
"""What a reply in the form of `reply_schema` says in place of a category if it has an output."""

_KEYS = ("Response", "Reasoning")
_SCHEMA_KEYS = (*_KEYS, "Output")
_CATEGORIES: Mapping[str, AbstentionCategory] = {
    category.casefold(): category for category in get_args(AbstentionCategory)
}


class Reply(Record):
    """What a node's reply is: its output, an abstention, or an abstention that went wrong."""

    kind: Literal["output", "abstention", "syntax_failure"]
    output: str | None = None
    """The task's output; None unless `kind` is `output`."""
    abstention: Abstention | None = None
    """None unless `kind` is `abstention`."""
    problem: str | None = None
    """What is wrong with the form; None unless `kind` is `syntax_failure`."""
    raw: str
    """The reply as it came."""


def parse_reply(text: str, *, phrase: str | None = None) -> Reply:
    r"""Read a node's reply; never raises.

    A reply is an *abstention* if it is one JSON object of the agreed form and nothing else, save
    for outer spaces and one pair of code fences. Categories match in any case and with `_` or `-`
    for the space; keys match exactly. A rationale over 40 words (or 400 characters) is cut, since
    what it says still helps; line breaks and control characters in it become spaces.

    A reply is an *attempt* at an abstention, and so a syntax failure, if it

    * is JSON that is, or holds, an object with the key `Response` in any case and either the key
      `Reasoning` or a category as the value, but breaks the form (a missing, extra or repeated
      key, an unknown category, an empty rationale, a value that is no string, a list around it);
    * or is no JSON but holds, anywhere, `Response` with a category and `Reasoning`, each before a
      colon and however quoted: inside prose, twice, with trailing commas;
    * or is no JSON but opens like an object and either gives `Response` a category or names both
      keys (a reply cut short, or one with quotation marks that JSON does not know).

    Everything else is *output*, handed on as it came: JSON without those keys, JSON whose strings
    speak of them, and text that merely names a category.

    A reply in the form of `reply_schema` is read too: with `Solvable` its `Output` is the output.

    Args:
        text: the reply.
        phrase: a reply that is this and nothing else, apart from punctuation, markup, quotation
            marks and an `Answer:` before it, is an abstention with *Insufficient Input*.

    >>> text = '```json\n{"Response": "insufficient_input", "Reasoning": "no year"}\n```'
    >>> parse_reply(text).abstention
    Abstention(category='Insufficient Input', rationale='no year')
    >>> parse_reply("Answer: not found.", phrase="not found").abstention.rationale
    'not found'
    >>> parse_reply("It was not found in Doha.", phrase="not found").kind
    'output'
    >>> parse_reply('{"Response": "Misrouting"}').problem
    "the key 'Reasoning' is missing"
    """
    if phrase is not None and _is_phrase(text, phrase):
        abstention = Abstention(category="Insufficient Input", rationale=short_rationale(phrase))
        return Reply(kind="abstention", abstention=abstention, raw=text)
    content = _without_fences(text)
    try:
        value = _parsed(content)
    except (ValueError, RecursionError):
        problem = _problem_of_broken(content)
        return _failure(problem, text) if problem else _output(text, text)
    if isinstance(value, _Object) and value.is_attempt:
        return _read(value, text)
    if _holds_attempt(value):
        return _failure("the object stands inside another JSON value", text)
    return _output(text, text)


def _output(output: str, raw: str) -> Reply:
    return Reply(kind="output", output=output, raw=raw)


def _failure(problem: str, raw: str) -> Reply:
    return Reply(kind="syntax_failure", problem=problem, raw=raw)


_OUTER = string.whitespace + "\u00a0\u2028\u2029\u200b\ufeff"
_FENCE = "```"
_INFO = re.compile(r"[\w+-]*")


def _without_fences(text: str) -> str:
    """The reply without outer spaces and one pair of code fences."""
    content = text.strip(_OUTER)
    if len(content) < 2 * len(_FENCE) or not (
        content.startswith(_FENCE) and content.endswith(_FENCE)
    ):
        return content
    inner = content.removeprefix(_FENCE).removesuffix(_FENCE)
    return _INFO.sub("", inner, count=1).strip(_OUTER)


_PREFIX = re.compile(r"(?:final )?answer ?: ?")


def _is_phrase(text: str, phrase: str) -> bool:
    """Whether a reply is the marker phrase and nothing else."""
    wanted = bare(phrase)
    found = bare(text)
    found = bare(_PREFIX.sub("", found, count=1)) if _PREFIX.match(found) else found
    return found == wanted != "" and short_rationale(phrase) != ""


class _Object(tuple[tuple[str, Any], ...]):
    """A JSON object as its pairs, repeated keys included."""

    __slots__ = ()

    @property
    def is_attempt(self) -> bool:
        """Whether this object is meant to be an abstention, well-formed or not."""
        folded = {key.strip().casefold(): value for key, value in self}
        if "response" not in folded:
            return False
        value = folded["response"]
        return "reasoning" in folded or (isinstance(value, str) and _folded(value) in _CATEGORIES)


def _parsed(content: str) -> object:
    """The JSON value that `content` is.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(
        content,
        object_pairs_hook=_Object,
        parse_int=_no_number,
        parse_float=_no_number,
        parse_constant=_refuse_constant,
    )


def _no_number(_: str) -> None:
    """Stand for a number: none is needed, and a huge one takes time that grows with its square."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _holds_attempt(value: object) -> bool:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _Object):
            if value.is_attempt:
                return True
            waiting += [inner for _, inner in value]
        elif isinstance(value, list):
            waiting += value
    return False


_Q = r"[\"'“”‘’*`]{0,3}"
_RESPONSE_KEY = re.compile(rf"(?<!\w)response{_Q}\s*+[:：]", re.IGNORECASE)
_REASONING_KEY = re.compile(rf"(?<!\w)reasoning{_Q}\s*+[:：]", re.IGNORECASE)
_RESPONSE_CATEGORY = re.compile(
    rf"{_RESPONSE_KEY.pattern}\s*+{_Q}(?:ambiguous[\s_-]query|insufficient[\s_-]input"
    r"|missing[\s_-]capability|misrouting)(?!\w)",
    re.IGNORECASE,
)


def _problem_of_broken(content: str) -> str | None:
    """What is wrong with text that is no JSON; None if it is no attempt at an abstention."""
    n_categories = sum(1 for _ in islice(_RESPONSE_CATEGORY.finditer(content), 2))
    has_reasoning = _REASONING_KEY.search(content) is not None
    is_open = content.startswith("{")
    has_both_keys = has_reasoning and _RESPONSE_KEY.search(content) is not None
    if not ((n_categories and has_reasoning) or (is_open and (n_categories or has_both_keys))):
        return None
    if n_categories > 1:
        return "it holds more than one abstention"
    if not is_open:
        return "text stands around the JSON object"
    if not content.endswith("}"):
        return "the JSON object is cut short, or text follows it"
    return "it is not valid JSON"


def _read(found: _Object, raw: str) -> Reply:
    """Read an object that is meant to be an abstention, or a reply in the form of the schema."""
    problem = _problem_of_keys(found)
    if problem is not None:
        return _failure(problem, raw)
    values: dict[str, str] = dict(found)
    label, output = _folded(values["Response"]), values.get("Output", "")
    if label == _folded(SOLVABLE):
        if not output.strip():
            return _failure(f"it says {SOLVABLE!r} and gives no output", raw)
        return _output(output, raw)
    rationale = short_rationale(values["Reasoning"])
    if label not in _CATEGORIES:
        return _failure(f"unknown category {values['Response'][:40]!r}", raw)
    if not rationale:
        return _failure("the rationale is empty", raw)
    if output.strip():
        return _failure("it gives both an abstention and an output", raw)
    abstention = Abstention(category=_CATEGORIES[label], rationale=rationale)
    return Reply(kind="abstention", abstention=abstention, raw=raw)


def _problem_of_keys(found: _Object) -> str | None:
    keys = [key for key, _ in found]
    for key in _KEYS:
        if key not in keys:
            return f"the key {key!r} is missing"
    for key, value in found:
        if key not in _SCHEMA_KEYS:
            return f"the key {key[:40]!r} does not belong there"
        if keys.count(key) > 1:
            return f"the key {key!r} is there more than once"
        if not isinstance(value, str):
            return f"the value of {key!r} is no string"
    return None


_JOINTS = re.compile(r"[\s_-]+")


def _folded(category: str) -> str:
    return _JOINTS.sub(" ", category).strip().casefold()


def short_rationale(text: str) -> str:
    """One line of at most 40 words and 400 characters, without control characters."""
    kinds = ((c, unicodedata.category(c)) for c in text)
    visible = "".join(" " if kind == "Cc" else c for c, kind in kinds if kind not in ("Cf", "Cs"))
    cut = " ".join(visible.split()[:MAX_RATIONALE_WORDS])
    return cut[:MAX_RATIONALE_CHARS].rstrip()


def reply_schema() -> dict[str, Any]:
    """JSON Schema of a reply, for endpoints that enforce one.

    One flat object whose keys are all required, as strict modes want it. A node that can act says
    `Solvable` and puts its output, as text, under `Output`; one that abstains leaves `Output`
    empty.
    """
    return {
        "type": "object",
        "properties": {
            "Response": {"type": "string", "enum": [SOLVABLE, *_CATEGORIES.values()]},
            "Reasoning": {"type": "string"},
            "Output": {"type": "string"},
        },
        "required": list(_SCHEMA_KEYS),
        "additionalProperties": False,
    }


def abstention_prompt(lists: Sequence[str] = (), *, is_structured: bool = False) -> str:
    """What a node that may abstain is told about it.

    Args:
        lists: what it has to know of its workflow, as `splice.rendering` lists it: alternatives for
            *Missing Capability*, other agents for *Misrouting*.
        is_structured: every reply has the form of `reply_schema`, not only abstentions.
    """
    name = "agent_may_abstain_structured" if is_structured else "agent_may_abstain"
    return render(name, details="".join(f"\n{each}" for each in lists))


def wire(abstention: Abstention) -> str:
    """The canonical JSON that an abstaining node emits and its descendants read.

    >>> wire(Abstention(category="Misrouting", rationale="ask the planner"))
    '{"Response": "Misrouting", "Reasoning": "ask the planner"}'
    """
    message = {"Response": abstention.category, "Reasoning": abstention.rationale}
    return json.dumps(message, ensure_ascii=False)


def is_declining(answer: str | None) -> bool:
    """Whether an answer says, in words or by passing on an abstention, that there is none.

    >>> is_declining("not found"), is_declining("Doha"), is_declining(None)
    (True, False, True)
    """
    return is_refusal(answer) or (answer is not None and parse_reply(answer).kind == "abstention")


def clarifying_question(abstention: Abstention) -> str:
    """One question to the user that may resolve an abstention.

    >>> clarifying_question(Abstention(category="Ambiguous Query", rationale="two films fit."))
    'Which reading do you mean: two films fit?'
    """
    rationale = abstention.rationale.rstrip(" .;:,")
    if rationale.endswith("?"):
        return rationale
    if abstention.category == "Ambiguous Query":
        return f"Which reading do you mean: {rationale}?"
    if abstention.category == "Insufficient Input":
        return f"Can you provide this: {missing_item(abstention)}?"
    return f"How should this be handled: {rationale}?"


_LACKING = re.compile(
    r"(?:(?:i |we )?(?:need(?:s|ed)?|require[sd]?|lack(?:s|ed)?|(?:do not|don't) have"
    r"|(?:am |are )?missing)"
    r"|there is no|no (?:information|data) (?:on|about))[: ]+",
    re.IGNORECASE,
)
_WAS_LACKING = re.compile(
    r" (?:is|are|was|were) (?:missing|unknown|needed|required|absent"
    r"|not (?:given|provided|specified|stated|known|available|found|included|there))",
    re.IGNORECASE,
)


def missing_item(abstention: Abstention) -> str:
    """The item that a rationale names as missing; the whole rationale if its form is another.

    >>> missing_item(Abstention(category="Insufficient Input", rationale="The year was not given."))
    'The year'
    """
    rationale = abstention.rationale.strip(" .;:,")
    opening = _LACKING.match(rationale)
    item = rationale[opening.end() :] if opening else rationale
    closing = _WAS_LACKING.search(item)
    if closing and closing.end() == len(item):
        item = item[: closing.start()]
    return item.strip(" .;:,") or rationale or abstention.rationale
