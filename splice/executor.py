"""Run a workflow: each node as soon as its last parent has ended.

A node starts when its last parent ends; there is no barrier between levels. Ties follow declaration
order, and nothing in a trace but its times depends on the order in which nodes finish. A node that
fails is recorded as failed and its successors are told; it never passes for an empty answer.

Running again after a change is the same code: each node whose rendered input, definition, model
and rollout equal a recorded run takes that run as it is, byte for byte, and every other node runs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field

from splice._version import __version__
from splice.abstention import parse_reply, reply_schema, wire
from splice.errors import (
    BudgetExceeded,
    ModelError,
    PromptError,
    ScriptExhausted,
    SettingsError,
    WriteBlocked,
)
from splice.ledger import Account, Budget, most_cost, most_tokens, open_account
from splice.models.protocol import ChatModel, cost
from splice.prompts import defuse, without_surrogates
from splice.records import (
    Abstention,
    CallRecord,
    ChatMessage,
    Completion,
    Document,
    FailureKind,
    ModelIdentity,
    NodeFailure,
    NodeId,
    NodeRun,
    NodeStatus,
    Query,
    Record,
    Request,
    SpliceMessage,
    Stage,
    ToolCall,
    Trace,
    Usage,
    digest,
    trusted,
)
from splice.rendering import documents_block, parent_block, question_block, render_input
from splice.text import last_answer_line
from splice.tools import ToolMemory, call_tool, in_thread
from splice.workflow import Agent, Function, Tool, Workflow

Models: TypeAlias = ChatModel | Mapping[str, ChatModel]
"""One model for all nodes, or models by the name that nodes give in `model.name`."""

Memo: TypeAlias = Callable[[NodeId, tuple[ChatMessage, ...], ModelIdentity | None], NodeRun | None]
"""Looks up a recorded run by node, rendered input and model; None: there is none."""

OnNode: TypeAlias = Callable[[NodeRun], None]
"""Told of each node run as soon as it has ended."""


class Recording(NamedTuple):
    """Where node runs of earlier runs are found, and where new ones are kept."""

    memo: Memo
    on_node: OnNode


class RunSettings(Record):
    """How a workflow is run."""

    node_timeout_s: Annotated[float, Field(gt=0)] | None = 600.0
    """Seconds for one node, its tool rounds and the client's retries included. Ten minutes: one
    call with a full context takes minutes on a slow CPU."""
    run_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds for the whole run; what has not finished by then is recorded as failed or skipped."""
    max_output_bytes: Annotated[int, Field(ge=1)] = 1_048_576
    """UTF-8 bytes of one node's output, over which the node has failed. A megabyte is far more than
    any context window holds."""
    rollout: Annotated[int, Field(ge=0)] = 0
    """Index of this sample among samples of the same run; part of every memo and cache key."""
    budget: Budget = Budget()


class NodeInput(NamedTuple):
    """What a function node is called with."""

    query: Query
    """Its id and text alone: what other nodes privately know is none of this node's business."""
    node: NodeId
    subtask: str
    parents: Mapping[NodeId, str]
    """Outputs of the parents that delivered, in declaration order."""
    missing: tuple[NodeId, ...]
    """Parents that delivered nothing."""
    documents: tuple[Document, ...]
    message: SpliceMessage | None
    """A message delivered by a spliced edge, in a trial."""


