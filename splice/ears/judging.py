"""Judging interactions: a model says, by a guideline, what was right to do with a request.

A judge reads what the agent was told and what it was asked, never what it replied: what is right to
do is a fact about those two, and a reply that sounds sure would pull the verdict to its side. All
of it is quoted, so a request that holds a verdict or gives orders is material like any other.

A reply that can't be read is a verdict of its own, without a label. It is never guessed at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from pydantic import Field

from splice.abstention import SOLVABLE, short_rationale
from splice.concurrency import each
from splice.ears.interactions import Interaction, Label
from splice.ears.record_files import RecordFile, records_in
from splice.errors import BudgetExceeded, ModelError, StoreError
from splice.executor import book_call
from splice.ledger import Account
from splice.lines import check_regular
from splice.models.protocol import ChatModel
from splice.prompts import defuse, excerpt, one_line, render, without_surrogates
from splice.records import CallRecord, ChatMessage, ModelSettings, Record, Request, digest

JUDGE_SETTINGS: Final = ModelSettings(max_tokens=256)
"""How judges are asked: at temperature 0, and with room for a verdict of a few dozen words."""

VERDICT_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "rationale": {"type": "string"},
        "verdict": {"type": "string", "enum": ["solvable", "insufficient_input", "not_solvable"]},
        "reason": {
            "type": "string",
            "enum": ["none", "missing_capability", "misrouting", "ambiguous_query"],
        },
    },
    "required": ["rationale", "verdict", "reason"],
    "additionalProperties": False,
}
"""JSON Schema of a verdict, for endpoints that enforce one. The rationale comes first: what a small
model has written down helps it to decide."""

_LABELS: Final[Mapping[tuple[str, str], Label]] = {
    ("solvable", ""): SOLVABLE,
    ("insufficient_input", ""): "Insufficient Input",
    ("not_solvable", "missing_capability"): "Missing Capability",
    ("not_solvable", "misrouting"): "Misrouting",
    ("not_solvable", "ambiguous_query"): "Ambiguous Query",
}
"""Label by verdict and reason; one to one (EARS A.2)."""

_CONTEXT_ENDS: Final = (5_333, 2_667)
_QUERY_ENDS: Final = (2_000, 1_000)
"""What is shown of the beginning and the end of each: with the guideline it fits into a context of
4,096 tokens. Contexts begin with the role and end with what is near, and requests begin or end with
what is asked."""

_MOST_READ: Final = 20_000
"""Characters of a reply that are read and kept; a verdict takes some hundred."""


# --- guidelines ------------------------------------------------------------------------------


class Guideline(Record):
    """One version of what a judge decides by."""

    version: Annotated[int, Field(ge=1)]
    text: Annotated[str, Field(min_length=1)]
    parent: str | None = None
    """Digest of the version that it was made from; None: it is the first."""

    @property
    def digest(self) -> str:
        """Digest of the text, which is all that a judge reads of it."""
        return digest(self.text)


def default_guideline() -> Guideline:
    """The annotation hierarchy as a guideline: what a calibration begins with.

    Source: EARS 3.1. Within the last step the order is ours, Misrouting before Missing Capability
    before Insufficient Input, as an agent that is wrong for a request should not ask for more.
    """
    return Guideline(version=1, text=render("judge_guideline"))


# --- verdicts --------------------------------------------------------------------------------


class Verdict(Record):
    """What one judge says about one interaction."""

    interaction: str
    """Digest of what the judge was shown of it; see `interaction_digest`."""
    judge: str
    guideline: str
    """Digest of the guideline."""
    label: Label | None
    """None: there is no answer, or none that can be read."""
    rationale: str | None = None
    """In at most 40 words; None: the judge gave none."""
    problem: str | None = None
    """Why there is no label; None if there is one."""
    reply: str | None
    """What the judge wrote, up to 20,000 characters; None: no answer came."""
    calls: tuple[CallRecord, ...] = ()
    """Every attempt at the call."""

    @property
    def key(self) -> VerdictKey:
        """What makes it this verdict."""
        return VerdictKey(self.interaction, self.judge, self.guideline)

    @property
    def is_answered(self) -> bool:
        """Whether an answer came, readable or not."""
        return self.reply is not None


class VerdictKey(NamedTuple):
    """What was judged, by whom, and by what: one and the same is never asked twice."""

    interaction: str
    judge: str
    guideline: str


class ReadVerdict(NamedTuple):
    """A judge's reply as it was read: a label, or why there is none."""

    label: Label | None
    rationale: str | None
    problem: str | None


