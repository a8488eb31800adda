"""Multi-hop questions: formats, dealing, tasks and gap edges."""

import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import realdata

from skeletons.multihop import load
from skeletons.multihop.dealing import N_DISTRACTORS, N_WORDS, deal, document, own_steps
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


def test_each_researcher_holds_the_paragraph_of_its_step(tmp_path):
    hands = deal(one(tmp_path, TWO_WIKI))

    assert 0 in hands["first"].paragraphs
    assert 1 in hands["second"].paragraphs
    assert not {0, 1} & set(hands["third"].paragraphs)


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
    assert named == {"first": {"Ana Lima"}, "second": {"Rui Sol"}, "third": set()}


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
def test_real_evidence_is_dealt_once_and_to_the_researcher_of_its_step(name, split):
    for question in real(name, split):
        hands = deal(question)
        dealt = [n for hand in hands.values() for n in hand.paragraphs]
        evidence = {n for n, page in enumerate(question.paragraphs) if page.is_supporting}
        assert len(dealt) == len(set(dealt)), question.id
        assert evidence <= set(dealt), question.id
        for researcher in ("first", "second"):
            assert len(evidence & set(hands[researcher].paragraphs)) <= 1, question.id
        for researcher, own in own_steps(question).items():
            held = hands[researcher].paragraphs
            assert {question.steps[n].paragraph for n in own} <= set(held), question.id
            assert len(set(held) - evidence) <= N_DISTRACTORS, question.id


@pytest.mark.parametrize("name", SETS)
def test_dealing_does_not_depend_on_what_was_dealt_before(name):
    questions = real(name, "train")[:20]

    there = [deal(question) for question in questions]
    back = [deal(question) for question in reversed(questions)]

    assert there == back[::-1]


@pytest.mark.parametrize("name", SETS)
def test_real_supporting_sentences_stand_whole_in_the_documents(name):
    for question in real(name, "train"):
        for hand in deal(question).values():
            for place, read in zip(hand.paragraphs, hand.documents, strict=True):
                page = question.paragraphs[place]
                for n in page.key:
                    assert " ".join(page.sentences[n].split()) in read.text, question.id


@pytest.mark.parametrize("name", SETS)
def test_real_prompts_of_researchers_stay_small(name):
    longest = 0
    for question, host in product(real(name, "train"), HOSTS):
        flow = workflow(host)
        for origin, (researcher, hand) in product(origins(question), deal(question).items()):
            messages = render_input(
                flow,
                flow.by_id[researcher],
                [documents_block(hand.documents)],
                subtasks(question, origin)[researcher],
                None,
            )
            longest = max(longest, sum(len(message.content.split()) for message in messages))

    assert longest < 265


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
def test_a_known_form_gives_one_look_up_each(text, expected):
    tasks = by_form(text)

    assert (tasks.first, tasks.second) == expected
    assert text in tasks.third


@pytest.mark.parametrize(("text", "asked"), DIRECTORS.items(), ids=DIRECTORS)
def test_two_films_are_compared_by_way_of_their_directors(text, asked):
    tasks = by_form(text)

    assert tasks.first == "Who is the director of Dream?"
    assert tasks.second == "Who is the director of Elm?"
    assert tasks.third == f"{asked.format('Dream')} {asked.format('Elm')}"


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
def test_of_another_form_everybody_gets_the_whole_question(text):
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
    }


def test_a_subject_under_another_name_is_described_too(tmp_path):
    row = changed(TWO_WIKI, "Ana M. Lima", "evidences", 1, 0)

    assert "Lima" not in planned(one(tmp_path, row))["second"]


