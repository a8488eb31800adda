from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splice.abstention import wire
from splice.evidence import evidence_block, gather_evidence
from splice.records import (
    Abstention,
    Edge,
    Evidence,
    MessageLine,
    NodeFailure,
    NodeRun,
    Query,
    SpliceMessage,
    ToolCall,
    Trace,
    Trial,
)

QUERY = Query(text="Where was the director born?")
SUBTASK = "find the birthplace"

# plan and source are read by nobody but receiver and writer; the tried edge is source -> receiver.
EDGES: Sequence[Edge] = (
    ("plan", "receiver"),
    ("receiver", "check"),
    ("receiver", "writer"),
    ("source", "writer"),
    ("check", "writer"),
    ("check", "editor"),
    ("writer", "editor"),
)
NODES = ("plan", "source", "receiver", "check", "writer", "editor")

NO_YEAR = Abstention(category="Insufficient Input", rationale="director unnamed")

Output = str | Abstention | None


def node_run(node: str, output: Output, edges: Sequence[Edge], returned: Sequence[str]) -> NodeRun:
    parents = tuple(source for source, target in edges if target == node)
    calls = tuple(ToolCall(name="look", arguments="{}", result=text) for text in returned)
    run = NodeRun(node=node, status="ok", expected=parents, received=parents, tool_calls=calls)
    if output is None:
        failure = NodeFailure(kind="model", message="no reply")
        return run.model_copy(update={"status": "failed", "failure": failure})
    if isinstance(output, Abstention):
        update = {"status": "abstained", "output": wire(output), "abstention": output}
        return run.model_copy(update=update)
    return run.model_copy(update={"output": output})


def trace(
    outputs: Mapping[str, Output],
    answer: str | None,
    *,
    edges: Sequence[Edge] = EDGES,
    returned: Sequence[str] = (),
) -> Trace:
    runs = [
        node_run(node, outputs.get(node, ""), edges, returned if node == "receiver" else ())
        for node in NODES
    ]
    return Trace(
        query=QUERY,
        workflow="test",
        fingerprint="f",
        node_runs=tuple(runs),
        answer=answer,
        engine_version="0",
    )


def evidence(
    before: Mapping[str, Output],
    after: Mapping[str, Output],
    *,
    message: str = "hello",
    answers: tuple[str | None, str | None] = ("old", "new"),
    private: Sequence[str] = (),
    returned: Sequence[str] = (),
    edges: Sequence[Edge] = EDGES,
    focus: str | None = None,
) -> Evidence:
    base = trace(before, answers[0], edges=edges, returned=returned)
    told = SpliceMessage(
        source="source",
        receiver="receiver",
        key=MessageLine(text=message, spans=()),
        focus=focus,
        writer="extractive",
    )
    trial = Trial(
        message=told, trace=trace({**before, **after}, answers[1], edges=edges), receipt=()
    )
    return gather_evidence(base, trial, query=QUERY, subtask=SUBTASK, private=private, edges=edges)


def test_movement_is_one_minus_the_jaccard_index_of_content_words() -> None:
    # before {born, rome, maybe}, after {born, doha}: 1 shared of 4.
    found = evidence({"receiver": "born in Rome maybe"}, {"receiver": "was born in Doha"})
    assert found.move_w == 0.75
    assert found.n_add == 1  # doha
    assert found.n_del == 2  # rome, maybe
    assert found.move_len == 0.0  # 4 words before and after


def test_length_changes_are_relative_to_the_length_before() -> None:
    assert evidence({"receiver": "a b c d"}, {"receiver": "a"}).move_len == -0.75
    assert evidence({"receiver": "a"}, {"receiver": "a b c"}).move_len == 2.0
    assert evidence({"receiver": ""}, {"receiver": "a b c"}).move_len == 3.0


