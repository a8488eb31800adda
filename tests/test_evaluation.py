"""Evaluations on a small scripted workload whose numbers can be worked out by hand."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import LoopbackServer, Reply
from typer.testing import CliRunner

from splice import Agent, CachedModel, Document, Query, ScriptedModel, SettingsError, Workflow
from splice.evaluation import (
    EvaluationResult,
    EvaluationSettings,
    PolicyResult,
    Row,
    charged,
    claim,
    drawn,
    evaluate,
    half_of,
)
from splice.evaluation_table import evaluation_text
from splice.policies import POLICIES
from splice.records import CallRecord, Completion, Request, Usage
from splice.report.abstentions import NodeAbstentions
from splice.workload import Example, Options, Workload, choose, find_loader, workload_names

CITIES = ("Doha", "Lima", "Oslo", "Riga", "Bern", "Cairo", "Quito", "Hanoi")
FOUNDERS = ("Ada Quist", "Bo Renner", "Cy Twist", "Di Umber", "Ed Vance", "Flo Wick", "Gus Xu")


def agent(name: str, task: str) -> Agent:
    return Agent(
        id=name,
        role="You look up one fact.",
        subtask=task,
        reads_query=False,
        abstention_phrase="not found",
    )


WORKFLOW = Workflow(
    name="companies",
    nodes=(
        agent("founder", "Who founded the company?"),
        agent("home", "Where was the founder born?"),
        agent("staff", "How many people work there?"),
        Agent(id="writer", role="You answer.", subtask="Answer the question."),
    ),
    edges=(("founder", "writer"), ("home", "writer"), ("staff", "writer")),
    output="writer",
)


def example(n: int) -> Example:
    """Question `n`; `home` lacks the founder's name for even `n` and is told it for odd `n`."""
    company, founder = f"Firm{n}", FOUNDERS[n % len(FOUNDERS)]
    table = tuple(
        Document(text=f"{name} was born in {CITIES[(k + n) % len(CITIES)]}.")
        for k, name in enumerate(FOUNDERS)
    )
    who = "the founder" if n % 2 == 0 else founder
    return Example(
        query=Query(
            id=f"q{n}",
            text=f"In which city was the founder of {company} born?",
            context={
                "founder": (Document(text=f"{company} was founded by {founder}."),),
                "home": table,
                "staff": (Document(text=f"{company} has {40 + n} workers."),),
            },
            subtasks={
                "founder": f"Who founded {company}?",
                "home": f"In which city was {who} of {company} born?",
                "staff": f"How many people work at {company}?",
            },
        ),
        reference={"answer": CITIES[(n % len(FOUNDERS) + n) % len(CITIES)]},
        kind="gap" if n % 2 == 0 else "no gap",
        gap_edges=(("founder", "home"),) if n % 2 == 0 else (),
    )


def score(one: Example, answer: str | None) -> dict[str, float]:
    return {"right": float(answer == one.reference["answer"]), "said": float(answer is not None)}


def workload(n: int = 10, **values: object) -> Workload:
    fields = {
        "name": "companies",
        "about": "Three colleagues and a writer.",
        "workflow": WORKFLOW,
        "examples": tuple(map(example, range(n))),
        "metrics": ("right", "said"),
        "score": score,
        **values,
    }
    return Workload(**fields)  # type: ignore[arg-type]


def load(data: Path | None, *, split: str, options: Options) -> Workload:
    return workload(int(options.get("n", "10")))


def said(node: str, text: str) -> str:
    """What the agent `node` replies to a prompt, from what stands in it alone."""
    if node == "founder":
        return text.partition("founded by ")[2].split(".")[0]
    if node == "staff":
        return text.partition(" has ")[2].split(" ")[0]
    if node == "writer":
        report = text.partition("From home")[2]
        return next((city for city in CITIES if city in report), "unknown")
    documents, _, rest = (
        text.partition("From founder") if "From founder" in text else (text.partition("Your task:"))
    )
    for name in FOUNDERS:
        if name in rest:
            return documents.partition(f"{name} was born in ")[2].split(".")[0]
    return "not found"


def model() -> ScriptedModel:
    def respond(request: Request) -> str:
        if request.stage == "select":
            return "unsure"
        return said(request.node or "", request.messages[-1].content)

    return ScriptedModel(respond)


