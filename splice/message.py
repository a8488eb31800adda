"""The targeted message: what the receiver lacks, in the source's own words.

Each line carries spans of the source's own material, checked verbatim before anything is delivered;
a line whose quotation is not found, or that says more than its source, is dropped. Messages are
extractive (no model call) or written by a model; either way they pass the same check.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from splice.errors import BudgetExceeded, ModelError
from splice.executor import book_call
from splice.features import bridges, named_items, telling_items
from splice.ledger import Account
from splice.material import Piece, emitted, holds, is_finding, material, told
from splice.models.protocol import ChatModel
from splice.prompts import one_line, quote, render
from splice.records import (
    CallRecord,
    ChatMessage,
    Gap,
    MessageLine,
    ModelSettings,
    Record,
    Request,
    Span,
    SpliceMessage,
    Trace,
    digest,
)
from splice.text import contains, is_refusal, items, norm, sentences, words
from splice.workflow import Workflow

_LINE = re.compile(r'(KEY|FACT):([^|]*)\|\s*"(.+)"', re.IGNORECASE)

_MAX_LINE = 2000
"""Characters of one line of a model's reply that are looked at."""

_MAX_READ_LINES = 50
"""Lines of a model's reply that are looked at; it is asked for a handful."""

_KNOWN_SHARE = 0.9
"""A sentence of which the receiver was told this share of the content words adds nothing."""

_MOST_ABOUT = 3
"""Items that a message may be said to be about."""


class MessageSettings(Record):
    """How messages are written."""

    writer: Literal["extractive", "model", "placebo"] = "extractive"
    """`model` costs one call and falls back to `extractive` where nothing of it can be verified.
    `placebo` is a control: the shape of the extractive message, in words that say nothing."""
    max_words: Annotated[int, Field(ge=10)] = 120
    """Words of a message: the paper finds that one key statement carries most of the value."""
    max_lines: Annotated[int, Field(ge=0)] = 3
    """Lines beside the key statement."""
    model: ModelSettings = ModelSettings(max_tokens=256)


async def write_message(
    workflow: Workflow,
    base: Trace,
    gap: Gap,
    *,
    model: ChatModel | None,
    settings: MessageSettings = MessageSettings(),
    account: Account | None = None,
    calls: list[CallRecord] | None = None,
) -> SpliceMessage | None:
    """Write the message for a gap; None if the source holds nothing that the receiver lacks.

    Args:
        workflow: the workflow.
        base: the base run.
        gap: the edge and what its receiver lacks.
        model: who writes, if `settings.writer` is `model`.
        settings: how to write.
        account: spending to reserve the call from.
        calls: gets every attempt at the call.
    """
    if settings.writer == "model" and model is not None:
        written = await _ask_for_message(
            workflow, base, gap, model, settings, account, calls if calls is not None else []
        )
        if written is not None:
            return written
    message = extract_message(workflow, base, gap, settings)
    if settings.writer == "placebo" and message is not None:
        return placebo(message, seed=int(digest(base.query.id)[:8], 16))
    return message


def extract_message(
    workflow: Workflow, base: Trace, gap: Gap, settings: MessageSettings = MessageSettings()
) -> SpliceMessage | None:
    """The message in the source's own sentences; None if it has nothing new for the receiver."""
    edge = gap.edge
    heard = told(workflow, base, edge.receiver)
    pieces = material(workflow, base, edge.source)
    about = _about(workflow, base, gap)
    lines = list(_finding(workflow, base, gap, heard))
    ranked = _ranked_sentences(pieces, gap, heard, about)
    lines += ranked if not lines else ranked[: settings.max_lines]
    lines = _within(_distinct(lines), settings)
    if not lines:
        return None
    return _message(gap, lines, about, "extractive", n_dropped=0)


def _finding(workflow: Workflow, base: Trace, gap: Gap, heard: str) -> Iterator[MessageLine]:
    """The source's short output together with what it was asked: one fact as one line.

    A bare output ("Doha") does not say what it is; with the source's task it does. It is news even
    if the receiver's own documents contain it: nobody told the receiver which of their entries
    matters.
    """
    said = emitted(base.by_node[gap.edge.source])
    output = said.strip()
    if is_refusal(output) or not is_finding(output):
        return
    if not words(output) - words(heard) and all(contains(heard, i) for i in named_items(output)):
        return
    start = said.index(output)
    span = Span(origin="output", start=start, end=start + len(output), text=output)
    asked = one_line(workflow.subtask(gap.edge.source, base.query), limit=200).rstrip("?:. ")
    text = f"{asked}: {one_line(output)}" if asked else one_line(output)
    yield MessageLine(text=text, spans=(span,))