def test_two_chains_end_with_the_last_researcher(tmp_path):
    triples = [
        ["Elm", "director", "Rui Sol"],
        ["Dream", "director", "Ana Lima"],
        ["Rui Sol", "date of birth", "1901"],
        ["Ana Lima (director)", "date of birth", "1902"],
    ]
    row = {
        **TWO_WIKI,
        "question": "Which film has the director born first, Dream or Elm?",
        "answer": "Elm",
        "type": "bridge_comparison",
        "evidences": triples,
        "supporting_facts": [[title, 0] for title, _ in CONTEXT],
    }

    assert planned(one(tmp_path, row)) == {
        "first": "Who is the director of Dream?",
        "second": "Who is the director of Elm?",
        "third": "What is the date of birth of the director of Dream? "
        "What is the date of birth of the director of Elm?",
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
    assert subtasks(question, "planned")["second"] == by_form(QUESTION).second


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
    """A question whose k-th paragraph says step k; `texts` says otherwise by title."""
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


MADE = Step(paragraph=0, subjects=("Opus",), answer="Ana")
BORN = Step(paragraph=1, subjects=("Ana",), answer="Faro", needs=(0,))
LIES = Step(paragraph=2, subjects=("Faro",), answer="Algarve", needs=(1,))
ALONE = Step(paragraph=1, subjects=("Ana",), answer="Faro")
UNKNOWN = Step(paragraph=1, subjects=("Ana",), answer=None)
SKIPS = Step(paragraph=2, subjects=("Faro",), answer="Algarve", needs=(0,))

TASKS = {name: f"Task of the {name}." for name in RESEARCHERS}
GAPS = {
    # Question, tasks that differ, edges in the parallel host, edges in the chain.
    "the second needs the first, and the writer what the second found": (
        tiny(MADE, BORN),
        {},
        [("first", "second")],
        [("second", "writer")],
    ),
    "of three steps each needs the one before": (
        tiny(MADE, BORN, LIES, answer="Algarve"),
        {},
        [("first", "second"), ("second", "third")],
        [],
    ),
    "G2: both steps are the first researcher's own": (
        tiny(MADE, Step(paragraph=0, subjects=("Ana",), answer="Faro", needs=(0,))),
        {},
        [],
        [("first", "writer")],
    ),
    "G2: no step needs another": (
        tiny(MADE, ALONE),
        {},
        [],
        [("first", "writer"), ("second", "writer")],
    ),
    "G1: the second does not hold what the third needs": (
        tiny(MADE, ALONE, SKIPS, answer="Algarve"),
        {},
        [("first", "third")],
        [("first", "third"), ("second", "writer")],
    ),
    "G2: a choice among what the question names needs every step": (
        tiny(MADE, BORN, ALONE.model_copy(update={"paragraph": 2}), answer="Opus"),
        {},
        [("first", "second")],
        [("first", "writer"), ("second", "writer")],
    ),
    "G3: a document of the receiver says it": (
        tiny(MADE, BORN, Ana="Ana made Opus and is from Faro."),
        {},
        [],
        [("second", "writer")],
    ),
    "G3: a document has the answer but not what it is about": (
        tiny(MADE, BORN, Ana="Ana is from Faro and likes opera."),
        {},
        [("first", "second")],
        [("second", "writer")],
    ),
    "G3: a parent looks it up": (
        tiny(MADE, BORN, LIES, answer="Algarve"),
        {},
        [("first", "second"), ("second", "third")],
        [],
    ),
    "G4: the answer stands in the question": (
        tiny(MADE, BORN, text="Where was Ana born, who made Opus?"),
        {},
        [],
        [("second", "writer")],
    ),
    "G4: the answer stands in the task": (
        tiny(MADE, BORN),
        {"second": "Where was Ana born?"},
        [],
        [("second", "writer")],
    ),
    "G4: the writer's answer stands in the question": (
        tiny(MADE, BORN, text="Was the maker of Opus born in Faro?"),
        {},
        [("first", "second")],
        [],
    ),
    "an answer that is not annotated can't be read elsewhere": (
        tiny(MADE, UNKNOWN),
        {},
        [],
        [("first", "writer"), ("second", "writer")],
    ),
}


@pytest.mark.parametrize(("question", "tasks", "parallel", "chain"), GAPS.values(), ids=GAPS)
def test_a_gap_meets_all_four_conditions(question, tasks, parallel, chain):
    hands, told = deal(question), TASKS | tasks

    assert list(gap_edges(question, workflow("parallel"), hands, told)) == parallel
    assert list(gap_edges(question, workflow("chain"), hands, told)) == chain


@pytest.mark.parametrize(
    ("change", "edges"),
    [
        ({}, (("first", "second"),)),
        ({"type": "comparison"}, ()),
        ({"question": "Where was Ana Lima, who made Dream, born?"}, ()),
        ({"context": [["Dream", ["Dream is a film.", "x"]], *CONTEXT[1:]]}, ()),
    ],
    ids=["a bridge", "a comparison", "the question names both", "neither names the other"],
)
def test_hotpotqa_has_a_gap_where_an_unnamed_title_is_the_bridge(tmp_path, change, edges):
    workload = load(write(tmp_path, {**HOTPOT, **change}), split="train", options={})

    assert workload.examples[0].gap_edges == edges


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


def test_most_real_chains_have_a_gap_between_their_researchers():
    workload = load(realdata.data_set("multihop_2wiki"), split="train", options={})
    chains = [e for e in workload.examples if e.kind in ("compositional", "inference")]

    with_gap = [e for e in chains if e.gap_edges == (("first", "second"),)]

    assert len(with_gap) > 0.9 * len(chains)