async def evaluated(n: int = 10, **values: object) -> EvaluationResult:
    settings = EvaluationSettings.model_validate(values)
    return await evaluate(workload(n), model(), split="test", settings=settings)


def of(result: EvaluationResult, policy: str, budget: float | None = 0.5) -> PolicyResult:
    return next(p for p in result.policies if (p.policy, p.budget) == (policy, budget))


# --- numbers ---------------------------------------------------------------------------------


async def test_every_policy_has_a_row_for_each_budget_it_knows() -> None:
    result = await evaluated(budgets=(0.3, 0.5, 1.0))
    found = [(policy.policy, policy.budget) for policy in result.policies]
    assert found == [
        (name, budget)
        for name, kind in POLICIES.items()
        for budget in ((0.3, 0.5, 1.0) if kind.is_budgeted else (None,))
    ]


async def test_fixed_questions_gain_and_trials_are_those_worked_out_by_hand() -> None:
    # Five of ten questions lack the edge; each of them abstains, so they come first.
    result = await evaluated(budgets=(0.3, 0.5))
    assert of(result, "static", None).score == 0.5
    three, five = of(result, "splice", 0.3), of(result, "splice")
    assert (three.score, three.fixed, three.broken, three.kept, three.n_trials) == (0.8, 3, 0, 7, 3)
    assert (five.score, five.fixed, five.n_trials, five.n_decisive) == (1.0, 5, 5, 5)
    assert five.gain.mean == 0.5
    assert five.gain.interval.low > 0
    assert five.p_mcnemar == 2 * 0.5**5
    assert of(result, "never").score == 0.5
    assert of(result, "oracle").score == 1.0


async def test_queries_drawn_by_lot_miss_those_that_need_an_edge() -> None:
    result = await evaluated(20, policies=("splice", "random_query"))
    by_headroom, by_lot = of(result, "splice"), of(result, "random_query")
    assert by_headroom.fixed == 10
    assert 0 < by_lot.fixed < 10
    assert by_lot.n_trials == by_headroom.n_trials == 10
    again = await evaluated(20, policies=("random_query",))
    assert of(again, "random_query").fixed == by_lot.fixed


async def test_learned_parts_are_named_in_the_result_and_on_its_page() -> None:
    result = await evaluated(policies=("static",), parts="0123456789abcdef")
    assert "learned parts 0123456789ab" in evaluation_text(result)


async def test_a_language_selector_is_wanted_where_it_is_compared() -> None:
    with pytest.raises(SettingsError, match="'splice_language' needs a language-model selector"):
        await evaluated(policies=("splice_language",))


async def test_costs_count_the_base_run_and_every_call_beyond_it() -> None:
    scripted = model()
    settings = EvaluationSettings(policies=("static", "splice", "never", "edge_expansion"))
    result = await evaluate(workload(), scripted, split="test", settings=settings)

    def tokens(stage: str) -> int:
        return sum(
            sum(len(m.content.split()) for m in request.messages)
            + len(said(request.node or "", request.messages[-1].content).split())
            for request in scripted.requests
            if request.stage == stage
        )

    # Stage "run" holds the base runs and the runs of the expanded workflow.
    static, splice = of(result, "static", None), of(result, "splice")
    expanded = of(result, "edge_expansion", None)
    assert static.cost_multiple == 1.0
    assert static.tokens + expanded.tokens == tokens("run")
    assert splice.tokens == static.tokens + tokens("trial") == of(result, "never").tokens
    assert splice.cost_multiple == pytest.approx(splice.tokens / static.tokens)
    assert splice.tokens_per_net_fixed == pytest.approx(tokens("trial") / 5)
    assert (static.n_calls, splice.n_calls, expanded.n_calls) == (40, 50, 40)
    assert of(result, "never").tokens_per_net_fixed is None


async def test_each_answer_to_a_question_is_scored_once() -> None:
    asked: list[tuple[str, str | None]] = []

    def counting(one: Example, answer: str | None) -> dict[str, float]:
        asked.append((one.query.id, answer))
        return score(one, answer)

    await evaluate(workload(score=counting), model(), split="test")
    assert len(asked) == len(set(asked))