async def execute(
    workflow: Workflow,
    query: Query,
    models: Models,
    *,
    settings: RunSettings = RunSettings(),
    account: Account | None = None,
    message: SpliceMessage | None = None,
    memo: Memo | None = None,
    tool_memory: ToolMemory | None = None,
    on_node: OnNode | None = None,
    ledger: list[CallRecord] | None = None,
    keep_keys: bool = False,
    stage: Stage = "run",
    clock: Callable[[], float] = time.perf_counter,
) -> Trace:
    """Run a workflow on one query.

    Args:
        workflow: what to run.
        query: what to run it on.
        models: what answers the agents.
        settings: limits, rollout and budget.
        account: spending shared with other runs; None: an account of this run's own over
            `settings.budget`.
        message: delivered to `message.receiver`, as by an added edge.
        memo: where recorded runs are looked up instead of running a node.
        tool_memory: where tool calls are answered from, in a trial.
        on_node: told of each node run as soon as it has ended.
        ledger: gets every attempt at a model call, also if the run is cancelled or raises.
        keep_keys: write into each node run the key under which a later run finds it.
        stage: what the model calls are booked under.
        clock: seconds from any fixed point.

    Raises:
        QueryError: the query does not fit the workflow.
        SettingsError: a node's model is not among `models`. Raised before the first call.
        WriteBlocked: with `tool_memory`, a tool would have to write anew.
        ScriptExhausted: a scripted model has no reply left.
    """
    workflow.check_query(query)
    run = _Run(
        workflow=workflow,
        query=query,
        answering=resolve_models(workflow, models),
        settings=settings,
        account=account or open_account(settings.budget),
        message=message,
        memo=memo,
        tool_memory=tool_memory,
        on_node=on_node,
        keep_keys=keep_keys,
        stage=stage,
        clock=clock,
    )
    try:
        return await run.finish()
    finally:
        if ledger is not None:
            ledger.extend(run.ordered_calls())


def resolve_models(workflow: Workflow, models: Models) -> Mapping[NodeId, ChatModel]:
    """The model of each agent."""
    if not isinstance(models, Mapping):
        return {node.id: models for node in workflow.agents}
    found = {}
    for node in workflow.agents:
        name = node.model.name
        if name is None and len(models) == 1:
            found[node.id] = next(iter(models.values()))
        elif name is not None and name in models:
            found[node.id] = models[name]
        else:
            asked = "names no model" if name is None else f"names unknown model {name!r}"
            raise SettingsError(
                f"node {node.id!r} {asked}; there are {', '.join(map(repr, models)) or 'none'}"
            )
    return found


def model_identity(node: Agent | Function, model: ChatModel | None) -> ModelIdentity | None:
    """What answers for a node; None for a function."""
    return model.identity(node.model.name) if isinstance(node, Agent) and model else None


def memo_key(
    fingerprint: str,
    model: ModelIdentity | None,
    rollout: int,
    messages: Iterable[ChatMessage],
) -> str:
    """Digest under which a node run is found again.

    The definition of the node is part of it, so two nodes with the same prompt and other tools or
    another model never share a run.
    """
    parts = [fingerprint, model.model_dump_json() if model else "", str(rollout)]
    for message in messages:
        parts += message.role, message.content
    return digest("\0".join(f"{len(part)}:{part}" for part in parts))


