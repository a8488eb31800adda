"""Trials: exactly what a message touches runs again, and nothing outside is done twice."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

import splice
from splice.errors import ModelError, SettingsError, TraceMismatch
from splice.executor import NodeInput, Recording, RunSettings, execute
from splice.ledger import Budget
from splice.models.protocol import OnRetry
from splice.models.scripted import Reply, ScriptedModel
from splice.records import (
    CallRecord,
    CandidateEdge,
    Completion,
    Diagnosis,
    EdgeScore,
    MessageLine,
    ModelSettings,
    NodeRun,
    Query,
    Receipt,
    RepairResult,
    Request,
    SpliceMessage,
    ToolRequest,
    Trace,
    Trial,
)
from splice.tools import tool
from splice.trial import resample, run_trial, warmer
from splice.workflow import Agent, Function, Tool, Workflow

QUERY = Query(text="Where?")
FAILED = ModelError("no answer", reason="server_error")


def agent(name: str, **more) -> Agent:
    return Agent(**{"id": name, "role": f"You are {name}.", **more})


def make(edges: str, output: str, nodes: Sequence[Agent | Function] = (), **more) -> Workflow:
    """A workflow from "a-b b-c"; what `nodes` doesn't define is an agent."""
    pairs = [tuple(edge.split("-")) for edge in edges.split()]
    own = {node.id: node for node in nodes}
    names = dict.fromkeys([*(name for pair in pairs for name in pair), *own, output])
    return Workflow(
        nodes=[own.get(name) or agent(name) for name in names], edges=pairs, output=output, **more
    )


def message_to(receiver: str, source: str = "a", text: str = "The fact.") -> SpliceMessage:
    line = MessageLine(text=text, spans=())
    return SpliceMessage(source=source, receiver=receiver, key=line, writer="extractive")


def echo(request: Request) -> str:
    """An answer that changes with anything that the model is shown."""
    text = "".join(message.content for message in request.messages)
    return f"{request.node} {sum(map(ord, text)) % 100_003}"


def receipt_of(trial: Trial) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {line.node: (line.reason, line.changed) for line in trial.receipt}


# --- the exact set ---------------------------------------------------------------------------


