"""Multi-hop questions: formats, dealing, tasks and gap edges."""

import json
import random
from collections import Counter
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
import realdata

from skeletons.multihop import load
from skeletons.multihop.dealing import (
    N_DISTRACTORS,
    N_HAND_WORDS,
    N_WORDS,
    Hand,
    archive,
    deal,
    document,
    own_steps,
)
from skeletons.multihop.forms import by_form
from skeletons.multihop.gaps import gap_edges
from skeletons.multihop.hosts import RESEARCHERS, WRITER, workflow
from skeletons.multihop.plans import planned
from skeletons.multihop.questions import Paragraph, Question, Step
from skeletons.multihop.rows import read_questions
from skeletons.multihop.subtasks import subtasks
from splice import ScriptedModel, run
from splice.errors import DataError, SettingsError
from splice.rendering import documents_block, render_input
from splice.text import contains

SETS = ("multihop_2wiki", "multihop_hotpotqa", "multihop_musique")
SPLITS = ("train", "validation", "test")
HOSTS = ("parallel", "chain")

DREAM = "Dream is a 1990 film by Ana Lima."
LIMA = "She was born in Faro."
CONTEXT = [
    ["Dream", [DREAM, "It won nothing."]],
    ["Ana Lima", ["Ana Lima is a director.", "She has a dog.", LIMA]],
    ["Rui Sol", ["Rui Sol is a cook."]],
    ["Elm", ["Elm is a town."]],
]
FACTS = [["Dream", 0], ["Ana Lima", 2]]
TRIPLES = [["Dream", "director", "Ana Lima"], ["Ana Lima", "place of birth", "Faro"]]
QUESTION = "Where was the director of film Dream born?"

HOTPOT = {
    "_id": "h1",
    "question": QUESTION,
    "answer": "Faro",
    "type": "bridge",
    "level": "easy",
    "supporting_facts": FACTS,
    "context": CONTEXT,
}
TWO_WIKI = {
    **HOTPOT,
    "type": "compositional",
    "evidences": TRIPLES,
    "evidences_id": [],
    "entity_ids": "Q1_Q2",
    "answer_id": "Q3",
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": QUESTION,
    "answer": "Faro",
    "answer_aliases": ["Faro, Portugal"],
    "answerable": True,
    "paragraphs": [
        {
            "idx": place,
            "title": title,
            "paragraph_text": " ".join(texts),
            "is_supporting": place < 2,
        }
        for place, (title, texts) in enumerate(CONTEXT)
    ],
    "question_decomposition": [
        {
            "id": 7,
            "question": "Dream >> director",
            "answer": "Ana Lima",
            "paragraph_support_idx": 0,
        },
        {
            "id": 8,
            "question": "Where was #1 born?",
            "answer": "Faro",
            "paragraph_support_idx": 1,
        },
    ],
}
PAGES = [
    {"idx": place, "title": title, "sentences": texts, "is_supporting": place < 2}
    for place, (title, texts) in enumerate(CONTEXT)
]
COMMON = {
    "id": "c1",
    "question": QUESTION,
    "answer": "Faro",
    "answer_aliases": [],
    "source": "a train split",
}
COMMON_HOTPOT = {
    **COMMON,
    "dataset": "hotpotqa",
    "type": "bridge",
    "level": "easy",
    "paragraphs": PAGES,
    "supporting_facts": FACTS,
}
COMMON_TWO_WIKI = {
    **COMMON,
    "dataset": "2wikimultihopqa",
    "type": "compositional",
    "paragraphs": PAGES,
    "supporting_facts": FACTS,
    "evidence_triples": TRIPLES,
}
COMMON_MUSIQUE = {
    **COMMON,
    "dataset": "musique",
    "type": "2hop",
    "paragraphs": [
        {
            "idx": page["idx"],
            "title": page["title"],
            "text": " ".join(page["sentences"]),
            "is_supporting": page["is_supporting"],
        }
        for page in PAGES
    ],
    "decomposition": [
        {"question": "Dream >> director", "answer": "Ana Lima", "paragraph_idx": 0},
        {"question": "Where was #1 born?", "answer": "Faro", "paragraph_idx": 1},
    ],
}
FORMATS = {
    "HotpotQA": (HOTPOT, "hotpotqa"),
    "2WikiMultihopQA": (TWO_WIKI, "2wiki"),
    "MuSiQue": (MUSIQUE, "musique"),
    "common HotpotQA": (COMMON_HOTPOT, "hotpotqa"),
    "common 2WikiMultihopQA": (COMMON_TWO_WIKI, "2wiki"),
    "common MuSiQue": (COMMON_MUSIQUE, "musique"),
}


TWO_CHAINS = {
    **TWO_WIKI,
    "question": "Which film has the director born first, Dream or Elm?",
    "answer": "Elm",
    "type": "bridge_comparison",
    "evidences": [
        ["Elm", "director", "Rui Sol"],
        ["Dream", "director", "Ana Lima"],
        ["Rui Sol", "date of birth", "1901"],
        ["Ana Lima (director)", "date of birth", "1902"],
    ],
    "supporting_facts": [[title, 0] for title, _ in CONTEXT],
}


def without(row, *path):
    """A deep copy of a row without the field at `path`."""
    copy = json.loads(json.dumps(row))
    at = copy
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return copy


def changed(row, value, *path):
    """A deep copy of a row with `value` at `path`."""
    copy = json.loads(json.dumps(row))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


