"""The ledger: it equals what the server served, and says what was paid for, by whom and for what."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from loopback import LoopbackServer, Reply

import splice
from splice.executor import RunSettings, execute
from splice.ledger import Budget, most_cost, most_tokens, spending
from splice.line import RepairSettings
from splice.message import MessageSettings
from splice.models.cache import CachedModel
from splice.models.endpoint import Endpoint
from splice.models.limits import Limits
from splice.models.protocol import cost
from splice.models.scripted import ScriptedModel
from splice.records import (
    CallRecord,
    CandidateEdge,
    ChatMessage,
    Diagnosis,
    EdgeScore,
    MessageLine,
    ModelSettings,
    Price,
    Query,
    RepairBatch,
    Request,
    SpliceMessage,
    ToolRequest,
    ToolSpec,
    Trace,
    Usage,
)
from splice.trial import run_trial
from splice.workflow import Agent, Workflow

PRICE = Price(prompt=10.0, completion=30.0, cached=1.0)
Json = dict[str, Any]


def flow() -> Workflow:
    """Two branches into one; `a -> d` is missing."""
    nodes = [Agent(id=name, role=f"You are {name}.", subtask=f"Task {name}?") for name in "abcdz"]
    edges = [("a", "b"), ("c", "d"), ("b", "z"), ("d", "z")]
    return Workflow(nodes=nodes, edges=edges, output="z")


async def at_once(seconds: float) -> None:
    """No waiting between attempts."""


def endpoint(server: LoopbackServer, **more) -> Endpoint:
    settings = {
        "model": "m",
        "base_url": server.base_url,
        "api_key": "k",
        "limits": Limits(concurrency=32),
        "prices": {"m": PRICE},
        "sleep": at_once,
    }
    return Endpoint(**settings | more)


def message() -> SpliceMessage:
    line = MessageLine(text="A fact.", spans=())
    return SpliceMessage(source="a", receiver="d", key=line, writer="extractive")


def always_a_to_d(workflow: Workflow, base: Trace) -> Diagnosis:
    """A diagnosis that tries a -> d, with more headroom for queries of a higher number."""
    edge = CandidateEdge(source="a", receiver="d", kind="parallel_branch")
    score = EdgeScore(edge=edge, p_decisive=1.0, features={}, reason="said so")
    number = int(re.sub(r"\D", "", base.query.id) or 0)
    return Diagnosis(
        base_score=1 / (2 + number), base_reasons=(), edges=(score,), admission="headroom"
    )


# --- it equals what was served ---------------------------------------------------------------

FAULTS = (
    Reply(status=429),
    Reply(status=500),
    Reply(status=503),
    Reply(fault="cut"),
    Reply(fault="invalid_json"),
    Reply(fault="empty_choices"),
    Reply(fault="drop"),
)


def unreliable(seed: int) -> Callable[[Json], Reply]:
    """Answers whose tokens differ from each other, between failures of every kind."""
    rng = random.Random(seed)

    def respond(request: Json) -> Reply:
        if rng.random() < 0.3:
            return rng.choice(FAULTS)
        return Reply(
            text=f"answer {rng.randrange(1000)} Doha Port",
            prompt_tokens=rng.randint(50, 500),
            completion_tokens=rng.randint(1, 40),
            cached_tokens=rng.choice([None, 0, 40]),
            reasoning_tokens=rng.choice([None, 0, 1]),
            latency_s=rng.choice([0.0, 0.0, 0.002]),
        )

    return respond


def assert_ledger_is_what_was_served(calls: list[CallRecord], server: LoopbackServer) -> None:
    """Compare with a server that has stopped: it counts a reply just after it has sent it."""
    spent = spending(tuple(calls))
    assert spent.n_calls == server.n_requests
    assert spent.n_calls - spent.n_failed == server.n_served
    assert (spent.prompt_tokens, spent.completion_tokens) == (
        server.served.prompt_tokens,
        server.served.completion_tokens,
    )
    assert (spent.cached_tokens, spent.reasoning_tokens) == (
        server.served.cached_tokens,
        server.served.reasoning_tokens,
    )
    full = server.served.prompt_tokens - server.served.cached_tokens
    money = full * 10 + server.served.cached_tokens + server.served.completion_tokens * 30
    assert spent.cost == pytest.approx(money / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize("max_attempts", [1, 4])
async def test_runs_and_trials_book_what_the_server_served_token_for_token(max_attempts) -> None:
    workflow = flow()
    calls: list[CallRecord] = []
    with LoopbackServer(unreliable(7)) as server:
        model = endpoint(server, max_attempts=max_attempts)
        queries = [Query(text=f"Which port is number {i}?", id=f"q{i}") for i in range(32)]
        bases = await asyncio.gather(*(execute(workflow, query, model) for query in queries))
        trials = await asyncio.gather(
            *(run_trial(workflow, base, message(), model, calls=calls) for base in bases)
        )
        await model.aclose()
    assert len(trials) == 32
    for base in bases:
        calls += base.calls
    outcomes = Counter(call.outcome for call in calls)
    reasons = {call.reason for call in calls if call.outcome in ("retried", "failed")}
    assert outcomes["failed" if max_attempts == 1 else "retried"] > 20
    assert {"rate_limit", "server_error", "bad_response"} <= reasons
    assert server.max_in_flight > 1
    assert_ledger_is_what_was_served(calls, server)


@pytest.mark.slow
async def test_a_whole_repair_of_many_queries_books_what_the_server_served() -> None:
    queries = [Query(text=f"Which port is number {i}?", id=f"q{i:02d}") for i in range(24)]
    with LoopbackServer(unreliable(11)) as server:
        model = endpoint(server)
        batch = await splice.arepair_many(
            flow(),
            queries,
            model=model,
            budget_fraction=0.5,
            concurrency=24,
            settings=RepairSettings(message=MessageSettings(writer="model")),
            diagnoser=always_a_to_d,
        )
        await model.aclose()
    calls = [call for result in batch.results for call in result.calls]
    assert batch.n_trials > 0
    assert {call.stage for call in calls} == {"run", "generate", "trial"}
    assert_ledger_is_what_was_served(calls, server)


@pytest.mark.slow
async def test_a_server_that_never_answers_is_in_the_ledger_as_often_as_it_was_asked() -> None:
    replies = iter([Reply(text="x", prompt_tokens=9)])
    hangs = iter([Reply(fault="hang")] * 3)

    def respond(request: Json) -> Reply:
        return next(replies, None) or next(hangs, Reply(text="x", prompt_tokens=7))

    with LoopbackServer(respond) as server:
        model = endpoint(server, timeout_s=2.0)
        trace = await execute(flow(), Query(text="q"), model)
        await model.aclose()
    assert_ledger_is_what_was_served(list(trace.calls), server)
    outcomes = Counter((call.outcome, call.reason) for call in trace.calls)
    assert outcomes == {("ok", None): 5, ("retried", "timeout"): 3}


async def test_queries_in_flight_together_do_not_mix_their_costs() -> None:
    def respond(request: Json) -> Reply:
        number = int(re.search(r"number (\d+)", str(request["messages"])).group(1))
        return Reply(text="x", prompt_tokens=1000 + number, completion_tokens=number + 1)

    with LoopbackServer(respond) as server:
        model = endpoint(server)
        queries = [Query(text=f"number {i}", id=f"q{i}") for i in range(40)]
        traces = await asyncio.gather(*(execute(flow(), query, model) for query in queries))
        await model.aclose()
    for i, trace in enumerate(traces):
        spent = spending(trace.calls)
        assert (spent.n_calls, spent.prompt_tokens) == (5, 5 * (1000 + i))
        assert spent.completion_tokens == 5 * (i + 1)
        for run in trace.node_runs:
            assert (run.usage.prompt_tokens, run.usage.completion_tokens) == (1000 + i, i + 1)


async def test_each_attempt_is_a_line_of_its_own_with_what_went_wrong() -> None:
    replies = iter([Reply(status=429), Reply(fault="cut"), Reply(text="x", prompt_tokens=5)])
    workflow = Workflow(nodes=(Agent(id="a", role="r"),), edges=(), output="a")
    with LoopbackServer(lambda request: next(replies)) as server:
        model = endpoint(server)
        trace = await execute(workflow, Query(text="q", id="7"), model)
        await model.aclose()
    lines = [(call.outcome, call.reason, call.status) for call in trace.calls]
    assert lines == [
        ("retried", "rate_limit", 429),
        ("retried", trace.calls[1].reason, trace.calls[1].status),
        ("ok", None, None),
    ]
    assert trace.calls[1].reason in ("bad_response", "connection")
    assert {(call.stage, call.node, call.query_id, call.model) for call in trace.calls} == {
        ("run", "a", "7", "m")
    }
    assert all(call.cost is None for call in trace.calls[:2])


# --- money -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "price", "expected"),
    [
        (Usage(prompt_tokens=1000, completion_tokens=100), PRICE, 0.013),
        (Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=800), PRICE, 0.0058),
        (Usage(prompt_tokens=1000, completion_tokens=100, reasoning_tokens=90), PRICE, 0.013),
        (
            Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=800),
            Price(prompt=10.0, completion=30.0),
            0.013,
        ),
        (Usage(prompt_tokens=0, completion_tokens=0), PRICE, 0.0),
        (Usage(prompt_tokens=1000), PRICE, None),
        (Usage(completion_tokens=10), PRICE, None),
        (Usage(prompt_tokens=1000, completion_tokens=100), None, None),
    ],
)
def test_cached_and_reasoning_tokens_are_parts_and_are_not_paid_twice(
    usage: Usage, price: Price | None, expected: float | None
) -> None:
    assert cost(usage, price) == (None if expected is None else pytest.approx(expected))


async def test_the_cost_of_a_run_is_the_cost_of_what_the_server_counted() -> None:
    reply = Reply(
        text="x",
        prompt_tokens=1000,
        completion_tokens=100,
        cached_tokens=800,
        reasoning_tokens=90,
    )
    with LoopbackServer(lambda request: reply) as server:
        model = endpoint(server)
        trace = await execute(flow(), Query(text="q"), model)
        await model.aclose()
    spent = spending(trace.calls)
    assert spent.cost == pytest.approx(5 * 0.0058)
    assert spent.tokens == 5500
    assert (spent.cached_tokens, spent.reasoning_tokens) == (4000, 450)


async def test_an_unknown_price_stays_unknown() -> None:
    with LoopbackServer() as server:
        model = endpoint(server, prices={"other": PRICE})
        trace = await execute(flow(), Query(text="q"), model)
        await model.aclose()
    assert {call.cost for call in trace.calls} == {None}
    assert spending(trace.calls).cost is None
    known = CallRecord(stage="run", model="k", outcome="ok", cost=1.0)
    assert spending((known, *trace.calls)).cost is None
    assert spending((known,)).cost == 1.0
    assert spending(()).cost == 0.0


async def test_a_call_without_token_counts_is_uncounted_rather_than_free() -> None:
    with LoopbackServer(lambda request: Reply(usage="absent")) as server:
        model = endpoint(server)
        trace = await execute(flow(), Query(text="q"), model)
        await model.aclose()
    spent = spending(trace.calls)
    assert (spent.n_calls, spent.n_uncounted, spent.tokens, spent.cost) == (5, 5, 0, None)
    assert trace.node_runs[0].usage == Usage()


async def test_a_call_without_token_counts_takes_its_reservation_from_the_budget() -> None:
    with LoopbackServer(lambda request: Reply(usage="absent", text="x")) as server:
        model = endpoint(server)
        settings = RunSettings(budget=Budget(max_tokens=2200))
        trace = await execute(flow(), Query(text="q"), model, settings=settings)
        await model.aclose()
        assert 0 < server.n_requests < 5
    kinds = {run.failure.kind for run in trace.node_runs if run.failure}
    assert "budget" in kinds


async def test_what_a_cache_answers_is_sent_to_nobody_and_costs_nothing() -> None:
    with LoopbackServer(lambda request: Reply(text="x", prompt_tokens=9)) as server:
        model = CachedModel(endpoint(server))
        first = await execute(flow(), Query(text="q"), model)
        second = await execute(flow(), Query(text="q"), model)
        await model.aclose()
        assert server.n_requests == 5
    assert (spending(first.calls).n_calls, spending(first.calls).n_cached) == (5, 0)
    spent = spending(second.calls)
    assert (spent.n_calls, spent.n_cached, spent.tokens, spent.cost) == (0, 5, 0, 0.0)
    assert {call.cost for call in second.calls} == {0.0}
    assert second.answer == first.answer


def test_attempts_that_failed_are_counted_and_their_tokens_are_not() -> None:
    used = Usage(prompt_tokens=7, completion_tokens=2)
    outcomes = ("ok", "cached", "retried", "failed", "aborted")
    calls = tuple(
        CallRecord(stage="run", model="m", outcome=outcome, usage=used, cost=0.5)
        for outcome in outcomes
    )
    spent = spending(calls)
    assert (spent.n_calls, spent.n_failed, spent.n_cached) == (4, 3, 1)
    assert (spent.tokens, spent.cost) == (9, 0.5)


# --- stages ----------------------------------------------------------------------------------


async def test_a_repair_is_booked_by_stage() -> None:
    model = ScriptedModel(
        {
            "a": ["Doha Port"],
            "b": ["b"],
            "c": ["c"],
            "d": ["d", "d with Doha Port"],
            "z": ["old", "new"],
            "generate": ['KEY: It is Doha Port | "Doha Port"'],
        },
        price=PRICE,
    )
    result = await splice.arepair(
        flow(),
        Query(text="Which port?", id="q1"),
        model=model,
        settings=RepairSettings(message=MessageSettings(writer="model")),
        diagnoser=always_a_to_d,
    )
    assert result.message.writer == "model"
    stages = [(call.stage, call.node) for call in result.calls]
    assert stages == [
        *(("run", name) for name in ("a", "c", "b", "d", "z")),
        ("generate", None),
        ("trial", "d"),
        ("trial", "z"),
    ]
    assert len(model.requests) == len(result.calls)
    by_stage = {
        stage: spending(tuple(call for call in result.calls if call.stage == stage))
        for stage in ("run", "generate", "trial")
    }
    assert sum(spent.tokens for spent in by_stage.values()) == spending(result.calls).tokens
    assert sum(spent.cost for spent in by_stage.values()) == pytest.approx(
        spending(result.calls).cost
    )
    assert all(spent.cost for spent in by_stage.values())
    assert {call.query_id for call in result.calls} == {"q1"}


# --- budgets of a batch ----------------------------------------------------------------------


async def repair_under(budget: Budget, n: int = 6, **more) -> tuple[RepairBatch, ScriptedModel]:
    def respond(request: Request) -> str:
        text = "".join(one.content for one in request.messages)
        return f"{request.node} Doha {sum(map(ord, text)) % 997}"

    model = ScriptedModel(respond, price=PRICE)
    batch = await splice.arepair_many(
        flow(),
        [Query(text=f"Which port is number {i}?", id=f"q{i}") for i in range(n)],
        model=model,
        budget_fraction=0.5,
        settings=RepairSettings(run=RunSettings(budget=budget)),
        diagnoser=always_a_to_d,
        **more,
    )
    return batch, model


async def test_a_batch_whose_budget_suffices_is_done_and_says_how_many_trials_it_made() -> None:
    batch, model = await repair_under(Budget(max_calls=6 * 5 + 3 * 2))
    assert (batch.stop_reason, batch.n_trials) == ("done", 3)
    calls = [call for result in batch.results for call in result.calls]
    assert len(calls) == len(model.requests) == 36
    tried = [result.query.id for result in batch.results if result.trial]
    assert tried == ["q3", "q4", "q5"]


@pytest.mark.parametrize("max_calls", [0, 7, 29, 30, 31, 33, 35])
@pytest.mark.parametrize("concurrency", [1, 6])
async def test_a_batch_whose_budget_ends_says_so_and_what_it_bought(max_calls, concurrency) -> None:
    batch, model = await repair_under(Budget(max_calls=max_calls), concurrency=concurrency)
    assert batch.stop_reason == "budget"
    calls = [call for result in batch.results for call in result.calls]
    assert len(calls) == len(model.requests) == max_calls
    assert len(batch.results) == 6
    assert batch.n_trials == sum(result.trial is not None for result in batch.results)
    for result in batch.results:
        assert result.stop_reason
        assert result.answer == result.base.answer or result.decision.action == "adopt"
        if result.trial is not None and result.trial.stop_reason is not None:
            assert "budget of" in result.decision.reason
            assert result.decision.action == "retain"


async def test_a_batch_never_spends_more_tokens_or_money_than_its_budget() -> None:
    full, _ = await repair_under(Budget())
    calls = tuple(call for result in full.results for call in result.calls)
    spent = spending(calls)
    for share in (0.3, 0.7, 0.95):
        for budget in (
            Budget(max_tokens=int(spent.tokens * share) + 1200),
            Budget(max_cost=(spent.cost or 0.0) * share + 0.02),
        ):
            batch, _ = await repair_under(budget)
            used = spending(tuple(call for r in batch.results for call in r.calls))
            assert used.tokens <= (budget.max_tokens or used.tokens)
            assert used.cost <= (budget.max_cost or used.cost)


# --- what a call can cost at most ------------------------------------------------------------


def test_the_most_that_a_call_can_use_counts_bytes_of_everything_that_is_sent() -> None:
    def most(**more) -> int:
        messages = more.pop("messages", (ChatMessage(role="user", content="x"),))
        request = Request(messages=messages, settings=ModelSettings(max_tokens=11), **more)
        usage = most_tokens(request)
        assert usage.completion_tokens == 11
        return usage.prompt_tokens

    plain = most()
    text = "Zürich 東京 " * 20
    n_bytes = len(text.encode())
    asked = ToolRequest(id="1", name="look", arguments=text)
    spec = ToolSpec(name="look", description=text, parameters={})
    assert most(messages=(ChatMessage(role="user", content=text),)) >= n_bytes
    used = ChatMessage(role="assistant", content="x", tool_requests=(asked,))
    assert most(messages=(used,)) >= plain + n_bytes
    assert most(tools=(spec,)) >= plain + n_bytes
    assert most(response_schema={"description": text}) >= plain + n_bytes
    assert most(messages=(ChatMessage(role="user", content="\ud800"),)) >= plain


def test_the_most_money_assumes_that_nothing_is_cached() -> None:
    usage = Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=1000)
    assert most_cost(usage, PRICE) == pytest.approx(0.013)
    assert most_cost(usage, None) is None