class World:
    """A random graph of pure functions, some of which take in only a part of what they are told."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.names = [f"n{i}" for i in range(rng.randint(2, 9))]
        edges = []
        for place, source in enumerate(self.names[:-1]):
            later = self.names[place + 1 :]
            chosen = rng.sample(later, rng.randint(1, min(3, len(later))))
            edges += [(source, receiver) for receiver in chosen]
        self.parents = {
            name: [source for source, receiver in edges if receiver == name] for name in self.names
        }
        self.heeds = {
            name: [parent for parent in self.parents[name] if rng.random() < 0.8]
            for name in self.names
        }
        self.n_values = {name: rng.choice([1, 2, 2, 3, 1000]) for name in self.names}
        self.hears_messages = {name: rng.random() < 0.9 for name in self.names}
        self.n_calls: Counter[str] = Counter()
        nodes = [
            Function(id=name, call=self._call) for name in rng.sample(self.names, len(self.names))
        ]
        self.workflow = Workflow(nodes=nodes, edges=edges, output=self.names[-1])

    async def _call(self, given: NodeInput) -> str:
        self.n_calls[given.node] += 1
        return self._output(given.node, given.parents, given.message)

    def _output(self, node: str, parents: Mapping[str, str], message: SpliceMessage | None) -> str:
        heard = [node, *(parents[parent] for parent in self.heeds[node])]
        if message is not None and self.hears_messages[node]:
            heard.append(message.text)
        value = random.Random("|".join(heard)).randrange(self.n_values[node])
        return f"value {value}"

    def outputs(self, message: SpliceMessage | None) -> dict[str, str]:
        """All outputs, worked out without the engine."""
        found: dict[str, str] = {}
        for name in self.names:
            heard = message if message and message.receiver == name else None
            found[name] = self._output(name, found, heard)
        return found


async def test_exactly_the_nodes_whose_input_changed_run_again() -> None:
    n_absorbed = n_reached = 0
    for seed in range(1000):
        world = World(seed)
        legal = world.workflow.candidate_edges
        if not legal:
            continue
        base = await execute(world.workflow, QUERY, {})
        before = base.model_dump_json()
        edge = random.Random(seed).choice(legal)
        message = message_to(edge.receiver, edge.source, f"fact {seed}")
        old, new = world.outputs(None), world.outputs(message)
        touched = {
            name
            for name in world.names
            if name == edge.receiver
            or any(old[parent] != new[parent] for parent in world.parents[name])
        }
        world.n_calls.clear()
        trial = await run_trial(world.workflow, base, message, {})
        assert world.n_calls == dict.fromkeys(touched, 1)
        assert set(trial.rerun) == touched
        assert {run.node: run.output for run in trial.trace.node_runs} == new
        for run in trial.trace.node_runs:
            if run.node not in touched:
                assert run is base.by_node[run.node]
        whole = await execute(world.workflow, QUERY, {}, message=message)
        assert whole.content() == trial.trace.content()
        assert base.model_dump_json() == before
        assert [line.node for line in trial.receipt] == list(world.workflow.plan.order)
        for line in trial.receipt:
            changed = tuple(p for p in base.by_node[line.node].expected if old[p] != new[p])
            reason = "message" if line.node == edge.receiver else "input_changed"
            if line.node in touched:
                assert line == Receipt(
                    node=line.node, action="rerun", reason=reason, changed=changed
                )
            else:
                assert line == Receipt(node=line.node, action="reused", reason="input_unchanged")
        assert trial.stop_reason is None
        descendants = {name for name in world.names if name in _descendants(world, edge.receiver)}
        n_absorbed += touched < {edge.receiver} | descendants
        n_reached += world.names[-1] in touched
    assert n_absorbed > 100
    assert n_reached > 100


def _descendants(world: World, node: str) -> set[str]:
    found = {node}
    for name in world.names:
        if found & set(world.parents[name]):
            found.add(name)
    return found - {node}


TWO_BRANCHES = "a1-a2 a2-a3 a3-a4 a4-sink b1-b2 b2-b3 b3-b4 b4-sink"


async def test_a_message_into_one_branch_leaves_the_other_alone_and_the_join_runs() -> None:
    workflow = make(TWO_BRANCHES, "sink")
    model = ScriptedModel(echo)
    base = await execute(workflow, QUERY, model)
    model.requests.clear()
    trial = await run_trial(workflow, base, message_to("b3", "a4"), model)
    assert trial.rerun == ("b3", "b4", "sink")
    assert [request.node for request in model.requests] == ["b3", "b4", "sink"]
    assert [request.stage for request in model.requests] == ["trial"] * 3
    assert trial.trace.answer != base.answer
    assert trial.trace.answer is not None


async def test_what_is_downstream_is_invalidated_and_the_receipt_says_by_whom() -> None:
    workflow = make("a-b b-c c-d a-d x-d", "d")
    base = await execute(workflow, QUERY, ScriptedModel(echo))
    trial = await run_trial(workflow, base, message_to("b", "x"), ScriptedModel(echo))
    assert receipt_of(trial) == {
        "a": ("input_unchanged", ()),
        "x": ("input_unchanged", ()),
        "b": ("message", ()),
        "c": ("input_changed", ("b",)),
        "d": ("input_changed", ("c",)),
    }


async def test_a_change_that_a_node_absorbs_goes_no_further() -> None:
    async def constant(given: NodeInput) -> str:
        return "always the same"

    workflow = make("a-b b-c c-d", "d", [Function(id="c", call=constant)])
    base = await execute(workflow, QUERY, ScriptedModel(echo))
    trial = await run_trial(workflow, base, message_to("b"), ScriptedModel(echo))
    assert trial.rerun == ("b", "c")
    assert trial.trace.by_node["d"] is base.by_node["d"]
    assert trial.trace.answer == base.answer


async def test_the_output_node_has_a_run_in_every_trial() -> None:
    workflow = make(TWO_BRANCHES, "sink")
    base = await execute(workflow, QUERY, ScriptedModel(echo))
    for edge in workflow.candidate_edges:
        message = message_to(edge.receiver, edge.source)
        trial = await run_trial(workflow, base, message, ScriptedModel(echo))
        assert [run.node for run in trial.trace.node_runs] == list(workflow.plan.order)
        assert "sink" in trial.rerun
        assert trial.trace.answer is not None


async def test_the_same_trial_from_the_same_base_gives_the_same_again() -> None:
    workflow = make(TWO_BRANCHES, "sink")
    base = await execute(workflow, QUERY, ScriptedModel(echo), settings=RunSettings(rollout=3))
    before = base.model_dump_json()
    trials = [
        await run_trial(workflow, base, message_to("a2", "b1"), ScriptedModel(echo))
        for _ in range(2)
    ]
    assert trials[0].trace.content() == trials[1].trace.content()
    assert trials[0].receipt == trials[1].receipt
    assert trials[0].trace.rollout == 3
    assert base.model_dump_json() == before


async def test_a_base_trace_that_was_written_and_read_gives_the_same_trial() -> None:
    workflow = make(TWO_BRANCHES, "sink")
    base = await execute(workflow, QUERY, ScriptedModel(echo))
    read = Trace.model_validate_json(base.model_dump_json())
    first = await run_trial(workflow, base, message_to("a2", "b1"), ScriptedModel(echo))
    second = await run_trial(workflow, read, message_to("a2", "b1"), ScriptedModel(echo))
    assert first.trace.content() == second.trace.content()
    assert first.receipt == second.receipt


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", ["any", "all"])
async def test_a_receiver_whose_parents_failed_is_called_with_the_message(needs: str) -> None:
    workflow = make("a-b b-z x-z", "z", [agent("b", needs=needs)])
    model = ScriptedModel({"a": [FAILED], "x": ["x"], "z": ["old", "new"], "b": ["Doha"]})
    base = await execute(workflow, QUERY, model)
    assert base.by_node["b"].status == "skipped"
    trial = await run_trial(workflow, base, message_to("b", "x", "It is Doha."), model)
    assert trial.stop_reason is None
    assert trial.rerun == ("b", "z")
    assert trial.trace.by_node["a"] is base.by_node["a"]
    assert trial.trace.by_node["b"].output == "Doha"
    assert trial.trace.answer == "new"
    shown = model.requests[-2].messages[-1].content
    assert "From a: nothing arrived (failed)." in shown
    assert "> It is Doha." in shown


async def test_a_failed_node_that_the_trial_does_not_touch_is_not_tried_again() -> None:
    workflow = make("a-z b-z", "z")
    model = ScriptedModel({"a": [FAILED, "would work now"], "b": ["b", "c"], "z": ["old", "new"]})
    base = await execute(workflow, QUERY, model)
    trial = await run_trial(workflow, base, message_to("b"), model)
    assert trial.rerun == ("b", "z")
    assert trial.stop_reason is None
    assert trial.trace.by_node["a"] is base.by_node["a"]


async def test_a_new_failure_stops_the_trial() -> None:
    workflow = make("a-z b-z", "z")
    model = ScriptedModel({"a": ["a"], "b": ["b", FAILED], "z": ["old", "new"]})
    base = await execute(workflow, QUERY, model)
    trial = await run_trial(workflow, base, message_to("b"), model)
    assert trial.stop_reason == "node 'b' failed: server_error: no answer"


async def test_a_node_that_failed_before_and_fails_again_stops_nothing() -> None:
    workflow = make("a-b b-z x-z", "z")
    model = ScriptedModel({"a": ["a"], "b": [FAILED, FAILED], "x": ["x"], "z": ["old"]})
    base = await execute(workflow, QUERY, model)
    trial = await run_trial(workflow, base, message_to("b", "x"), model)
    assert trial.stop_reason is None
    assert trial.rerun == ("b",)
    assert trial.trace.by_node["z"] is base.by_node["z"]


async def test_a_node_that_is_skipped_for_another_reason_than_before_says_so() -> None:
    workflow = make("a-z b-z", "z", [agent("z", needs="all")])
    model = ScriptedModel({"a": [FAILED], "b": ["b", FAILED]})
    base = await execute(workflow, QUERY, model)
    trial = await run_trial(workflow, base, message_to("b"), model)
    run = trial.trace.by_node["z"]
    assert (run.received, run.failure.message) == ((), "nothing arrived from 'a', 'b'")
    assert receipt_of(trial)["z"] == ("not_reached", ())
    assert trial.rerun == ("b",)


class Stuck(ScriptedModel):
    """Never answers some node in a trial."""

    def __init__(self, stuck: str) -> None:
        super().__init__(echo)
        self.stuck = stuck

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        if request.node == self.stuck and request.stage == "trial":
            await asyncio.Event().wait()
        return await super().complete(request, on_retry)


async def test_a_trial_whose_time_is_up_stops_and_says_what_was_not_reached() -> None:
    workflow = make("a-b b-c c-z", "z")
    model = Stuck("b")
    base = await execute(workflow, QUERY, model)
    calls: list[CallRecord] = []
    trial = await run_trial(
        workflow,
        base,
        message_to("b"),
        model,
        settings=RunSettings(run_timeout_s=0.02),
        calls=calls,
    )
    assert trial.stop_reason == "run_timeout after 0.02 s"
    assert trial.rerun == ("b",)
    assert receipt_of(trial)["c"] == receipt_of(trial)["z"] == ("not_reached", ())
    assert [(call.node, call.outcome) for call in calls] == [("b", "aborted")]


async def test_a_budget_that_ends_in_a_trial_stops_it() -> None:
    workflow = make("a-b b-z", "z")
    model = ScriptedModel(echo)
    base = await execute(workflow, QUERY, model)
    settings = RunSettings(budget=Budget(max_calls=1))
    trial = await run_trial(workflow, base, message_to("b"), model, settings=settings)
    assert trial.stop_reason == "node 'z' failed: budget of 1 calls is used up"


# --- what is refused -------------------------------------------------------------------------


async def test_another_model_than_the_base_runs_is_refused_before_the_first_call() -> None:
    nodes = [agent("b", model=ModelSettings(name="m")), agent("z", model=ModelSettings(name="n"))]
    workflow = make("a-b b-z", "z", [agent("a", model=ModelSettings(name="m")), *nodes])
    base = await execute(workflow, QUERY, {name: ScriptedModel(echo) for name in "mn"})
    other = ScriptedModel(echo)
    other.identity = lambda name: splice.records.ModelIdentity(name="n2", provider="other")
    same = ScriptedModel(echo)
    message = message_to("b")
    with pytest.raises(SettingsError, match=r"node 'z' was answered by 'n' \(scripted\) in the"):
        await run_trial(workflow, base, message, {"m": same, "n": other})
    assert same.requests == other.requests == []


async def test_a_base_run_of_another_workflow_is_refused() -> None:
    base = await execute(make("a-z b-z", "z"), QUERY, ScriptedModel(echo))
    edited = make("a-z b-z", "z", [agent("b", subtask="New.")])
    model = ScriptedModel(echo)
    with pytest.raises(TraceMismatch, match="node 'b' has changed"):
        await run_trial(edited, base, message_to("b"), model)
    with pytest.raises(TraceMismatch, match="node 'b' has changed"):
        await splice.arepair(edited, base=base, model=model)
    assert model.requests == []


# --- tools -----------------------------------------------------------------------------------


class Desk:
    """Something outside that tools read and write."""

    def __init__(self) -> None:
        self.bookings: list[str] = []
        self.n_reads = 0

    def tools(self) -> tuple[Tool, ...]:
        @tool(effects="write")
        def book(city: str) -> str:
            """Book a trip."""
            self.bookings.append(city)
            return f"booking {len(self.bookings)} to {city}"

        @tool(effects="read")
        def look_up(city: str) -> str:
            """Look up a city."""
            self.n_reads += 1
            return f"reading {self.n_reads} of {city}"

        return book, look_up


def asks(*calls: tuple[str, str]) -> Completion:
    requests = tuple(
        ToolRequest(id=f"c{place}", name=name, arguments=f'{{"city": "{city}"}}')
        for place, (name, city) in enumerate(calls)
    )
    return Completion(text="", tool_requests=requests, finish_reason="tool_calls", model="m")


def desk_workflow(desk: Desk) -> Workflow:
    nodes = [
        agent("source", subtask="Which harbour is meant?"),
        agent("clerk", tools=("book", "look_up"), subtask="Book the trip."),
        agent("other", tools=("look_up",)),
    ]
    return make("source-z clerk-z other-z", "z", nodes, tools=desk.tools())


def clerk_edge(workflow: Workflow, base: Trace) -> Diagnosis:
    """A diagnosis that always tries source -> clerk."""
    edge = CandidateEdge(source="source", receiver="clerk", kind="parallel_branch")
    score = EdgeScore(edge=edge, p_decisive=1.0, features={}, reason="said so")
    return Diagnosis(base_score=0.2, base_reasons=(), edges=(score,), admission="headroom")


async def book_and_repair(
    desk: Desk, base: Sequence[Reply], trial: Sequence[Reply], other: Sequence[Reply] = ("o",)
) -> tuple[RepairResult, ScriptedModel]:
    model = ScriptedModel(
        {
            "source": ["Doha Port"],
            "clerk": [*base, *trial],
            "other": other,
            "z": ["old answer", "new answer"],
        }
    )
    result = await splice.arepair(desk_workflow(desk), QUERY, model=model, diagnoser=clerk_edge)
    return result, model


async def test_an_identical_write_is_answered_from_the_base_run() -> None:
    desk = Desk()
    once = [asks(("book", "Doha")), "booked"]
    again = [asks(("book", "Doha")), "booked, and Doha Port is meant"]
    result, model = await book_and_repair(desk, once, again)
    assert desk.bookings == ["Doha"]
    assert result.trial is not None
    assert result.trial.stop_reason is None
    call = result.trial.trace.by_node["clerk"].tool_calls[0]
    assert (call.result, call.is_reused) == ("booking 1 to Doha", True)
    told = [m.content for m in model.requests[-2].messages if m.role == "tool"]
    assert told == ["booking 1 to Doha"]


async def test_arguments_in_another_order_or_spacing_are_the_same_call() -> None:
    desk = Desk()
    spaced = ToolRequest(id="9", name="book", arguments='{ "city":"Doha"\n}')
    call = Completion(text="", tool_requests=(spaced,), finish_reason="tool_calls", model="m")
    result, _ = await book_and_repair(
        desk, [asks(("book", "Doha")), "booked"], [call, "booked again"]
    )
    assert desk.bookings == ["Doha"]
    assert result.trial.stop_reason is None


async def test_a_new_write_stops_the_trial_and_the_original_is_kept() -> None:
    desk = Desk()
    result, model = await book_and_repair(
        desk,
        [asks(("book", "Doha")), "booked"],
        [asks(("look_up", "Muscat"), ("book", "Muscat"), ("look_up", "Doha"))],
    )
    assert desk.bookings == ["Doha"]
    assert result.answer == "old answer"
    assert result.stop_reason == "trial_stopped"
    assert result.decision.action == "retain"
    assert "node 'clerk' would write anew: book" in result.decision.reason
    assert "Muscat" in result.trial.stop_reason
    made = [(call.stage, call.node, call.outcome) for call in result.calls]
    assert made[len(result.base.calls) :] == [("trial", "clerk", "ok")]
    assert len(result.calls) == len(model.requests)


async def test_the_second_identical_write_of_a_trial_needs_a_second_in_the_base_run() -> None:
    twice = [asks(("book", "Doha"), ("book", "Doha"))]
    desk = Desk()
    result, _ = await book_and_repair(desk, [*twice, "two"], [*twice, "two, Doha Port"])
    assert desk.bookings == ["Doha", "Doha"]
    calls = result.trial.trace.by_node["clerk"].tool_calls
    assert [call.result for call in calls] == ["booking 1 to Doha", "booking 2 to Doha"]
    desk = Desk()
    result, _ = await book_and_repair(desk, [asks(("book", "Doha")), "one"], twice)
    assert desk.bookings == ["Doha"]
    assert result.stop_reason == "trial_stopped"


async def test_a_write_of_another_node_does_not_allow_ones_own() -> None:
    desk = Desk()
    nodes = [agent("a", tools=("book",)), agent("b", tools=("book",))]
    workflow = make("a-z b-z", "z", nodes, tools=desk.tools())
    model = ScriptedModel(
        {"a": [asks(("book", "Doha")), "x"], "b": ["y", asks(("book", "Doha"))], "z": ["end"]}
    )
    base = await execute(workflow, QUERY, model)
    trial = await run_trial(workflow, base, message_to("b"), model)
    assert trial.stop_reason.startswith("node 'b' would write anew")
    assert desk.bookings == ["Doha"]
    assert trial.trace is base


async def test_a_read_that_any_node_made_is_answered_from_the_base_run() -> None:
    desk = Desk()
    result, _ = await book_and_repair(
        desk,
        [asks(("look_up", "Doha")), "seen"],
        [asks(("look_up", "Doha"), ("look_up", "Muscat"), ("look_up", "Oslo")), "Doha Port"],
        other=[asks(("look_up", "Muscat")), "o"],
    )
    calls = result.trial.trace.by_node["clerk"].tool_calls
    assert [call.is_reused for call in calls] == [True, True, False]
    known = {
        call.arguments: call.result for run in result.base.node_runs for call in run.tool_calls
    }
    assert all(call.result == known[call.arguments] for call in calls[:2])
    assert calls[2].result == "reading 3 of Oslo"
    assert desk.n_reads == 3


async def test_a_read_that_failed_in_the_base_run_is_made_again() -> None:
    n_called = 0

    @tool
    def flaky() -> str:
        """Read."""
        nonlocal n_called
        n_called += 1
        if n_called == 1:
            raise OSError("down")
        return "up"

    request = ToolRequest(id="1", name="flaky", arguments="{}")
    call = Completion(text="", tool_requests=(request,), finish_reason="tool_calls", model="m")
    workflow = make("a-z b-z", "z", [agent("b", tools=("flaky",))], tools=(flaky,))
    model = ScriptedModel({"a": ["a"], "b": [call, "x", call, "y"], "z": ["old", "new"]})
    base = await execute(workflow, QUERY, model)
    trial = await run_trial(workflow, base, message_to("b"), model)
    assert base.by_node["b"].tool_calls[0].outcome == "error"
    assert trial.trace.by_node["b"].tool_calls[0].result == "up"


# --- the ledger of a trial -------------------------------------------------------------------


async def test_calls_of_a_stopped_trial_are_kept() -> None:
    workflow = make("a-b b-z x-z", "z")
    model = ScriptedModel({"a": ["a"], "b": ["b", "c"], "x": ["x"], "z": ["old", FAILED]})
    base = await execute(workflow, QUERY, model)
    calls: list[CallRecord] = []
    trial = await run_trial(workflow, base, message_to("b"), model, calls=calls)
    assert trial.stop_reason is not None
    assert [(call.stage, call.node, call.outcome) for call in calls] == [
        ("trial", "b", "ok"),
        ("trial", "z", "failed"),
    ]
    assert trial.trace.calls == tuple(calls)


async def test_listeners_hear_of_every_node_of_a_trial() -> None:
    workflow = make("a-b b-z", "z")
    base = await execute(workflow, QUERY, ScriptedModel(echo))
    heard: list[NodeRun] = []
    recording = Recording(memo=lambda *_: None, on_node=heard.append)
    trial = await run_trial(
        workflow, base, message_to("b"), ScriptedModel(echo), recording=recording
    )
    assert [run.node for run in heard] == ["a", "b", "z"]
    assert tuple(heard) == trial.trace.node_runs


async def test_a_repair_adopts_or_keeps_and_never_changes_the_base_run() -> None:
    desk = Desk()
    result, _ = await book_and_repair(desk, ["clerk says"], ["clerk says Doha Port"], other=["o"])
    assert result.base.answer == "old answer"
    assert result.answer in ("old answer", "new answer")
    assert result.answer == ("new answer" if result.decision.action == "adopt" else "old answer")
    assert result.trial.trace.answer == "new answer"


# --- the control without a message -----------------------------------------------------------


async def resampled(temperature: float | None = None, **of_c) -> tuple[Trace, Trial, list[Request]]:
    """b and what follows it run again; a and c don't."""
    asked: list[Request] = []

    def reply(request: Request) -> str:
        asked.append(request)
        return f"{request.node} {request.rollout} {request.settings.temperature}"

    flow = make("a-b b-d c-d", "d", [agent("c", **of_c)])
    model = ScriptedModel(reply)
    base = await execute(flow, QUERY, model)
    asked.clear()
    edge = CandidateEdge(source="a", receiver="b", kind="parallel_branch")
    return base, await resample(flow, base, edge, model, temperature=temperature), asked


