"""A trial: deliver one message, and run again exactly what it touches."""

from __future__ import annotations

from splice.errors import SettingsError, WriteBlocked
from splice.executor import (
    Models,
    Recording,
    RunSettings,
    execute,
    model_identity,
    resolve_models,
)
from splice.ledger import Account
from splice.records import (
    CallRecord,
    CandidateEdge,
    ChatMessage,
    MessageLine,
    ModelIdentity,
    NodeId,
    NodeRun,
    Receipt,
    SpliceMessage,
    Trace,
    Trial,
)
from splice.rendering import parent_block
from splice.tools import ToolMemory
from splice.workflow import Agent, Node, Workflow


async def run_trial(
    workflow: Workflow,
    base: Trace,
    message: SpliceMessage,
    models: Models,
    *,
    settings: RunSettings = RunSettings(),
    account: Account | None = None,
    calls: list[CallRecord] | None = None,
    recording: Recording | None = None,
) -> Trial:
    """Deliver `message` and run again each node whose rendered input differs from the base run's.

    Every other node keeps its recorded run, byte for byte. Tool calls that the base run made are
    answered from it; a write that it did not make stops the trial, as does a node that fails now
    and did not fail before. A stopped trial has no candidate answer to judge.

    Args:
        workflow: the workflow that recorded `base`.
        base: the base run.
        message: what is delivered, and to whom.
        models: what answers the agents; the same that answered in the base run.
        settings: limits; the rollout is always that of the base run.
        account: spending shared with other runs.
        calls: gets every attempt at a model call.
        recording: where a trial that was interrupted left its node runs, and where new ones go.

    Raises:
        TraceMismatch: another workflow recorded `base`.
        SettingsError: other models answered in the base run than would in the trial.
    """
    workflow.check_trace(base)
    check_models(workflow, base, models)

    def recorded(
        node: NodeId, messages: tuple[ChatMessage, ...], model: ModelIdentity | None
    ) -> NodeRun | None:
        run = base.by_node[node]
        if run.input == messages:
            return run
        return recording.memo(node, messages, model) if recording is not None else None

    made: list[CallRecord] = []
    try:
        trace = await execute(
            workflow,
            base.query,
            models,
            settings=settings.model_copy(update={"rollout": base.rollout}),
            account=account,
            message=message,
            memo=recorded,
            tool_memory=ToolMemory(base.node_runs),
            on_node=recording.on_node if recording is not None else None,
            keep_keys=recording is not None,
            ledger=made,
            stage="trial",
        )
    except WriteBlocked as blocked:
        return Trial(message=message, trace=base, receipt=(), stop_reason=str(blocked))
    finally:
        if calls is not None:
            calls.extend(made)
    return Trial(
        message=message,
        trace=trace,
        receipt=_receipt(base, trace, message),
        stop_reason=_new_failure(base, trace),
    )


async def resample(
    workflow: Workflow,
    base: Trace,
    edge: CandidateEdge,
    models: Models,
    *,
    settings: RunSettings = RunSettings(),
    temperature: float | None = None,
    account: Account | None = None,
) -> Trial:
    """Run the receiver of `edge`, and what follows it, once more: no edge, no message.

    What changes is the sampling seed, that of the next rollout; so at temperature 0 this measures
    how far a model is from repeating itself.

    Args:
        workflow: the workflow that recorded `base`.
        base: the base run.
        edge: whose receiver runs again; the trial has an empty message from its source.
        models: what answers the agents.
        settings: limits; the rollout is the one after that of the base run.
        temperature: of the agents that run again, where it is above their own; None: their own.
        account: spending shared with other runs.
    """
    again = {edge.receiver, *workflow.hops[edge.receiver]}

    def recorded(
        node: NodeId, messages: tuple[ChatMessage, ...], model: ModelIdentity | None
    ) -> NodeRun | None:
        return None if node in again else base.by_node[node]

    trace = await execute(
        workflow if temperature is None else warmer(workflow, temperature),
        base.query,
        models,
        settings=settings.model_copy(update={"rollout": base.rollout + 1}),
        account=account,
        memo=recorded,
        stage="trial",
    )
    nothing = no_message(edge)
    receipt = tuple(
        line if line.action == "reused" else line.model_copy(update={"reason": "resampled"})
        for line in _receipt(base, trace, nothing)
    )
    return Trial(
        message=nothing, trace=trace, receipt=receipt, stop_reason=_new_failure(base, trace)
    )


def no_message(edge: CandidateEdge) -> SpliceMessage:
    """The empty message of a trial that delivers nothing."""
    return SpliceMessage(
        source=edge.source,
        receiver=edge.receiver,
        key=MessageLine(text="", spans=()),
        writer="extractive",
    )


def warmer(workflow: Workflow, temperature: float) -> Workflow:
    """The workflow with no agent below a temperature."""
    return workflow.changed(nodes=tuple(_at_least(node, temperature) for node in workflow.nodes))


def _at_least(node: Node, temperature: float) -> Node:
    if not isinstance(node, Agent) or node.model.temperature >= temperature:
        return node
    return node.model_copy(
        update={"model": node.model.model_copy(update={"temperature": temperature})}
    )


def check_models(workflow: Workflow, base: Trace, models: Models) -> None:
    """Refuse models other than those of the base run, before the first call.

    Raises:
        SettingsError: a node was answered by another model; the message names both.
    """
    for name, model in resolve_models(workflow, models).items():
        was, now = base.by_node[name].model, model_identity(workflow.by_id[name], model)
        if was is not None and now is not None and was != now:
            raise SettingsError(
                f"node {name!r} was answered by {was.name!r} ({was.provider}) in the base run and "
                f"would be by {now.name!r} ({now.provider}) in the trial"
            )


def _receipt(base: Trace, trace: Trace, message: SpliceMessage) -> tuple[Receipt, ...]:
    """What happened to each node, in canonical order."""
    lines = []
    for run in trace.node_runs:
        before = base.by_node[run.node]
        if run is before:
            lines.append(Receipt(node=run.node, action="reused", reason="input_unchanged"))
            continue
        if run.status == "skipped":
            lines.append(Receipt(node=run.node, action="reused", reason="not_reached"))
            continue
        changed = tuple(
            parent
            for parent in run.expected
            if parent_block(trace.by_node[parent]) != parent_block(base.by_node[parent])
        )
        reason = "message" if run.node == message.receiver else "input_changed"
        lines.append(Receipt(node=run.node, action="rerun", reason=reason, changed=changed))
    return tuple(lines)


def _new_failure(base: Trace, trace: Trace) -> str | None:
    """The first node that failed in the trial and not in the base run."""
    if trace.stop_reason is not None:
        return trace.stop_reason
    for run in trace.node_runs:
        if run.status == "failed" and base.by_node[run.node].status != "failed":
            problem = run.failure.message if run.failure else "no reason recorded"
            return f"node {run.node!r} failed: {problem}"
    return None
