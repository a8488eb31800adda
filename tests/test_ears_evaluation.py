"""Arms over one labelled workload: asked through the engine, once each, graded and compared."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from splice.abstention import wire
from splice.ears.evaluation import (
    DEFAULT_ARMS,
    AbstentionResult,
    AgentReply,
    Arm,
    ReplyFile,
    grade_all,
    in_mode,
    interaction_of,
    messages_of,
    over_abstaining,
    reply_all,
    run,
    source_of,
)
from splice.ears.interactions import LABELS, Label
from splice.ears.metrics import Graded
from splice.errors import DataError, ModelError, ScriptExhausted, SettingsError
from splice.executor import execute
from splice.ledger import Account, Budget
from splice.models.scripted import ScriptedModel
from splice.records import Abstention, Query, Request
from splice.workflow import Agent, Workflow
from splice.workload import Example, Options, Workload

# --- a workload and its agents ---------------------------------------------------------------

N = 10
"""Requests 0 to 5 can be carried out; 6 to 9 call for each of the four abstentions."""


def label_of(n: int) -> Label:
    return "Solvable" if n < 6 else LABELS[n - 5]


def workflow(n: int) -> Workflow:
    agent = Agent(
        id="trains" if n % 2 == 0 else "hotels",
        role="You book what you are asked for.",
        subtask="Carry out the request.",
        reply="Reply with one call.",
        documents=("Fares are fixed.",),
    )
    return Workflow(name="desk", nodes=(agent,), edges=(), output=agent.id)


def example(n: int, **reference: object) -> Example:
    prefix = "" if n == 9 else "rail/" if n % 2 == 0 else "rooms/"
    return Example(
        query=Query(id=f"{prefix}{n}", text=f"Book number {n}."),
        reference={"label": label_of(n), "rationale_has": f"item {n}", **reference},
        workflow=workflow(n),
    )


def score(one: Example, answer: str | None) -> dict[str, float]:
    n = int(re.findall(r"\d+", one.query.text)[0])
    return {"correct": float(answer == f"booked {n}")}


def workload(**values: object) -> Workload:
    fields = {
        "name": "desk",
        "about": "Requests to a desk.",
        "workflow": workflow(0),
        "examples": tuple(map(example, range(N))),
        "metrics": ("correct",),
        "score": score,
        **values,
    }
    return Workload(**fields)  # type: ignore[arg-type]


def load(data: Path | None, *, split: str, options: Options) -> Workload:
    return workload()


def number_in(request: Request) -> int:
    return int(re.findall(r"Book number (\d+)", request.messages[-1].content)[0])


def may_abstain(request: Request) -> bool:
    return "Insufficient Input" in request.messages[-1].content


def replying(request: Request) -> str:
    """Books all, number 5 wrongly; if it may, abstains rightly, and from number 0 as well.

    About number 9 its rationale names the wrong thing.
    """
    n = number_in(request)
    label = label_of(n)
    if not may_abstain(request) or label == "Solvable" != 0 < n:
        return "booked nothing" if n == 5 else f"booked {n}"
    category = "Misrouting" if label == "Solvable" else label
    about = 1 if n == 9 else n
    return wire(Abstention(category=category, rationale=f"lacks item {about}"))


async def evaluated(folder: Path, **values: object) -> AbstentionResult:
    model = values.pop("model", None) or ScriptedModel(replying)
    arms = values.pop("arms", DEFAULT_ARMS)
    return await run(
        workload(**values),
        arms,  # type: ignore[arg-type]
        lambda name: model,  # type: ignore[arg-type, return-value]
        folder,
        split="test",
    )


# --- prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["baseline", "prompted"])
async def test_what_is_rendered_is_what_the_engine_shows(mode: str) -> None:
    asked = in_mode(workflow(3), mode)  # type: ignore[arg-type]
    model = ScriptedModel({"hotels": ["ok"]})
    query = Query(id="q", text="Book?", context={"hotels": ("Rooms: 2",)})  # type: ignore[dict-item]
    await execute(asked, query, model)
    assert model.requests[0].messages == messages_of(asked, query)


def test_only_the_prompted_mode_tells_of_abstaining() -> None:
    baseline, prompted = (
        messages_of(in_mode(workflow(3), mode), Query(text="Book?"))[-1].content
        for mode in ("baseline", "prompted")
    )
    assert "Insufficient Input" not in baseline
    assert prompted.startswith(baseline)
    assert "Insufficient Input" in prompted


def test_the_baseline_takes_back_what_goes_with_abstaining() -> None:
    (agent,) = workflow(1).agents
    structured = agent.model_copy(
        update={"may_abstain": True, "structured_replies": True, "abstention_phrase": "no"}
    )
    (found,) = in_mode(workflow(1).changed(nodes=(structured,)), "baseline").agents
    assert (found.may_abstain, found.structured_replies, found.abstention_phrase) == (
        False,
        False,
        None,
    )


def test_an_interaction_is_the_agents_view_without_the_rules_of_abstaining() -> None:
    found = interaction_of(workload(), example(7, also_right=["Misrouting"], rationale="no item"))
    assert (found.id, found.source, found.agent) == ("rooms/7", "desk", "hotels")
    assert (found.label, found.also_right) == (LABELS[2], ("Misrouting",))
    assert (found.query, found.reply, found.rationale) == ("Book number 7.", None, "no item")
    system, user = messages_of(in_mode(workflow(7), "baseline"), example(7).query)
    assert found.context == f"{system.content}\n\n{user.content}"


def test_an_interaction_says_which_other_agents_there_are() -> None:
    aside = workflow(6).changed(elsewhere={"taxis": "books taxis"})
    found = interaction_of(workload(), example(6).model_copy(update={"workflow": aside}))
    assert "The other agents:\n- taxis: books taxis" in found.context


@pytest.mark.parametrize("label", [None, "Whatever", ["Solvable"]])
def test_a_label_that_is_none_is_refused_with_those_that_there_are(label: object) -> None:
    with pytest.raises(DataError, match=r"desk: example 'rail/2': label: .*Solvable, Ambiguous"):
        interaction_of(workload(), example(2, label=label))


def test_a_malformed_reference_names_its_field() -> None:
    with pytest.raises(DataError, match="example 'rail/2': also_right"):
        interaction_of(workload(), example(2, also_right=["Nonsense"]))


def test_a_workflow_of_several_nodes_is_refused() -> None:
    two = Workflow(
        nodes=(Agent(id="a", role="A."), Agent(id="b", role="B.")), edges=(("a", "b"),), output="b"
    )
    with pytest.raises(SettingsError, match="not one agent alone"):
        in_mode(two, "prompted")


def test_sources_are_prefixes_of_ids_or_the_workload() -> None:
    found = [source_of(workload(), example(n)) for n in (8, 7, 9)]
    assert found == ["rail", "rooms", "desk"]


# --- replies ---------------------------------------------------------------------------------


async def test_a_reply_is_what_the_model_wrote_also_in_the_wrong_form(tmp_path: Path) -> None:
    broken = '{"Response": "Misrouting"}'
    texts = {
        0: broken,
        1: "  ",
        2: f"```json\n{wire(Abstention(category='Misrouting', rationale='no'))}\n```",
    }
    model = ScriptedModel(lambda request: texts[number_in(request)])
    some = workload(examples=tuple(map(example, range(3))))
    with ReplyFile(tmp_path / "replies.jsonl") as known:
        replies, problems = await reply_all(some, "prompted", model, known)
    assert not problems
    assert [reply.text for reply in replies.values()] == [broken, "", texts[2]]
    assert replies["rail/0"].problem == "abstention_syntax: the key 'Reasoning' is missing"
    graded = await grade_all(some, replies)
    assert [row.syntax_ok for row in graded] == [False, False, True]
    assert [row.predicted for row in graded] == [None, "Solvable", "Misrouting"]


async def test_nothing_is_asked_twice_in_one_mode_of_one_model(tmp_path: Path) -> None:
    model = ScriptedModel(replying)
    for _ in range(2):
        await evaluated(tmp_path, model=model)
    assert len(model.requests) == 2 * N
    other = ScriptedModel(replying, name="other")
    await evaluated(tmp_path, model=other)
    assert len(other.requests) == 2 * N


async def test_what_is_resumed_gives_the_same_result(tmp_path: Path) -> None:
    first = await evaluated(tmp_path)
    assert await evaluated(tmp_path, model=ScriptedModel({})) == first
    assert AbstentionResult.model_validate_json((tmp_path / "result.json").read_text()) == first


async def test_a_killed_evaluation_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    whole = await evaluated(tmp_path / "whole")

    def dying(request: Request) -> str | Exception:
        if len(model.requests) > 7:
            return ScriptExhausted("killed")
        return replying(request)

    model = ScriptedModel(dying)
    with pytest.raises(ScriptExhausted):
        await evaluated(tmp_path / "killed", model=model)
    path = tmp_path / "killed" / "replies.jsonl"
    n_kept = len(path.read_text("utf-8").splitlines())
    assert 0 < n_kept < N
    with path.open("a", encoding="utf-8") as file:
        file.write('{"mode": "base')
    again = ScriptedModel(replying)
    result = await evaluated(tmp_path / "killed", model=again)
    assert len(again.requests) == 2 * N - n_kept
    assert result.arms[0].scores == whole.arms[0].scores
    assert result.comparisons == whole.comparisons


async def test_another_prompt_is_asked_anew(tmp_path: Path) -> None:
    await evaluated(tmp_path)

    def curt(n: int) -> Example:
        (agent,) = workflow(n).agents
        changed = agent.model_copy(update={"role": "You book."})
        return example(n).model_copy(update={"workflow": workflow(n).changed(nodes=(changed,))})

    model = ScriptedModel(replying)
    examples = (curt(0), *map(example, range(1, N)))
    await evaluated(tmp_path, model=model, examples=examples)
    assert [number_in(request) for request in model.requests] == [0, 0]


async def test_a_model_that_fails_on_one_example_loses_no_other(tmp_path: Path) -> None:
    def failing(request: Request) -> str | Exception:
        if number_in(request) == 3 and may_abstain(request):
            return ModelError("out of order", reason="server_error")
        return replying(request)

    result = await evaluated(tmp_path, model=ScriptedModel(failing))
    assert (result.n_examples, result.n_compared) == (N, N - 1)
    assert [found.n_missing for found in result.arms] == [0, 1]
    assert [found.scores.n for found in result.arms] == [N - 1, N - 1]
    page = result.text()
    assert "1 of 10 examples" in page
    assert "prompted: no answer about 1: server_error: out of order" in page
    lines = (tmp_path / "replies.jsonl").read_text("utf-8").splitlines()
    kept = [AgentReply.model_validate_json(line) for line in lines]
    assert ("prompted", "rooms/3") not in {(reply.mode, reply.example) for reply in kept}
    again = ScriptedModel(replying)
    assert (await evaluated(tmp_path, model=again)).n_compared == N
    assert [number_in(request) for request in again.requests] == [3]


async def test_a_model_that_never_answers_is_an_error_that_says_so(tmp_path: Path) -> None:
    model = ScriptedModel(lambda _: ModelError("out of order", reason="server_error"))
    with pytest.raises(ModelError, match=r"every arm \(baseline: server_error: out of order"):
        await evaluated(tmp_path, model=model)


async def test_a_budget_that_is_used_up_leaves_examples_without_reply(tmp_path: Path) -> None:
    with ReplyFile(tmp_path / "replies.jsonl") as known:
        found, problems = await reply_all(
            workload(),
            "baseline",
            ScriptedModel(replying),
            known,
            account=Account(Budget(max_calls=4)),
        )
    assert (len(found), len(problems)) == (4, 6)
    assert set(problems.values()) == {"budget of 4 calls is used up"}


async def test_progress_is_told_of_those_that_are_there_and_of_each_that_is_done(
    tmp_path: Path,
) -> None:
    told: list[tuple[int, int]] = []
    with ReplyFile(tmp_path / "replies.jsonl") as known:
        few = workload(examples=tuple(map(example, range(3))))
        await reply_all(few, "baseline", ScriptedModel(replying), known)
        await reply_all(
            workload(examples=tuple(map(example, range(5)))),
            "baseline",
            ScriptedModel(replying),
            known,
            progress=lambda n_done, n_all: told.append((n_done, n_all)),
        )
    assert told == [(3, 5), (4, 5), (5, 5)]


def test_a_damaged_line_is_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text('{"mode": "sometimes"}\n', "utf-8")
    with pytest.raises(DataError, match=r"replies\.jsonl:1: mode: "):
        ReplyFile(path)


# --- grades and results ----------------------------------------------------------------------


async def test_passes_gains_and_over_abstention_are_those_worked_out_by_hand(
    tmp_path: Path,
) -> None:
    result = await evaluated(tmp_path)
    baseline, prompted = (found.scores for found in result.arms)
    assert baseline.overall is not None
    assert prompted.overall is not None
    # Baseline: 0 to 4. Prompted: 1 to 4, and 6 to 8; what it says about 9 names another item.
    assert (baseline.overall.n_hits, prompted.overall.n_hits) == (5, 7)
    assert baseline.under_abstention is not None
    assert baseline.under_abstention.value == 1.0
    (one,) = result.comparisons
    assert (one.base, one.other) == ("baseline", "prompted")
    assert (one.overall.counts.n_fixed, one.overall.counts.n_broken) == (3, 1)
    assert one.overall.gain.mean == pytest.approx(0.2)
    assert one.solvable is not None
    assert one.abstention is not None
    assert (one.solvable.gain.n, one.solvable.counts.n_broken) == (6, 1)
    assert (one.abstention.gain.n, one.abstention.counts.n_fixed) == (4, 3)
    assert one.abstention.p_mcnemar == 2 * 0.5**3
    assert list(result.arms[1].by_source) == ["desk", "rail", "rooms"]
    (worst,) = result.arms[1].over_abstaining
    assert (worst.agent, worst.n_abstained, worst.share.n) == ("trains", 1, 3)
    assert result.arms[0].over_abstaining == ()


def test_agents_are_ranked_by_what_their_examples_support() -> None:
    def rows(agent: str, n: int, n_abstained: int) -> list[Graded]:
        return [
            Graded(
                id=f"{agent}/{k}",
                source=agent,
                label="Solvable",
                predicted="Misrouting" if k < n_abstained else "Solvable",
                syntax_ok=True,
                semantic_ok=k >= n_abstained,
                abstention_ok=None,
                problem=None,
            )
            for k in range(n)
        ]

    graded = [*rows("once", 1, 1), *rows("often", 10, 8), *rows("never", 5, 0)]
    found = over_abstaining(graded, {row.id: row.source for row in graded})
    assert [row.agent for row in found] == ["often", "once"]
    many = [row for k in range(12) for row in rows(f"agent{k}", 2, 1)]
    assert len(over_abstaining(many, {row.id: row.source for row in many})) == 10


async def test_costs_are_those_of_an_arms_own_calls(tmp_path: Path) -> None:
    model = ScriptedModel(replying)
    result = await evaluated(tmp_path, model=model)
    words = sum(len(m.content.split()) for r in model.requests[:N] for m in r.messages)
    spent = result.arms[0].spending
    assert (spent.n_calls, spent.prompt_tokens) == (N, words)


async def test_later_arms_are_compared_with_the_first_and_with_the_one_before(
    tmp_path: Path,
) -> None:
    arms = [Arm(name=name, mode="prompted") for name in "abcd"]
    result = await evaluated(tmp_path, arms=arms)
    pairs = [(one.base, one.other) for one in result.comparisons]
    assert pairs == [("a", "b"), ("a", "c"), ("b", "c"), ("a", "d"), ("c", "d")]
    assert {one.overall.gain.mean for one in result.comparisons} == {0.0}


async def test_a_part_without_examples_is_left_out(tmp_path: Path) -> None:
    result = await evaluated(tmp_path, examples=tuple(map(example, range(4))))
    (one,) = result.comparisons
    assert one.abstention is None
    assert "abstention  " not in result.text().split("Arm baseline")[0].split("comparison")[1]


async def test_a_category_that_is_as_right_needs_no_item_of_the_other(tmp_path: Path) -> None:
    one = example(6, also_right=["Misrouting"], rationale_has="the train")
    replies = {
        "the other": wire(Abstention(category="Misrouting", rationale="a taxi")),
        "its own": wire(Abstention(category="Ambiguous Query", rationale="a taxi")),
    }
    for text in replies.values():
        with ReplyFile(tmp_path / f"{len(text)}.jsonl") as known:
            some = workload(examples=(one,))
            found, _ = await reply_all(some, "prompted", ScriptedModel(lambda _, t=text: t), known)
            (row,) = await grade_all(some, found)
        assert row.predicted == "Ambiguous Query"
        assert row.abstention_ok == (text == replies["the other"])


async def test_a_scorer_may_be_a_coroutine_function_and_say_what_is_well_formed(
    tmp_path: Path,
) -> None:
    async def judged(one: Example, answer: str | None) -> dict[str, float]:
        await asyncio.sleep(0)
        is_call = answer is not None and answer.startswith("booked ")
        return {**score(one, answer), "well_formed": float(is_call and answer != "booked nothing")}

    result = await evaluated(tmp_path, score=judged, metrics=("correct", "well_formed"))
    found = result.arms[0].scores
    assert found.overall is not None
    assert found.syntax is not None
    assert (found.overall.n_hits, found.syntax.n_hits) == (5, 9)


async def test_a_workload_without_the_score_is_refused_before_a_call(tmp_path: Path) -> None:
    model = ScriptedModel({})
    with pytest.raises(SettingsError, match=r"no score 'correct'.* it has right"):
        await evaluated(tmp_path, model=model, metrics=("right",))
    with pytest.raises(SettingsError, match="gave \\['correct'\\], not \\('correct', 'more'\\)"):
        await evaluated(tmp_path, metrics=("correct", "more"))
    with pytest.raises(SettingsError, match="names of their own, not a, a"):
        await evaluated(tmp_path, arms=[Arm(name="a", mode="baseline")] * 2)
    with pytest.raises(SettingsError, match="no example"):
        await evaluated(tmp_path, examples=())


class Opening:
    """Opens scripted models, and keeps what was opened, asked and closed, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, name: str | None) -> ScriptedModel:
        if name == "missing":
            raise SettingsError("no model 'missing'")
        events = self.events
        events.append(f"open {name}")

        class Model(ScriptedModel):
            async def aclose(self) -> None:
                events.append(f"close {name}")

        def respond(request: Request) -> str:
            if events[-1] != f"ask {name}":
                events.append(f"ask {name}")
            return replying(request)

        return Model(respond, name=name or "default")