class _Run:
    """The state of one execution."""

    def __init__(
        self,
        *,
        workflow: Workflow,
        query: Query,
        answering: Mapping[NodeId, ChatModel],
        settings: RunSettings,
        account: Account | None,
        message: SpliceMessage | None,
        memo: Memo | None,
        tool_memory: ToolMemory | None,
        on_node: OnNode | None,
        keep_keys: bool,
        stage: Stage,
        clock: Callable[[], float],
    ) -> None:
        self.workflow = workflow
        self.plan = workflow.plan
        self.query = query
        self.answering = answering
        self.settings = settings
        self.account = account
        self.message = message
        self.memo = memo
        self.tool_memory = tool_memory
        self.on_node = on_node
        self.keep_keys = keep_keys
        self.stage: Stage = stage
        self.clock = clock

        self.began = clock()
        self.question = question_block(query)
        # The two mappings are this run's own: a default would be shared with every other run.
        own: dict[str, Any] = {"context": {}, "subtasks": {}}
        self.asked = trusted(Query, {"text": query.text, "id": query.id, **own})
        self.runs: dict[NodeId, NodeRun] = {}
        self.blocks: dict[NodeId, str] = {}
        self.calls: dict[NodeId, list[CallRecord]] = {}
        self.waiting = {node: len(parents) for node, parents in self.plan.parents.items()}
        self.tasks: dict[NodeId, asyncio.Task[None]] = {}
        """By the node that it began with."""
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.deadlines = _Deadlines(self.loop)

    # --- scheduling --------------------------------------------------------------------------

    async def finish(self) -> Trace:
        """Run everything and put the trace together."""
        stop_reason = None
        limit_s = self.settings.run_timeout_s
        for node in self.plan.order:
            if not self.waiting[node]:
                self._spawn(node)
        try:
            async with nullcontext() if limit_s is None else asyncio.timeout(limit_s) as limit:
                await self.ended
        except BaseException as error:
            in_flight = self.deadlines.running()
            await self._cancel()
            if not (isinstance(error, TimeoutError) and limit is not None and limit.expired()):
                raise
            stop_reason = f"run_timeout after {limit_s} s"
            self._close_unfinished(in_flight)
        finally:
            self.deadlines.close()
        return self._trace(stop_reason)

    def _spawn(self, node: NodeId) -> None:
        if self.ended.done():
            return
        self.tasks[node] = self.loop.create_task(self._walk(node))

    async def _cancel(self) -> None:
        """Cancel what is in flight and wait until it is gone."""
        if not self.ended.done():
            self.ended.cancel()
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _walk(self, node: NodeId) -> None:
        """Run a node, then go on with what it made ready: the first here, the others beside."""
        task = self.tasks[node]
        following: NodeId | None = node
        try:
            # A node may end well although it was told to stop; nothing follows it then.
            while following is not None and not self.ended.done():
                following = self._deliver(await self._run_node(following, task))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not self.ended.done():
                self.ended.set_exception(error)
        finally:
            del self.tasks[node]
            if not self.tasks and not self.ended.done():
                self.ended.set_result(None)

    def _deliver(self, run: NodeRun) -> NodeId | None:
        """Hand a node's output on; what that makes ready is started, but for the first, returned."""
        name = run.node
        self.runs[name] = run
        readers = self.plan.children[name]
        if readers:
            self.blocks[name] = parent_block(run)
        if self.on_node is not None:
            self.on_node(run)
        first, waiting = None, self.waiting
        for child in readers:
            waiting[child] -= 1
            if not waiting[child]:
                if first is None:
                    first = child
                else:
                    self._spawn(child)
        return first

    # --- one node ----------------------------------------------------------------------------

    async def _run_node(self, name: NodeId, task: asyncio.Task[None]) -> NodeRun:
        node = self.workflow.by_id[name]
        began = self.clock()
        parents = self.plan.parents[name]
        outputs = {
            parent: output for parent in parents if (output := self.runs[parent].output) is not None
        }
        received = parents if len(outputs) == len(parents) else tuple(outputs)
        message = self.message if self.message and self.message.receiver == name else None
        if len(received) < len(parents) and message is None and _lacks(node, received):
            return self._skipped(name, parents, received, began)
        subtask = self.workflow.subtask(name, self.query)
        documents = self.workflow.private(name, self.query)
        blocks = [documents_block(documents)] if documents else []
        blocks += [self.blocks[parent] for parent in parents]
        if isinstance(node, Function) or node.reads_query:
            blocks.append(self.question)
        messages = render_input(self.workflow, node, blocks, subtask, message)
        model = self.answering.get(name)
        identity = model_identity(node, model)
        if self.memo is not None and (known := self.memo(name, messages, identity)) is not None:
            return known
        made: dict[str, Any] = {}
        if isinstance(node, Function):
            missing = _missing(parents, received)
            given = NodeInput(self.asked, name, subtask, outputs, missing, documents, message)
            coming = node.call(given) if node.is_async else in_thread(node.call, given)
            outcome = await self._guarded(node, coming, task)
        else:
            work = _AgentWork(self, node, self.answering[name], messages)
            outcome = await self._guarded(node, work.ask(), task)
            made = {
                "tool_calls": tuple(work.tool_calls),
                "usage": _sum_usage(work.calls),
                "model": identity,
                "is_truncated": work.is_truncated,
            }
        if outcome.status != "ok":
            made["abstention"] = outcome.abstention
            made["failure"] = outcome.failure
        if outcome.raw is not None:
            made["raw"] = outcome.raw
        if self.keep_keys:
            fingerprint = self.workflow.node_fingerprints[name]
            made["key"] = memo_key(fingerprint, identity, self.settings.rollout, messages)
        made |= {
            "node": name,
            "status": outcome.status,
            "output": outcome.output,
            "input": messages,
            "expected": parents,
            "received": received,
            "rollout": self.settings.rollout,
            "started_s": began - self.began,
            "elapsed_s": self.clock() - began,
        }
        return trusted(NodeRun, made)

    def _skipped(
        self,
        name: NodeId,
        parents: tuple[NodeId, ...],
        received: tuple[NodeId, ...],
        began: float,
    ) -> NodeRun:
        """The record of a node that was not called because what it needs did not arrive."""
        gone = ", ".join(map(repr, _missing(parents, received)))
        skipped = NodeRun(
            node=name,
            status="skipped",
            failure=NodeFailure(kind="missing_input", message=f"nothing arrived from {gone}"),
            expected=parents,
            received=received,
            rollout=self.settings.rollout,
            started_s=began - self.began,
        )
        known = self.memo(name, (), None) if self.memo is not None else None
        return known if known is not None and known.failure == skipped.failure else skipped

    async def _guarded(
        self, node: Agent | Function, coming: Awaitable[Any], task: asyncio.Task[None]
    ) -> _Outcome:
        """The outcome of a node, whatever happens inside it."""
        limit_s = node.timeout_s or self.settings.node_timeout_s
        self.deadlines.enter(node.id, limit_s, task)
        try:
            returned = await coming
            outcome = returned if type(returned) is _Outcome else _read_returned(node, returned)
            return self._checked(outcome)
        except asyncio.CancelledError:
            if self.ended.done():
                raise
            if self.deadlines.is_over(node.id):
                return _failed("timeout", f"not finished after {limit_s:g} s")
            return _failed("exception", "the node raised CancelledError of its own")
        except (SettingsError, PromptError, ScriptExhausted, WriteBlocked):
            raise
        except ModelError as error:
            return _failed("model", f"{error.reason}: {error}")
        except BudgetExceeded as error:
            return _failed("budget", str(error))
        except Exception as error:
            return _failed("exception", f"{type(error).__name__}: {error}")
        finally:
            self.deadlines.leave(node.id)

    def _checked(self, outcome: _Outcome) -> _Outcome:
        """The outcome, or a failure if the output is nothing or far too much."""
        output = outcome.output
        if output is None:
            return outcome
        if not output.strip():
            return _failed("empty", "the output is empty")
        most = self.settings.max_output_bytes
        # A character has at most four bytes: only long texts need to be encoded to be measured.
        if len(output) * 4 > most and len(encoded := output.encode("utf-8", "replace")) > most:
            problem = f"the output has {len(encoded):,} bytes; max_output_bytes is {most:,}"
            return _failed("too_large", problem, raw=encoded[:most].decode("utf-8", "ignore"))
        return outcome

    # --- the end -----------------------------------------------------------------------------

    def _close_unfinished(self, in_flight: Collection[NodeId]) -> None:
        """Record nodes that a timeout of the run kept from finishing."""
        for name in self.plan.order:
            if name in self.runs:
                continue
            parents = self.plan.parents[name]
            self.runs[name] = NodeRun(
                node=name,
                status="failed" if name in in_flight else "skipped",
                failure=NodeFailure(kind="run_timeout", message="the run's time was up"),
                expected=parents,
                received=tuple(p for p in parents if self.runs[p].output is not None),
                rollout=self.settings.rollout,
            )

    def ordered_calls(self) -> tuple[CallRecord, ...]:
        """Every attempt at a model call, by node in canonical order."""
        if not self.calls:
            return ()
        return tuple(call for name in self.plan.order for call in self.calls.get(name, ()))

    def _trace(self, stop_reason: str | None) -> Trace:
        order = self.plan.order
        answer = None
        try:
            answer = extract_answer(self.workflow, self.runs[self.workflow.output])
        except Exception as error:
            # A fault of the caller's own rule must not cost the run that was paid for.
            stop_reason = without_surrogates(f"the answer rule: {type(error).__name__}: {error}")
        return trusted(
            Trace,
            {
                "query": self.query,
                "workflow": self.workflow.name,
                "fingerprint": self.workflow.fingerprint,
                "node_fingerprints": self.workflow.node_fingerprints,
                "node_runs": tuple([self.runs[name] for name in order]),
                "answer": answer,
                "stop_reason": stop_reason,
                "calls": self.ordered_calls(),
                "rollout": self.settings.rollout,
                "elapsed_s": self.clock() - self.began,
                "engine_version": __version__,
            },
        )


