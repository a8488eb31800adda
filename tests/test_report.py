"""What people see of a run and of a repair: text, tables, HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from splice.records import (
    Abstention,
    AbstentionCategory,
    CallRecord,
    CandidateEdge,
    ChatMessage,
    Decision,
    Diagnosis,
    EdgeScore,
    Evidence,
    Gap,
    GapItem,
    Likelihoods,
    MessageLine,
    ModelIdentity,
    NodeFailure,
    NodeRun,
    Query,
    Receipt,
    RepairBatch,
    RepairResult,
    Span,
    SpliceMessage,
    ToolCall,
    Trace,
    Trial,
    Usage,
)
from splice.report.abstentions import NodeAbstentions, abstention_table, abstentions_by_node
from splice.report.batch import ScoredRow, batch_table, batch_totals, result_rows
from splice.report.display import visible
from splice.report.html import result_html, result_page
from splice.report.text import result_text, trace_text, workflow_text

QUESTION = "Which visa do I need to fly from Lyon to Sydney in May, and what does it cost?"
FACT = "The routing stops in Doha, Qatar, for 14 hours."
PARENTS = ("routing", "fares", "visa", "baggage")
EDGE = CandidateEdge(source="routing", receiver="visa", kind="parallel_branch")


def node_run(node: str, output: str | None, **more: Any) -> NodeRun:
    fields: dict[str, Any] = {
        "status": "ok",
        "input": (
            ChatMessage(role="system", content=f"You are the {node} agent."),
            ChatMessage(role="user", content=QUESTION),
        ),
        "usage": Usage(prompt_tokens=200, completion_tokens=50),
        "model": ModelIdentity(name="small-model", provider="scripted"),
        "elapsed_s": 0.5,
    }
    return NodeRun(node=node, output=output, **(fields | more))


def writer_run(output: str) -> NodeRun:
    return node_run("writer", output, expected=PARENTS, received=PARENTS)


def trace(*runs: NodeRun, answer: str | None, **more: Any) -> Trace:
    return Trace(
        query=Query(text=QUESTION, id="q7"),
        workflow="trip",
        fingerprint="f" * 32,
        node_runs=runs,
        answer=answer,
        engine_version="0",
        **more,
    )


def call(stage: str, node: str | None = None, **more: Any) -> CallRecord:
    fields: dict[str, Any] = {
        "model": "small-model",
        "outcome": "ok",
        "usage": Usage(prompt_tokens=200, completion_tokens=50),
    }
    return CallRecord(stage=stage, node=node, **(fields | more))


SEARCH = ToolCall(name="search", arguments='{"to": "SYD"}', result=f"QR 40. {FACT}", is_reused=True)
BASE = trace(
    node_run("routing", f"Lyon to Sydney by QR 40. {FACT}", tool_calls=(SEARCH,)),
    node_run("fares", "The fare is 1,140 EUR."),
    node_run(
        "visa",
        "I can't tell: the stops are not known.",
        status="abstained",
        abstention=Abstention(
            category="Insufficient Input", rationale="The transit stops are missing."
        ),
    ),
    node_run("baggage", "Two bags of 23 kg."),
    writer_run("You need an eVisitor visa. It is free."),
    answer="an eVisitor visa",
    elapsed_s=1.5,
)
RUN_CALLS = tuple(call("run", node) for node in (*PARENTS, "writer"))

MESSAGE = SpliceMessage(
    source="routing",
    receiver="visa",
    key=MessageLine(
        text=FACT, spans=(Span(origin="output", start=25, end=25 + len(FACT), text=FACT),)
    ),
    lines=(
        MessageLine(
            text="The flight is QR 40.",
            spans=(Span(origin="tool:0", start=0, end=6, text="QR 40."),),
            item="transit stops",
        ),
    ),
    focus="the stop in Doha",
    not_found=("passport",),
    n_dropped=1,
    writer="extractive",
)

TRIAL = Trial(
    message=MESSAGE,
    trace=trace(
        *BASE.node_runs[:2],
        node_run("visa", "A Qatar transit visa is not needed for 14 hours. eVisitor is needed."),
        BASE.node_runs[3],
        writer_run("You need an eVisitor visa; it is free. No visa is needed for Doha."),
        answer="an eVisitor visa and none for Doha",
    ),
    receipt=(
        Receipt(node="routing", action="reused", reason="input_unchanged"),
        Receipt(node="fares", action="reused", reason="input_unchanged"),
        Receipt(node="visa", action="rerun", reason="message"),
        Receipt(node="baggage", action="reused", reason="input_unchanged"),
        Receipt(node="writer", action="rerun", reason="input_changed", changed=("visa",)),
    ),
)

EVIDENCE = Evidence(
    move_w=0.8,
    move_len=0.5,
    n_add=8,
    n_del=4,
    msg_only=0.5,
    ctx_only=0.25,
    both=0.125,
    untraceable=0.125,
    uptake=0.6,
    is_ignored=False,
    del_supported=0.25,
    focus_new=0.5,
    focus_old=0.0,
    num_msg=1.0,
    num_ctx=0.0,
    num_untraceable=0.0,
    num_dropped=0.0,
    survival=(0.4,),
    surv_final=0.3,
    is_absorbed=False,
    ans_change=0.45,
    ans_len_ratio=2.3,
    is_number_changed=False,
    copies_source=0.1,
    is_abstention_resolved=True,
    is_abstention_new=False,
    is_answer_refusal_resolved=False,
    is_answer_refusal_new=False,
)


def edge_score(source: str, receiver: str, p: float) -> EdgeScore:
    return EdgeScore(
        edge=CandidateEdge(source=source, receiver=receiver, kind="parallel_branch"),
        p_decisive=p,
        features={},
        reason="routing holds what visa lacks",
    )


ADOPTED = RepairResult(
    query=BASE.query,
    answer=TRIAL.trace.answer,
    base=BASE,
    diagnosis=Diagnosis(
        base_score=0.21,
        base_reasons=("visa abstained",),
        edges=(edge_score("routing", "visa", 0.81), edge_score("fares", "visa", 0.12)),
        admission="abstention",
        missing_inputs=("the passport's country",),
    ),
    edge=edge_score("routing", "visa", 0.81),
    gap=Gap(
        edge=EDGE,
        items=(
            GapItem(text="transit stops", named_in="abstention", is_held=True),
            GapItem(text="passport", named_in="query", is_held=False),
        ),
    ),
    message=MESSAGE,
    trial=TRIAL,
    evidence=EVIDENCE,
    decision=Decision(
        action="adopt",
        reason="the message was taken up and reached the answer",
        base_score=0.21,
        likelihoods=Likelihoods(beneficial=0.7, neutral=0.2, harmful=0.1),
        weighting="headroom",
        gain_side=0.7 * 0.79,
        loss_side=0.1 * 0.21,
    ),
    stop_reason="decided",
    calls=(
        *RUN_CALLS,
        call("generate", outcome="cached"),
        call("trial", "visa", outcome="retried", usage=Usage(), status=429),
        call("trial", "visa"),
        call("trial", "writer"),
    ),
)

NO_TRIAL = RepairResult(
    query=BASE.query,
    answer=BASE.answer,
    base=BASE,
    diagnosis=Diagnosis(
        base_score=0.9,
        base_reasons=("the answer covers the question",),
        edges=(),
        admission="headroom",
        clarifying_questions=("Which passport do you hold?",),
        unsupported=("booking",),
    ),
    decision=Decision(
        action="retain", reason="no room for improvement", base_score=0.9, weighting="headroom"
    ),
    stop_reason="no_trial_admitted",
    calls=tuple(call("run", node, cost=0.0005) for node in (*PARENTS, "writer")),
)

FAILED = ADOPTED.model_copy(
    update={
        "base": trace(
            *BASE.node_runs[:3],
            node_run(
                "baggage",
                None,
                status="failed",
                failure=NodeFailure(kind="timeout", message="no reply within 60 s"),
                usage=None,
                raw="Two ba",
            ),
            node_run("writer", None, status="skipped", expected=PARENTS, received=()),
            answer=None,
            stop_reason="the output node was skipped",
        ),
        "answer": None,
        "trial": TRIAL.model_copy(
            update={
                "trace": trace(
                    node_run(
                        "visa",
                        None,
                        status="failed",
                        failure=NodeFailure(kind="exception", message="a new write was refused"),
                    ),
                    answer=None,
                ),
                "stop_reason": "visa asked for a write that the run did not make",
            }
        ),
        "evidence": None,
        "decision": Decision(
            action="retain", reason="the trial stopped", base_score=0.21, weighting="headroom"
        ),
        "stop_reason": "trial_stopped",
        "calls": (*RUN_CALLS, call("trial", "visa", outcome="failed", usage=Usage())),
    }
)

ALL = pytest.mark.parametrize("result", [ADOPTED, NO_TRIAL, FAILED])


def flat(text: str) -> str:
    """Text without its line breaks and indents."""
    return " ".join(text.split())


# --- the page of a result ------------------------------------------------------------------------


def test_the_page_of_an_adopted_repair_tells_the_whole_story() -> None:
    page = flat(result_text(ADOPTED))
    for fact in (
        QUESTION,
        'Base answer "an eVisitor visa"',
        "predicted base score 0.21, headroom 0.79",
        "visa abstained (Insufficient Input): The transit stops are missing.",
        '"transit stops", named in the abstention, held by routing',
        '"passport", named in the query, not held by routing',
        "routing -> visa, parallel branch",
        "not tried: fares -> visa 0.12",
        f'key: "{FACT}" [output 25-72]',
        'transit stops: "The flight is QR 40." [tool:0 (search) 0-6]',
        "not found: passport",
        "left out: 1 line",
        "re-run visa: it received the message",
        "re-run writer: its input changed (visa)",
        "reused routing, fares, baggage: input unchanged",
        'Candidate "an eVisitor visa and none for Doha"',
        "50% from the message alone",
        "30% in the answer",
        "ADOPT: the message was taken up and reached the answer",
        "p_beneficial x headroom = 0.70 x 0.79 = 0.553",
        "p_harmful x base score = 0.10 x 0.21 = 0.021",
        "0.553 > 0.021",
        'Answer "an eVisitor visa and none for Doha"',
        "Missing - the passport's country",
        "8 calls, 1,750 tokens, money unknown",
        "1 cached, 1 retried",
        "cost multiple 1.40",
    ):
        assert fact in page


def test_the_page_without_a_trial_says_why_and_shows_no_rule() -> None:
    page = flat(result_text(NO_TRIAL))
    assert "Trial none: no trial was admitted" in page
    assert "RETAIN: no room for improvement" in page
    assert "the rule was not applied" in page
    assert "Clarify - Which passport do you hold?" in page
    assert "Unsupported - booking" in page
    assert "Candidate" not in page
    assert "p_beneficial" not in page


def test_the_page_of_a_failed_run_names_every_node_without_an_output() -> None:
    page = flat(result_text(FAILED))
    assert "baggage failed (timeout): no reply within 60 s" in page
    assert "writer skipped" in page
    assert "the run ended early: the output node was skipped" in page
    assert "in the trial, visa failed (exception): a new write was refused" in page
    assert "stopped: visa asked for a write that the run did not make" in page
    assert "Candidate (none)" in page


def test_an_empty_answer_and_no_answer_look_different() -> None:
    assert "Answer (empty)" in flat(result_text(NO_TRIAL.model_copy(update={"answer": ""})))
    assert "Answer (none)" in flat(result_text(NO_TRIAL.model_copy(update={"answer": None})))


def test_a_stopped_trial_without_a_receipt_still_says_why() -> None:
    trial = Trial(message=MESSAGE, trace=BASE, receipt=(), stop_reason="a write was refused")
    result = FAILED.model_copy(update={"trial": trial})
    assert "Trial stopped: a write was refused" in flat(result_text(result))
    assert "stopped: a write was refused" in result_html(result)


def test_the_rule_without_weighting_names_the_plain_probabilities() -> None:
    decision = ADOPTED.decision.model_copy(
        update={"weighting": "none", "gain_side": 0.7, "loss_side": 0.1, "margin": 0.65}
    )
    page = flat(result_text(ADOPTED.model_copy(update={"decision": decision})))
    assert "gain: p_beneficial = 0.700" in page
    assert "loss: p_harmful = 0.100" in page
    assert "0.700 < 0.100 + margin 0.650" in page


def test_a_known_price_is_added_up_and_an_unknown_one_makes_the_sum_unknown() -> None:
    assert "money 0.0025" in result_text(NO_TRIAL)
    mixed = NO_TRIAL.model_copy(update={"calls": (*NO_TRIAL.calls, call("trial", "visa"))})
    page = flat(result_text(mixed))
    assert "money unknown" in page
    assert "run 5 1,250 0.0025" in page
    assert "trial 1 250 unknown" in page


def test_a_stage_whose_attempts_all_failed_has_unknown_tokens_and_money() -> None:
    assert "trial 1 unknown unknown" in flat(result_text(FAILED))


def test_calls_without_token_counts_make_the_cost_multiple_unknown() -> None:
    silent = call("trial", "visa", usage=Usage())
    page = flat(result_text(ADOPTED.model_copy(update={"calls": (*RUN_CALLS, silent)})))
    assert "1,250 + 1 uncounted tokens" in page
    assert "cost multiple unknown" in page


@ALL
def test_no_line_of_the_page_is_wider_than_a_hundred_columns(result: RepairResult) -> None:
    assert max(map(len, result_text(result).splitlines())) <= 100


def test_very_long_and_wide_texts_are_shortened_and_stay_in_the_columns() -> None:
    for text in ("word " * 100_000, "x" * 500_000, "漢" * 100_000, "e\u0301" * 100_000):
        page = result_text(tainted(ADOPTED, text))
        assert "..." in page
        assert max(map(columns, page.splitlines())) <= 100
        assert len(page) < 200_000


def columns(line: str) -> int:
    return sum(2 if "漢" <= c <= "龥" else 0 if c == "\u0301" else 1 for c in line)


def test_str_of_a_result_is_its_page() -> None:
    assert str(ADOPTED) == result_text(ADOPTED)


# --- hostile text --------------------------------------------------------------------------------

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202egnp.exe\u2066\u200b\U000e0041\ud800"
    "<script>alert(1)</script></svg></style></title></div><img src=x onerror=alert(1)>"
    "\" onload='alert(1)' {{ 7 * 7 }} [red]x[/red] &lt;b&gt;"
)
FREE = frozenset(
    [
        "answer",
        "arguments",
        "base_reasons",
        "clarifying_questions",
        "content",
        "focus",
        "item",
        "message",
        "missing_inputs",
        "name",
        "node",
        "not_found",
        "output",
        "query_id",
        "rationale",
        "raw",
        "reason",
        "receiver",
        "result",
        "source",
        "stop_reason",
        "text",
        "title",
        "unsupported",
        "workflow",
        "received",
        "expected",
        "changed",
        "id",
    ]
)


def tainted(result: RepairResult, text: str) -> RepairResult:
    """The result with `text` behind every free text, names of nodes included."""

    def taint(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: taint(held, name) for name, held in value.items()}
        if isinstance(value, (list, tuple)):
            return [taint(held, key) for held in value]
        is_literal = value in ("message", "input_changed", "input_unchanged", "not_reached")
        if not isinstance(value, str) or key not in FREE or is_literal:
            return value
        # Constrained texts refuse lone surrogates by themselves.
        return value + (text.replace("\ud800", "") if key == "rationale" else text)

    fields = taint(json.loads(result.model_dump_json()), "")
    return RepairResult.model_validate(fields)


class Tags(HTMLParser):
    """Collects the start tags of a document with the names of their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[str, ...]]] = set()
        self.n_open = 0
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add((tag, tuple(name for name, _ in attrs)))
        self.n_open += tag not in ("meta", "br")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add((tag, tuple(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.n_open -= 1

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def is_harmless(text: str) -> bool:
    return not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]", text)


def test_visible_shows_what_could_drive_a_terminal() -> None:
    assert visible("a\x1b[31mb\u202ec\ud800\U000e0041") == r"a\x1b[31mb\u202ec\ud800\U000e0041"
    assert visible("tab\there\r\nnext\rback") == "tab\there\nnext\\x0dback"
    assert (
        visible("naïve 漢字 🇫🇷 👩\u200d🚀 می\u200cخواهم")
        == "naïve 漢字 🇫🇷 👩\u200d🚀 می\u200cخواهم"
    )


@ALL
def test_hostile_text_cannot_drive_a_terminal(result: RepairResult) -> None:
    hostile = tainted(result, HOSTILE)
    for page in (
        result_text(hostile),
        trace_text(hostile.base),
        trace_text(hostile.base, full=True),
        workflow_text([HOSTILE], [], HOSTILE),
    ):
        assert is_harmless(page)
        assert r"\x1b[2J" in page
        page.encode("utf-8")


@ALL
def test_no_tag_of_the_html_comes_from_data(result: RepairResult) -> None:
    clean, hostile = Tags(result_page(result)), Tags(result_page(tainted(result, HOSTILE)))
    assert hostile.seen == clean.seen
    assert hostile.n_open == clean.n_open == 0
    assert "script" not in {tag for tag, _ in hostile.seen}
    assert any("<script>alert(1)</script>" in text for text in hostile.texts)


@ALL
def test_the_html_shows_hidden_characters_and_can_be_written(result: RepairResult) -> None:
    page = result_page(tainted(result, HOSTILE))
    assert is_harmless(page)
    assert "{{ 7 * 7 }}" in page
    page.encode("utf-8")


def test_markup_of_the_table_library_in_an_answer_stays_text() -> None:
    row = result_rows(batch(tainted(ADOPTED, "[red]x[/red]\x1b[2J")), None)
    shown = printed(row)
    assert "[red]x[/red]" in shown.replace("\n", "")
    assert "\x1b" not in shown


# --- HTML ----------------------------------------------------------------------------------------


@ALL
def test_every_html_page_is_well_formed_and_loads_nothing(result: RepairResult) -> None:
    page = result_page(result)
    tags = Tags(page)
    assert tags.n_open == 0
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert result_html(result) in page


def test_the_styles_of_the_piece_reach_nothing_outside_of_it() -> None:
    [style] = re.findall(r"<style>(.*?)</style>", result_html(ADOPTED), re.DOTALL)
    rules = re.sub(r"@media[^{]*", "", style)
    selectors = [part for rule in re.findall(r"[{}]?([^{}]+)\{", rules) for part in rule.split(",")]
    assert len(selectors) > 30
    assert all(".splice-report" in selector for selector in selectors if selector.strip())


def test_the_drawing_has_every_node_and_the_message_and_says_it_in_words() -> None:
    html = result_html(ADOPTED)
    svg = html[html.index("<svg") : html.index("</svg>")]
    for node in (*PARENTS, "writer"):
        assert f">{node}</text>" in svg
    assert svg.count('class="sp-rerun"') == 2
    assert "abstained, then ok" in svg
    assert FACT in svg
    assert "<desc" in svg
    assert "added edge: routing to visa; ran again: visa, writer" in svg


def test_the_added_edge_runs_below_every_node() -> None:
    html = result_html(ADOPTED)
    bottoms = [float(y) + 46 for y in re.findall(r'class="sp-box" x="[\d.]+" y="([\d.]+)"', html)]
    [path] = re.findall(r'class="sp-added" d="([^"]+)"', html)
    turns = [float(y) for y in re.findall(r"V([\d.]+)", path)]
    [label] = re.findall(r'class="sp-label" x="[\d.]+" y="([\d.]+)"', html)
    assert len(bottoms) == 5
    assert max(turns) > max(bottoms)
    assert float(label) > max(bottoms)


def test_boxes_neither_overlap_nor_leave_the_drawing() -> None:
    names = [f"node_{'x' * (k % 30)}_{k}" for k in range(14)]
    parents = {k: tuple(names[j] for j in range(k) if (j * 7 + k * 3) % 5 == 0) for k in range(14)}
    base = trace(
        *(node_run(name, "x", expected=parents[k]) for k, name in enumerate(names)), answer="x"
    )
    html = result_html(NO_TRIAL.model_copy(update={"base": base}))
    size = re.findall(r'<svg[^>]* viewBox="0 0 ([\d.]+) ([\d.]+)"', html)[0]
    found = re.findall(r'class="sp-box" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', html)
    boxes = [tuple(map(float, box)) for box in found]
    assert len(boxes) == 14
    for place, (x, y, width) in enumerate(boxes):
        assert x >= 0
        assert x + width <= float(size[0])
        assert y + 46 <= float(size[1])
        for other_x, other_y, other_width in boxes[:place]:
            is_apart = x >= other_x + other_width or other_x >= x + width
            assert is_apart or abs(y - other_y) > 46


def test_changed_words_are_marked_in_both_columns() -> None:
    html = result_html(ADOPTED)
    assert "You need an eVisitor <del>visa. It</del> is free." in html
    assert "<ins>visa; it</ins> is free. <ins>No visa is needed for Doha.</ins>" in html


def test_a_failed_node_shows_its_reason_in_place_of_an_output() -> None:
    html = result_html(FAILED)
    assert "failed (exception): a new write was refused" in html
    assert 'class="sp-mark sp-failed"' in html


def test_both_sides_of_the_rule_have_a_bar() -> None:
    html = result_html(ADOPTED)
    assert 'sp-gain" style="width: 100.0%"' in html
    assert 'sp-loss" style="width: 3.8%"' in html
    assert "sp-track" in html
    assert 'class="sp-fill' not in result_html(NO_TRIAL)


def test_two_results_on_one_page_share_no_id() -> None:
    ids = [set(re.findall(r' id="([^"]+)"', result_html(r))) for r in (ADOPTED, NO_TRIAL)]
    assert len(ids[0]) == 5
    assert not ids[0] & ids[1]


def test_very_long_texts_are_cut_in_the_html() -> None:
    assert len(result_html(tainted(ADOPTED, "word " * 100_000))) < 300_000


def test_the_html_of_a_result_is_what_a_notebook_shows() -> None:
    assert ADOPTED._repr_html_() == result_html(ADOPTED)


# --- traces and workflows ------------------------------------------------------------------------


def test_a_trace_shows_parents_tools_failures_and_totals() -> None:
    base = FAILED.base.model_copy(update={"calls": RUN_CALLS, "elapsed_s": 2.5})
    page = flat(trace_text(base))
    for fact in (
        "1. routing: ok, 0.50 s, 200 + 50 tokens, model small-model",
        'tool search({"to": "SYD"}): ok, reused "QR 40.',
        "why abstained (Insufficient Input): The transit stops are missing.",
        "why failed (timeout): no reply within 60 s",
        'raw reply "Two ba"',
        "received nothing; missing: routing, fares, visa, baggage",
        "Answer (none)",
        "Ended early the output node was skipped",
        "Totals 2.50 s 5 calls, 1,250 tokens, money unknown",
    ):
        assert fact in page


def test_a_full_trace_keeps_every_line_of_inputs_and_outputs() -> None:
    output = "\n".join(f"    line {k}" for k in range(300))
    base = trace(node_run("writer", output), answer="x")
    assert "    line 299" in trace_text(base, full=True)
    assert "line 299" not in trace_text(base)


def test_a_workflow_is_listed_by_generation() -> None:
    edges = [("plan", "search"), ("plan", "check"), ("search", "write"), ("check", "write")]
    assert workflow_text(["plan", "search", "check", "write"], edges, "write") == "\n".join(
        (
            "4 nodes, 4 edges; the answer is read from write",
            "",
            "generation 1",
            "  plan    feeds search, check",
            "",
            "generation 2",
            "  search  reads plan; feeds write",
            "  check   reads plan; feeds write",
            "",
            "generation 3",
            "  write   reads search, check; gives the answer",
        )
    )


def test_a_workflow_of_one_node_is_listed_too() -> None:
    assert "  solo  gives the answer" in workflow_text(["solo"], [], "solo")


# --- batches -------------------------------------------------------------------------------------


def batch(*results: RepairResult) -> RepairBatch:
    n_trials = sum(result.trial is not None for result in results)
    return RepairBatch(results=results, budget_fraction=0.5, n_trials=n_trials, stop_reason="done")


def printed(rows: tuple[ScoredRow, ...]) -> str:
    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(batch_table(rows))
    return capture.get()


def row(decision: str, *correct: bool | None) -> ScoredRow:
    base, candidate, final = correct
    return ScoredRow(
        query_id="q",
        question="?",
        base="a",
        edge="x -> y",
        candidate="b",
        decision=decision,
        base_correct=base,
        candidate_correct=candidate,
        final_correct=final,
    )


@pytest.mark.parametrize(
    ("decision", "correct", "outcome"),
    [
        ("adopt", (False, True, True), "fixed"),
        ("adopt", (True, False, False), "broken"),
        ("adopt", (False, False, False), "changed"),
        ("adopt", (True, True, True), "changed"),
        ("retain", (False, True, False), "kept"),
        ("retain", (None, None, None), "kept"),
        ("adopt", (None, None, None), None),
    ],
)
def test_the_outcome_follows_from_decision_and_scores(
    decision: str, correct: tuple[bool | None, ...], outcome: str | None
) -> None:
    assert row(decision, *correct).outcome == outcome


def test_rows_are_scored_by_answer_and_query_id() -> None:
    asked = []

    def is_correct(answer: str | None, query_id: str) -> bool:
        asked.append(query_id)
        return answer is not None and "Doha" in answer

    rows = result_rows(batch(ADOPTED, NO_TRIAL, FAILED), is_correct)
    assert [r.outcome for r in rows] == ["fixed", "kept", "kept"]
    assert [r.edge for r in rows] == ["routing -> visa", None, "routing -> visa"]
    assert rows[2].candidate_correct is None
    assert set(asked) == {"q7"}


def test_totals_count_right_answers_against_both_fixed_policies() -> None:
    rows = (
        row("adopt", False, True, True),
        row("adopt", True, False, False),
        row("retain", True, False, True),
        row("retain", False, True, False),
        row("retain", True, None, True),
    )
    totals = flat(batch_totals(rows, batch(ADOPTED, NO_TRIAL)))
    assert "base 3, final 3, always adopt 3, oracle 5 of 5" in totals
    assert "1 fixed, 1 broken, 0 changed, 3 kept" in totals
    assert "cost per net fixed query: undefined, net fixed is 0" in totals


def test_totals_give_trials_and_the_price_of_a_net_fix() -> None:
    results = batch(ADOPTED, NO_TRIAL, FAILED)
    rows = result_rows(results, lambda answer, _: answer is not None and "Doha" in answer)
    totals = flat(batch_totals(rows, results))
    assert "Trials 2 (at most 50% of the queries), 1 decisive" in totals
    assert "cost per net fixed query, beyond the base run: 500 tokens, money unknown" in totals
    assert "cost multiple 1.13" in totals
    cut_short = results.model_copy(update={"stop_reason": "budget"})
    assert "Queries 3, stopped by: budget" in flat(batch_totals(rows, cut_short))


def test_without_references_nothing_is_called_right() -> None:
    rows = result_rows(batch(ADOPTED, NO_TRIAL), None)
    assert "unknown: no references were given" in batch_totals(rows, batch(ADOPTED, NO_TRIAL))
    shown = printed(rows)
    assert "unknown" in shown
    assert "kept" in shown


def test_abstentions_are_counted_by_node_with_those_of_right_answers() -> None:
    results = batch(ADOPTED, NO_TRIAL)
    rows = result_rows(results, lambda answer, _: answer is not None)
    lines = batch_totals(rows, results).splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("Abstained"))
    head, visa, legend = (flat(line[13:]) for line in lines[place : place + 3])
    assert head == "node runs abstained ambiguous input capability misrouted right"
    assert visa == "visa 2 2 0 2 0 0 2"
    assert legend.startswith("right: the answer was right all the same")


def test_where_references_are_unknown_no_abstention_is_called_doubtful() -> None:
    results = batch(ADOPTED)
    totals = batch_totals(result_rows(results, None), results)
    assert re.search(r"visa +1 +1 +0 +1 +0 +0 +-\n", totals)
    assert "right: the answer" not in totals


def test_where_no_node_abstained_nothing_is_said_of_it() -> None:
    quiet = NO_TRIAL.model_copy(
        update={"base": trace(node_run("visa", "yes"), answer="yes")},
    )
    assert "Abstained" not in batch_totals(result_rows(batch(quiet), None), batch(quiet))


def abstaining(node: str, category: AbstentionCategory) -> NodeRun:
    why = Abstention(category=category, rationale="x")
    return node_run(node, "x", status="abstained", abstention=why)


def test_a_node_counts_the_runs_in_which_it_was_called() -> None:
    skipped = node_run("a", None, status="skipped")
    runs = [
        (trace(abstaining("a", "Misrouting"), node_run("b", "y"), answer="y"), True),
        (trace(abstaining("a", "Ambiguous Query"), node_run("b", "y"), answer="z"), False),
        (trace(skipped, node_run("b", "y"), answer="y"), None),
        (trace(node_run("a", "x"), node_run("b", "y"), answer="y"), None),
    ]
    (found,) = abstentions_by_node(runs)
    assert found == NodeAbstentions(
        node="a",
        n_runs=3,
        n_abstained=2,
        by_category={"Misrouting": 1, "Ambiguous Query": 1},
        n_right=1,
    )


def test_a_table_of_many_nodes_shows_those_that_abstained_most() -> None:
    runs = [
        (trace(*(abstaining(f"n{n:02}", "Misrouting") for n in range(k, 40)), answer=None), None)
        for k in range(40)
    ]
    lines = abstention_table(abstentions_by_node(runs))
    assert [line.split()[0] for line in lines[1:-1]] == [f"n{n}" for n in range(39, 24, -1)]
    assert lines[-1] == "and 25 nodes more that abstained less often"


def test_parts_of_a_batch_are_counted_apart() -> None:
    fixed = row("adopt", False, True, True).model_copy(update={"query_id": "a"})
    broken = row("adopt", True, False, False).model_copy(update={"query_id": "b"})
    totals = batch_totals((fixed, broken), batch(), {"train": ["a"], "test": ["b"]})
    assert re.search(r"- train +base 0, final 1, .* of 1\n +1 fixed, 0 broken", totals)
    assert re.search(r"- test +base 1, final 0, .* of 1\n +0 fixed, 1 broken", totals)