def write(folder: Path, *rows, name: str = "train.jsonl") -> Path:
    path = folder / name
    if name.endswith(".json"):
        path.write_text(json.dumps(rows), "utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def one(folder: Path, row) -> Question:
    (question,) = read_questions(write(folder, row)).questions
    return question


@cache
def real(name: str, split: str) -> tuple[Question, ...]:
    stem = "val" if split == "validation" else split
    return read_questions(realdata.data_set(name) / f"{stem}.jsonl").questions


@cache
def dealt(name: str, split: str) -> tuple[tuple[Question, dict[str, Hand]], ...]:
    """Real questions with their hands, as they are loaded."""
    questions = real(name, split)
    others = archive(questions)
    return tuple((question, dict(deal(question, others))) for question in questions)


def evidence(question: Question, hand: Hand) -> set[int]:
    return {n for n in hand.paragraphs if question.paragraphs[n].is_supporting}


def origins(question: Question) -> tuple[str, ...]:
    return ("form",) if question.source == "hotpotqa" else ("form", "planned")


# --- formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "source"), FORMATS.values(), ids=FORMATS)
def test_each_format_is_told_by_its_fields_and_becomes_the_same_question(tmp_path, row, source):
    question = one(tmp_path, row)

    assert (question.source, question.text, question.answer) == (source, QUESTION, "Faro")
    assert [page.title for page in question.paragraphs] == ["Dream", "Ana Lima", "Rui Sol", "Elm"]
    assert [page.is_supporting for page in question.paragraphs] == [True, True, False, False]
    assert [page.key for page in question.paragraphs] == [(0,), (2,), (), ()]
    assert [step.paragraph for step in question.steps] == [0, 1]
    assert [step.needs for step in question.steps] == [(), (0,)]
    assert [step.answer for step in question.steps] == ["Ana Lima", "Faro"]


def test_aliases_and_the_kind_of_musique_are_kept(tmp_path):
    question = one(tmp_path, MUSIQUE)

    assert (question.aliases, question.kind) == (("Faro, Portugal",), "2hop")


def test_a_json_list_is_read_like_lines(tmp_path):
    lines = write(tmp_path, HOTPOT, MUSIQUE)
    listed = write(tmp_path, HOTPOT, MUSIQUE, name="train.json")

    assert read_questions(lines) == read_questions(listed)


def test_formats_may_be_mixed_in_one_file(tmp_path):
    workload = load(write(tmp_path, HOTPOT, MUSIQUE), split="train", options={})

    assert workload.name == "multihop/hotpotqa+musique/parallel/form"


def test_a_sentence_out_of_range_is_ignored(tmp_path):
    question = one(tmp_path, {**HOTPOT, "supporting_facts": [*FACTS, ["Dream", 9]]})

    assert question.paragraphs[0].key == (0,)


def test_rows_with_evidence_that_is_not_there_are_left_out_and_counted(tmp_path):
    rows = [
        HOTPOT,
        {**HOTPOT, "_id": "h2", "supporting_facts": [["Dune", 0]]},
        {**HOTPOT, "_id": "h3", "supporting_facts": []},
        changed(MUSIQUE, 99, "question_decomposition", 1, "paragraph_support_idx"),
        changed(MUSIQUE, "Where was #2 born?", "question_decomposition", 1, "question"),
        changed(MUSIQUE, "#1 #1 #1 #1 #1?", "question_decomposition", 1, "question"),
        {**MUSIQUE, "answerable": False},
    ]

    workload = load(write(tmp_path, *rows), split="train", options={})

    assert [example.query.id for example in workload.examples] == ["h1"]
    assert "Left out: 5 " in workload.about
    assert "unanswerable: 1." in workload.about


def test_an_answerable_row_may_share_its_id_with_one_that_is_not(tmp_path):
    path = write(tmp_path, {**MUSIQUE, "answerable": False}, MUSIQUE)

    assert len(read_questions(path).questions) == 1


MALFORMED = {
    "no object": ([1], "not an object"),
    "no format": ({"id": "x"}, "no known format"),
    "unknown data set": ({**COMMON_HOTPOT, "dataset": "squad"}, "field 'dataset': 'squad'"),
    "data set of a wrong type": ({**COMMON_HOTPOT, "dataset": ["musique"]}, "field 'dataset'"),
    "no id": (without(HOTPOT, "_id"), "field '_id' is missing"),
    "no question": (without(TWO_WIKI, "question"), "field 'question' is missing"),
    "no answer": (without(MUSIQUE, "answer"), "field 'answer' is missing"),
    "an empty question": ({**HOTPOT, "question": " "}, "field 'question'"),
    "a number for an answer": ({**HOTPOT, "answer": 7}, "field 'answer'"),
    "half a fact": ({**HOTPOT, "supporting_facts": [["Dream"]]}, "field 'supporting_facts.0.1'"),
    "a fact by name": (
        {**HOTPOT, "supporting_facts": [["Dream", "0"]]},
        "field 'supporting_facts.0.1'",
    ),
    "text for sentences": (
        changed(HOTPOT, "Dream is a film.", "context", 0, 1),
        "field 'context.0.1'",
    ),
    "no triples": ({**TWO_WIKI, "evidences": []}, "field 'evidences'"),
    "half a triple": ({**TWO_WIKI, "evidences": [["Dream", "director"]]}, "field 'evidences.0.2'"),
    "too many triples": ({**TWO_WIKI, "evidences": TRIPLES * 9}, "field 'evidences'"),
    "no text": (without(MUSIQUE, "paragraphs", 0, "paragraph_text"), "paragraphs.0.paragraph_text"),
    "a word for a truth value": ({**MUSIQUE, "answerable": "yes"}, "field 'answerable'"),
    "no steps": ({**MUSIQUE, "question_decomposition": []}, "field 'question_decomposition'"),
    "no aliases": (without(COMMON_TWO_WIKI, "answer_aliases"), "field 'answer_aliases' is missing"),
    "no decomposition": (without(COMMON_MUSIQUE, "decomposition"), "'decomposition' is missing"),
    "a key too many": ({**COMMON_HOTPOT, "hint": "Faro"}, "unknown field 'hint'"),
    "half a character": ({**HOTPOT, "question": "\ud800?"}, "field 'question'"),
}


@pytest.mark.parametrize(("row", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path, row, message):
    path = write(tmp_path, {**HOTPOT, "_id": "h0"}, row)

    with pytest.raises(DataError) as caught:
        load(path, split="train", options={})

    assert f"{path}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(HOTPOT) + '\n{"_id": "h2",\n', "utf-8")

    with pytest.raises(DataError, match=r"train\.jsonl:2: not JSON"):
        load(path, split="train", options={})


def test_an_id_is_not_given_twice(tmp_path):
    with pytest.raises(DataError, match=r"train\.jsonl:2: field 'id': 'h1' was there before"):
        load(write(tmp_path, HOTPOT, HOTPOT), split="train", options={})


def test_a_file_of_unusable_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="no row that can be used"):
        load(write(tmp_path, {**MUSIQUE, "answerable": False}), split="train", options={})


# --- loading ---------------------------------------------------------------------------------


def test_a_folder_has_a_file_for_each_split(tmp_path):
    write(tmp_path, HOTPOT, name="val.jsonl")
    write(tmp_path, MUSIQUE, name="test.json")

    validation = load(tmp_path, split="validation", options={})
    test = load(tmp_path, split="test", options={})

    assert [example.query.id for example in validation.examples] == ["h1"]
    assert [example.query.id for example in test.examples] == ["2hop__1_2"]
    assert list(test.sources) == ["test.json"]
    with pytest.raises(DataError, match=r"neither train\.jsonl nor train\.json is there"):
        load(tmp_path, split="train", options={})


def test_there_is_nothing_to_load_without_data():
    with pytest.raises(DataError, match="ships no questions"):
        load(None, split="train", options={})


@pytest.mark.parametrize("options", [{"hosts": "chain"}, {"host": "ring"}, {"subtasks": "model"}])
def test_unknown_options_are_refused(tmp_path, options):
    with pytest.raises(SettingsError, match="option"):
        load(write(tmp_path, HOTPOT), split="train", options=options)


def test_hotpotqa_has_no_plan(tmp_path):
    with pytest.raises(SettingsError, match="no decomposition"):
        load(write(tmp_path, MUSIQUE, HOTPOT), split="train", options={"subtasks": "planned"})


def test_an_answer_scores_by_the_best_of_answer_and_aliases(tmp_path):
    workload = load(write(tmp_path, MUSIQUE), split="train", options={})

    scores = workload.score(workload.examples[0], "Faro, Portugal.")

    assert scores == {"f1": 1.0, "exact_match": 1.0, "contains": 1.0}
    assert tuple(scores) == workload.metrics


def test_about_says_where_tasks_and_dealing_come_from(tmp_path):
    path = write(tmp_path, MUSIQUE)

    form = load(path, split="train", options={}).about
    plan = load(path, split="train", options={"subtasks": "planned"}).about

    assert "from the form of the question alone" in form
    assert "from the annotated decomposition" in plan
    assert "follows the annotation" in form
    assert "follows the annotation" in plan
    assert "a draw decides" in form


@pytest.mark.parametrize("host", HOSTS)
def test_only_the_writer_reads_the_question_and_only_researchers_hold_paragraphs(tmp_path, host):
    workload = load(write(tmp_path, TWO_WIKI), split="train", options={"host": host})
    flow, query = workload.workflow, workload.examples[0].query

    assert flow is workflow(host)
    assert [node.id for node in flow.agents if node.reads_query] == [WRITER]
    assert set(query.context) == set(query.subtasks) == set(RESEARCHERS)
    assert all(flow.by_id[name].abstention_phrase == "not found" for name in RESEARCHERS)
    assert all(agent.model.max_tokens <= 32 for agent in flow.agents)
    assert all(agent.model.temperature == 0.0 for agent in flow.agents)


def test_hosts_miss_the_edges_that_they_are_about():
    missing = {
        host: [(edge.source, edge.receiver) for edge in workflow(host).candidate_edges]
        for host in HOSTS
    }

    assert missing == {
        "parallel": [("first", "second"), ("first", "third"), ("second", "third")],
        "chain": [("first", "third"), ("first", "writer"), ("second", "writer")],
    }


def test_a_question_runs_through_its_workflow(tmp_path):
    workload = load(write(tmp_path, TWO_WIKI), split="train", options={})
    model = ScriptedModel(
        {
            "first": ["Ana Lima"],
            "second": ["not found"],
            "third": ["not found"],
            "writer": ["Faro"],
        }
    )

    trace = run(workload.workflow, workload.examples[0].query, model=model)

    assert trace.answer == "Faro"
    assert trace.by_node["second"].status == "abstained"
    asked = trace.by_node["first"].input[-1].content
    assert DREAM in asked
    assert "Who is the director of Dream?" in asked
    assert QUESTION not in asked


# --- dealing ---------------------------------------------------------------------------------


def chain(number: int, relation: str = "place of birth", **changes):
    """A question of two stages on pages of its own, with two distractors."""
    film, maker, town = f"Film {number}", f"Maker {number}", f"Town {number}"
    pages = (
        Paragraph(title=film, sentences=(f"{film} is by {maker}.",), is_supporting=True, key=(0,)),
        Paragraph(
            title=maker, sentences=(f"{maker} is from {town}.",), is_supporting=True, key=(0,)
        ),
        Paragraph(title=f"Elm {number}", sentences=("Elm is a tree.",), is_supporting=False),
        Paragraph(title=f"Oak {number}", sentences=("Oak is a tree.",), is_supporting=False),
    )
    steps = (
        Step(paragraph=0, subjects=(film,), answer=maker, relation="director"),
        Step(paragraph=1, subjects=(maker,), answer=town, relation=relation, needs=(0,)),
    )
    return Question(
        id=f"q{number}",
        source="2wiki",
        text=f"Where was the director of {film} born?",
        answer=town,
        kind="compositional",
        paragraphs=pages,
        steps=steps,
    ).model_copy(update=changes)


def read_by(hands) -> list[str]:
    """Titles of all documents, by researcher and place."""
    return [read.title for name in RESEARCHERS for read in hands[name].documents]


def test_the_second_stage_is_asked_of_both_later_researchers_and_held_by_one():
    holders = Counter()
    for number in range(40):
        question = chain(number)
        hands = deal(question)

        assert own_steps(question) == {"first": (0,), "second": (1,), "third": (1,)}
        assert evidence(question, hands["first"]) == {0}
        held = {name: evidence(question, hands[name]) for name in ("second", "third")}
        assert sorted(held.values(), key=len) == [set(), {1}]
        holders[next(name for name, places in held.items() if places)] += 1

    assert min(holders["second"], holders["third"]) >= 10


def test_both_chains_of_a_comparison_are_held_in_stages(tmp_path):
    question = one(tmp_path, TWO_CHAINS)
    hands = deal(question)
    title = {n: page.title for n, page in enumerate(question.paragraphs)}

    assert own_steps(question) == {"first": (0, 1), "second": (2, 3), "third": (2, 3)}
    assert {title[n] for n in evidence(question, hands["first"])} == {"Dream", "Elm"}
    late = [{title[n] for n in evidence(question, hands[name])} for name in ("second", "third")]
    assert sorted(late, key=len) == [set(), {"Ana Lima", "Rui Sol"}]


def test_a_longer_question_is_dealt_in_order():
    question = tiny(MADE, BORN, LIES, answer="Algarve")

    assert own_steps(question) == {"first": (0,), "second": (1,), "third": (2,)}
    assert {name: hand.paragraphs for name, hand in deal(question).items()} == {
        "first": (0,),
        "second": (1,),
        "third": (2,),
    }


def test_the_last_researcher_of_a_longer_question_holds_all_the_rest():
    fourth = Step(paragraph=3, subjects=("Algarve",), answer="Portugal", needs=(2,))
    question = tiny(MADE, BORN, LIES, fourth, Algarve="Algarve is in Portugal.")

    assert own_steps(question)["third"] == (2, 3)
    assert deal(question)["third"].paragraphs == (2, 3)


def test_support_that_no_step_needs_goes_with_the_last_evidence():
    question = tiny(MADE, BORN)
    hands = deal(question)

    assert hands["first"].paragraphs == (0,)
    assert sorted(hands[name].paragraphs for name in ("second", "third")) == [(), (1, 2)]


def test_a_paragraph_of_both_stages_is_held_by_the_first_researcher_alone():
    question = tiny(MADE, BORN.model_copy(update={"paragraph": 0}))
    hands = deal(question)

    assert hands["first"].paragraphs == (0,)
    assert sorted(hands[name].paragraphs for name in ("second", "third")) == [(), (1, 2)]


def test_the_archive_has_evidence_of_steps_that_need_an_earlier_one():
    question = chain(0)

    assert archive([question]) == {"place of birth": [question.paragraphs[1]]}


def test_hard_distractors_say_the_same_of_others_beside_late_evidence_only():
    questions = [chain(number) for number in range(6)]
    questions += [chain(number, relation="spouse") for number in range(6, 9)]

    hands = deal(questions[0], archive(questions))

    strange = {f"Maker {number}" for number in range(1, 6)}
    for hand in hands.values():
        foreign = [read.title for read in hand.documents if read.title in strange]
        n_hard = min(N_DISTRACTORS, len(strange)) if evidence(questions[0], hand) == {1} else 0
        assert len(foreign) == n_hard
        assert len(hand.documents) == len(hand.paragraphs) + len(foreign)
    assert not {"Maker 6", "Maker 7", "Maker 8"} & set(read_by(hands))


@pytest.mark.parametrize(
    "page",
    [
        {"sentences": ("Maker 1 is from Town 0.",)},
        {"sentences": ("Maker 1 and Maker 0 are from Town 1.",)},
        {"sentences": ("Maker 1 is from The Town.",)},
        {"title": "Town 0"},
        {"title": "Oak 0"},
        {"title": "Maker 0"},
    ],
    ids=["the answer", "a step's answer", "an alias", "in the title", "a title", "evidence"],
)
def test_a_distractor_that_has_an_answer_or_a_title_of_the_question_is_not_taken(page):
    question = chain(0, aliases=("The Town",))
    other = chain(1)
    changed_page = other.paragraphs[1].model_copy(update=page)
    pages = (other.paragraphs[0], changed_page, *other.paragraphs[2:])

    hands = deal(question, archive([question, other.model_copy(update={"paragraphs": pages})]))

    assert all(len(hand.documents) == len(hand.paragraphs) for hand in hands.values())


def test_hard_distractors_come_once_where_several_stages_have_one_relation():
    def ancestors(number: int) -> Question:
        names = [f"{letter}{number}" for letter in "ABCD"]
        return Question(
            id=f"q{number}",
            source="2wiki",
            text=f"Who is the great-grandfather of {names[0]}?",
            answer=names[3],
            kind="inference",
            paragraphs=tuple(
                Paragraph(title=a, sentences=(f"{b} begot {a}.",), is_supporting=True, key=(0,))
                for a, b in pairwise(names)
            ),
            steps=tuple(
                Step(
                    paragraph=n,
                    subjects=(a,),
                    answer=b,
                    relation="father",
                    needs=(n - 1,) if n else (),
                )
                for n, (a, b) in enumerate(pairwise(names))
            ),
        )

    questions = [ancestors(number) for number in range(4)]

    for question in questions:
        titles = read_by(deal(question, archive(questions)))
        assert len(titles) == len(set(titles))


def test_a_paragraph_that_a_row_has_twice_is_dealt_once():
    question = chain(0)
    again = [
        page.model_copy(update={"is_supporting": False, "key": ()}) for page in question.paragraphs
    ]
    question = question.model_copy(update={"paragraphs": (*question.paragraphs, *again)})

    assert sorted(read_by(deal(question))) == sorted(page.title for page in again)


def test_steps_on_one_paragraph_are_one_researchers(tmp_path):
    triples = [
        ["Rui Sol", "date of birth", "1901"],
        ["Rui Sol", "date of death", "1970"],
        ["Ana Lima", "date of birth", "1902"],
        ["Ana Lima", "date of death", "1990"],
    ]
    row = {
        **TWO_WIKI,
        "question": "Who lived longer, Ana Lima or Rui Sol?",
        "type": "comparison",
        "evidences": triples,
        "supporting_facts": [["Rui Sol", 0], ["Ana Lima", 0]],
    }
    question = one(tmp_path, row)

    own = own_steps(question)
    named = {name: {question.steps[n].subjects[0] for n in places} for name, places in own.items()}
    assert named == {"first": {"Ana Lima"}, "second": {"Rui Sol"}, "third": {"Rui Sol"}}


def test_evidence_keeps_its_supporting_sentence_whole_however_long_it_is():
    long = " ".join(f"word{n}" for n in range(N_WORDS + 5))
    page = Paragraph(title="T", sentences=("One two.", long), is_supporting=True, key=(1,))

    assert document(page, N_WORDS).text == long


def test_evidence_has_its_first_sentence_where_there_is_room():
    page = Paragraph(
        title="T", sentences=("One two.", "Three.", "Four."), is_supporting=True, key=(2,)
    )

    assert document(page, N_WORDS).text == "One two. Four."


def test_distractors_are_cut_after_their_beginning():
    text = " ".join(f"word{n}" for n in range(N_WORDS + 5))
    page = Paragraph(title="T", sentences=(text,), is_supporting=False)

    kept = document(page, 10).text.split()

    assert kept == [*text.split()[:10], "..."]


def test_of_a_table_without_full_stops_the_part_around_the_answer_is_kept(tmp_path):
    table = " ".join(["cell"] * 100 + ["born in Faro"] + ["cell"] * 100)
    question = one(tmp_path, changed(MUSIQUE, table, "paragraphs", 1, "paragraph_text"))

    (kept,) = question.paragraphs[1].sentences
    assert "born in Faro" in kept
    assert len(kept.split()) == 50


@pytest.mark.parametrize(("name", "split"), list(product(SETS, SPLITS)))
def test_real_evidence_is_dealt_once_and_to_one_who_is_asked_for_it(name, split):
    for question, hands in dealt(name, split):
        places = [n for hand in hands.values() for n in hand.paragraphs]
        supporting = {n for n, page in enumerate(question.paragraphs) if page.is_supporting}
        assert len(places) == len(set(places)), question.id
        assert supporting <= set(places), question.id
        for number, step in enumerate(question.steps):
            (holder,) = (r for r, hand in hands.items() if step.paragraph in hand.paragraphs)
            assert number in own_steps(question)[holder] or holder == "first", question.id
        for hand in hands.values():
            n_evidence = len(evidence(question, hand))
            assert len(hand.documents) - n_evidence <= N_DISTRACTORS, question.id


@pytest.mark.parametrize(("name", "split"), list(product(SETS, SPLITS)))
def test_no_real_paragraph_is_dealt_twice(name, split):
    for question, hands in dealt(name, split):
        pages = [question.paragraphs[n] for hand in hands.values() for n in hand.paragraphs]
        own = [(page.title, page.text) for page in pages]
        titles = {page.title for page in question.paragraphs}
        foreign = [title for title in read_by(hands) if title not in titles]
        assert len(own) == len(set(own)), question.id
        assert len(foreign) == len(set(foreign)), question.id
        assert len(own) + len(foreign) == len(read_by(hands)), question.id


@pytest.mark.parametrize("name", SETS)
def test_of_two_researchers_with_one_task_either_may_hold_the_real_evidence(name):
    holders = Counter()
    for split in SPLITS:
        for question, hands in dealt(name, split):
            own = own_steps(question)
            if own["second"] == own["third"]:
                held = [r for r in ("second", "third") if evidence(question, hands[r])]
                assert len(held) == 1, question.id
                holders[held[0]] += 1

    assert holders.total() > 100
    assert 0.4 < holders["second"] / holders.total() < 0.6


@pytest.mark.parametrize("split", SPLITS)
def test_real_hard_distractors_have_the_relation_another_title_and_no_answer(split):
    questions = real("multihop_2wiki", split)
    relations = {}
    for question in questions:
        for step in question.steps:
            title = question.paragraphs[step.paragraph].title
            relations.setdefault(title, set()).add(step.relation)
    n_hard = []
    for question, hands in dealt("multihop_2wiki", split):
        titles = {page.title for page in question.paragraphs}
        answers = {question.answer, *(step.answer for step in question.steps)}
        late = [step for step in question.steps if step.needs]
        for hand in hands.values():
            wanted = {step.relation for step in late if step.paragraph in hand.paragraphs}
            strange = [read for read in hand.documents if read.title not in titles]
            assert len(strange) == len(hand.documents) - len(hand.paragraphs), question.id
            for read in strange:
                assert relations[read.title] & wanted, question.id
                said = f"{read.title}: {read.text}"
                assert not any(contains(said, answer) for answer in answers), question.id
            if wanted:
                n_hard.append(len(strange))

    assert n_hard.count(N_DISTRACTORS) > 0.8 * len(n_hard)


@pytest.mark.parametrize("name", ["multihop_hotpotqa", "multihop_musique"])
def test_without_relations_all_distractors_are_the_questions_own(name):
    assert archive(real(name, "train")) == {}


@pytest.mark.parametrize("name", SETS)
def test_with_no_others_all_documents_are_the_questions_own(name):
    for question in real(name, "train"):
        titles = {page.title for page in question.paragraphs}
        for hand in deal(question).values():
            assert len(hand.documents) == len(hand.paragraphs), question.id
            assert {read.title for read in hand.documents} <= titles, question.id


@pytest.mark.parametrize("name", SETS)
def test_a_hand_does_not_depend_on_the_order_of_the_rows(name):
    shuffled = list(real(name, "train"))
    random.Random(1).shuffle(shuffled)

    others = archive(shuffled)

    assert {question.id: deal(question, others) for question in shuffled} == {
        question.id: hands for question, hands in dealt(name, "train")
    }


@pytest.mark.parametrize("name", SETS)
def test_who_holds_evidence_does_not_depend_on_the_other_questions(name):
    for question, hands in dealt(name, "train"):
        alone = deal(question)
        for researcher, hand in hands.items():
            assert evidence(question, alone[researcher]) == evidence(question, hand), question.id


@pytest.mark.parametrize("name", SETS)
def test_real_supporting_sentences_stand_whole_in_the_documents(name):
    for question, hands in dealt(name, "train"):
        for hand in hands.values():
            for place in hand.paragraphs:
                page = question.paragraphs[place]
                for n in page.key:
                    sentence = " ".join(page.sentences[n].split())
                    assert any(
                        read.title == page.title and sentence in read.text
                        for read in hand.documents
                    ), question.id


@pytest.mark.parametrize("name", SETS)
def test_real_hands_keep_to_their_words_but_for_long_evidence(name):
    sizes = sorted(
        sum(len(read.text.split()) for read in hand.documents)
        for _, hands in dealt(name, "train")
        for hand in hands.values()
    )

    # Each cut paragraph has a mark that counts as a word.
    assert sizes[int(0.75 * len(sizes))] <= N_HAND_WORDS + N_DISTRACTORS + 1
    assert sizes[-1] < 2 * N_HAND_WORDS


@pytest.mark.parametrize("name", SETS)
def test_real_prompts_of_researchers_are_little_more_than_their_documents(name):
    longest = 0
    for (question, hands), host in product(dealt(name, "train"), HOSTS):
        flow = workflow(host)
        for origin, (researcher, hand) in product(origins(question), hands.items()):
            messages = render_input(
                flow,
                flow.by_id[researcher],
                [documents_block(hand.documents)],
                subtasks(question, origin)[researcher],
                None,
            )
            prompt = sum(len(message.content.split()) for message in messages)
            read = sum(len(f"{read.title} {read.text}".split()) for read in hand.documents)
            longest = max(longest, prompt - read)

    assert longest < 170


# --- tasks from the form ---------------------------------------------------------------------

FORMS = {
    "When was the performer of song Dream born?": (
        "Who is the performer of Dream?",
        "When was this person born?",
    ),
    "What is the cause of death of director of film Dream?": (
        "Who is the director of Dream?",
        "What is the cause of death of this person?",
    ),
    "When is the director of film Dream 's birthday?": (
        "Who is the director of Dream?",
        "When is this person's birthday?",
    ),
    "Which country Ana Lima's father is from?": (
        "Who is the father of Ana Lima?",
        "Which country this person is from?",
    ),
    "When did the country of Izgo's performer join the union?": (
        "Who is the performer of Izgo?",
        "When did the country of this person join the union?",
    ),
    "Who was the first president of Elm's country?": (
        "What is the country of Elm?",
        "Who was the first president of this country?",
    ),
    "Who was in charge of the state where Elm is located?": (
        "What is the state where Elm is located?",
        "Who was in charge of this state?",
    ),
    "What is the birth name of the actress who starred in Dream?": (
        "Who is the actress who starred in Dream?",
        "What is the birth name of this actress?",
    ),
    "Who is Ana Lima's maternal grandfather?": (
        "Who is the mother of Ana Lima?",
        "Who is the father of this person?",
    ),
    "Who is the uncle of Ana Lima?": (
        "Who is the parent of Ana Lima?",
        "Who is the brother of this person?",
    ),
    "Who was born first, Ana Lima or Rui Sol?": (
        "When was Ana Lima born?",
        "When was Rui Sol born?",
    ),
    "Was Ana Lima or Rui Sol born first?": ("When was Ana Lima born?", "When was Rui Sol born?"),
    "Who was born first out of Ana Lima and Rui Sol?": (
        "When was Ana Lima born?",
        "When was Rui Sol born?",
    ),
    "Who lived longer, Ana Lima or Rui Sol?": (
        "When was Ana Lima born, and when did Ana Lima die?",
        "When was Rui Sol born, and when did Rui Sol die?",
    ),
    "Which film came out first, Dream or Elm?": (
        "When did Dream come out?",
        "When did Elm come out?",
    ),
    "Which band was founded first Elm or The Oaks ?": (
        "When was Elm founded?",
        "When was The Oaks founded?",
    ),
    "Are both Elm, Ohio and Oak located in the same country?": (
        "In which country is Elm, Ohio?",
        "In which country is Oak?",
    ),
    "Are both villages, Elm and Oak, located in the same country?": (
        "In which country is Elm?",
        "In which country is Oak?",
    ),
    "Does Ana Lima have the same nationality as Rui Sol?": (
        "What is the nationality of Ana Lima?",
        "What is the nationality of Rui Sol?",
    ),
    "What do Elm and Oak have in common?": (
        "What is said about Elm that helps with this question? What do Elm and Oak have in common?",
        "What is said about Oak that helps with this question? What do Elm and Oak have in common?",
    ),
    "Were Ana Lima and Rui Sol of the same nationality?": (
        "What is the nationality of Ana Lima?",
        "What is the nationality of Rui Sol?",
    ),
}
DIRECTORS = {
    "Which film has the director who died first, Dream or Elm?": "When did the director of {} die?",
    "Which film whose director is younger, Dream or Elm?": "When was the director of {} born?",
    "Do director of film Dream and director of film Elm share the same nationality?": (
        "What is the nationality of the director of {}?"
    ),
    "Are the directors of both films Dream and Elm from the same country?": (
        "Which country is the director of {} from?"
    ),
    "Do both films Dream and Elm have the directors that share the same nationality?": (
        "What is the nationality of the director of {}?"
    ),
}


@pytest.mark.parametrize(("text", "expected"), FORMS.items(), ids=FORMS)
def test_a_known_form_gives_a_look_up_for_each_stage(text, expected):
    assert by_form(text) == expected


@pytest.mark.parametrize(("text", "asked"), DIRECTORS.items(), ids=DIRECTORS)
def test_two_films_are_compared_by_way_of_their_directors(text, asked):
    tasks = by_form(text)

    assert tasks.first == "Who is the director of Dream? Who is the director of Elm?"
    assert tasks.then == f"{asked.format('Dream')} {asked.format('Elm')}"


def test_directors_compared_by_something_unknown_leave_the_question_for_then():
    text = "Which film whose director is taller, Dream or Elm?"

    assert by_form(text).then == f"Find the detail that this question asks for: {text}"


@pytest.mark.parametrize(
    "text",
    [
        "Which role did the sailor from Elm have in Dream?",
        "Who is the director of Dream?",
        "What genre is the author of the story behind Dream by all accounts mostly known for?",
        "?",
        "Are both?",
        "Where was " + "the director of film " * 40 + "Dream born?",
    ],
)
def test_of_another_form_both_stages_get_the_whole_question(text):
    assert all(" ".join(text.split()) in task for task in by_form(text))


@pytest.mark.parametrize("name", SETS)
def test_every_form_of_a_real_question_gives_tasks_that_read_as_questions(name):
    for question in real(name, "train"):
        tasks = by_form(question.text)
        assert all(len(task.split()) > 2 for task in tasks), question.id
        assert not any("the this" in task or "{}" in task for task in tasks), question.id


# --- tasks from the plan ---------------------------------------------------------------------


def test_a_triple_is_asked_for_with_its_subject_described(tmp_path):
    assert planned(one(tmp_path, TWO_WIKI)) == {
        "first": "Who is the director of Dream?",
        "second": "What is the place of birth of the director of Dream?",
        "third": "What is the place of birth of the director of Dream?",
    }


def test_a_subject_under_another_name_is_described_too(tmp_path):
    row = changed(TWO_WIKI, "Ana M. Lima", "evidences", 1, 0)

    assert "Lima" not in planned(one(tmp_path, row))["second"]


def test_two_chains_are_asked_for_stage_by_stage(tmp_path):
    then = (
        "What is the date of birth of the director of Dream? "
        "What is the date of birth of the director of Elm?"
    )

    assert planned(one(tmp_path, TWO_CHAINS)) == {
        "first": "Who is the director of Dream? Who is the director of Elm?",
        "second": then,
        "third": then,
    }


PLANS = {
    # First and second question of MuSiQue; the second task.
    ("Dream >> director", "#1 >> place of birth"): (
        "What is the place of birth of the director of Dream?"
    ),
    ("Dream >> director", "Who is #1 's mother?"): "Who is the director of Dream's mother?",
    ("Elm >> part of", "when was #1 founded"): "When was the whole that Elm is part of founded?",
    ("Which state is Elm located?", "what is the capital of the #1 ?"): (
        "What is the capital of the state where Elm is located?"
    ),
    ("Where was Rui born?", "Elm (#1 ) >> country"): (
        "What is the country of Elm (the place where Rui was born)?"
    ),
    ("What country is Rui from?", "who led #1"): "Who led the country that Rui is from?",
    ("What label released Dream?", "who owns #1"): "Who owns the label that released Dream?",
    ("who broke the law", "#1 >> spouse"): "Who is the spouse of the person who broke the law?",
    ('Who said "no"?', "where did #1 die"): ("Where did the answer to \"Who said 'no'?\" die?"),
}


@pytest.mark.parametrize(("questions", "expected"), PLANS.items(), ids=map(str, PLANS))
def test_a_reference_is_replaced_by_a_description(tmp_path, questions, expected):
    row = MUSIQUE
    for place, text in enumerate(questions):
        row = changed(row, text, "question_decomposition", place, "question")

    assert planned(one(tmp_path, row))["second"] == expected


def test_a_plan_that_gives_an_answer_away_is_not_used(tmp_path):
    row = changed(MUSIQUE, "Was #1 born in Faro?", "question_decomposition", 1, "question")
    question = one(tmp_path, row)

    assert contains(planned(question)["second"], "Faro")
    assert subtasks(question, "planned") == {
        "first": "Who is the director of Dream?",
        "second": by_form(QUESTION).then,
        "third": by_form(QUESTION).then,
    }


def test_whoever_has_no_step_in_the_plan_gets_the_task_of_the_form(tmp_path):
    triples = [["Dream", "director", "Ana Lima"], ["Dream", "country", "Faro"]]
    row = {**TWO_WIKI, "evidences": triples, "type": "comparison"}
    question = one(tmp_path, row)

    assert set(planned(question)) == {"first"}
    assert subtasks(question, "planned")["third"] == by_form(QUESTION).then


@pytest.mark.parametrize(("name", "split"), list(product(SETS, SPLITS)))
def test_later_researchers_of_a_real_question_of_two_stages_have_one_task(name, split):
    for question in real(name, split):
        own = own_steps(question)
        for origin in origins(question):
            tasks = subtasks(question, origin)
            if own["second"] == own["third"] or origin == "form":
                assert tasks["second"] == tasks["third"], question.id


@pytest.mark.parametrize(("name", "split"), list(product(SETS, SPLITS)))
def test_no_task_of_a_real_question_gives_an_answer_away(name, split):
    for question in real(name, split):
        golds = {question.answer, *(step.answer for step in question.steps if step.answer)}
        hidden = [gold for gold in golds if not contains(question.text, gold)]
        for origin in origins(question):
            for task in subtasks(question, origin).values():
                assert not any(contains(task, gold) for gold in hidden), question.id


# --- gap edges -------------------------------------------------------------------------------


def tiny(
    *steps: Step, text: str = "Where was the maker of Opus born?", answer: str = "Faro", **texts
):
    """A question whose k-th paragraph says step k; `texts` says otherwise or more, by title."""
    said = {
        "Opus": "Opus was made by Ana.",
        "Ana": "Ana is from Faro.",
        "Faro": "Faro is in Algarve.",
    }
    said |= texts
    return Question(
        id="tiny",
        source="musique",
        text=text,
        answer=answer,
        kind="tiny",
        paragraphs=tuple(
            Paragraph(title=title, sentences=(body,), is_supporting=True, key=(0,))
            for title, body in said.items()
        ),
        steps=steps,
    )


def pair(answer: str):
    """Two films by way of their makers: both first steps, then both second ones."""
    return tiny(
        MADE,
        Step(paragraph=2, subjects=("Epos",), answer="Bo"),
        Step(paragraph=1, subjects=("Ana",), answer="1901", needs=(0,)),
        Step(paragraph=3, subjects=("Bo",), answer="1902", needs=(1,)),
        text="Is the maker of Opus older than the one of Epos?",
        answer=answer,
        Opus="Opus was made by Ana.",
        Ana="Ana was born in 1901.",
        Faro="Epos was made by Bo.",
        Bo="Bo was born in 1902.",
    )


def hands_of(question: Question, held: dict[str, tuple[int, ...]]) -> dict[str, Hand]:
    return {
        name: Hand(places, tuple(document(question.paragraphs[place], N_WORDS) for place in places))
        for name, places in held.items()
    }


MADE = Step(paragraph=0, subjects=("Opus",), answer="Ana")
BORN = Step(paragraph=1, subjects=("Ana",), answer="Faro", needs=(0,))
LIES = Step(paragraph=2, subjects=("Faro",), answer="Algarve", needs=(1,))
LIES_WITH_BOTH = Step(paragraph=2, subjects=("Faro",), answer="Algarve", needs=(0, 1))
ALONE = Step(paragraph=1, subjects=("Ana",), answer="Faro")
UNKNOWN = Step(paragraph=1, subjects=("Ana",), answer=None)
SKIPS = Step(paragraph=2, subjects=("Faro",), answer="Algarve", needs=(0,))
ON_ONE_PAGE = Step(paragraph=0, subjects=("Ana",), answer="Faro", needs=(0,))

AT_SECOND = {"first": (0,), "second": (1,), "third": ()}
AT_THIRD = {"first": (0,), "second": (), "third": (1,)}
IN_A_ROW = {"first": (0,), "second": (1,), "third": (2,)}
PAIR_AT_SECOND = {"first": (0, 2), "second": (1, 3), "third": ()}
PAIR_AT_THIRD = {"first": (0, 2), "second": (), "third": (1, 3)}

F_S, F_T, F_W = ("first", "second"), ("first", "third"), ("first", "writer")
S_T, S_W = ("second", "third"), ("second", "writer")
BOTH_TASKS = {"second": "Where was Ana born?", "third": "Where was Ana born?"}
TASKS = {name: f"Task of the {name}." for name in RESEARCHERS}
GAPS = {
    # Question, who holds which paragraphs, tasks that differ, edges in the parallel host, edges in
    # the chain. The third reports to the writer in both, so what it holds is no gap of the writer.
    "a chain that ends with the second": (tiny(MADE, BORN), AT_SECOND, {}, [F_S], [S_W]),
    "a chain that ends with the third": (tiny(MADE, BORN), AT_THIRD, {}, [F_T], [F_T]),
    "a comparison whose other half is with the second": (
        tiny(MADE, ALONE),
        AT_SECOND,
        {},
        [],
        [F_W, S_W],
    ),
    "a comparison whose other half is with the third": (
        tiny(MADE, ALONE),
        AT_THIRD,
        {},
        [],
        [F_W],
    ),
    "two chains that end with the second": (pair("yes"), PAIR_AT_SECOND, {}, [F_S], [S_W]),
    "two chains that end with the third": (pair("yes"), PAIR_AT_THIRD, {}, [F_T], [F_T]),
    "a choice of two chains that end with the second": (
        pair("Opus"),
        PAIR_AT_SECOND,
        {},
        [F_S],
        [F_W, S_W],
    ),
    "a choice of two chains that end with the third": (
        pair("Opus"),
        PAIR_AT_THIRD,
        {},
        [F_T],
        [F_T, F_W],
    ),
    "three steps in a row": (
        tiny(MADE, BORN, LIES, answer="Algarve"),
        IN_A_ROW,
        {},
        [F_S, S_T],
        [],
    ),
    "three steps of which the last needs both": (
        tiny(MADE, BORN, LIES_WITH_BOTH, answer="Algarve"),
        IN_A_ROW,
        {},
        [F_S, F_T, S_T],
        [F_T],
    ),
    "G1: the first does not hold what the later ones need": (
        tiny(MADE, BORN),
        {"first": (), "second": (1,), "third": (0,)},
        {},
        [],
        [S_W],
    ),
    "G2: two late steps, and neither is on the second's pages": (
        tiny(MADE, BORN, SKIPS, answer="Algarve"),
        {"first": (0,), "second": (), "third": (1, 2)},
        {},
        [F_T],
        [F_T],
    ),
    "G2: nobody who is asked holds the second step": (
        tiny(MADE, BORN),
        {"first": (0,), "second": (2,), "third": ()},
        {},
        [],
        [],
    ),
    "G2: the first holds both steps": (
        tiny(MADE, ON_ONE_PAGE, Opus="Opus was made by Ana, who is from Faro."),
        {"first": (0,), "second": (1,), "third": (2,)},
        {},
        [],
        [F_W],
    ),
    "G3: a document of the second says it": (
        tiny(MADE, BORN, Ana="Ana made Opus and is from Faro."),
        AT_SECOND,
        {},
        [],
        [S_W],
    ),
    "G3: a document of the third says it": (
        tiny(MADE, BORN, Ana="Ana made Opus and is from Faro."),
        AT_THIRD,
        {},
        [],
        [],
    ),
    "G3: a document has the answer but not what it is about": (
        tiny(MADE, BORN, Ana="Ana is from Faro and likes opera."),
        AT_SECOND,
        {},
        [F_S],
        [S_W],
    ),
    "G4: the answer stands in the question": (
        tiny(MADE, BORN, text="Where was Ana born, who made Opus?"),
        AT_THIRD,
        {},
        [],
        [],
    ),
    "G4: the answer stands in the tasks": (tiny(MADE, BORN), AT_SECOND, BOTH_TASKS, [], [S_W]),
    "G4: the answer stands in the task of one who has no use for it": (
        tiny(MADE, BORN),
        AT_SECOND,
        {"third": "Where was Ana born?"},
        [F_S],
        [S_W],
    ),
    "G4: the writer's answer stands in the question": (
        tiny(MADE, BORN, text="Was the maker of Opus born in Faro?"),
        AT_SECOND,
        {},
        [F_S],
        [],
    ),
    "an answer that is not annotated can't be read elsewhere": (
        tiny(MADE, UNKNOWN),
        AT_SECOND,
        {},
        [],
        [F_W, S_W],
    ),
}


@pytest.mark.parametrize(
    ("question", "held", "tasks", "parallel", "in_chain"), GAPS.values(), ids=GAPS
)
def test_a_gap_meets_all_four_conditions(question, held, tasks, parallel, in_chain):
    hands, told = hands_of(question, held), TASKS | tasks

    assert list(gap_edges(question, workflow("parallel"), hands, told)) == parallel
    assert list(gap_edges(question, workflow("chain"), hands, told)) == in_chain


@pytest.mark.parametrize(
    ("change", "is_gap"),
    [
        ({}, True),
        ({"type": "comparison"}, False),
        ({"question": "Where was Ana Lima, who made Dream, born?"}, False),
        ({"context": [["Dream", ["Dream is a film.", "x"]], *CONTEXT[1:]]}, False),
    ],
    ids=["a bridge", "a comparison", "the question names both", "neither names the other"],
)
def test_hotpotqa_has_a_gap_where_an_unnamed_title_is_the_bridge(tmp_path, change, is_gap):
    workload = load(write(tmp_path, {**HOTPOT, **change}), split="train", options={})
    (example,) = workload.examples
    (holder,) = (
        name
        for name in ("second", "third")
        if "Ana Lima" in [read.title for read in example.query.context[name]]
    )

    assert example.gap_edges == ((("first", holder),) if is_gap else ())


@pytest.mark.parametrize(
    ("text", "answer", "titles"),
    [
        ("Where was the director of Dream born?", "Faro", ["Dream", "Ana Lima"]),
        ("Which film did Ana Lima make in 1990?", "1990", ["Ana Lima", "Dream"]),
        ("Which film is by someone born in Faro?", "Dream", ["Ana Lima", "Dream"]),
        ("Who directed a film of 1990?", "Ana Lima", ["Dream", "Ana Lima"]),
        ("Where is the director of a film of 1990 from?", "Faro", ["Dream", "Ana Lima"]),
    ],
)
@pytest.mark.parametrize("facts", [FACTS, FACTS[::-1]])
def test_the_steps_of_hotpotqa_begin_with_what_the_question_names(
    tmp_path, text, answer, titles, facts
):
    row = {**HOTPOT, "question": text, "answer": answer, "supporting_facts": facts}
    question = one(tmp_path, row)

    assert [question.paragraphs[step.paragraph].title for step in question.steps] == titles


# --- real rows -------------------------------------------------------------------------------

COUNTS = {
    "multihop_2wiki": (394, 100, 84),
    "multihop_hotpotqa": (240, 60, 110),
    "multihop_musique": (80, 20, 110),
}


@pytest.mark.parametrize(("name", "host"), list(product(SETS, HOSTS)))
def test_all_real_rows_load_and_fit_their_workflow(name, host):
    folder = realdata.data_set(name)
    for split, count in zip(SPLITS, COUNTS[name], strict=True):
        workload = load(folder, split=split, options={"host": host})
        candidates = {(e.source, e.receiver) for e in workload.workflow.candidate_edges}
        assert len(workload.examples) == count
        for example in workload.examples:
            workload.workflow.check_query(example.query)
            assert set(example.gap_edges) <= candidates, example.query.id
            assert workload.score(example, example.reference["answers"][0])["f1"] == 1.0


def test_real_comparisons_have_no_gap_where_researchers_work_side_by_side():
    for name in ("multihop_2wiki", "multihop_hotpotqa"):
        workload = load(realdata.data_set(name), split="train", options={})
        edges = {e.gap_edges for e in workload.examples if e.kind == "comparison"}
        assert edges == {()}


@pytest.mark.parametrize("kind", ["compositional", "inference", "bridge_comparison"])
def test_most_real_chains_have_one_gap_and_it_leads_to_either_later_researcher(kind):
    edges = Counter()
    for split in SPLITS:
        workload = load(realdata.data_set("multihop_2wiki"), split=split, options={})
        edges.update(e.gap_edges for e in workload.examples if e.kind == kind)

    assert set(edges) <= {(F_S,), (F_T,), ()}
    assert edges[()] < 0.1 * edges.total()
    assert min(edges[(F_S,)], edges[(F_T,)]) > 0.25 * edges.total()