async def test_one_model_is_open_at_a_time_and_all_are_tried_before_the_first_call(
    tmp_path: Path,
) -> None:
    opening = Opening()
    arms = [
        Arm(name="base", mode="baseline"),
        Arm(name="tuned", mode="prompted", model="tuned"),
    ]
    result = await run(workload(), arms, opening, tmp_path, split="test")
    tried = ["open None", "close None", "open tuned", "close tuned"]
    asked = ["open None", "ask None", "close None", "open tuned", "ask tuned", "close tuned"]
    assert opening.events == [*tried, *asked]
    assert [found.model.name for found in result.arms] == ["default", "tuned"]
    opening.events.clear()
    gone = Arm(name="gone", mode="prompted", model="missing")
    with pytest.raises(SettingsError, match="no model 'missing'"):
        await run(workload(), [*arms, gone], opening, tmp_path / "new", split="test")
    assert not [event for event in opening.events if event.startswith("ask")]


async def test_the_page_shows_arms_gains_and_agents_and_does_a_terminal_no_harm(
    tmp_path: Path,
) -> None:
    examples = tuple(
        one.model_copy(
            update={"query": one.query.model_copy(update={"id": f"\x1b[31m{one.query.id}"})}
        )
        for one in map(example, range(N))
    )
    result = await evaluated(tmp_path, name="d\x1b[2J", about="b\x1b]0;x\x07", examples=examples)
    page = result.text()
    assert "\x1b" not in page
    assert "\x07" not in page
    cells = [line.split() for line in page.splitlines()]
    assert ["prompted", "over", "baseline", "all", "10"] in [row[:5] for row in cells]
    assert ["trains", "3", "1", "0.333", "[0.061,", "0.792]"] in cells
    assert "No agent abstained from what it could do." in page
    assert [r"\x1b[31mrail", "prompted", "5", "0.800"] in [row[:4] for row in cells]
