"""What several judges make of interactions: agreement, targets, conflicts, counts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soon import soon

from splice.abstention import parse_reply
from splice.ears.curation import (
    Curated,
    Curation,
    CurationSettings,
    Vote,
    accepted_rationale,
    agreed,
    curate,
    from_traces,
    leading,
    names_item,
    near_pairs,
    parameters,
    read_interactions,
    write_curated,
)
from splice.ears.interactions import Interaction, Label
from splice.ears.judging import Verdict, interaction_digest
from splice.errors import DataError, SettingsError, TraceMismatch
from splice.records import Abstention, AbstentionCategory, ChatMessage, NodeRun, Query, Trace
from splice.workflow import Agent, Function, Workflow

LABELS: tuple[Label, ...] = (
    "Solvable",
    "Ambiguous Query",
    "Insufficient Input",
    "Missing Capability",
    "Misrouting",
)
CONTEXT = "You book rooms: book(city, check_in). The other agents:\n- flights: books flights"


def interaction(id: str, query: str = "", **more: object) -> Interaction:
    fields = {
        "source": "made",
        "agent": "hotels",
        "context": CONTEXT,
        "query": query or f"Book a room in town number {id}.",
        "reply": f"booked {id}",
        **more,
    }
    return Interaction.model_validate({"id": id, **fields})


def verdict(
    about: Interaction, judge: str, label: Label | None, rationale: str | None = "no city given"
) -> Verdict:
    return Verdict(
        interaction=interaction_digest(about),
        judge=judge,
        guideline=f"guideline of {judge}",
        label=label,
        rationale=rationale if label else None,
        problem=None if label else "unreadable",
        reply="...",
    )


def verdicts(about: Interaction, *labels: Label | None) -> list[Verdict]:
    return [verdict(about, f"judge{k}", label) for k, label in enumerate(labels)]


def one(labels: Iterable[Label | None], settings: CurationSettings, **more: object) -> Curated:
    about = interaction("a", **more)
    (row,) = curate([about], verdicts(about, *labels), settings).rows
    return row


def votes(*labels: Label | None) -> list[Vote]:
    return [Vote(judge=f"j{k}", guideline="g", label=label) for k, label in enumerate(labels)]


# --- agreement -------------------------------------------------------------------------------

S, M, I = "Solvable", "Misrouting", "Insufficient Input"  # noqa: E741


@pytest.mark.parametrize(
    ("labels", "accepted_up_to", "label"),
    [
        ([M, M, M, M], 4, M),
        ([M, M, M, S], 3, M),
        ([M, M, S, I], 2, M),
        ([M, M, S, S], 0, None),
        ([M, S, I, None], 0, None),
        ([M, None, None, None], 1, M),
        ([S, S, None], 2, S),
        ([None, None], 0, None),
    ],
)
def test_a_label_is_accepted_by_k_judges_and_of_several_the_one_with_most_votes(
    labels: list[Label | None], accepted_up_to: int, label: Label | None
) -> None:
    cast = votes(*labels)
    found = [agreed(cast, k) for k in range(1, len(labels) + 1)]
    assert found == [label if k <= accepted_up_to else None for k in range(1, len(labels) + 1)]
    assert leading(cast)[0] == label


BALLOTS = st.lists(
    st.lists(st.sampled_from([*LABELS, None]), min_size=4, max_size=4), min_size=1, max_size=12
)


@given(BALLOTS)
def test_accepted_sets_shrink_as_k_grows(ballots: list[list[Label | None]]) -> None:
    rows = [interaction(f"r{k}") for k in range(len(ballots))]
    said = [v for row, labels in zip(rows, ballots, strict=True) for v in verdicts(row, *labels)]
    before: set[tuple[str, str | None]] | None = None
    for k in (1, 2, 3, 4):
        found = curate(rows, said, CurationSettings(k=k, on_disagreement="drop"))
        accepted = {
            (row.interaction.id, row.label) for row in found.rows if row.disposition == "accepted"
        }
        assert before is None or accepted <= before
        before = accepted


@given(BALLOTS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_order_of_judges_and_rows_does_not_matter(
    ballots: list[list[Label | None]], random: random.Random, k: int
) -> None:
    rows = [interaction(f"r{k}", label=LABELS[k % 5]) for k in range(len(ballots))]
    said = [v for row, labels in zip(rows, ballots, strict=True) for v in verdicts(row, *labels)]
    settings = CurationSettings(k=k)
    first = curate(rows, said, settings)
    random.shuffle(rows)
    random.shuffle(said)
    assert curate(rows, said, settings).model_dump_json() == first.model_dump_json()


# --- dispositions ----------------------------------------------------------------------------

UNANIMOUS = CurationSettings()


def test_an_accepted_abstention_becomes_the_target_in_its_wire_form() -> None:
    row = one([I, I], UNANIMOUS)
    assert (row.disposition, row.reason, row.label) == ("accepted", "agreement", I)
    wanted = Abstention(category=I, rationale="no city given")
    assert parse_reply(row.target or "").abstention == wanted
    assert [(vote.judge, vote.guideline, vote.label) for vote in row.votes] == [
        ("judge0", "guideline of judge0", I),
        ("judge1", "guideline of judge1", I),
    ]


def test_accepted_solvable_keeps_the_original_reply_byte_for_byte() -> None:
    reply = "  two\r\nlines\u2028 "
    row = one([S, S], CurationSettings(on_disagreement="drop"), reply=reply)
    assert (row.disposition, row.label, row.target) == ("accepted", S, reply)


@pytest.mark.parametrize(
    ("on_disagreement", "disposition", "label", "target"),
    [
        ("keep", "kept", S, "booked a"),
        ("drop", "dropped", None, None),
        ("human", "human", None, None),
    ],
)
@pytest.mark.parametrize("labels", [[I, S], [I, M], [I, None], [None, None]])
def test_without_agreement_the_setting_decides(
    labels: list[Label | None],
    on_disagreement: str,
    disposition: str,
    label: Label | None,
    target: str | None,
) -> None:
    settings = CurationSettings.model_validate({"on_disagreement": on_disagreement})
    row = one(labels, settings)
    assert (row.disposition, row.reason) == (disposition, "no_agreement")
    assert (row.label, row.target) == (label, target)


@pytest.mark.parametrize(
    ("labels", "reply", "disposition", "reason"),
    [
        ([S, S], None, "dropped", "no_reply"),
        ([S, I], None, "dropped", "no_reply"),
        ([S, S], '{"Response": "Misrouting", "Reasoning": "x"}', "human", "reply_abstains"),
        ([S, I], '{"Response": "Misrouting"}', "human", "reply_abstains"),
        ([I, I], None, "accepted", "agreement"),
        ([I, I], '{"Response": "Misrouting", "Reasoning": "x"}', "accepted", "agreement"),
    ],
)
def test_only_an_output_is_kept_as_the_target_of_a_solvable_request(
    labels: list[Label], reply: str | None, disposition: str, reason: str
) -> None:
    row = one(labels, UNANIMOUS, reply=reply)
    assert (row.disposition, row.reason) == (disposition, reason)
    assert (row.target is None) == (disposition != "accepted")


def test_an_abstention_that_nobody_gives_a_reason_for_goes_to_a_person() -> None:
    about = interaction("a")
    said = [verdict(about, "x", M, None), verdict(about, "y", M, None)]
    found = curate([about], said)
    assert [(row.disposition, row.reason) for row in found.rows] == [("human", "no_rationale")]
    assert found.for_human == found.rows
    assert found.instances == ()


def test_counts_go_by_the_category_with_most_votes() -> None:
    ballots: list[list[Label | None]] = [[I, I], [I, None], [M, S], [S, S], [None, None]]
    rows = [interaction(f"r{k}") for k in range(len(ballots))]
    said = [v for row, labels in zip(rows, ballots, strict=True) for v in verdicts(row, *labels)]
    found = curate(rows, said)
    tallies = [(t.category, t.accepted, t.kept, t.dropped, t.human) for t in found.tallies]
    assert tallies == [(S, 1, 0, 0, 0), (I, 1, 1, 0, 0), (None, 0, 2, 0, 0)]
    assert (found.judges, found.k) == (("judge0", "judge1"), 2)
    assert found.guidelines == ("guideline of judge0", "guideline of judge1")


def test_known_labels_decide_nothing() -> None:
    known, unknown = interaction("a", label=M), interaction("a")
    first = curate([known], verdicts(known, I, I))
    second = curate([unknown], verdicts(unknown, I, I))
    assert first.rows[0].target == second.rows[0].target


@pytest.mark.parametrize(
    ("said", "k", "message"),
    [
        ([], None, "no verdicts"),
        ([("a", "x", "g")], None, "'x' has no verdict on interaction 'b'"),
        ([("a", "x", "g"), ("b", "x", "h")], None, "'x' judged by several guidelines"),
        ([("a", "x", "g"), ("b", "x", "g")], 2, "2 judges can't agree where there are 1"),
    ],
)
def test_votes_that_are_not_one_of_each_judge_are_refused(
    said: list[tuple[str, str, str]], k: int | None, message: str
) -> None:
    rows = {id: interaction(id) for id in "ab"}
    cast = [
        verdict(rows[id], judge, S).model_copy(update={"guideline": guideline})
        for id, judge, guideline in said
    ]
    with pytest.raises(SettingsError, match=message):
        curate(list(rows.values()), cast, CurationSettings(k=k))


def test_two_verdicts_of_a_judge_must_be_the_same() -> None:
    about = interaction("a")
    said = [verdict(about, "x", S), verdict(about, "x", S), verdict(interaction("else"), "x", M)]
    assert curate([about], said).rows[0].label == S
    with pytest.raises(SettingsError, match="two verdicts"):
        curate([about], [*said, verdict(about, "x", M)])
    with pytest.raises(DataError, match="'a' is there twice"):
        curate([about, about], said)


# --- rationales ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("category", "rationale", "is_named"),
    [
        ("Insufficient Input", "no city", True),
        ("Insufficient Input", "the check-in day", False),
        ("Insufficient Input", "needs check_in", True),
        ("Insufficient Input", "which room", True),
        ("Insufficient Input", "for 1994?", True),
        ("Insufficient Input", "for 1995?", False),
        ("Insufficient Input", "something is missing", False),
        ("Ambiguous Query", "two readings of room", True),
        ("Ambiguous Query", "it is unclear", False),
        ("Misrouting", "ask flights", True),
        ("Misrouting", "ask the hotels agent", False),
        ("Misrouting", "ask trains", False),
        ("Misrouting", "ask Car_Rental", True),
        ("Misrouting", "ask another agent", False),
        ("Missing Capability", "no refunds", True),
        ("Missing Capability", "no", False),
    ],
)
def test_a_rationale_names_what_its_category_requires(
    category: AbstentionCategory, rationale: str, is_named: bool
) -> None:
    about = interaction(
        "a", "Book a room as in 1994.", context=CONTEXT + "\nCar_Rental rents cars."
    )
    agents = ["hotels", "Car_Rental", "trains"]
    assert names_item(rationale, category, about, agents) is is_named


def test_parameters_of_a_json_schema_are_names_and_its_keywords_are_not() -> None:
    context = json.dumps({"parameters": {"properties": {"theater_name": {"type": "string"}}}})
    assert parameters(context) == {"theater name"}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (["it is unclear", "the city was not given", "the city is not there"], "the city"),
        (["it is unclear", "this is quite unclear"], "it is unclear"),
        (["no city b", "no city a"], "no city a"),
        ([None, "no city"], "no city"),
        ([None, None], None),
    ],
)
def test_the_shortest_rationale_that_names_the_item_is_accepted(
    given: list[str | None], chosen: str | None
) -> None:
    cast = [
        Vote(judge=f"j{k}", guideline="g", label=I, rationale=rationale)
        for k, rationale in enumerate(given)
    ]
    cast.append(Vote(judge="other", guideline="g", label=M, rationale="city"))
    found = accepted_rationale(interaction("a"), I, cast)
    assert found is None if chosen is None else (found or "").startswith(chosen)
    assert accepted_rationale(interaction("a"), I, cast[::-1]) == found


@pytest.mark.parametrize("piece", ["(", "a(b", "_a", '"a" ', "- a", "other agents\n- ", "a_", "x,"])
def test_contexts_without_end_are_read_in_linear_time(piece: str) -> None:
    about = interaction("a", piece * 50_000, context=piece * 50_000)
    with soon():
        for category in ("Insufficient Input", "Misrouting"):
            names_item("zzzz", category, about, ["flights"])


# --- conflicts -------------------------------------------------------------------------------

LONG = "Please book a quiet double room with breakfast near the old harbour for my two colleagues"


def conflicting(**more: object) -> Curation:
    abstained = interaction("a", f"{LONG}.")
    keeping = interaction("b", f"{LONG}!", **more)
    said = [*verdicts(abstained, I, I), *verdicts(keeping, S, S)]
    return curate([keeping, abstained], said)


def test_a_near_duplicate_of_an_abstention_does_not_keep_its_reply() -> None:
    abstained, keeping = conflicting().rows
    assert abstained.disposition == "accepted"
    assert (keeping.disposition, keeping.reason) == ("human", "conflict")
    assert (keeping.conflicts_with, keeping.label, keeping.target) == ("a", None, None)


@pytest.mark.parametrize(
    "more",
    [{"agent": "flights"}, {"context": "You may book anything."}, {"query": "Cancel the room."}],
)
def test_another_agent_context_or_query_is_no_conflict(more: dict[str, object]) -> None:
    if "query" in more:
        abstained, keeping = interaction("a", LONG), interaction("b", str(more["query"]))
        found = curate([abstained, keeping], [*verdicts(abstained, I), *verdicts(keeping, S)])
    else:
        found = conflicting(**more)
    assert [row.disposition for row in found.rows] == ["accepted", "accepted"]


def test_a_row_that_was_kept_without_agreement_conflicts_too_and_a_dropped_one_does_not() -> None:
    abstained, keeping = interaction("a", LONG), interaction("b", LONG, context=f"{CONTEXT}.")
    said = [*verdicts(abstained, I, I), *verdicts(keeping, S, I)]
    for on_disagreement, reason in (("keep", "conflict"), ("drop", "no_agreement")):
        settings = CurationSettings.model_validate({"on_disagreement": on_disagreement})
        assert curate([abstained, keeping], said, settings).rows[1].reason == reason


def brute_force(left: Sequence[str], right: Sequence[str], threshold: float) -> set[tuple]:
    """Every pair, its cosine worked out in Python."""
    from splice.ears.curation import _features

    texts = sorted({*left, *right})
    rows = {text: _features(text) for text in texts}
    n_with = {c: sum(c in row for row in rows.values()) for row in rows.values() for c in row}

    def weighted(text: str) -> dict[int, float]:
        row = {
            c: n * (math.log((1 + len(texts)) / (1 + n_with[c])) + 1) for c, n in rows[text].items()
        }
        length = math.sqrt(sum(w * w for w in row.values())) or 1.0
        return {c: w / length for c, w in row.items()}

    vectors = {text: weighted(text) for text in texts}
    return {
        (a, b)
        for a in left
        for b in right
        if round(sum(w * vectors[b].get(c, 0.0) for c, w in vectors[a].items()), 12) >= threshold
    }


TEXTS = st.lists(
    st.lists(st.sampled_from(["book", "a", "room", "car", "now", ""]), max_size=6).map(" ".join),
    unique=True,
    max_size=8,
)


@given(TEXTS, TEXTS, st.sampled_from([0.5, 0.8, 0.95]))
def test_no_near_pair_is_missed_and_none_is_made_up(
    left: list[str], right: list[str], threshold: float
) -> None:
    found = list(near_pairs(left, right, threshold))
    assert len(found) == len(set(found))
    assert set(found) == brute_force(left, right, threshold)


def test_many_queries_are_compared_in_time_that_does_not_grow_with_their_square() -> None:
    rng = random.Random(1)
    lexicon = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(3000)]
    left = [" ".join(rng.choices(lexicon, k=9)) for _ in range(3000)]
    right = [f"{text} now" for text in left[:1000]]
    with soon(20):
        found = list(near_pairs(left, right, 0.9))
    assert {(a, b) for a, b in found} == set(zip(left[:1000], right, strict=True))


def test_long_queries_are_curated_soon() -> None:
    rows = [interaction(f"r{k}", "book it " * 12_500) for k in range(4)]
    rows[0] = interaction("r0", "book it " * 12_500, context=CONTEXT + "!")
    said = [*verdicts(rows[0], I), *(v for row in rows[1:2] for v in verdicts(row, S))]
    with soon():
        found = curate(rows, said)
    assert [row.reason for row in found.rows] == ["agreement", *["conflict"] * 3]


# --- files and traces ------------------------------------------------------------------------


def test_curating_again_writes_the_same_bytes(tmp_path: Path) -> None:
    rows = [interaction(f"r{k}", reply=f"done \ud800 {k}") for k in range(5)]
    said = [v for k, row in enumerate(rows) for v in verdicts(row, LABELS[k], LABELS[k])]
    for name, order in (("one", 1), ("two", -1)):
        write_curated(tmp_path / name, curate(rows[::order], said[::order]).instances)
    data = (tmp_path / "one").read_bytes()
    assert data == (tmp_path / "two").read_bytes()
    read = [Curated.model_validate_json(line) for line in data.splitlines()]
    assert [row.interaction.id for row in read] == [f"r{k}" for k in range(5)]
    assert read[0].target == "done \ufffd 0"
    for row in read[1:]:
        abstention = parse_reply(row.target or "").abstention
        assert abstention is not None
        assert abstention.category == row.label


def line(**fields: object) -> str:
    return json.dumps(
        {"id": "a", "source": "s", "agent": "g", "context": "c", "query": "q"} | fields
    )


def test_interactions_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "i.jsonl"
    second_line = line(id="b", query="x\u2028y", label=M)
    path.write_text(f"{line()}\n\n{second_line}\n", "utf-8")
    first, second = read_interactions(path)
    assert (first.id, second.query, second.label) == ("a", "x\u2028y", M)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"i\.jsonl: no interactions"),
        (f"{line()}\n{line(id='b')[:-5]}", r"i\.jsonl:2: "),
        ("7", r"i\.jsonl:1: "),
        (line(query=3), r"i\.jsonl:1: query: "),
        (line(label="Perhaps"), r"i\.jsonl:1: label"),
        (line(tone="rude"), r"i\.jsonl:1: tone: "),
        ('{"id": "a"}', r"i\.jsonl:1: source: "),
        (f"{line()}\n\n{line()}", r"i\.jsonl:3: id: 'a' is that of line 1 too"),
        (line(query="\ud800"), r"i\.jsonl:1: "),
        ("[" * 100_000, r"i\.jsonl:1: "),
    ],
)
def test_a_line_that_is_no_interaction_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "i.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(DataError, match=message):
        read_interactions(path)


def test_a_file_that_is_not_there_or_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none"):
        read_interactions(tmp_path / "none")
    (tmp_path / "i.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        read_interactions(tmp_path / "i.jsonl")


def joined(node: object) -> str:
    return "joined"


WORKFLOW = Workflow(
    name="trip",
    nodes=(
        Agent(id="routes", role="Routes.", may_abstain=True),
        Agent(id="visas", role="Visas."),
        Function(id="join", call=joined),
        Agent(id="desk", role="Desk."),
    ),
    edges=(("routes", "join"), ("visas", "join"), ("join", "desk")),
    output="desk",
)
READ = (ChatMessage(role="system", content="Routes."), ChatMessage(role="user", content="Where?"))


def trace(*runs: NodeRun, fingerprint: str = WORKFLOW.fingerprint) -> Trace:
    return Trace(
        query=Query(text="Where do I stop?", id="q1"),
        workflow="trip",
        fingerprint=fingerprint,
        node_runs=runs,
        answer=None,
        engine_version="0",
    )


ABSTAINED = NodeRun(
    node="routes",
    status="abstained",
    output='{"Response": "Misrouting", "Reasoning": "x"}',
    raw='```\n{"Response": "misrouting", "Reasoning": "x"}\n```',
    input=READ,
)


def test_each_agents_run_is_an_interaction_with_its_raw_reply() -> None:
    runs = (
        ABSTAINED,
        NodeRun(node="visas", status="ok", output="two days", input=READ[:1]),
        NodeRun(node="join", status="ok", output="joined", input=READ[1:]),
        NodeRun(node="desk", status="failed", raw="{broken", input=READ[1:]),
    )
    first, second, third = from_traces(WORKFLOW, [trace(*runs)])
    assert (first.source, first.agent, first.query) == ("trip", "routes", "Where do I stop?")
    assert first.context == "Routes.\n\nWhere?"
    assert first.reply == ABSTAINED.raw
    assert first.id.startswith("q1:routes:")
    assert (second.agent, second.reply) == ("visas", "two days")
    assert (third.agent, third.reply) == ("desk", "{broken")


def test_runs_without_a_reply_are_left_out_and_reused_ones_stand_once() -> None:
    skipped = NodeRun(node="desk", status="skipped")
    failed = NodeRun(node="visas", status="failed", input=READ)
    again = NodeRun(node="visas", status="ok", output="three", input=READ)
    found = from_traces(WORKFLOW, [trace(ABSTAINED, failed, skipped), trace(ABSTAINED, again)])
    assert [(made.agent, made.reply) for made in found] == [
        ("routes", ABSTAINED.raw),
        ("visas", "three"),
    ]


def test_interactions_of_traces_can_be_written_and_read(tmp_path: Path) -> None:
    odd = NodeRun(node="visas", status="ok", output="x \ud800", input=READ)
    (made,) = from_traces(WORKFLOW, [trace(odd)])
    (tmp_path / "i.jsonl").write_text(f"{made.model_dump_json()}\n", "utf-8")
    assert read_interactions(tmp_path / "i.jsonl") == (made,)


def test_a_trace_of_another_workflow_is_refused() -> None:
    with pytest.raises(TraceMismatch):
        from_traces(WORKFLOW, [trace(ABSTAINED, fingerprint="other")])