def _ranked_sentences(
    pieces: Sequence[Piece], gap: Gap, heard: str, about: Sequence[str]
) -> list[MessageLine]:
    """Sentences of the source that tell the receiver something, the most telling first.

    By number of gap items and mention of what the message is about, then by share of new words.
    What names neither is left out, unless it is the source's output itself.
    """
    wanted = [item.text for item in gap.items if item.is_held]
    read = words(heard)
    scored = []
    for piece in pieces:
        for start, end in sentences(piece.text):
            text = piece.text[start:end]
            own = words(text)
            new = len(own - read) / max(1, len(own))
            hits = [item for item in wanted if contains(text, item)]
            is_about = any(contains(text, name) for name in about)
            if piece.origin == "output" and is_refusal(text):
                continue
            is_new = new > 1 - _KNOWN_SHARE or any(not contains(heard, i) for i in items(text))
            if not is_new or not (hits or is_about or piece.origin == "output"):
                continue
            span = Span(origin=piece.origin, start=start, end=end, text=text)
            line = MessageLine(text=one_line(text), spans=(span,), item=hits[0] if hits else None)
            scored.append(((len(hits) + is_about, new), line))
    scored.sort(key=lambda entry: entry[0], reverse=True)
    return [line for _, line in scored]


def _about(workflow: Workflow, base: Trace, gap: Gap) -> tuple[str, ...]:
    """What the receiver should look for, the first first.

    The items of the source's finding that the receiver's own documents know, all of them if the
    finding is short: of two directors, a receiver that is pointed at one answers for one. Else the
    first item that the receiver was not told; else none.
    """
    heard = told(workflow, base, gap.edge.receiver)
    output = emitted(base.by_node[gap.edge.source])
    if is_refusal(output):
        return ()
    if bridging := bridges(workflow, base, gap.edge):
        n_most = _MOST_ABOUT if is_finding(output) else 1
        return tuple(_apart(bridging))[:n_most]
    new = [item for item in telling_items(output) if not contains(heard, item)]
    return tuple(new[:1])


def _apart(names: Sequence[str]) -> Iterator[str]:
    """Names of which none stands in another one that came before, nor holds one."""
    kept: list[str] = []
    for name in names:
        if not any(contains(name, other) or contains(other, name) for other in kept):
            kept.append(name)
            yield name


def _distinct(lines: Sequence[MessageLine]) -> list[MessageLine]:
    """Lines without those that repeat an earlier one."""
    kept: list[MessageLine] = []
    for line in lines:
        if not any(contains(other.text, line.text) for other in kept):
            kept.append(line)
    return kept


def _within(lines: Sequence[MessageLine], settings: MessageSettings) -> list[MessageLine]:
    """The first lines that fit; the first is there whatever its length, cut at the limit."""
    kept: list[MessageLine] = []
    n_words = 0
    for line in lines[: settings.max_lines + 1]:
        n = len(line.text.split())
        if not kept and n > settings.max_words:
            short = " ".join(line.text.split()[: settings.max_words])
            return [line.model_copy(update={"text": short})]
        if n_words + n > settings.max_words:
            break
        kept.append(line)
        n_words += n
    return kept


def _message(
    gap: Gap,
    lines: Sequence[MessageLine],
    about: Sequence[str],
    writer: Literal["extractive", "model"],
    n_dropped: int,
) -> SpliceMessage:
    return SpliceMessage(
        source=gap.edge.source,
        receiver=gap.edge.receiver,
        key=lines[0],
        lines=tuple(lines[1:]),
        focus=about[0] if about else None,
        also=tuple(about[1:]),
        not_found=tuple(item.text for item in gap.items if not item.is_held),
        n_dropped=n_dropped,
        writer=writer,
    )


_FILLER = (
    "The sky is often grey in the morning and clears later in the day.",
    "A chair stands beside the table near the window of the room.",
    "Water runs downhill and gathers in the lowest place it finds.",
    "Bread is best when it is fresh and still a little warm.",
    "The path along the river is pleasant to walk in summer.",
    "People like to sit down together after a long day outside.",
)
"""Plain statements without a name, a number or anything that a question could be about."""


def placebo(message: SpliceMessage, seed: int) -> SpliceMessage:
    """A message of the same shape that carries nothing: the control for being told anything at all.

    It has the lines of `message`, each with as many words, in filler sentences that have neither
    names nor numbers, and no focus.

    Args:
        message: what the real trial delivers.
        seed: chooses the sentence to begin with.
    """
    start = seed % len(_FILLER)
    spoken = itertools.cycle(" ".join(_FILLER[start:] + _FILLER[:start]).split())

    def filled(line: MessageLine) -> MessageLine:
        n_words = len(line.text.split())
        return MessageLine(text=" ".join(itertools.islice(spoken, n_words)), spans=())

    return SpliceMessage(
        source=message.source,
        receiver=message.receiver,
        key=filled(message.key),
        lines=tuple(map(filled, message.lines)),
        writer="placebo",
    )


