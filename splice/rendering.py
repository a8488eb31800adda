"""What a node reads: the one place where a node's input is put together.

The order is fixed: the node's own documents, outputs of its parents in declaration order, the
question, a delivered message, the task, how to reply. What is asked stands near the end because
small models lose it behind the material. A delivered message stands before the task and the task
is bound to what the message is about: on two-hop questions this turned 6 fixed and 8 broken answers
into 10 and 2 (docs/results.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from splice.abstention import abstention_prompt
from splice.prompts import one_line, quote, render
from splice.records import ChatMessage, Document, NodeId, NodeRun, Query, SpliceMessage, trusted
from splice.workflow import Agent, Function, Workflow

_THIS: Final = re.compile(
    r"\b[Tt]his (?!(?:a|an|and|answer|are|as|be|been|by|can|case|could|data|did|document|does"
    r"|evidence|file|for|form|from|had|has|information|in|is|it|kind|line|list|may|message|might"
    r"|must|of|on|one|or|part|problem|query|question|reply|report|request|sentence|shall|should"
    r"|step|task|text|that|the|time|to|topic|was|way|week|were|what|which|will|with|word|would"
    r"|year)\b)([a-z]+)\b"
)
"""`this person`, and the like: `this` with a word for something that has a name."""


def question_block(query: Query) -> str:
    """The question, as every node sees it."""
    return render("agent_question", question=quote(query.text))


def parent_block(run: NodeRun) -> str:
    """What a node's run delivers to those that read it."""
    if run.abstention is not None:
        return render(
            "agent_abstained",
            source=run.node,
            category=run.abstention.category,
            rationale=quote(run.abstention.rationale),
        )
    if run.output is None:
        return render("agent_missing", source=run.node, status=run.status)
    return render("agent_parent", source=run.node, output=quote(run.output))


def documents_block(documents: Sequence[Document]) -> str:
    """A node's private documents."""
    return render("agent_documents", documents=quote("\n\n".join(doc.shown for doc in documents)))


def message_block(message: SpliceMessage) -> str:
    """A delivered message."""
    return render("agent_message", source=message.source, message=quote(message.text))


def task_block(subtask: str, message: SpliceMessage | None) -> str:
    """The node's task; with a message, bound to what it is about.

    A task that says `this person`, or the like, is asked with the name in that place: small models
    go on answering about somebody else if the name stands beside the task (docs/results.md).
    """
    task = one_line(subtask, limit=4000)
    if message is None or message.focus is None:
        return render("agent_task", subtask=task)
    # Names are the source's wording: they must not close the quotation marks around them.
    names = [one_line(name, limit=80).replace('"', "'") for name in (message.focus, *message.also)]
    about = " and ".join(f'"{name}"' for name in names)
    if len(set(_THIS.findall(task))) == 1:
        return render("agent_task", subtask=_THIS.sub(lambda _: about, task))
    return render("agent_task_about", about=about, subtask=task)


def render_input(
    workflow: Workflow,
    node: Agent | Function,
    blocks: Sequence[str],
    subtask: str,
    message: SpliceMessage | None,
) -> tuple[ChatMessage, ...]:
    """The messages that `node` is called with.

    Args:
        workflow: the workflow that `node` belongs to.
        node: who reads.
        blocks: private documents, parents' blocks and the question, in this order.
        subtask: the node's task for this query; empty: it has none.
        message: a delivered message, or None.
    """
    blocks = list(blocks)
    if message is not None:
        blocks.append(message_block(message))
    if subtask:
        blocks.append(task_block(subtask, message))
    if isinstance(node, Function):
        return (trusted(ChatMessage, {"role": "user", "content": "\n\n".join(blocks)}),)
    if node.reply:
        blocks.append(node.reply)
    system = render("agent_system", role=node.role)
    if node.may_abstain:
        others = neighbours(workflow, node.id)
        rules = abstention_prompt(neighbours=others, is_structured=node.structured_replies)
        system = f"{system}\n\n{rules}"
    return (
        ChatMessage(role="system", content=system),
        ChatMessage(role="user", content="\n\n".join(blocks)),
    )


def neighbours(workflow: Workflow, node: NodeId) -> Mapping[NodeId, str]:
    """The other nodes and what each does, as a node that may refer to them is told."""
    others = (other for other in workflow.nodes if other.id != node)
    return {other.id: one_line(other.subtask, limit=120) for other in others if other.subtask}