async def test_ranked_edges_are_compared_with_the_true_gap_edges() -> None:
    diagnosis = (await evaluated()).diagnosis
    shares = {choice.ranker: choice.share for choice in diagnosis.edge_choice}
    assert diagnosis.n_with_gaps == 5
    assert (shares["splice"].value, shares["splice"].n) == (1.0, 5)
    assert shares["random"].value < 1.0


async def test_questions_whose_gaps_are_not_known_are_left_out_of_the_edge_choice() -> None:
    unknown = [e.model_copy(update={"gap_edges": None}) for e in workload().examples[:4]]
    mixed = workload(examples=(*unknown, *workload().examples[4:]))
    result = await evaluate(mixed, model(), split="test")
    assert result.diagnosis.n_gaps_unknown == 4
    assert result.diagnosis.n_with_gaps == 3


async def test_predicted_base_scores_are_shown_against_the_actual_ones() -> None:
    diagnosis = (await evaluated()).diagnosis
    assert sum(b.n for b in diagnosis.calibration) == 10
    assert diagnosis.auc is not None
    assert diagnosis.auc > 0.9


async def test_kinds_of_questions_are_counted_apart() -> None:
    result = await evaluated()
    kinds = {(k.kind, k.policy): k for k in result.kinds if k.budget in (0.5, None)}
    assert kinds["gap", "splice"].fixed == 5
    assert (kinds["gap", "static"].score, kinds["no gap", "static"].score) == (0.0, 1.0)


async def test_policies_on_a_half_are_compared_with_the_base_answers_of_that_half() -> None:
    result = await evaluated(on_half=("always",), seed=3)
    always = of(result, "always")
    chosen = half_of([f"q{n}" for n in range(10)], 3)
    n_gaps = sum(int(name[1:]) % 2 == 0 for name in chosen)
    assert (always.n, always.is_half) == (5, True)
    assert always.base_score == pytest.approx(1 - n_gaps / 5)
    assert always.fixed == n_gaps
    assert of(result, "splice").n == 10


async def test_repeats_of_a_question_count_once_and_have_their_own_rollouts() -> None:
    scripted = model()
    result = await evaluate(
        workload(4), scripted, split="test", settings=EvaluationSettings(repeats=2)
    )
    assert of(result, "splice").n == of(result, "splice").gain.n == 4
    assert {r.rollout // 100 for r in scripted.requests if r.stage == "run"} == {0, 1}
    assert of(result, "static", None).n_calls == 32


async def test_a_failed_node_is_counted_and_its_answer_is_wrong() -> None:
    def respond(request: Request) -> str:
        if request.node == "writer" and request.query_id == "q1":
            return ""
        return said(request.node or "", request.messages[-1].content)

    result = await evaluate(workload(), ScriptedModel(respond), split="test")
    assert result.failed_nodes == 1
    assert of(result, "static", None).score == 0.4


def call(outcome: str, prompt: int | None, completion: int | None) -> CallRecord:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
    return CallRecord(stage="run", model="m", outcome=outcome, usage=usage)  # type: ignore[arg-type]


def test_cached_calls_are_charged_like_those_that_filled_the_cache() -> None:
    calls = [call("ok", 10, 2), call("cached", 10, 2), call("ok", None, 2), call("failed", None, 0)]
    assert charged(calls) == (26, 4, 2)


# --- going on --------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


class Stopping:
    """A model that ends the process after some calls."""

    def __init__(self, inner: ScriptedModel, after: int) -> None:
        self.inner, self.left = inner, after

    async def complete(self, request: Request, on_retry: object) -> Completion:
        if not self.left:
            raise Killed
        self.left -= 1
        return await self.inner.complete(request, on_retry)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize("after", [1, 17, 45, 70])
async def test_an_interrupted_evaluation_goes_on_and_gives_the_same_result(
    after: int, tmp_path: Path
) -> None:
    settings = EvaluationSettings(concurrency=1)
    whole = await evaluate(workload(), model(), split="test", settings=settings)
    scripted = model()
    cached = CachedModel(Stopping(scripted, after), tmp_path / "replies.sqlite")  # type: ignore[arg-type]
    with pytest.raises(Killed):
        await evaluate(workload(), cached, split="test", settings=settings, folder=tmp_path)
    assert not (tmp_path / "result.json").exists()
    again = CachedModel(scripted, tmp_path / "replies.sqlite")
    result = await evaluate(workload(), again, split="test", settings=settings, folder=tmp_path)
    assert result == whole
    keys = [
        (r.stage == "select", r.node, r.query_id, r.rollout, r.settings.temperature, r.messages)
        for r in scripted.requests
    ]
    assert len(keys) == len(set(keys))


async def test_the_order_of_arrival_changes_nothing() -> None:
    results = [await evaluated(concurrency=n) for n in (1, 8)]
    assert results[0].policies == results[1].policies


async def test_rows_and_result_are_written_and_read_back(tmp_path: Path) -> None:
    result = await evaluate(workload(), model(), split="test", folder=tmp_path)
    text = (tmp_path / "result.json").read_text("utf-8")
    assert EvaluationResult.model_validate_json(text) == result
    lines = (tmp_path / "outcomes.jsonl").read_text("utf-8").splitlines()
    rows = [Row.model_validate_json(line) for line in lines]
    assert len(rows) == 10 * len(POLICIES)
    assert "was founded by" not in "\n".join(lines)


def test_a_folder_belongs_to_one_evaluation(tmp_path: Path) -> None:
    claim(tmp_path / "out", {"workload": "a", "seed": 1})
    claim(tmp_path / "out", {"workload": "a", "seed": 1})
    with pytest.raises(SettingsError, match=r"seed is 1 there and 2 here; choose another --out"):
        claim(tmp_path / "out", {"workload": "a", "seed": 2})


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"policies": ("splice", "spice")}, "no policy 'spice'; there are: static, splice,"),
        ({"on_half": ("x",)}, "no policy 'x'"),
        ({"metric": "f1"}, "workload 'companies' has no metric 'f1'; it has right, said"),
    ],
)
async def test_unknown_names_are_refused_before_the_first_call(
    values: dict[str, object], problem: str
) -> None:
    scripted = model()
    with pytest.raises(SettingsError, match=problem):
        await evaluate(
            workload(),
            scripted,
            split="test",
            settings=EvaluationSettings.model_validate(values),
        )
    assert not scripted.requests