# --- written by a model ----------------------------------------------------------------------


async def _ask_for_message(
    workflow: Workflow,
    base: Trace,
    gap: Gap,
    model: ChatModel,
    settings: MessageSettings,
    account: Account | None,
    calls: list[CallRecord],
) -> SpliceMessage | None:
    """Ask a model for the message; None if the call failed or nothing of the reply holds."""
    edge = gap.edge
    pieces = material(workflow, base, edge.source)
    prompt = render(
        "write_message",
        question=quote(base.query.text),
        task=one_line(workflow.subtask(edge.receiver, base.query), limit=1000),
        gap=quote("\n".join(item.text for item in gap.items) or "whatever helps with the task"),
        source=edge.source,
        material=quote("\n\n".join(piece.text for piece in pieces)),
        n_facts=str(settings.max_lines),
    )
    request = Request(
        messages=(ChatMessage(role="user", content=prompt),),
        settings=settings.model,
        stage="generate",
        query_id=base.query.id,
        rollout=base.rollout,
    )
    try:
        completion = await book_call(model, request, account, calls)
    except (ModelError, BudgetExceeded):
        return None
    lines, n_dropped = read_message(completion.text, pieces, _allowed(workflow, base, gap))
    heard = told(workflow, base, edge.receiver)
    lines = _within([line for line in _distinct(lines) if _is_new(line, heard)], settings)
    if not lines:
        return None
    return _message(gap, lines, _about(workflow, base, gap), "model", n_dropped)


def read_message(
    reply: str, pieces: Sequence[Piece], allowed: str = ""
) -> tuple[list[MessageLine], int]:
    """Read a model's reply into verified lines, the key statement first.

    A line holds if its quotation stands verbatim in the source's material, and if each entity and
    number that it states stands in that material or in `allowed`.

    Args:
        reply: what the model wrote.
        pieces: the source's material.
        allowed: text whose items a line may mention as well, such as the question.

    Returns:
        The lines that hold, and the number of lines that did not.
    """
    everything = norm("\n".join([allowed, *(piece.text for piece in pieces)]))
    keys: list[MessageLine] = []
    facts: list[MessageLine] = []
    n_dropped = 0
    candidates = (raw[:_MAX_LINE].strip().lstrip("-* ") for raw in reply.splitlines())
    marked = (raw for raw in candidates if raw[:5].upper().startswith(("KEY:", "FACT:")))
    for raw in itertools.islice(marked, _MAX_READ_LINES):
        found = _LINE.fullmatch(raw)
        statement = found.group(2).strip() if found else ""
        span = _locate(found.group(3), pieces) if found else None
        if found is None or span is None or not _is_supported(statement, everything):
            n_dropped += 1
            continue
        line = MessageLine(text=one_line(statement), spans=(span,))
        (keys if raw[:3].upper() == "KEY" else facts).append(line)
    return keys + facts, n_dropped


def _locate(quotation: str, pieces: Sequence[Piece]) -> Span | None:
    """Where a quotation stands verbatim; None if it stands nowhere."""
    for piece in pieces:
        start = piece.text.find(quotation)
        if start >= 0:
            return Span(
                origin=piece.origin, start=start, end=start + len(quotation), text=quotation
            )
    return None


def _is_supported(statement: str, everything: str) -> bool:
    """Whether a statement says something, and each entity and number of it stands in the text.

    A single name that opens the statement looks like any other first word and is not checked.
    """
    return bool(statement) and all(contains(everything, item) for item in items(statement))


def _is_new(line: MessageLine, heard: str) -> bool:
    """Whether a line tells its receiver something."""
    own = words(line.text)
    return bool(own - words(heard)) or any(not contains(heard, item) for item in items(line.text))


def _allowed(workflow: Workflow, base: Trace, gap: Gap) -> str:
    return "\n".join(
        [
            base.query.text,
            workflow.subtask(gap.edge.source, base.query),
            workflow.subtask(gap.edge.receiver, base.query),
        ]
    )


def verify(workflow: Workflow, base: Trace, message: SpliceMessage) -> SpliceMessage | None:
    """The message with only those lines whose every span holds; None if no line is left.

    The last check before delivery, whoever wrote the message.
    """
    lines = [message.key, *message.lines]
    held = [
        line
        for line in lines
        if line.spans and all(holds(workflow, base, message.source, span) for span in line.spans)
    ]
    if not held:
        return None
    n_dropped = message.n_dropped + len(lines) - len(held)
    return message.model_copy(
        update={"key": held[0], "lines": tuple(held[1:]), "n_dropped": n_dropped}
    )