_KEY = re.compile(r'"verdict"\s*:', re.IGNORECASE)


def read_verdict(reply: str) -> ReadVerdict:
    r"""Read a judge's reply; never raises.

    Code fences, text around the object, further keys, the case of keys and values, and spaces or
    hyphens for `_` don't matter. What is unclear is not decided: two objects, two verdicts, a key
    given twice, a reason that is missing or does not belong to the verdict, a name that is none.

    >>> read_verdict('```json\n{"Verdict": "Not solvable", "reason": "misrouting"}\n```').label
    'Misrouting'
    >>> read_verdict('{"verdict": "not_solvable", "reason": "none"}').problem
    "no label is called 'not_solvable' without a reason"
    >>> read_verdict("The request is solvable.").problem
    'it holds no verdict'
    """
    if len(reply) > _MOST_READ:
        return _unreadable(f"it has more than {_MOST_READ} characters")
    n_verdicts = len(_KEY.findall(reply))
    if n_verdicts != 1:
        return _unreadable(f"it holds {'more than one' if n_verdicts else 'no'} verdict")
    objects = _objects(reply)
    if len(objects) != 1:
        return _unreadable(f"it holds {'more than one' if objects else 'no'} JSON object")
    (pairs,) = objects
    fields = {key.casefold(): value for key, value in pairs}
    if len(fields) < len(pairs):
        return _unreadable("a key is there more than once")
    verdict, reason = _folded(fields.get("verdict")), _folded(fields.get("reason"))
    label = _LABELS.get((verdict, reason))
    if label is None:
        with_reason = f"with the reason {reason[:40]!r}" if reason else "without a reason"
        return _unreadable(f"no label is called {verdict[:40]!r} {with_reason}")
    return ReadVerdict(label, _rationale(fields.get("rationale")), None)


def _unreadable(problem: str) -> ReadVerdict:
    return ReadVerdict(None, None, problem)


_Pairs: TypeAlias = list[tuple[str, Any]]
"""A JSON object with its repeated keys."""

_DECODER = json.JSONDecoder(object_pairs_hook=list)


def _objects(text: str) -> list[_Pairs]:
    """The JSON objects in a text that stand in no other, at most two of them."""
    found: list[_Pairs] = []
    start = text.find("{")
    while start != -1 and len(found) < 2:
        end = start + 1
        try:
            pairs, end = _DECODER.raw_decode(text, start)
            found.append(pairs)
        except (ValueError, RecursionError):
            pass
        start = text.find("{", end)
    return found


_JOINTS = re.compile(r"[\s_-]+")


def _folded(value: object) -> str:
    """A name in one spelling; empty for none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return "?"
    name = _JOINTS.sub("_", value.strip().casefold())
    return "" if name in ("none", "null") else name


def _rationale(value: object) -> str | None:
    """A rationale as an agent's abstention would carry it; None if there is none."""
    return (short_rationale(defuse(value)) or None) if isinstance(value, str) else None


# --- asking ----------------------------------------------------------------------------------


def judge_prompt(interaction: Interaction, guideline: str) -> str:
    """What a judge is asked about an interaction.

    A guideline is what the judge is to follow and stands there unquoted; who approves one answers
    for it. Long contexts and queries are shown without their middle, which a line says.
    """
    return render(
        "judge_interaction",
        guideline=defuse(guideline),
        agent=one_line(interaction.agent, limit=100),
        context=excerpt(interaction.context, *_CONTEXT_ENDS),
        query=excerpt(interaction.query, *_QUERY_ENDS),
    )


def interaction_digest(interaction: Interaction) -> str:
    """Digest of what judges are shown of an interaction, the wording of the template included.

    Interactions that differ in id, source, reply or label alone are one and the same to a judge.
    """
    return digest(judge_prompt(interaction, ""))


def judge_name(model: ChatModel, settings: ModelSettings = JUDGE_SETTINGS) -> str:
    """What a judge is called unless its user names it: the model's name."""
    return model.identity(settings.name).name