async def test_a_scorer_that_gives_other_scores_is_refused() -> None:
    wrong = workload(score=lambda example, answer: {"right": 1.0})
    with pytest.raises(SettingsError, match=r"gave \['right'\]"):
        await evaluate(wrong, model(), split="test")


async def test_a_scorer_may_be_a_coroutine_function() -> None:
    async def judged(one: Example, answer: str | None) -> dict[str, float]:
        await asyncio.sleep(0)
        return score(one, answer)

    result = await evaluate(workload(score=judged), model(), split="test")
    assert of(result, "splice").score == 1.0


def test_two_questions_with_one_id_are_refused() -> None:
    with pytest.raises(SettingsError, match="two questions with the id 'q1'"):
        workload(examples=(example(1), example(1)))


def test_draws_depend_on_the_seed_alone() -> None:
    examples = tuple(map(example, range(10)))

    def ids(order: tuple[Example, ...], seed: int) -> list[str]:
        return sorted(one.query.id for one in drawn(order, 4, seed=seed))

    assert len(ids(examples, 1)) == 4
    assert ids(examples[::-1], 1) == ids(examples, 1) != ids(examples, 2)
    assert drawn(examples, 50, seed=1) == examples


def test_options_off_the_menu_are_refused() -> None:
    menu = {"host": ("parallel", "chain")}
    assert choose({}, menu) == {"host": "parallel"}
    with pytest.raises(SettingsError, match="unknown option 'hosts'; there are: host"):
        choose({"hosts": "chain"}, menu)
    with pytest.raises(SettingsError, match="option host='ring'; it is one of parallel, chain"):
        choose({"host": "ring"}, menu)


@pytest.mark.parametrize("name", ["nothing", "no_module:load", "json:nothing", ":load"])
def test_a_workload_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="no workload"):
        find_loader(name)


def test_the_benchmark_workloads_are_registered() -> None:
    assert set(workload_names()) >= {
        "abstention",
        "api_bank",
        "gsm8k",
        "humaneval",
        "multihop",
        "plancraft",
        "strategyqa",
        "toolbench",
    }
    for name in workload_names():
        assert callable(find_loader(name))


# --- for people ------------------------------------------------------------------------------


