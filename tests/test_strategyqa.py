"""StrategyQA as a workload: both forms of the data, who holds and is asked what, yes and no."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import realdata
from soon import soon

from skeletons.strategyqa import load
from skeletons.strategyqa.answers import yes_or_no
from skeletons.strategyqa.dealing import N_DISTRACTORS, RESEARCHERS
from splice import ScriptedModel, repair
from splice.errors import DataError, SettingsError
from splice.queries import Split
from splice.records import Edge, Request
from splice.workload import Example, Workload


def row(name: str = "trees", **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "question": f"Do {name} keep their needles?",
        "answer": "yes",
        "term": name,
        "facts": [f"The {name} are pines.", f"Pines among {name} keep their needles."],
        "decomposition": [f"What are the {name}?", "Do #1 keep their needles?"],
        **changes,
    }


ORIGINAL = {
    "qid": "trees",
    "term": "trees",
    "description": "Plants",
    "question": "Do trees keep their needles?",
    "answer": True,
    "facts": ["The trees are pines.", "Pines among trees keep their needles."],
    "decomposition": ["What are the trees?", "Do #1 keep their needles?"],
    "evidence": [[["Pine-1"], ["operation"]]],
}
FILE = [row(), *(row(f"other-{letter}") for letter in "abcdefgh")]


def written(path: Path, rows: Any) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows), "utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def loaded(path: Path, split: Split = "test", subtasks: str = "question") -> Workload:
    return load(path, split=split, options={"subtasks": subtasks})


def example(tmp_path: Path, subtasks: str = "planned", **changes: Any) -> Example:
    rows = [row(**changes), *FILE[1:]]
    return loaded(written(tmp_path / "test.jsonl", rows), subtasks=subtasks).examples[0]


# --- data ------------------------------------------------------------------------------------


def test_both_forms_give_the_same_example(tmp_path: Path) -> None:
    original = loaded(written(tmp_path / "train.json", [ORIGINAL, *FILE[1:]]))
    ours = loaded(written(tmp_path / "train.jsonl", FILE))
    assert original.examples == ours.examples
    assert original.examples[0].reference == {"answer": "yes"}


def test_a_false_answer_of_the_original_is_no(tmp_path: Path) -> None:
    workload = loaded(written(tmp_path / "train.json", [{**ORIGINAL, "answer": False}]))
    assert workload.examples[0].reference == {"answer": "no"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "maybe"}, "field 'answer'"),
        ({"answer": 1}, "field 'answer'"),
        ({"facts": []}, "field 'facts'"),
        ({"facts": ["Pines.", " "]}, "field 'facts.1'"),
        ({"facts": "Pines."}, "field 'facts'"),
        ({"decomposition": []}, "field 'decomposition'"),
        ({"question": " "}, "field 'question'"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"test\.jsonl:2: {message}"):
        loaded(written(tmp_path / "test.jsonl", [row(), row("other", **change)]))
    with pytest.raises(DataError, match=rf"test\.json: row 2: {message}"):
        loaded(written(tmp_path / "test.json", [row(), row("other", **change)]))


@pytest.mark.parametrize("field", ["id", "question", "answer", "term", "facts", "decomposition"])
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in row().items() if name != field}
    with pytest.raises(DataError, match=f"test.jsonl:1: field '{field}' is missing"):
        loaded(written(tmp_path / "test.jsonl", [kept]))


def test_without_data_or_with_a_wrong_option_it_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="strategyqa ships no questions"):
        load(None, split="test", options={})
    with pytest.raises(DataError, match=r"neither val\.jsonl nor val\.json"):
        loaded(tmp_path, "validation")
    with pytest.raises(SettingsError, match="one of question, planned"):
        loaded(tmp_path, subtasks="form")


@pytest.mark.parametrize(("split", "n"), [("train", 600), ("validation", 150), ("test", 250)])
@pytest.mark.parametrize("subtasks", ["question", "planned"])
def test_every_real_question_loads_with_all_its_facts(split: Split, n: int, subtasks: str) -> None:
    folder = realdata.data_set("strategyqa")
    workload = loaded(folder, split, subtasks)
    assert len(workload.examples) == n
    stem = {"validation": "val"}.get(split, split)
    rows = map(json.loads, (folder / f"{stem}.jsonl").read_text("utf-8").splitlines())
    missing = set(workload.workflow.candidate_edges)
    for found, source in zip(workload.examples, rows, strict=True):
        workload.workflow.check_query(found.query)
        held = Counter(doc.text for docs in found.query.context.values() for doc in docs)
        assert held.total() == len(source["facts"]) + N_DISTRACTORS * len(RESEARCHERS)
        assert set(held) >= {fact.strip() for fact in source["facts"]}
        assert {(edge.source, edge.receiver) for edge in missing} >= set(found.gap_edges or ())


# --- who holds and is asked what -------------------------------------------------------------


def test_facts_go_round_among_two_distractors_each(tmp_path: Path) -> None:
    facts = [f"Fact {number}." for number in range(1, 5)]
    context = example(tmp_path, facts=facts).query.context
    own = {name: [doc.text for doc in docs if doc.text in facts] for name, docs in context.items()}
    assert {name: sorted(texts) for name, texts in own.items()} == {
        "first": ["Fact 1.", "Fact 4."],
        "second": ["Fact 2."],
        "third": ["Fact 3."],
    }
    assert [len(context[name]) - len(own[name]) for name in RESEARCHERS] == [N_DISTRACTORS] * 3


def test_dealing_depends_on_the_question_alone_and_not_on_the_option(tmp_path: Path) -> None:
    planned, asked = (example(tmp_path, subtasks=kind) for kind in ("planned", "question"))
    assert planned.query.context == asked.query.context
    assert planned == example(tmp_path)


def test_the_place_of_the_own_fact_among_the_documents_varies(tmp_path: Path) -> None:
    workload = loaded(written(tmp_path / "test.jsonl", FILE))
    places = {
        [doc.text for doc in found.query.context["first"]].index(f"The {found.query.id} are pines.")
        for found in workload.examples
    }
    assert len(places) > 1


def test_no_distractor_comes_from_a_question_about_the_same_page(tmp_path: Path) -> None:
    rows = [row(), row("twin", term="trees", facts=["The twin is near."]), row("other-a")]
    found = loaded(written(tmp_path / "test.jsonl", rows)).examples[0]
    texts = {doc.text for docs in found.query.context.values() for doc in docs}
    assert "The twin is near." not in texts
    assert len(texts) == len({*rows[0]["facts"]} | texts)


def test_by_default_everybody_is_asked_about_the_whole_question(tmp_path: Path) -> None:
    found = example(tmp_path, subtasks="question")
    tasks = {found.query.subtasks[name] for name in RESEARCHERS}
    assert len(tasks) == 1
    assert "Do trees keep their needles?" in tasks.pop()
    assert found.gap_edges is None


def test_planned_steps_go_round_and_say_what_they_refer_to(tmp_path: Path) -> None:
    steps = ["What is it?", "Is #1 red?", "Is #2 true?", "Is #10 or #3 so?"]
    assert example(tmp_path, decomposition=steps).query.subtasks == {
        "first": "What is it? Is the answer to step 10 or the answer to step 3 so?",
        "second": "Is the answer to step 1 red?",
        "third": "Is the answer to step 2 true?",
    }


def test_a_researcher_without_a_step_gets_the_whole_question(tmp_path: Path) -> None:
    tasks = example(tmp_path).query.subtasks
    assert tasks["first"] == "What are the trees?"
    assert tasks["third"].endswith("Do trees keep their needles?")


@pytest.mark.parametrize(
    ("steps", "n_facts", "expected"),
    [
        (["What is it?", "Is #1 red?"], 2, (("first", "second"),)),
        (["What?", "Who?", "Is #1 #2?"], 3, (("first", "third"), ("second", "third"))),
        (["What?", "Is #1?", "#1 or #2?"], 3,
         (("first", "second"), ("first", "third"), ("second", "third"))),
        (["What?", "Who?"], 2, ()),
        # Which fact is whose is not known.
        (["What is it?", "Is #1 red?"], 3, None),
        (["What?", "Who?", "Is #1 #2?"], 2, None),
        (["What?", "Who?", "Is #1?", "Is #3?"], 4, None),
        # The plan is not one.
        (["What is it?", "Is #2 red?"], 2, None),
        (["Is #0 it?", "Is #1 red?"], 2, None),
    ],
)  # fmt: skip
def test_a_step_that_refers_to_another_lacks_the_edge_from_it(
    steps: list[str], n_facts: int, expected: tuple[Edge, ...] | None, tmp_path: Path
) -> None:
    facts = [f"Fact {number}." for number in range(n_facts)]
    assert example(tmp_path, decomposition=steps, facts=facts).gap_edges == expected


# --- yes and no ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("yes", "yes"),
        ("Yes.", "yes"),
        ("**YES**", "yes"),
        ("- no", "no"),
        ('"No"', "no"),
        ("yes, because pines keep them", "yes"),
        ("Yes, because there is no rule", "yes"),
        ("No, yes-men are rare", "no"),
        ("No. The reports say so.", "no"),
        ("No, no, no!", "no"),
        ("The answer is no.", "no"),
        ("I would say yes", "yes"),
        ("Maybe.\nAnswer: yes", "yes"),
        ("Answer: no\nAnswer: **Yes**", "yes"),
        ("Answer:\nNo", "no"),
        ("Yes and no", None),
        ("yes or no", None),
        ("Yes/No", None),
        ("no, yes", None),
        ("No but yes", None),
        ("It is yes for some and no for others", None),
        ("perhaps", None),
        ("true", None),
        ("yesterday", None),
        ("I know it", None),
        ("not found", None),
        ("No information is available.", None),
        ("", None),
        (None, None),
    ],
)
def test_what_an_answer_says(answer: str | None, said: str | None) -> None:
    assert yes_or_no(answer) == said


def test_a_long_hostile_answer_is_read_in_linear_time() -> None:
    with soon():
        for piece in ("yes ", "no, ", "yes and ", "\n", "answer: \n", "yes-"):
            yes_or_no(piece * 100_000)


def test_neither_and_both_score_nothing_whatever_is_right(tmp_path: Path) -> None:
    workload = loaded(written(tmp_path / "test.jsonl", [row(), row("other", answer="no")]))
    for found in workload.examples:
        for answer in ("perhaps", "yes and no", None):
            assert workload.score(found, answer) == {"correct": 0.0}
        right, wrong = ("Yes.", "No.") if found.reference["answer"] == "yes" else ("No.", "Yes.")
        assert workload.score(found, right) == {"correct": 1.0}
        assert workload.score(found, wrong) == {"correct": 0.0}


# --- from end to end -------------------------------------------------------------------------


THREE_STEPS = {
    "facts": ["The trees are pines.", "Pines keep their needles.", "Needles are leaves."],
    "decomposition": ["What are the trees?", "Do #1 keep their needles?", "What are needles?"],
}


def colleague(request: Request) -> str:
    """Looks up what its own document says; the second one has to be told that it is pines."""
    prompt = request.messages[-1].content
    if request.node == "first":
        return "The trees are pines."
    if request.node == "second":
        return "Pines keep their needles." if "trees are pines" in prompt else "not found"
    if request.node == "third":
        return "Needles are leaves."
    return "Yes." if "Pines keep their needles." in prompt else "No."


def test_a_repair_brings_the_second_researcher_what_its_step_refers_to(tmp_path: Path) -> None:
    path = written(tmp_path / "test.jsonl", [row(**THREE_STEPS), *FILE[1:]])
    workload = loaded(path, subtasks="planned")
    found = workload.examples[0]
    result = repair(workload.workflow, found.query, model=ScriptedModel(colleague))
    assert workload.score(found, result.base.answer) == {"correct": 0.0}
    assert workload.score(found, result.answer) == {"correct": 1.0}
    assert result.message is not None
    assert ((result.message.source, result.message.receiver),) == found.gap_edges


def test_only_the_writer_reads_the_question_when_steps_are_planned(tmp_path: Path) -> None:
    workload = loaded(written(tmp_path / "test.jsonl", FILE), subtasks="planned")
    model = ScriptedModel(colleague)
    repair(workload.workflow, workload.examples[0].query, model=model)
    for request in model.requests:
        assert ("Question:" in request.messages[-1].content) == (request.node == "writer")
