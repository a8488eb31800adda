"""Workflows: nodes, edges, what makes them valid, and their file format.

A workflow is a directed acyclic graph of agents and Python functions. An edge delivers the source's
output into the receiver's input; without an edge no byte of the source reaches it.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, ValidationError, field_serializer, model_validator

from splice import prompts
from splice.errors import QueryError, TraceMismatch, WorkflowError
from splice.files import read_text
from splice.prompts import one_line, without_surrogates
from splice.records import (
    CandidateEdge,
    Document,
    Documents,
    Edge,
    ModelSettings,
    NodeId,
    Query,
    Record,
    ToolSpec,
    Trace,
    digest,
)

if TYPE_CHECKING:
    import networkx as nx

_ID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def qualified_name(call: Callable[..., Any]) -> str:
    """`module.name` of a function, or of the class of a callable object."""
    named = call if hasattr(call, "__qualname__") else type(call)
    return f"{named.__module__}.{named.__qualname__}"


def _code_digest(call: Callable[..., Any]) -> str:
    """Digest of a function's source, or of the source of a callable object's class.

    Without source (a lambda typed at a prompt, a C function) the qualified name stands for it.
    """
    named = call if hasattr(call, "__qualname__") else type(call)
    try:
        return digest(inspect.getsource(named))
    except (OSError, TypeError):
        return digest(qualified_name(call))


def is_async(call: Callable[..., Any]) -> bool:
    """Whether calling a function, or a callable object, gives a coroutine."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - the method, to look at it
    )


_CAPABILITIES: Final = ("abilities", "limits", "alternatives")
"""Fields of an agent that are no part of its fingerprint where they are empty."""

_LISTS: Final = ("told_abilities", "told_limits", "told_alternatives", "told_others")


@cache
def _lists_version() -> str:
    """Digest of the templates by which agents are told of capabilities.

    They are no part of `prompts.version`, which is in the fingerprint of every workflow.
    """
    lists = [prompts.render(name, lines="") for name in _LISTS]
    return digest("\n".join([*lists, prompts.render("told_left_out", number="")]))


class Tool(Record):
    """A Python function that an agent may call."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    spec: ToolSpec
    call: Callable[..., Any]
    """Called with the arguments as keywords; sync or async. What it returns is turned into text."""
    effects: Literal["none", "read", "write"] = "read"
    """`write`: it changes something outside. A trial never fires a new write."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None

    @field_serializer("call")
    def _name_of_call(self, call: Callable[..., Any]) -> str:
        return qualified_name(call)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what the tool is and does."""
        return digest(self.model_dump_json() + _code_digest(self.call))


class _Common(Record):
    """What agents and functions have in common."""

    id: NodeId
    subtask: str = ""
    """What the node is to find out or do; a query may bring its own."""
    documents: Documents = ()
    """Standing private material, read before what the query brings."""
    needs: Literal["any", "all"] = "any"
    """Which parents must have delivered for the node to be called at all. With `any` it runs on
    what arrived, is told what did not, and is skipped if nothing did."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds for the whole node, tool rounds included; None: the run's default."""


class Agent(_Common):
    """A node that asks a language model."""

    kind: Literal["agent"] = "agent"
    role: str
    """Who the agent is and what it knows; the system message."""
    reply: str = ""
    """How to reply; the last line of the prompt."""
    reads_query: bool = True
    """Whether the agent sees the whole question. Small models answer the question rather than their
    task if they see both; an agent that only looks something up needs just its task."""
    model: ModelSettings = ModelSettings()
    tools: tuple[str, ...] = ()
    """Names of tools of the workflow."""
    max_tool_rounds: Annotated[int, Field(ge=1)] = 8
    """Rounds of tool calls after which the node fails rather than ask again."""
    may_abstain: bool = False
    """The agent may say, in a typed form, that it can't act and why."""
    structured_replies: bool = False
    """With `may_abstain`: every reply, abstention or not, is asked for by a JSON Schema, which the
    endpoint enforces where it can. Stricter than a promise in the prompt; the agent can't call
    tools at the same time."""
    abstention_phrase: str | None = None
    """A reply that is nothing but this phrase ("not found") counts as *Insufficient Input*; for
    models too small to keep the typed form."""
    abilities: tuple[str, ...] = ()
    """What the agent can do, a line each ("FindBus: find a bus journey between two cities"). It is
    told them, and with them its tools, whether it may abstain or not."""
    limits: tuple[str, ...] = ()
    """Policy: what the agent can't or must not do, a line each. It is told them in any case."""
    alternatives: Mapping[str, str] = {}
    """Functions that the agent does not support, by name, each with the supported one to offer in
    its place. Told to an agent with `may_abstain`."""