async def test_the_page_shows_policies_edges_and_calibration() -> None:
    page = evaluation_text(await evaluated(on_half=("voting",)))
    row = next(line.split() for line in page.splitlines() if line.startswith("splice  "))
    assert row[:5] == ["splice", "0.5", "10", "1.000", "+0.500"]
    assert "voting*" in page
    assert "* on a random half of the questions (5)" in page
    assert "First edge is a true gap edge:" in page
    assert "Predicted base score:" in page


async def test_abstentions_are_counted_by_node_of_the_base_runs() -> None:
    result = await evaluated()
    assert result.abstentions == (
        NodeAbstentions(
            node="home", n_runs=10, n_abstained=5, by_category={"Insufficient Input": 5}, n_right=0
        ),
    )
    page = evaluation_text(result)
    assert "\nAbstentions by node, in the base runs:\nnode " in page
    assert re.search(r"\nhome +10 +5 +0 +5 +0 +0 +0\n", page)


async def test_where_no_node_abstained_the_page_is_silent_on_it() -> None:
    told = workload(examples=tuple(map(example, (1, 3, 5))))
    result = await evaluate(told, model(), split="test")
    assert result.abstentions == ()
    assert "Abstentions" not in evaluation_text(result)


async def test_names_from_a_workload_do_no_harm_on_a_terminal() -> None:
    loud = workload(name="a\x1b[31m", about="b\x1b[2J")
    page = evaluation_text(await evaluate(loud, model(), split="test"))
    assert "\x1b" not in page


def colleagues(request: dict[str, object]) -> Reply:
    messages = request["messages"]
    assert isinstance(messages, list)
    text = messages[-1]["content"]
    for node, mark in (
        ("writer", "Your task: Answer the question."),
        ("founder", "Your task: Who founded"),
        ("staff", "Your task: How many"),
        ("home", "Your task: In which city"),
    ):
        if mark in text:
            return Reply(text=said(node, text))
    return Reply(text="unsure")


def test_the_command_evaluates_and_goes_on_without_new_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splice import cli

    arguments = ["evaluate", "test_evaluation:load", "--out", str(tmp_path), "--limit", "6"]
    with LoopbackServer(colleagues) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        first = CliRunner().invoke(cli.app, arguments)
        assert first.exit_code == 0, first.output
        n = server.n_requests
        second = CliRunner().invoke(cli.app, [*arguments, "--json"])
        assert server.n_requests == n
    result = EvaluationResult.model_validate_json(second.stdout)
    assert result.n_questions == 6
    assert (tmp_path / "table.txt").read_text("utf-8") == f"{evaluation_text(result)}\n"
    assert evaluation_text(result) in first.output
    identity = json.loads((tmp_path / "evaluation.json").read_text("utf-8"))
    assert identity["workload"] == "companies"


def test_a_killed_command_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    def slowly(request: dict[str, object]) -> Reply:
        return replace(colleagues(request), latency_s=0.01)

    def command(out: str) -> list[str]:
        asked = ["--limit", "6", "--concurrency", "2", "--json"]
        return [
            *(sys.executable, "-m", "splice", "evaluate", "test_evaluation:load"),
            *("--out", str(tmp_path / out), *asked),
        ]

    with LoopbackServer(slowly) as server:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": server.base_url,
            "PYTHONPATH": str(Path(__file__).parent),
        }
        whole = subprocess.run(command("whole"), env=environment, capture_output=True, check=True)
        n = server.n_requests
        with subprocess.Popen(
            command("killed"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            while server.n_requests < n + n // 2 and process.poll() is None:
                time.sleep(0.005)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        again = subprocess.run(command("killed"), env=environment, capture_output=True, check=True)
        # What was in flight when it was killed is asked again, and nothing else: at most the
        # three researchers of two questions.
        assert 2 * n <= server.n_requests <= 2 * n + 6
    assert again.stdout == whole.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--option", "host"], "is not NAME=VALUE"),
        (["--split", "dev"], "dev"),
        (["--budget", "1.5"], "--budget"),
    ],
)
def test_wrong_usage_of_the_command_is_explained(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    from splice import cli

    done = CliRunner().invoke(
        cli.app, ["evaluate", "test_evaluation:load", "--out", str(tmp_path), *arguments]
    )
    assert done.exit_code == 2
    assert problem in done.output