class _Deadlines:
    """Time limits of the nodes in flight, kept by one timer.

    A timer for each node would cost more than everything else the engine does for it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[NodeId, tuple[float, asyncio.Task[Any]]] = {}
        self._over: set[NodeId] = set()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, node: NodeId, limit_s: float | None, task: asyncio.Task[Any]) -> None:
        """`task` works on `node` from now on."""
        due = math.inf if limit_s is None else self._loop.time() + limit_s
        self._due[node] = due, task
        if limit_s is not None and (self._timer is None or due < self._timer.when()):
            self._set(due)

    def leave(self, node: NodeId) -> None:
        """The work on `node` has ended; if it was cancelled for its time, that is taken back."""
        _, task = self._due.pop(node)
        if node in self._over:
            task.uncancel()

    def running(self) -> frozenset[NodeId]:
        """Nodes in flight."""
        return frozenset(self._due)

    def is_over(self, node: NodeId) -> bool:
        """Whether `node` took too long."""
        return node in self._over

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        self.close()
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        for node, (due, task) in self._due.items():
            if due <= now and node not in self._over:
                self._over.add(node)
                task.cancel()
        coming = [due for node, (due, _) in self._due.items() if node not in self._over]
        if coming and (earliest := min(coming)) < math.inf:
            self._set(earliest)


class _Outcome(NamedTuple):
    status: NodeStatus
    output: str | None = None
    abstention: Abstention | None = None
    failure: NodeFailure | None = None
    raw: str | None = None


def _lacks(node: Agent | Function, received: tuple[NodeId, ...]) -> bool:
    """Whether a node of which some parent delivered nothing can't be called."""
    return node.needs == "all" or not received