class Function(_Common):
    """A node that is a Python callable, sync or async.

    It is called with one `NodeInput` and returns a text or an `Abstention`. A sync callable runs in
    a worker thread, so that it holds up nothing else.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kind: Literal["function"] = "function"
    call: Callable[..., Any]
    version: str = ""
    """Part of the fingerprint. Raise it when the callable changes in a way that its source does not
    show, such as the configuration of a callable object."""

    @field_serializer("call")
    def _name_of_call(self, call: Callable[..., Any]) -> str:
        return qualified_name(call)

    @cached_property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        return is_async(self.call)


Node: TypeAlias = Annotated[Agent | Function, Field(discriminator="kind")]

AnswerRule: TypeAlias = Literal["whole", "answer_line"] | Callable[[str], str | None]
"""How the answer is taken from the output node: all of it; what stands after the last `Answer:`; or
a function of the output, None for "no answer"."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A workflow's graph in the form the executor walks. All tuples are in declaration order."""

    order: tuple[NodeId, ...]
    """Canonical order: topological, ties by declaration."""
    parents: Mapping[NodeId, tuple[NodeId, ...]]
    children: Mapping[NodeId, tuple[NodeId, ...]]


class Workflow(Record):
    """An immutable, validated graph of nodes.

    Raises:
        WorkflowError: duplicate or malformed ids, unknown nodes in edges, self-edges, duplicate
            edges, a cycle, an output node that does not exist, a node from which the output can't
            be reached, a tool that is missing or given twice, an empty ability, limit, alternative
            or description, a name in `elsewhere` that is malformed or a node's.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str = "workflow"
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    output: NodeId
    answer: AnswerRule = "whole"
    tools: tuple[Tool, ...] = ()
    description: str = ""
    elsewhere: Mapping[NodeId, str] = {}
    """Agents that are no nodes of this workflow, by name, each with what it does in a line. An
    agent with `may_abstain` is told them beside the other nodes: a request may be one of theirs."""

    @model_validator(mode="after")
    def _check(self) -> Workflow:
        _check_nodes(self)
        _check_edges(self)
        _check_tools(self)
        _check_replies(self)
        _check_capabilities(self)
        _check_elsewhere(self)
        _check_reach(self)
        return self

    @field_serializer("answer")
    def _name_of_answer(self, answer: AnswerRule) -> str:
        return answer if isinstance(answer, str) else qualified_name(answer)

    @cached_property
    def by_id(self) -> Mapping[NodeId, Agent | Function]:
        """Nodes by id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def agents(self) -> tuple[Agent, ...]:
        """The nodes that ask a model."""
        return tuple(node for node in self.nodes if isinstance(node, Agent))

    @cached_property
    def tools_by_name(self) -> Mapping[str, Tool]:
        """Tools by name."""
        return {tool.spec.name: tool for tool in self.tools}

    @cached_property
    def plan(self) -> Plan:
        """The graph as the executor walks it."""
        ids = [node.id for node in self.nodes]
        parents: dict[NodeId, list[NodeId]] = {node: [] for node in ids}
        children: dict[NodeId, list[NodeId]] = {node: [] for node in ids}
        for source, receiver in self.edges:
            parents[receiver].append(source)
            children[source].append(receiver)
        return Plan(
            order=tuple(node for group in generations(self) for node in group),
            parents={node: tuple(found) for node, found in parents.items()},
            children={node: tuple(found) for node, found in children.items()},
        )

    @cached_property
    def graph(self) -> nx.DiGraph[NodeId]:
        """The graph for networkx, frozen; `graph.copy()` can be changed."""
        import networkx as nx

        graph: nx.DiGraph[NodeId] = nx.DiGraph()
        graph.add_nodes_from(node.id for node in self.nodes)
        graph.add_edges_from(self.edges)
        nx.freeze(graph)
        return graph

    @cached_property
    def candidate_edges(self) -> tuple[CandidateEdge, ...]:
        """All missing edges from a node to one after it in canonical order.

        Such an edge can't close a cycle. By receiver, then by source, in canonical order.
        """
        import networkx as nx

        order = self.plan.order
        found = []
        for place, receiver in enumerate(order):
            ancestors = nx.ancestors(self.graph, receiver)
            found += [
                CandidateEdge(
                    source=source,
                    receiver=receiver,
                    kind="distant_ancestor" if source in ancestors else "parallel_branch",
                )
                for source in order[:place]
                if source not in self.plan.parents[receiver]
            ]
        return tuple(found)

    @cached_property
    def distances(self) -> Mapping[NodeId, int]:
        """Edges on the shortest path from each node to the output node."""
        return {node: self.hops[node][self.output] for node in self.hops}

    @cached_property
    def hops(self) -> Mapping[NodeId, Mapping[NodeId, int]]:
        """Edges on the shortest path from each node to each node that it leads to."""
        import networkx as nx

        return dict(nx.all_pairs_shortest_path_length(self.graph))

    @cached_property
    def node_fingerprints(self) -> Mapping[NodeId, str]:
        """Fingerprint by node: definition, code and tools, but not the edges."""
        return {node.id: self._node_fingerprint(node) for node in self.nodes}

    def _node_fingerprint(self, node: Agent | Function) -> str:
        # Unused fields are left out: recorded runs stay those of a workflow that has none of them.
        unused = {name for name in _CAPABILITIES if not getattr(node, name, None)}
        parts = [node.model_dump_json(exclude=unused), prompts.version()]
        if isinstance(node, Function):
            parts.append(_code_digest(node.call))
        else:
            parts.extend(self.tools_by_name[name].fingerprint for name in node.tools)
            if len(unused) < len(_CAPABILITIES):
                parts.append(_lists_version())
        return digest("\n".join(parts))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the whole definition."""
        answer = self.answer if isinstance(self.answer, str) else _code_digest(self.answer)
        parts: list[Any] = [dict(self.node_fingerprints), self.edges, self.output, answer]
        if self.elsewhere:
            parts += [list(self.elsewhere.items()), _lists_version()]
        return digest(json.dumps(parts))

    def changed(self, **values: Any) -> Workflow:
        """A workflow with other values in some fields, validated anew.

        `model_copy` would keep what was derived from the old values.
        """
        fields = {name: getattr(self, name) for name in Workflow.model_fields}
        return Workflow(**{**fields, **values})

    def subtask(self, node: NodeId, query: Query) -> str:
        """The subtask of `node` for this query."""
        own = query.subtasks.get(node) if query.subtasks else None
        return own or self.by_id[node].subtask

    def private(self, node: NodeId, query: Query) -> tuple[Document, ...]:
        """Documents that only `node` sees: its own, then those of the query."""
        standing = self.by_id[node].documents
        return (*standing, *query.context.get(node, ())) if query.context else standing

    def check_query(self, query: Query) -> None:
        """Refuse a query that does not fit.

        Raises:
            QueryError: the text is empty, or the context or the subtasks name unknown nodes.
        """
        if not query.text.strip():
            raise QueryError(f"query {query.id!r} is empty")
        texts = [query.id, query.text, *query.subtasks.values()]
        for documents in query.context.values():
            texts += [part for doc in documents for part in (doc.title, doc.text) if part]
        if any(without_surrogates(text) != text for text in texts):
            raise QueryError(f"query {query.id!r} is not Unicode text: it holds lone surrogates")
        for what, names in (("context", query.context), ("subtasks", query.subtasks)):
            for name in names:
                if name not in self.by_id:
                    raise QueryError(
                        f"query {query.id!r}: {what} names unknown node {name!r}; "
                        f"there are {', '.join(self.by_id)}"
                    )

    def check_trace(self, trace: Trace) -> None:
        """Refuse a trace that another workflow recorded.

        Raises:
            TraceMismatch: the definitions differ; the message names each node that does.
        """
        if trace.fingerprint == self.fingerprint:
            return
        ours, theirs = self.node_fingerprints, trace.node_fingerprints
        lines = [f"- node {name!r} is gone" for name in theirs if name not in ours]
        lines += [f"- node {name!r} is new" for name in ours if name not in theirs]
        lines += [
            f"- node {name!r} has changed"
            for name in ours
            if name in theirs and ours[name] != theirs[name]
        ]
        lines = lines or [
            "- edges, output, answer rule or order of nodes have changed, or the agents elsewhere"
        ]
        raise TraceMismatch(
            f"the trace was recorded by another version of workflow {self.name!r}:\n"
            + "\n".join(lines)
        )


def generations(workflow: Workflow) -> tuple[tuple[NodeId, ...], ...]:
    """Group nodes so that each group depends only on earlier groups.

    Within a group nodes keep declaration order, so two runs of the same workflow visit them
    identically.

    Raises:
        WorkflowError: the edges form a cycle.
    """
    declared = {node.id: place for place, node in enumerate(workflow.nodes)}
    waiting = dict.fromkeys(declared, 0)
    receivers: dict[NodeId, list[NodeId]] = defaultdict(list)
    for source, receiver in workflow.edges:
        waiting[receiver] += 1
        receivers[source].append(receiver)
    ready = [node for node, inputs in waiting.items() if inputs == 0]
    groups: list[tuple[NodeId, ...]] = []
    while ready:
        groups.append(tuple(ready))
        for node in ready:
            del waiting[node]
        freed = []
        for receiver in (receiver for node in ready for receiver in receivers[node]):
            waiting[receiver] -= 1
            if waiting[receiver] == 0:
                freed.append(receiver)
        ready = sorted(freed, key=declared.__getitem__)
    if waiting:
        raise WorkflowError(f"cycle: {_cycle(workflow, waiting)}")
    return tuple(groups)


def _cycle(workflow: Workflow, waiting: Mapping[NodeId, int]) -> str:
    """One cycle among the nodes that never became ready, as `a -> b -> a`."""
    feeds = {r: s for s, r in workflow.edges if s in waiting and r in waiting}
    node, seen = next(iter(feeds)), []
    while node not in seen:
        seen.append(node)
        node = feeds[node]
    loop = [*seen[seen.index(node) :], node]
    return " -> ".join(reversed(loop))


def _check_nodes(workflow: Workflow) -> None:
    if not workflow.nodes:
        raise WorkflowError(f"workflow {workflow.name!r} has no nodes")
    seen: set[NodeId] = set()
    for place, node in enumerate(workflow.nodes):
        if not _ID.fullmatch(node.id):
            raise WorkflowError(
                f"nodes[{place}]: id {node.id!r} is not a letter followed by at most 63 letters, "
                "digits, '_', '.' or '-'"
            )
        if node.id in seen:
            raise WorkflowError(f"nodes[{place}]: there is a node {node.id!r} already")
        try:
            node.model_dump_json()
        except ValueError:
            # Or the fingerprint would fail, after the calls were paid.
            raise WorkflowError(
                f"nodes[{place}] {node.id!r}: not Unicode text: it holds lone surrogates"
            ) from None
        seen.add(node.id)
    if workflow.output not in seen:
        raise WorkflowError(
            f"output names unknown node {workflow.output!r}; there are {', '.join(sorted(seen))}"
        )


def _check_replies(workflow: Workflow) -> None:
    for node in workflow.nodes:
        if not isinstance(node, Agent) or not node.structured_replies:
            continue
        if not node.may_abstain:
            raise WorkflowError(f"node {node.id!r}: structured_replies needs may_abstain")
        if node.tools:
            raise WorkflowError(
                f"node {node.id!r}: structured_replies and tools exclude each other"
            )


def _check_capabilities(workflow: Workflow) -> None:
    for agent in workflow.agents:
        for field in ("abilities", "limits"):
            for place, line in enumerate(getattr(agent, field)):
                if not one_line(line):
                    raise WorkflowError(f"node {agent.id!r}: {field}[{place}] is empty")
        for unsupported, supported in agent.alternatives.items():
            if not one_line(unsupported):
                raise WorkflowError(f"node {agent.id!r}: alternatives has an empty name")
            if not one_line(supported):
                raise WorkflowError(f"node {agent.id!r}: alternatives[{unsupported!r}] is empty")
            if unsupported in agent.tools:
                raise WorkflowError(
                    f"node {agent.id!r}: alternatives names {unsupported!r} as not supported, "
                    f"which is a tool of it; its tools are {', '.join(agent.tools)}"
                )


def _check_elsewhere(workflow: Workflow) -> None:
    for name, what in workflow.elsewhere.items():
        if not _ID.fullmatch(name):
            raise WorkflowError(
                f"elsewhere: {name!r} is not a letter followed by at most 63 letters, digits, "
                "'_', '.' or '-'"
            )
        if name in workflow.by_id:
            raise WorkflowError(
                f"elsewhere: {name!r} is a node of this workflow; its nodes are "
                f"{', '.join(workflow.by_id)}"
            )
        if not one_line(what):
            raise WorkflowError(f"elsewhere: {name!r} does not say what the agent does")
        if without_surrogates(what) != what:
            raise WorkflowError(
                f"elsewhere: {name!r} is not Unicode text: it holds lone surrogates"
            )


def _check_edges(workflow: Workflow) -> None:
    ids = {node.id: node for node in workflow.nodes}
    seen: set[Edge] = set()
    for place, (source, receiver) in enumerate(workflow.edges):
        where = f"edges[{place}] {source!r} -> {receiver!r}"
        for end in (source, receiver):
            if end not in ids:
                raise WorkflowError(f"{where}: unknown node {end!r}; there are {', '.join(ids)}")
        if source == receiver:
            raise WorkflowError(f"{where}: a node can't read its own output")
        if (source, receiver) in seen:
            raise WorkflowError(f"{where}: the edge is there already")
        seen.add((source, receiver))
    generations(workflow)


def _check_tools(workflow: Workflow) -> None:
    names = [tool.spec.name for tool in workflow.tools]
    for name in names:
        if names.count(name) > 1:
            raise WorkflowError(f"tools: there are two tools named {name!r}")
    for node in workflow.nodes:
        for name in node.tools if isinstance(node, Agent) else ():
            if name not in names:
                have = f"there are {', '.join(names)}" if names else "the workflow has none"
                raise WorkflowError(f"node {node.id!r} names missing tool {name!r}; {have}")


def _check_reach(workflow: Workflow) -> None:
    sources: dict[NodeId, list[NodeId]] = defaultdict(list)
    for source, receiver in workflow.edges:
        sources[receiver].append(source)
    reaching, frontier = {workflow.output}, [workflow.output]
    while frontier:
        new = [source for source in sources[frontier.pop()] if source not in reaching]
        reaching.update(new)
        frontier += new
    lost = [node.id for node in workflow.nodes if node.id not in reaching]
    if lost:
        raise WorkflowError(
            f"no path leads from {', '.join(map(repr, lost))} to the output node "
            f"{workflow.output!r}"
        )


# --- the file format -------------------------------------------------------------------------


class DocumentEntry(Record):
    """A document in a workflow file: its text, or a file in the folder of the workflow file."""

    title: str | None = None
    text: str | None = None
    file: str | None = None


class AgentEntry(Agent):
    """An agent in a workflow file."""

    documents: tuple[DocumentEntry | str, ...] = ()  # type: ignore[assignment]


class FunctionEntry(_Common):
    """A function in a workflow file; its code comes from the caller."""

    kind: Literal["function"]
    documents: tuple[DocumentEntry | str, ...] = ()  # type: ignore[assignment]
    call: str
    """Name of a function that is handed in when the file is loaded."""
    version: str = ""


class WorkflowFile(Record):
    """A workflow as a TOML file."""

    name: str
    description: str = ""
    output: NodeId
    answer: Literal["whole", "answer_line"] = "whole"
    edges: tuple[Edge, ...] = ()
    elsewhere: Mapping[NodeId, str] = {}
    """Agents that are no nodes of the workflow, by name, each with what it does in a line."""
    model: ModelSettings = ModelSettings()
    """Model settings of every agent that does not bring its own."""
    nodes: tuple[AgentEntry | FunctionEntry, ...]


def workflow_schema() -> dict[str, Any]:
    """JSON Schema of a workflow file, for editors."""
    schema = WorkflowFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def load_workflow(
    path: str | Path,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    tools: Sequence[Tool] = (),
) -> Workflow:
    """Read a workflow from a TOML file.

    The file names functions and tools; their code is handed in here, so that opening a file never
    runs code that it brought along.

    Args:
        path: the TOML file.
        functions: callables by the name that the file uses in `call`.
        tools: tools that its agents name.

    Raises:
        WorkflowError: the file can't be read or is not a workflow; the message names the place.
    """
    path = Path(path)
    raw = _read_toml(path)
    try:
        head = WorkflowFile.model_validate({**raw, "nodes": ()})
    except ValidationError as error:
        raise WorkflowError(f"{path}: {_first_problem(error)}") from None
    nodes = []
    for place, entry in enumerate(_tables(path, raw)):
        nodes.append(_load_node(path, place, entry, raw.get("model", {}), functions or {}))
    try:
        return Workflow(
            name=head.name,
            description=head.description,
            nodes=tuple(nodes),
            edges=head.edges,
            output=head.output,
            answer=head.answer,
            tools=tuple(tools),
            elsewhere=head.elsewhere,
        )
    except WorkflowError as error:
        raise WorkflowError(f"{path}: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, WorkflowError))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise WorkflowError(f"{path}: not TOML: {error}") from None


def _tables(path: Path, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = raw.get("nodes")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise WorkflowError(f"{path}: there is no [[nodes]] table")
    return entries


def _load_node(
    path: Path,
    place: int,
    entry: Mapping[str, Any],
    model: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
) -> Agent | Function:
    where = f"{path}: nodes[{place}] {entry.get('id', '(no id)')!r}"
    kind = entry.get("kind", "agent")
    if kind not in ("agent", "function"):
        raise WorkflowError(f"{where}: kind {kind!r}; there are 'agent' and 'function'")
    try:
        if kind == "function":
            read: AgentEntry | FunctionEntry = FunctionEntry.model_validate(entry)
        else:
            own = entry.get("model", {})
            merged = {**model, **own} if isinstance(own, dict) else own
            read = AgentEntry.model_validate({**entry, "model": merged})
        documents = tuple(_load_document(path, where, item) for item in read.documents)
        values = {**dict(read), "documents": documents}
        if isinstance(read, AgentEntry):
            return Agent.model_validate(values)
        if read.call not in functions:
            have = f"there are {', '.join(functions)}" if functions else "none was handed in"
            raise WorkflowError(f"{where}: missing function {read.call!r}; {have}")
        return Function.model_validate({**values, "call": functions[read.call]})
    except ValidationError as error:
        raise WorkflowError(f"{where}: {_first_problem(error)}") from None


def _load_document(path: Path, where: str, item: DocumentEntry | str) -> Document:
    if isinstance(item, str):
        return Document(text=item)
    if (item.text is None) == (item.file is None):
        raise WorkflowError(f"{where}: a document has either a text or a file")
    if item.file is None:
        return Document(title=item.title, text=item.text or "")
    folder = path.parent.resolve()
    try:
        target = (folder / item.file).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise WorkflowError(f"{where}: document {item.file!r}: {error}") from None
    # A workflow file may come from anywhere; what it shows to a model must lie beside it.
    if not target.is_relative_to(folder):
        raise WorkflowError(f"{where}: document {item.file!r} lies outside {folder}")
    try:
        return Document(title=item.title, text=target.read_text("utf-8").strip())
    except OSError as error:
        raise WorkflowError(f"{where}: document {item.file!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WorkflowError(
            f"{where}: document {item.file!r} is not UTF-8 (byte {error.start})"
        ) from None


def _first_problem(error: ValidationError) -> str:
    """The first problem that pydantic found, as `key: what is wrong`."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the table"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {place!r}"
    if problem["type"] == "missing":
        return f"key {place!r} is missing"
    return f"{place}: {problem['msg']}"
