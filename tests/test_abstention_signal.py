"""What abstentions add: traces read without the signal, and parts fitted without it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from loopback import LoopbackServer, Reply
from test_multihop import TWO_WIKI, write
from test_training_fit import SETTINGS, base, planted, trial, tried

from selector_training.tables import Tables, read_tables
from splice import Agent, Query, ScriptedModel, Workflow, run
from splice.abstention import is_declining, wire
from splice.diagnosis import diagnose
from splice.features import CASE_FEATURES, EDGE_FEATURES, QUERY_FEATURES, declines
from splice.records import Abstention, Request
from splice.text import is_refusal, items, numbers, tokens, words
from splice.workload import Example, Workload

ROOT = Path(__file__).parent.parent
REASON = "benchmarks/ is importable from the root of the repository only"
signal = pytest.importorskip("benchmarks.abstention_signal", reason=REASON)

TYPED = wire(Abstention(category="Insufficient Input", rationale="which person made Film 1?"))


def agent(name: str, task: str, **given: object) -> Agent:
    return Agent(id=name, role="You look up one fact.", subtask=task, reads_query=False, **given)


WORKFLOW = Workflow(
    name="films",
    nodes=(
        agent("maker", "Who made the film?", abstention_phrase="not found"),
        agent("born", "When was this person born?", may_abstain=True),
        agent("town", "When was this person born?", may_abstain=True),
        Agent(id="writer", role="You answer.", subtask="Answer.", may_abstain=True),
    ),
    edges=(("maker", "writer"), ("born", "writer"), ("town", "writer")),
    output="writer",
)


def trace_of(**replies: str):
    script = {"maker": "Ana Lima", "born": "1901", "town": "1902", "writer": "1901", **replies}
    model = ScriptedModel({node: [reply] for node, reply in script.items()})
    return run(WORKFLOW, Query(id="q", text="When was the maker of Film 1 born?"), model=model)


# --- traces without the signal ---------------------------------------------------------------


def test_a_trace_in_which_all_answered_is_read_alike_by_all_arms():
    trace = trace_of()

    assert [reading(WORKFLOW, trace) for reading in signal.ARMS.values()] == [trace] * 3


def test_an_abstention_read_as_text_is_the_reply_that_was_given():
    trace = trace_of(maker="Not found.", born=TYPED)

    plain = signal.as_text(WORKFLOW, trace)

    assert {run.status for run in plain.node_runs} == {"ok"}
    assert [plain.by_node[n].output for n in ("maker", "born")] == ["Not found.", TYPED]
    assert all(run.abstention is None for run in plain.node_runs)
    # Words that decline are understood, the typed form is not.
    assert [declines(plain.by_node[n]) for n in ("maker", "born")] == [True, False]
    assert not any(score.features["named_held"] for score in diagnose(WORKFLOW, plain).edges)


def test_a_missed_form_is_an_output_where_nobody_knows_the_form():
    trace = trace_of(born='{"Response": "Insufficient Input"}')

    assert trace.by_node["born"].status == "failed"
    assert signal.as_text(WORKFLOW, trace).by_node["born"].status == "ok"


@pytest.mark.parametrize("reply", ["not found", "Not found.", "unknown", "N/A", TYPED])
def test_unread_replies_decline_no_more(reply):
    trace = trace_of(maker="none" if reply == TYPED else reply, born=reply, writer=reply)
    assert is_declining(trace.answer)

    read = signal.unread(WORKFLOW, trace)

    assert not any(map(declines, read.node_runs))
    assert not is_declining(read.answer)
    found = diagnose(WORKFLOW, read)
    assert found.base_reasons == ("every node answered",)
    assert not any(
        score.features[name] for score in found.edges for name in ("w_declines", "u_silent")
    )


@pytest.mark.parametrize("text", ["not found", "The answer was not found.", "unknown", "None"])
def test_a_hidden_refusal_keeps_its_words(text):
    hidden = signal._hidden(text)

    assert is_refusal(text)
    assert not is_refusal(hidden)
    for what in (words, tokens, numbers, items, str.split):
        assert set(what(hidden)) - {"."} == set(what(text))


def test_what_says_nothing_says_nothing_in_every_arm():
    trace = trace_of(town="...")

    assert is_refusal(signal.unread(WORKFLOW, trace).by_node["town"].output)


# --- base runs -------------------------------------------------------------------------------


def reply_to(request: Request) -> str:
    """Every second question is asked of one who abstains; what it needs goes to the third node."""
    film = int(re.search(r"Film (\d)", request.messages[-1].content)[1])
    if request.node == "maker":
        return "Rui Sol"
    if request.node == "town" and film % 2:
        return wire(Abstention(category="Insufficient Input", rationale="who is it?"))
    return "1901" if request.node in ("writer", "born") else "In 1902."


def films(n: int, gaps: tuple[tuple[str, str], ...] | None = (("maker", "town"),)) -> Workload:
    return Workload(
        name="films",
        about="Films.",
        workflow=WORKFLOW,
        examples=tuple(
            Example(
                query=Query(
                    id=f"q{k}",
                    text=f"When was the maker of Film {k} born?",
                    subtasks=dict.fromkeys(
                        ("maker", "born", "town"),
                        f"Who made Film {k}, and when was this person born?",
                    ),
                ),
                kind="odd" if k % 2 else "even",
                gap_edges=gaps,
            )
            for k in range(n)
        ),
        metrics=("right",),
        score=lambda example, answer: {"right": float(answer == "1901")},
    )


async def found_in(workload: Workload) -> list:
    model = ScriptedModel(reply_to)
    return await signal.cases(
        workload, workload.examples, model, learned=None, concurrency=2, prefix="film "
    )


async def test_edge_choices_of_the_arms_are_counted_side_by_side():
    cases = await found_in(films(6))
    one = signal.variant("typed", cases, None)

    assert (one.n, one.n_with_gaps, one.base_score) == (6, 6, 1.0)
    assert one.at_random == pytest.approx(1 / 3)
    hits = {(c.arm, c.is_stated): (c.share.n_hits, c.share.n) for c in one.choices}
    # Without the abstention the two receivers look the same, and the first one is taken.
    assert hits == {
        ("with the signal", False): (3, 6),
        ("words only", False): (0, 6),
        ("nothing read", False): (0, 6),
        ("with the signal", True): (3, 3),
        ("words only", True): (0, 3),
        ("nothing read", True): (0, 3),
    }
    words_only = one.choices[1]
    assert words_only.signal_more.mean == 0.5
    assert words_only.p_mcnemar == pytest.approx(2 * 0.5**3)


async def test_who_abstained_is_counted_apart_for_those_that_lack_something():
    cases = await found_in(films(4))
    cases += await found_in(films(4, gaps=()))
    one = signal.variant("typed", cases, None)

    assert (one.abstained.n_hits, one.abstained.n) == (2, 4)
    assert (one.stated.n_hits, one.stated.n) == (2, 4)
    nodes = {(count.node, count.lacks): (count.n, dict(count.said)) for count in one.nodes}
    assert nodes["town", True] == (4, {"answered": 2, "abstained": 2})
    assert nodes["town", False] == (4, {"answered": 2, "abstained": 2})
    assert nodes["maker", False] == (8, {"answered": 8})
    even, odd = one.kinds
    assert (odd.kind, odd.n, odd.n_with_gaps, odd.n_abstained, odd.n_lacking) == (
        "film odd",
        4,
        2,
        4,
        2,
    )
    assert even.hits == dict.fromkeys(signal.ARMS, 0)


async def test_questions_whose_gaps_are_unknown_are_not_run():
    model = ScriptedModel(reply_to)
    workload = films(2, gaps=None)

    found = await signal.cases(workload, workload.examples, model, learned=None, concurrency=1)

    assert found == []
    assert model.requests == []
    with pytest.raises(ValueError, match="no question"):
        signal.variant("typed", found, None)


# --- the command -----------------------------------------------------------------------------


def test_variants_of_a_workload_are_run_once_and_compared(tmp_path, monkeypatch, capsys):
    rows = [{**TWO_WIKI, "_id": f"q{n}"} for n in range(3)]
    data = write(tmp_path, *rows)

    def respond(request):
        text = request["messages"][-1]["content"]
        return Reply(text="Faro" if "Question:" in text else "not found")

    def measured(*more: str) -> str:
        command = ["runs", "multihop", "--data", str(data), "--split", "train", "--model", "m"]
        command += ["--vary", "abstention=phrase,none", "--out", str(tmp_path / "out"), *more]
        assert signal.main(command) == 0
        return capsys.readouterr().out

    with LoopbackServer(respond) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        text = measured("--limit", "2")
        n_asked = server.n_requests
        phrase, none = json.loads(measured("--limit", "2", "--json"))
        assert server.n_requests == n_asked > 0

    assert (phrase["n"], phrase["base_score"], none["more_than_first"]["mean"]) == (2, 1.0, 0.0)
    said = {count["node"]: count["said"] for count in none["nodes"]}
    assert said["first"] == {"declined": 2}
    learned = [c["arm"] for c in none["choices"] if c["diagnoser"] == "learned"]
    assert learned[:3] == list(signal.ARMS)
    assert text.startswith("variant  questions")
    assert "## none" in text


def test_an_option_without_a_value_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        signal.main(["runs", "multihop", "--out", "x", "--vary", "abstention"])
    assert "'abstention' is not NAME=VALUE" in capsys.readouterr().err


# --- learned parts ---------------------------------------------------------------------------


def test_every_feature_that_speaks_of_declining_is_a_signal():
    speaks = re.compile(r"abstain|abstention|declin|refus", re.IGNORECASE)
    found = {
        feature.name
        for feature in (*QUERY_FEATURES, *EDGE_FEATURES, *CASE_FEATURES)
        if speaks.search(f"{feature.name} {feature.definition}")
    }

    assert found == signal.SIGNALS | {"a_words", "base_declines", "new_declines"}


def declining() -> Tables:
    own = base("q1", 0.0, a_declines=1.0, n_declining=2.0, best_edge=0.9, q_words=7.0)
    facts = trial("beneficial", 1.0, is_abstention_resolved=1.0, is_answer_refusal_resolved=1.0)
    edge = tried(own, "b", facts, w_declines=1.0, bridge=1.0)
    return Tables((own,), (edge._replace(p_decisive=signal.by_hand(edge.features)),), ())


def test_without_signals_no_row_tells_of_declining():
    tables = declining()

    silent = signal.without_signals(tables)

    (row,), (probe,) = silent.bases, silent.probes
    assert probe.base is row
    assert (row.features["a_declines"], row.features["n_declining"]) == (0.0, 0.0)
    assert (row.features["a_words"], row.features["q_words"]) == (2.0, 7.0)
    assert probe.features["bridge"] == 1.0
    assert not any(
        probe.trial.evidence[name] for name in signal.SIGNALS & probe.trial.evidence.keys()
    )

    def log_odds(chance: float) -> float:
        return math.log(chance / (1 - chance))

    lost = log_odds(tables.probes[0].p_decisive) - log_odds(probe.p_decisive)
    assert lost == pytest.approx(2.0)


def test_without_hand_set_chances_the_signals_stay():
    (row,), (probe,) = signal.without_by_hand(signal.without_best_edge(declining()))[:2]

    assert probe.base is row
    assert (row.features["best_edge"], probe.p_decisive) == (0.0, 0.5)
    assert (row.features["a_declines"], probe.features["w_declines"]) == (1.0, 1.0)


def test_the_hand_set_chance_of_the_tables_is_computed_again_from_their_features():
    tables = read_tables([ROOT / "selector_training" / "pools" / "multihop"])

    for probe in tables.probes:
        assert signal.by_hand(probe.features) == pytest.approx(probe.p_decisive, abs=1e-6)


def test_parts_that_lose_their_only_signal_lose_what_they_knew():
    found = signal.compared(planted(80, 40), SETTINGS, n_resamples=50)

    by_name = {(r.split, r.part, r.metric): r for r in found}
    for split in ("train", "validation"):
        # In these tables only `a_declines` tells of the score, and nothing that declines of edges.
        row = by_name[split, "headroom", "AUC, full score"]
        assert row.with_signals > 0.7
        assert row.interval.low > 0.1
        assert row.difference == pytest.approx(row.with_signals - row.without)
        assert by_name[split, "headroom", "log loss"].difference < 0
        decisive = by_name[split, "edges", "AUC, decisive"]
        assert decisive.with_signals == pytest.approx(decisive.without, abs=0.05)
        assert by_name[split, "selector", "gain of what is adopted"].n > 0
    assert {part for _, part, _ in by_name} >= {"edges, hand-set chance in", "selector"}
    text = signal.rows_text(found)
    assert text.startswith("train, out of fold")
    assert "selector: accuracy" in text


def test_a_gap_hit_among_equal_edges_counts_by_its_chance():
    own = base("q1", 0.0)
    probes = tuple(
        tried(own, receiver, None, bridge=float(receiver == "b")) for receiver in ("b", "c")
    )
    edges = signal.labelled_edges(Tables((own,), probes, ()))
    both = [signal.np.array(ranks) for ranks in ([0.7, 0.2], [0.5, 0.5])]

    (row,) = signal._gap_rows("train", "edges", edges, both, 0)

    assert (row.with_signals, row.without, row.n) == (1.0, 0.5, 1)