def test_each_added_word_has_one_origin() -> None:
    found = evidence(
        {"receiver": "nothing yet", "plan": "check the archive"},
        {"receiver": "director Lima archive birthplace museum zebra yonder mystery"},
        message="Lima, the director, is in the archive",
        private=["a museum"],
    )
    # Of 8 added words the message alone holds lima; the message and the context hold director
    # (question) and archive (plan); the context alone birthplace (task) and museum (private).
    assert found.n_add == 8
    assert found.msg_only == 1 / 8
    assert found.both == 2 / 8
    assert found.ctx_only == 2 / 8
    assert found.untraceable == 3 / 8
    # The message has three content words: lima, director, archive.
    assert found.uptake == 1.0
    assert not found.is_ignored


def test_tool_returns_of_the_receiver_are_its_own_context() -> None:
    found = evidence({}, {"receiver": "zebra"}, returned=["the zebra file"])
    assert (found.ctx_only, found.untraceable) == (1.0, 0.0)


def test_what_the_receiver_did_not_receive_is_no_context() -> None:
    found = evidence({"source": "zebra"}, {"receiver": "zebra"})
    assert found.untraceable == 1.0


def test_a_parent_that_abstained_gave_its_rationale_to_read() -> None:
    found = evidence({"plan": NO_YEAR}, {"receiver": "unnamed reasoning response"})
    assert found.ctx_only == 1 / 3
    assert found.untraceable == 2 / 3


def test_a_message_is_ignored_if_neither_a_word_nor_a_number_is_taken_up() -> None:
    assert evidence({}, {"receiver": "zebra"}, message="Lima in 1994").is_ignored
    assert not evidence({}, {"receiver": "zebra lima"}, message="Lima in 1994").is_ignored
    assert not evidence({}, {"receiver": "1994"}, message="Lima in 1994").is_ignored
    assert evidence({"receiver": "Lima"}, {"receiver": "Lima!"}, message="Lima").is_ignored


def test_a_dropped_word_is_supported_if_the_receiver_could_read_it() -> None:
    found = evidence(
        {"receiver": "archive museum director Rome", "plan": "the archive"},
        {"receiver": "Rome"},
    )
    # Dropped: archive (plan), director (question), museum (nowhere).
    assert found.n_del == 3
    assert found.del_supported == pytest.approx(2 / 3)


def test_what_was_looked_up_stands_in_the_documents_that_the_message_names() -> None:
    private = ["[Ada Quist]\nBorn in Doha in 1901.", "[Bo Renner]\nBorn in Lima in 1902."]

    def found(before: str, after: str, focus: str | None) -> tuple[float, float]:
        told = evidence(
            {"receiver": before}, {"receiver": after}, private=private, focus=focus, message="So"
        )
        return told.focus_new, told.focus_old

    assert found("Lima, 1902", "Doha, 1901", "Ada Quist") == (1.0, 0.0)
    assert found("Lima, 1902", "Doha, 1901", "Bo Renner") == (0.0, 1.0)
    assert found("Lima", "Doha zebra", "Ada Quist") == (0.5, 0.0)
    assert found("Lima, 1902", "Doha, 1901", "Cy Twist") == (0.0, 0.0)
    assert found("Lima, 1902", "Doha, 1901", None) == (0.0, 0.0)
    assert found("1902", "1901", "Ada Quist") == (1.0, 0.0)


def test_numbers_come_from_the_message_else_from_the_context_else_from_nowhere() -> None:
    found = evidence(
        {"receiver": "1900 and 1901", "plan": "1,950 or 1960"},
        {"receiver": "1901, 1940, 1950, 1960 and 1970"},
        message="1940 or 1950",
    )
    # Added: 1940 (message), 1950 (message and plan), 1960 (plan), 1970. Dropped: 1900 of two.
    assert found.num_msg == 0.5
    assert found.num_ctx == 0.25
    assert found.num_untraceable == 0.25
    assert found.num_dropped == 0.5


def test_survival_is_the_mean_share_of_added_words_by_depth() -> None:
    found = evidence(
        {"check": "lima"},
        {
            "receiver": "Lima Doha archive museum",
            "check": "lima doha archive",  # adds 2 of the 4
            "writer": "doha",  # adds 1 of the 4
            "editor": "archive museum doha",  # adds 3 of the 4
        },
        answers=("Rome museum", "Doha museum"),
    )
    assert found.survival == (0.375, 0.75)
    assert found.surv_final == 0.25  # doha; museum was in the answer before