def _failed(kind: FailureKind, message: str, raw: str | None = None) -> _Outcome:
    failure = NodeFailure(kind=kind, message=without_surrogates(message))
    return _Outcome("failed", failure=failure, raw=raw)


def _abstained(abstention: Abstention, raw: str | None = None) -> _Outcome:
    output = wire(abstention)
    return _Outcome("abstained", output, abstention=abstention, raw=None if raw == output else raw)


def _missing(parents: tuple[NodeId, ...], received: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    if len(parents) == len(received):
        return ()
    return tuple(parent for parent in parents if parent not in received)


def _read_returned(node: Agent | Function, returned: object) -> _Outcome:
    """What a function node's return value means."""
    if isinstance(returned, str):
        return _Outcome("ok", without_surrogates(returned))
    if isinstance(returned, Abstention):
        return _abstained(returned)
    keys = f" with keys {sorted(map(str, returned))}" if isinstance(returned, dict) else ""
    return _failed(
        "output_type",
        f"node {node.id!r} returned {type(returned).__name__}{keys}; "
        "a node returns a str or an Abstention",
    )


class _AgentWork:
    """One call of one agent: what it asked for and was told on the way."""

    def __init__(
        self, run: _Run, node: Agent, model: ChatModel, messages: tuple[ChatMessage, ...]
    ) -> None:
        self.run = run
        self.node = node
        self.model = model
        self.messages = messages
        self.tool_calls: list[ToolCall] = []
        self.is_truncated = False
        self.calls: list[CallRecord] = run.calls.setdefault(node.id, [])

    async def ask(self) -> _Outcome:
        """Ask the model, and make the tool calls that it wants, until it replies."""
        node = self.node
        tools = {name: self.run.workflow.tools_by_name[name] for name in node.tools}
        messages = self.messages
        for n_rounds in count():
            request = Request(
                messages=messages,
                settings=node.model,
                tools=tuple(tool.spec for tool in tools.values()),
                response_schema=reply_schema() if node.structured_replies else None,
                stage=self.run.stage,
                node=node.id,
                query_id=self.run.query.id,
                rollout=self.run.settings.rollout,
            )
            completion = await book_call(self.model, request, self.run.account, self.calls)
            if not completion.tool_requests:
                self.is_truncated = completion.finish_reason == "length"
                return self._read(node, completion)
            if n_rounds == node.max_tool_rounds:
                break
            messages = (*messages, *await self._use_tools(completion, tools))
        names = ", ".join(call.name for call in self.tool_calls[-3:])
        return _failed(
            "tool_rounds", f"still calling tools ({names}) after {node.max_tool_rounds} rounds"
        )

    async def _use_tools(
        self, completion: Completion, tools: Mapping[str, Tool]
    ) -> list[ChatMessage]:
        """The assistant's message and what its tool calls returned."""
        memory = self.run.tool_memory
        asked = completion.tool_requests
        # Calls of one round run together, except where their order can matter.
        if memory is not None or any(tool.effects == "write" for tool in tools.values()):
            made = [await call_tool(self.node.id, request, tools, memory) for request in asked]
        else:
            made = await asyncio.gather(
                *(call_tool(self.node.id, request, tools, memory) for request in asked)
            )
        self.tool_calls.extend(made)
        said = ChatMessage(role="assistant", content=completion.text, tool_requests=asked)
        told = [
            ChatMessage(role="tool", content=defuse(call.result), tool_request_id=request.id)
            for call, request in zip(made, asked, strict=True)
        ]
        return [said, *told]

    def _read(self, node: Agent, completion: Completion) -> _Outcome:
        """What an agent's reply means."""
        text = without_surrogates(completion.text)
        if not text.strip():
            reason = completion.finish_reason
            return _failed("empty", f"the model returned nothing (it stopped with {reason!r})")
        if not node.may_abstain and node.abstention_phrase is None:
            return _Outcome("ok", text)
        reply = parse_reply(text, phrase=node.abstention_phrase)
        if reply.kind == "abstention" and reply.abstention is not None:
            return _abstained(reply.abstention, raw=text)
        if reply.kind == "syntax_failure" and node.may_abstain:
            problem = reply.problem or "not the agreed form"
            return _failed("abstention_syntax", problem, raw=text)
        output = reply.output if reply.output is not None else text
        return _Outcome("ok", output, raw=None if output == text else text)


async def book_call(
    model: ChatModel, request: Request, account: Account | None, calls: list[CallRecord]
) -> Completion:
    """Make one model call and add every attempt at it to `calls`.

    Raises:
        ModelError: no usable answer.
        BudgetExceeded: the call would go over the budget; it was not made.
    """
    name = model.identity(request.settings.name).name
    price = model.price(request.settings.name)
    reserved = None
    if account is not None:
        most = most_tokens(request)
        tokens = (most.prompt_tokens or 0) + (most.completion_tokens or 0)
        reserved = await account.reserve(tokens, most_cost(most, price))
    first = len(calls)
    attempt = CallRecord(
        stage=request.stage,
        node=request.node,
        query_id=request.query_id,
        model=name,
        outcome="ok",
    )

    def book(**values: object) -> None:
        calls.append(attempt.model_copy(update=values))

    def on_retry(reason: str, status: int | None, elapsed_s: float) -> None:
        book(outcome="retried", reason=reason, status=status, elapsed_s=elapsed_s)

    began = time.perf_counter()

    def elapsed_s() -> float:
        return time.perf_counter() - began

    try:
        completion = await model.complete(request, on_retry)
    except ModelError as error:
        book(outcome="failed", reason=error.reason, status=error.status, elapsed_s=elapsed_s())
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            book(outcome="aborted", reason="cancelled", elapsed_s=elapsed_s())
        else:
            book(outcome="failed", reason=type(error).__name__, elapsed_s=elapsed_s())
        raise
    else:
        usage = completion.usage
        if completion.is_cached:
            book(outcome="cached", usage=usage, cost=0.0, elapsed_s=elapsed_s())
        else:
            book(usage=usage, cost=cost(usage, price), elapsed_s=elapsed_s())
        return completion
    finally:
        if account is not None and reserved is not None:
            account.settle(reserved, tuple(calls[first:]))


def _sum_usage(calls: Iterable[CallRecord]) -> Usage:
    """Usage over the calls that were answered by the model; None where no call was counted."""
    ok = [call.usage for call in calls if call.outcome == "ok"]

    def total(field: str) -> int | None:
        counted = [n for usage in ok if (n := getattr(usage, field)) is not None]
        return sum(counted) if counted else None

    return Usage(**{field: total(field) for field in Usage.model_fields})


def extract_answer(workflow: Workflow, run: NodeRun) -> str | None:
    """The answer that the output node's run holds; None if it holds none."""
    if run.status != "ok" or run.output is None:
        return None
    if workflow.answer == "whole":
        return run.output.strip() or None
    if workflow.answer == "answer_line":
        return last_answer_line(run.output)
    answer = workflow.answer(run.output)
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"it returned {type(answer).__name__}, not a str or None")
    return None if answer is None else without_surrogates(answer)
