"""What a node reads: the one place where a node's input is put together.

The order is fixed: the node's own documents, outputs of its parents in declaration order, the
question, a delivered message, the task, how to reply. What is asked stands near the end because
small models lose it behind the material. A delivered message stands before the task and the task
is bound to what the message is about: on two-hop questions this turned 6 fixed and 8 broken answers
into 10 and 2 (docs/results.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from splice.abstention import abstention_prompt
from splice.prompts import one_line, quote, render
from splice.records import ChatMessage, Document, NodeId, NodeRun, Query, SpliceMessage, trusted
from splice.workflow import Agent, Function, Workflow

_MOST_LISTED: Final = 12
_LONGEST: Final = 120
"""Entries of a list of capabilities or agents, and characters of each: small models lose the task
behind more."""
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
    system = render("agent_system", role="\n".join([node.role, *capability_lists(workflow, node)]))
    if node.may_abstain:
        # Last, behind what a reply has to look like: a small model reads past it in the system
        # message (docs/results.md, "Where the rules of abstaining stand").
        lists = resort_lists(workflow, node)
        blocks.append(abstention_prompt(lists, is_structured=node.structured_replies))
    return (
        ChatMessage(role="system", content=system),
        ChatMessage(role="user", content="\n\n".join(blocks)),
    )


def capability_lists(workflow: Workflow, agent: Agent) -> tuple[str, ...]:
    """What an agent is told that it can do, and that it can't; nothing where nothing is declared.

    Beside its abilities stand its tools, save those that an ability opens with.
    """
    lists = []
    if agent.abilities:
        lists.append(_listed("told_abilities", [*agent.abilities, *_tool_lines(workflow, agent)]))
    if agent.limits:
        lists.append(_listed("told_limits", agent.limits))
    return tuple(lists)


def _tool_lines(workflow: Workflow, agent: Agent) -> Iterator[str]:
    """Name and first line of the description of each tool."""
    told = {ability.partition(":")[0].strip() for ability in agent.abilities}
    for name in agent.tools:
        if name not in told:
            first = workflow.tools_by_name[name].spec.description.strip().partition("\n")[0]
            yield f"{name}: {first}" if first else name


def resort_lists(workflow: Workflow, agent: Agent) -> tuple[str, ...]:
    """What an agent that may abstain is told of what is left to it and to others."""
    lists = []
    if agent.alternatives:
        offers = [
            f"{one_line(unsupported, limit=_LONGEST // 2)} -> {one_line(supported)}"
            for unsupported, supported in agent.alternatives.items()
        ]
        lists.append(_listed("told_alternatives", offers))
    if others := others_list(workflow, agent.id):
        lists.append(others)
    return tuple(lists)


def others_list(workflow: Workflow, node: NodeId) -> str:
    """The other agents there are, in this workflow and elsewhere; empty if there are none."""
    # All nodes are told, however many: what a run of a given workflow reads may not change.
    others = [
        f"- {name}: {one_line(what, limit=_LONGEST)}"
        for name, what in neighbours(workflow, node).items()
    ]
    others += _entries(
        [f"{name}: {one_line(what, limit=_LONGEST)}" for name, what in workflow.elsewhere.items()]
    )
    return render("told_others", lines="\n".join(others)) if others else ""


def neighbours(workflow: Workflow, node: NodeId) -> Mapping[NodeId, str]:
    """The other nodes that say what they do, by their subtask or else by their abilities."""
    does = {
        other.id: other.subtask or "; ".join(other.abilities if isinstance(other, Agent) else ())
        for other in workflow.nodes
        if other.id != node
    }
    return {name: what for name, what in does.items() if what}


def _listed(template: str, lines: Sequence[str]) -> str:
    entries = _entries([one_line(line, limit=_LONGEST) for line in lines])
    return render(template, lines="\n".join(entries))


def _entries(lines: Sequence[str]) -> list[str]:
    """The first lines as entries of a list, and how many are left out."""
    entries = [f"- {line}" for line in lines[:_MOST_LISTED]]
    n_left_out = len(lines) - len(entries)
    return [*entries, render("told_left_out", number=str(n_left_out))] if n_left_out else entries