def test_a_receiver_that_nothing_reads_has_no_survival_by_depth() -> None:
    found = evidence({}, {"receiver": "zebra"}, edges=(("plan", "receiver"),))
    assert found.survival == ()


def test_a_change_is_absorbed_if_the_answer_stays_the_same_after_normalisation() -> None:
    before, after = {"receiver": "Rome"}, {"receiver": "Doha"}
    assert evidence(before, after, answers=("**Rome**", "rome ")).is_absorbed
    assert not evidence(before, after, answers=("Rome", "Doha")).is_absorbed
    assert not evidence(before, before, answers=("Rome", "Rome")).is_absorbed
    assert evidence({"receiver": "1994"}, {"receiver": "1995"}, answers=("a", "a")).is_absorbed


def test_the_answers_are_compared_by_tokens_length_and_numbers() -> None:
    found = evidence({}, {}, answers=("born in Rome, 1994", "born in Doha"))
    # 2 shared of 4 and 3 tokens: F1 = 4/7.
    assert found.ans_change == pytest.approx(3 / 7)
    assert found.ans_len_ratio == 0.75
    assert found.is_number_changed
    found = evidence({}, {}, answers=(None, "Doha"))
    assert found.ans_change == 1.0
    assert found.ans_len_ratio == 0.0
    assert not found.is_number_changed
    assert evidence({}, {}, answers=("Doha", None)).ans_len_ratio == 0.0


def test_copying_is_how_much_nearer_the_answer_came_to_the_source_answer() -> None:
    source = {"source": "It is far away.\nAnswer: Doha"}
    assert evidence(source, {}, answers=("Rome", "Doha")).copies_source == 1.0
    assert evidence(source, {}, answers=("Doha", "Rome")).copies_source == -1.0
    assert evidence(source, {}, answers=("Rome", "in Doha")).copies_source == pytest.approx(2 / 3)
    assert evidence({"source": NO_YEAR}, {}, answers=(None, "Rome")).copies_source == 0.0


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NO_YEAR, "Doha", True),
        ("not found", "Doha", True),
        (NO_YEAR, NO_YEAR, False),
        (NO_YEAR, "I don't know.", False),
        (NO_YEAR, None, False),
        ("Rome", "Doha", False),
        (None, "Doha", False),
    ],
)
def test_an_abstention_is_resolved_if_the_receiver_answers_now(
    before: Output, after: Output, expected: bool
) -> None:
    found = evidence({"receiver": before}, {"receiver": after})
    assert found.is_abstention_resolved is expected


def test_an_abstention_is_new_if_any_node_abstains_that_did_not() -> None:
    base: Mapping[str, Output] = {
        "plan": NO_YEAR,
        "receiver": "Rome",
        **dict.fromkeys(NODES[3:], "x"),
    }
    base = {**base, "source": "Doha"}
    assert not evidence(base, {"receiver": "Doha"}).is_abstention_new
    assert evidence(base, {"writer": NO_YEAR}).is_abstention_new
    assert evidence(base, {"writer": "unknown"}).is_abstention_new
    assert not evidence(base, {"writer": None}).is_abstention_new
    assert not evidence(base, {"writer": ""}).is_abstention_new


@pytest.mark.parametrize(
    ("answers", "resolved", "new"),
    [
        (("Rome", "Doha"), False, False),
        (("not found", "Doha"), True, False),
        ((None, "Doha"), True, False),
        (("Rome", "The answer is unknown."), False, True),
        (("Rome", None), False, True),
        (("Rome", wire(NO_YEAR)), False, True),
        ((None, "unknown"), False, False),
    ],
)
def test_refusals_in_the_answer_are_told(
    answers: tuple[str | None, str | None], resolved: bool, new: bool
) -> None:
    found = evidence({}, {}, answers=answers)
    assert (found.is_answer_refusal_resolved, found.is_answer_refusal_new) == (resolved, new)


def test_the_json_of_an_abstention_has_no_content_words() -> None:
    found = evidence({"receiver": NO_YEAR}, {"receiver": "Doha"})
    assert (found.n_del, found.n_add, found.move_w) == (0, 1, 1.0)
    found = evidence({"receiver": "Doha"}, {"receiver": NO_YEAR})
    assert (found.n_del, found.n_add, found.untraceable) == (1, 0, 0.0)


