"""Tools: making one from a function, calling it, and remembering what it returned.

In a trial an identical call is answered from the base trace, and a tool that writes is never fired
again: what the world has seen once must not happen twice because of an experiment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, overload

from pydantic import ConfigDict, ValidationError, create_model

from splice.errors import WorkflowError, WriteBlocked
from splice.prompts import without_surrogates
from splice.records import NodeId, NodeRun, ToolCall, ToolRequest, ToolSpec
from splice.workflow import Tool, is_async

Effects = Literal["none", "read", "write"]


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, effects: Effects = ..., name: str | None = ..., timeout_s: float | None = ...
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    effects: Effects = "read",
    name: str | None = None,
    timeout_s: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function; its docstring and annotations are what the model is told.

    Args:
        function: sync or async; each parameter annotated.
        effects: `none` (pure), `read` (reads the outside) or `write` (changes it).
        name: name for the model; None: the function's own.
        timeout_s: seconds for one call; None: only the node's limit holds.

    Raises:
        WorkflowError: a parameter has no annotation or can't be given by name.

    >>> @tool(effects="none")
    ... def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> add.spec.name, sorted(add.spec.parameters["properties"])
    ('add', ['a', 'b'])
    """

    def make(call: Callable[..., Any]) -> Tool:
        spec = ToolSpec(
            name=name or _name(call),
            description=inspect.getdoc(call) or "",
            parameters=_arguments_model(call).model_json_schema(),
        )
        return Tool(spec=spec, call=call, effects=effects, timeout_s=timeout_s)

    return make if function is None else make(function)


@cache
def _arguments_model(call: Callable[..., Any]) -> Any:
    """A pydantic model of the function's parameters."""
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(call, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise WorkflowError(f"tool {_name(call)!r}: {parameter} can't be given by name")
        if parameter.annotation is parameter.empty:
            raise WorkflowError(f"tool {_name(call)!r}: {parameter.name!r} has no annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    return create_model(_name(call), __config__=ConfigDict(extra="forbid"), **fields)


def _name(call: Callable[..., Any]) -> str:
    """Name of a function, or of the class of a callable object."""
    return getattr(call, "__name__", type(call).__name__)


def canonical_arguments(arguments: str) -> str:
    """The arguments as JSON with sorted keys, so that equal calls compare equal; else as they are."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


class ToolMemory:
    """Tool returns of a base run, for a trial to answer identical calls from."""

    def __init__(self, base: Iterable[NodeRun]) -> None:
        """Remember what the nodes of a base run were told."""
        self._by_node: dict[tuple[NodeId, str, str], list[ToolCall]] = defaultdict(list)
        self._by_call: dict[tuple[str, str], ToolCall] = {}
        for run in base:
            for call in run.tool_calls:
                if call.outcome == "ok":
                    self._by_node[run.node, call.name, call.arguments].append(call)
                    self._by_call.setdefault((call.name, call.arguments), call)
        self._n_writes: dict[tuple[NodeId, str, str], int] = defaultdict(int)

    def recall(self, node: NodeId, tool: Tool, arguments: str) -> ToolCall | None:
        """What the same call returned in the base run; None: it is new and may be made.

        A call that only reads is answered from any node's identical call, the node's own first. The
        k-th identical write of a node is answered by its k-th write in the base run.

        Raises:
            WriteBlocked: the call would be a write that the base run did not make.
        """
        own = self._by_node.get((node, tool.spec.name, arguments), [])
        if tool.effects != "write":
            found = own[0] if own else self._by_call.get((tool.spec.name, arguments))
            return found and found.model_copy(update={"is_reused": True})
        place = self._n_writes[node, tool.spec.name, arguments]
        if place >= len(own):
            raise WriteBlocked(
                f"node {node!r} would write anew: {tool.spec.name}({arguments[:200]})"
            )
        self._n_writes[node, tool.spec.name, arguments] += 1
        return own[place].model_copy(update={"is_reused": True})


async def call_tool(
    node: NodeId,
    requested: ToolRequest,
    available: Mapping[str, Tool],
    memory: ToolMemory | None,
) -> ToolCall:
    """Make one tool call that a model asked for; what goes wrong is told to the model as a result.

    Raises:
        WriteBlocked: in a trial, a write that the base run did not make.
    """
    arguments = without_surrogates(canonical_arguments(requested.arguments))
    found = available.get(requested.name)
    if found is None:
        have = ", ".join(available) or "none"
        return ToolCall(
            name=without_surrogates(requested.name),
            arguments=arguments,
            result=f"There is no tool {requested.name!r}. Tools: {have}.",
            outcome="unknown_tool",
        )
    values, problem = _parse_arguments(found, arguments)
    if problem is not None:
        return _result(found, arguments, f"Bad arguments: {problem}", "bad_arguments")
    if memory is not None and (recalled := memory.recall(node, found, arguments)) is not None:
        return recalled
    try:
        async with asyncio.timeout(found.timeout_s):
            if is_async(found.call):
                returned = await found.call(**values)
            else:
                returned = await in_thread(found.call, **values)
        text = returned if isinstance(returned, str) else _as_json(returned)
    except Exception as error:
        reason = str(error)
        if not reason and isinstance(error, TimeoutError):
            reason = f"no result after {found.timeout_s} s"
        return _result(found, arguments, f"{type(error).__name__}: {reason}", "error")
    return _result(found, arguments, text, "ok")


async def in_thread(call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call a function in a worker thread."""

    def called() -> Any:
        try:
            return call(*values, **named)
        except StopIteration as error:
            # No future can hold one: whoever waits for the thread would wait forever.
            raise RuntimeError("the function raised StopIteration") from error

    return await asyncio.to_thread(called)


def _as_json(returned: object) -> str:
    return json.dumps(returned, default=repr, ensure_ascii=False)


def _parse_arguments(found: Tool, arguments: str) -> tuple[dict[str, Any], str | None]:
    """Arguments as keywords, or what is wrong with them."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}, "not JSON"
    if not isinstance(values, dict):
        return {}, "not a JSON object"
    try:
        model = _arguments_model(found.call).model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        return {}, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return {name: getattr(model, name) for name in type(model).model_fields}, None


def _result(
    found: Tool,
    arguments: str,
    text: str,
    outcome: Literal["ok", "error", "bad_arguments"],
) -> ToolCall:
    return ToolCall(
        name=found.spec.name,
        arguments=arguments,
        result=without_surrogates(text),
        outcome=outcome,
        effects=found.effects,
    )