async def test_a_resample_runs_the_receiver_and_what_follows_with_the_next_seed() -> None:
    base, trial, asked = await resampled()
    assert [(request.node, request.rollout) for request in asked] == [("b", 1), ("d", 1)]
    assert {request.stage for request in asked} == {"trial"}
    assert trial.rerun == ("b", "d")
    assert receipt_of(trial)["b"] == ("resampled", ())
    assert trial.trace.by_node["a"] is base.by_node["a"]
    assert trial.trace.by_node["c"] is base.by_node["c"]
    assert trial.message.text == ""
    assert trial.trace.answer == "d 1 0.0"


async def test_a_resample_may_be_warmer_but_is_never_colder() -> None:
    _, trial, asked = await resampled(temperature=0.7)
    assert trial.trace.answer == "d 1 0.7"
    assert [request.settings.temperature for request in asked] == [0.7, 0.7]
    hot = agent("c", model=ModelSettings(temperature=1.5))
    flow = warmer(make("a-b c-b", "b", [hot]), 0.7)
    assert {node.id: node.model.temperature for node in flow.agents}["c"] == 1.5


async def test_a_resample_in_which_a_node_fails_anew_has_stopped() -> None:
    def reply(request: Request) -> str:
        if request.stage == "trial":
            raise FAILED
        return "said"

    flow = make("a-b c-b", "b")
    base = await execute(flow, QUERY, ScriptedModel(reply))
    edge = CandidateEdge(source="a", receiver="c", kind="parallel_branch")
    trial = await resample(flow, base, edge, ScriptedModel(reply))
    assert "node 'c' failed" in (trial.stop_reason or "")