def test_a_refusal_in_prose_has_no_content_words() -> None:
    found = evidence(
        {"receiver": "The text does not mention the birthplace."}, {"receiver": "Doha"}
    )
    assert (found.n_del, found.del_supported) == (0, 0.0)


def test_nothing_at_all_gives_zeros() -> None:
    found = evidence({}, {}, message="", answers=(None, None))
    numbers = {
        name: value
        for name, value in found.model_dump().items()
        if name not in ("survival", "is_ignored")
    }
    assert not any(numbers.values())
    assert found.survival == (0.0, 0.0)
    assert found.is_ignored


def test_a_node_missing_from_a_trace_counts_as_empty() -> None:
    base = trace({"receiver": "Rome"}, "Rome").model_copy(update={"node_runs": ()})
    told = SpliceMessage(
        source="source", receiver="receiver", key=MessageLine(text="x", spans=()), writer="model"
    )
    trial = Trial(message=told, trace=trace({"receiver": "Doha"}, "Doha"), receipt=())
    found = gather_evidence(base, trial, query=QUERY, subtask=SUBTASK, private=(), edges=EDGES)
    assert found.n_add == 1


def test_the_block_is_one_line_a_group_with_two_decimals() -> None:
    found = evidence(
        {"receiver": NO_YEAR, "source": "Doha"},
        {"receiver": "Ana Lima of Doha, 1994", "writer": "Lima"},
        message="Ana Lima was born in Doha",
        answers=("unknown", "Doha"),
    )
    assert evidence_block(found).splitlines() == [
        "movement: receiver 1.00, length +5.00, words added 2, words dropped 0",
        "origin of added words: message only 1.00, own context only 0.00, both 0.00, neither 0.00",
        "uptake: 0.67 of the message's words, message ignored no",
        "loss: 0.00 of the dropped words are in the receiver's own context",
        "documents about what the message names: 0.00 of what was added, 0.00 of what was dropped",
        "origin of added numbers: message 0.00, own context 0.00, neither 1.00; "
        "share of numbers dropped 0.00",
        "survival of added words: depth 1 0.25, depth 2 0.00, answer 0.50; absorbed no",
        "answer: change 1.00, length ratio 1.00, numbers changed no",
        "agreement with the source's answer: +1.00",
        "abstention: receiver's resolved yes, a new one no",
        "refusal in the answer: resolved yes, new no",
    ]


VOCABULARY = [
    "Doha",
    "Rome",
    "Lima",
    "archive",
    "museum",
    "director",
    "1994",
    "-5",
    "unknown",
    "of",
]
TEXT = st.lists(st.sampled_from(VOCABULARY), max_size=6).map(" ".join) | st.text(max_size=12)
OUTPUT = TEXT | st.none() | st.just(NO_YEAR)
OUTPUTS = st.dictionaries(st.sampled_from(NODES), OUTPUT)


@settings(deadline=None)
@given(OUTPUTS, OUTPUTS, TEXT, st.tuples(TEXT | st.none(), TEXT | st.none()))
def test_origins_partition_what_was_added_and_the_rest_is_in_range(
    before: Mapping[str, Output],
    after: Mapping[str, Output],
    message: str,
    answers: tuple[str | None, str | None],
) -> None:
    # Ranges of shares are checked by the record itself.
    found = evidence(before, after, message=message, answers=answers)
    origins = found.msg_only + found.ctx_only + found.both + found.untraceable
    assert origins == pytest.approx(1.0 if found.n_add else 0.0)
    of_numbers = found.num_msg + found.num_ctx + found.num_untraceable
    assert of_numbers == pytest.approx(1.0) or of_numbers == 0.0
    assert found.move_len >= -1
    assert found.ans_len_ratio >= 0
    assert found.n_add >= 0
    assert not (found.is_answer_refusal_resolved and found.is_answer_refusal_new)
    assert found == evidence(before, after, message=message, answers=answers)
    assert len(evidence_block(found).splitlines()) == 11