async def judge(
    interaction: Interaction,
    guideline: Guideline,
    model: ChatModel,
    *,
    name: str | None = None,
    settings: ModelSettings = JUDGE_SETTINGS,
    account: Account | None = None,
) -> Verdict:
    """Ask a judge about one interaction, at temperature 0.

    A model that gives no answer, and a budget that is used up, are told in the verdict.

    Args:
        interaction: what is judged. Its reply, label and rationale are not shown.
        guideline: what to decide by.
        model: the judge.
        name: what the judge is called; None: as the model.
        settings: the model's name and how long a reply may be.
        account: spending to reserve the call from.
    """
    request = Request(
        messages=(ChatMessage(role="user", content=judge_prompt(interaction, guideline.text)),),
        settings=settings.model_copy(update={"temperature": 0.0}),
        response_schema=VERDICT_SCHEMA,
        stage="judge",
        query_id=without_surrogates(interaction.id),
    )
    calls: list[CallRecord] = []
    reply: str | None = None
    try:
        completion = await book_call(model, request, account, calls)
    except (ModelError, BudgetExceeded) as error:
        read = _unreadable(f"no answer: {one_line(str(error))}")
    else:
        reply = without_surrogates(completion.text)
        read = read_verdict(reply)
    return Verdict(
        interaction=interaction_digest(interaction),
        judge=name or judge_name(model, settings),
        guideline=guideline.digest,
        label=read.label,
        rationale=read.rationale,
        problem=read.problem,
        reply=None if reply is None else reply[:_MOST_READ],
        calls=tuple(calls),
    )


Progress: TypeAlias = Callable[[int, int], None]
"""Called as `progress(n_done, n_all)`."""


async def judge_all(
    interactions: Sequence[Interaction],
    guideline: Guideline,
    model: ChatModel,
    *,
    name: str | None = None,
    settings: ModelSettings = JUDGE_SETTINGS,
    known: VerdictFile | None = None,
    concurrency: int = 8,
    account: Account | None = None,
    progress: Progress | None = None,
) -> tuple[Verdict, ...]:
    """Ask a judge about many interactions; verdicts in their order.

    Interactions that are the same to a judge are asked about once. A verdict is written as soon as
    its answer came, so that whoever is killed loses what is in flight. What got no answer is not
    written and is asked again the next time.

    Args:
        interactions: what is judged.
        guideline: what to decide by.
        model: the judge.
        name: what the judge is called; None: as the model.
        settings: the model's name and how long a reply may be.
        known: verdicts that are there already, and where new ones go.
        concurrency: calls at a time.
        account: spending to reserve calls from.
        progress: told of each interaction that is done, and of those that were at the beginning.

    Raises:
        StoreError: the file of verdicts can't be written; what was written before is safe.
    """
    name = name or judge_name(model, settings)
    digests = [interaction_digest(interaction) for interaction in interactions]
    distinct: dict[str, Interaction] = {}
    made: dict[str, Verdict] = {}
    for shown, interaction in zip(digests, interactions, strict=True):
        distinct.setdefault(shown, interaction)
        found = known.find(VerdictKey(shown, name, guideline.digest)) if known is not None else None
        if found is not None:
            made[shown] = found

    def tell() -> None:
        if progress is not None:
            progress(len(made), len(distinct))

    async def ask(shown: str) -> None:
        verdict = await judge(
            distinct[shown], guideline, model, name=name, settings=settings, account=account
        )
        if known is not None and verdict.is_answered:
            known.put(verdict)
        made[shown] = verdict
        tell()

    tell()
    todo = [shown for shown in distinct if shown not in made]
    await each(todo, ask, concurrency, None, "judge")
    return tuple(made[shown] for shown in digests)


# --- verdicts on the disk --------------------------------------------------------------------


class VerdictFile(RecordFile[Verdict]):
    """Verdicts in a file that only grows. Several judges may share it."""

    kind = Verdict


def read_verdicts(path: str | Path) -> tuple[Verdict, ...]:
    """The verdicts of a file, in the order of writing, also while it is being written.

    An incomplete last line is left out.

    Raises:
        StoreError: the file can't be read.
        DataError: a line is no verdict; the message names file, line and field.
    """
    path = Path(path)
    return tuple(records_in(path, _bytes_of(path), Verdict))


def _bytes_of(path: Path) -> bytes:
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}") from None
