import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soon import soon

from splice import text as text_module
from splice.text import (
    contains,
    entities,
    is_refusal,
    items,
    last_answer_line,
    norm,
    numbers,
    sentences,
    token_f1,
    tokens,
    words,
)

ODD_TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from(list("aA bB.,-'\"*_`<>{}[]()0159%$#/\\:;!?\n\t’“”İſﬁ½²́\x85\u2028\x1c")),
        st.characters(),
    ),
    max_size=80,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Two\n\nlines ", "two lines"),
        ("“Don’t”", '"don\'t"'),
        ("ＡＢＣ ﬁne", "abc fine"),
        ("## Title\n> *quoted* **bold**", "title quoted bold"),
        ("a<br/>b <b>c</b>", "a b c"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("max_retries and 2*3", "max_retries and 2*3"),
        ("_Doha_", "doha"),
        ("\ufeffzero\u200bwidth", "zerowidth"),
        ("−5", "-5"),
        ("", ""),
    ],
)
def test_norm_folds_what_does_not_change_the_meaning(text: str, expected: str) -> None:
    assert norm(text) == expected


def test_words_are_alphabetic_and_longer_than_three_characters() -> None:
    assert words("Rome won't fall in 1994; ab12cdef") == {"rome", "won't", "fall", "cdef"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$1,250.50 and 7", {"1250.5", "7"}),
        ("£5 or €6 or US$7", {"5", "6", "7"}),
        ("-5, (-6), $-7, -$8", {"-5", "-6", "-7", "-8"}),
        ("−3.0", {"-3"}),
        ("1990-1995, 1990–1995, 10%-20%", {"1990", "1995", "10%", "20%"}),
        ("5-3=2", {"5", "3", "2"}),
        ("0.50 % and 5 percent", {"0.5%", "5%"}),
        ("100, 007, .5, 0.0, -0", {"100", "7", "0.5", "0"}),
        ("born on 2024-05-01.", {"2024-05-01"}),
        ("2024-13-01", {"2024", "13", "1"}),
        ("3rd, 1990s and 5km", {"3", "1990", "5"}),
        ("A320, GPT-4, v1.2.3, x86_64, 7f3a9c, 192.168.0.1", set()),
        ("1'000 and 2\u202f000", {"1000", "2000"}),
        ("1,5", {"1", "5"}),
        ("١٢٣", {"123"}),
        ("It ended in 1994.", {"1994"}),
        ("no digits", set()),
    ],
)
def test_numbers_are_canonical(text: str, expected: set[str]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Who is the director of Inception?", ("Inception",)),
        ("Who is Ana Lima?", ("Ana Lima",)),
        ("Ana Lima left. The results are poor. Which one?", ("Ana Lima",)),
        ("Directors often fail.", ()),
        ("Directors often ask other Directors.", ("Directors",)),
        ("Paris is large.", ("Paris",)),
        ("Doha", ("Doha",)),
        ("Doha, Qatar.", ("Doha", "Qatar")),
        ("Answer: Doha", ("Doha",)),
        ("He read Lord of the Rings in the Hague.", ("Lord of the Rings", "Hague")),
        ("by Mr. Wu and J. K. Rowling, in St. Ives", ("Mr. Wu", "J. K. Rowling", "St. Ives")),
        ("Lothair II's mother and Nolan’s film", ("Lothair II", "Nolan")),
        (
            "see “the iron age” or 'bronze age' or `run_all`",
            ("the iron age", "bronze age", "run_all"),
        ),
        ("don't use the boys' or girls' room", ()),
        ("in report_7, src/main.py and qwen2.5", ("report_7", "src/main.py", "qwen2.5")),
        ("an iPhone and/or mRNA, e.g. this", ("iPhone", "mRNA")),
        ("It ended.The next one", ()),
        ("in Rome, then ROME, then rome", ("Rome",)),
        ("- Alice: engineer\n- Bob: baker", ("Alice", "Bob")),
        ("I think I'm late", ()),
        ("", ()),
    ],
)
def test_entities_are_found_in_order_of_appearance(text: str, expected: tuple[str, ...]) -> None:
    assert entities(text) == expected


def test_a_gazetteer_adds_its_entries_where_they_occur() -> None:
    text = "the blue  mine lies near Porto and the blue mineral"
    assert entities(text, gazetteer=["Porto", "blue mine", "red mine"]) == ("blue  mine", "Porto")


def test_items_are_entities_then_numbers() -> None:
    assert items("In 1994 Ana Lima paid 20 to Rui Sá, in 1994") == (
        "Ana Lima",
        "Rui Sá",
        "1994",
        "20",
    )


@pytest.mark.parametrize(
    ("haystack", "needle", "expected"),
    [
        ("in New York City", "new york", True),
        ("in New Yorkers", "New York", False),
        ("“Who’s  there?”", "who's there", True),
        ("paid 1,000 euro", "1000", True),
        ("paid 12.5 euro", "12", False),
        ("paid -5", "5", False),
        ("the A320", "320", False),
        ("max_retries=3", "max_retries", True),
        ("anything", "", False),
        ("anything", "?", False),
    ],
)
def test_contains_compares_whole_words(haystack: str, needle: str, expected: bool) -> None:
    assert contains(haystack, needle) is expected


def test_token_f1_is_that_of_bags_without_articles_and_punctuation() -> None:
    # 2 of the 3 and 2 of the 4 tokens are shared: 2 * 2 / 7.
    assert token_f1("The red, red house", "a red red old barn") == pytest.approx(4 / 7)
    assert token_f1("Doha.", "the doha") == 1.0
    assert token_f1("5", "-5") == 0.0
    assert token_f1("", "Doha") == 0.0
    assert token_f1("?", "!") == 0.0
    assert token_f1(" ", "") == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("First line\nsecond line\r\n\r\nthird", ["First line", "second line", "third"]),
        ("- a\n* b\n1. c\n(2) d\n> e\n# f", ["a", "b", "c", "d", "e", "f"]),
        ("In St. Ives, Dr. Wu met J. K. Li.", ["In St. Ives, Dr. Wu met J. K. Li."]),
        ("No. It is not. See No. 5.", ["No.", "It is not.", "See No. 5."]),
        (
            "In the U.S. Army. In the U.S. The law.",
            ["In the U.S. Army.", "In the U.S.", "The law."],
        ),
        ("Pi is 3.14 and v1.2. Yes", ["Pi is 3.14 and v1.2.", "Yes"]),
        ('"Stop!" he said. (He left.) Then', ['"Stop!" he said.', "(He left.)", "Then"]),
        ("Wait... What", ["Wait...", "What"]),
        ("他来了。他走了。", ["他来了。", "他走了。"]),
        ("---\n***", []),
        ("No.\x85 \x85", ["No."]),
        ("", []),
    ],
)
def test_sentences_are_spans_of_the_text(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == expected


@pytest.mark.parametrize(
    "reply",
    [
        None,
        "",
        " \n",
        "...",
        "not found",
        "Not found.",
        "**Not Found**",
        "[not found]",
        '"unknown"',
        "Unknown",
        "N/A",
        "n/a.",
        "None",
        "I don't know",
        "I don’t know.",
        "I do not know the answer to this question.",
        "I don't know who directed the film.",
        "Answer: not found.",
        "**Answer:** unknown",
        "The answer is unknown.",
        "The answer is not found in the provided text.",
        "The answer cannot be determined.",
        "Cannot be determined from the given information.",
        "It can't be determined.",
        "I cannot determine the birthplace of the director.",
        "I'm sorry, but I cannot find that in the documents.",
        "Sorry, I can't help with that.",
        "I am unable to answer this question.",
        "No information",
        "No information found.",
        "There is no information about the director.",
        "No relevant information is available in the context.",
        "Not enough information.",
        "Insufficient information to answer.",
        "The text does not mention the director.",
        "Based on the provided documents, the text doesn't say.",
        "The director is not mentioned in the text.",
        "Not found. The document does not mention a director.",
        "Unfortunately, there is not enough context. Please provide more details.",
        "- unknown",
        "not found: the director of Inception",
        "no answer",
        "Unanswerable",
        "I'm not sure.",
        "I have no idea.",
    ],
)
def test_a_reply_that_only_declines_is_a_refusal(reply: str | None) -> None:
    assert is_refusal(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "The Unknown Soldier",
        "Unknown Pleasures",
        "It was not found guilty of fraud.",
        "He was not found until 1994.",
        "No",
        "no.",
        "No, it is not.",
        "Nothing Compares 2 U",
        "No Country for Old Men",
        "I Don't Know How She Does It",
        "Can't Help Falling in Love",
        "The text does not mention it, but it is Doha.",
        "I don't know for certain, however Doha is likely",
        "I don't know. Doha?",
        "There is no information about him in A. Doha is in B.",
        "No evidence of water on Mars",
        "Doha is not known for its rain",
        "The cause is unknown to most people but it was fire",
        "Doha",
        "0",
        "∞",
        "None of the Above won",
        "He cannot be trusted",
        "They could not find their son",
        "unknown " * 500,
    ],
)
def test_an_answer_that_merely_holds_such_words_is_no_refusal(reply: str) -> None:
    assert not is_refusal(reply)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: Doha", "Doha"),
        ("answer:Doha", "Doha"),
        ("Answer: Rome\nAnswer: Doha\nso", "Doha"),
        ("**Answer:** Doha", "Doha"),
        ("**Answer: Doha**", "Doha"),
        ("> **Answer**: *Doha*", "Doha"),
        ("ANSWER : Doha  ", "Doha"),
        ("the answer: Doha", None),
        ("Answers: Doha", None),
        ("Answer:", None),
        ("", None),
    ],
)
def test_the_last_answer_line_is_read(text: str, expected: str | None) -> None:
    assert last_answer_line(text) == expected


PIECES = [
    "St.",
    "No. ",
    "U.S. ",
    "Answer:",
    "answer is ",
    "not found",
    "A",
    "'s",
    "the ",
    "\n",
    "“",
]


@settings(deadline=None)
@given(ODD_TEXT)
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert norm(norm(text)) == norm(text)


@settings(deadline=None)
@given(st.text(alphabet="aAbBéÉ019.,-'_/:#%$ \n", max_size=60))
def test_a_text_contains_each_of_its_items(text: str) -> None:
    assert all(contains(text, item) for item in items(text))


@settings(deadline=None)
@given(ODD_TEXT, ODD_TEXT)
def test_token_f1_is_symmetric_and_one_for_equal_texts(a: str, b: str) -> None:
    assert token_f1(a, b) == token_f1(b, a)
    assert 0.0 <= token_f1(a, b) <= 1.0
    assert token_f1(a, a) == 1.0


@settings(deadline=None)
@given(ODD_TEXT)
def test_sentence_spans_are_ordered_apart_and_hold_every_letter(text: str) -> None:
    spans = sentences(text)
    bounds = [bound for span in spans for bound in span]
    assert bounds == sorted(bounds)
    assert all(text[start:end] == text[start:end].strip() != "" for start, end in spans)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PIECES) | ODD_TEXT, max_size=8).map("".join))
def test_no_text_is_too_odd(text: str) -> None:
    assert entities(text, gazetteer=[text[:5], text[-3:]]) is not None
    assert is_refusal(text) in (True, False)
    assert last_answer_line(text) != ""


@settings(deadline=None)
@given(ODD_TEXT)
def test_padding_changes_no_unit(text: str) -> None:
    padded = f" \n{text}\n  "
    assert words(padded) == words(text)
    assert numbers(padded) == numbers(text)
    assert items(padded) == items(text)
    assert tokens(padded) == tokens(text)
    assert is_refusal(padded) is is_refusal(text)


REPEATS = (
    "a", "A", "1", " ", "\n", "*", "_", "`", "<", "<b ", ">", "- ", "#", ".", "..", "'", '"', "“",
    "‘a", "(", "{", "-", "1,000,", "1,", "1.", "-1", "$", "a-", "a'", "a.", "A.", "A. ", "A of ",
    "of ", "A of of of ", "U.S. ", "://", "a/", "a:", ": ", "Answer:", "answer ", "not found ",
    "I don't know ", "1. ", "İ", "ſ", "\ufeff", "\u0301", "%", "1%", "2024-05-01", "2024-05-0",
    "no information about ", "。", "\ud800", "aA", "1a", "1abcd", "1.1.", "$-", "the ", '"a" ',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("piece", REPEATS)
def test_repeats_are_read_in_linear_time(piece: str) -> None:
    # A quadratic function takes many minutes for this.
    text = piece * (100_000 // len(piece))
    functions = (norm, words, tokens, numbers, items, sentences, last_answer_line, is_refusal)
    for function in (*functions, lambda t: contains(t, t[1:] + "x"), lambda t: token_f1(t, t)):
        with soon():
            function(text)


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["a", "A. ", "<b ", "Answer:"])
def test_a_megabyte_is_no_trouble(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    assert is_refusal(text) is False
    assert last_answer_line(text) is None or piece == "Answer:"
    assert len(norm(text)) <= len(text)
    assert len(sentences(text)) <= len(text)
    assert contains(text, "absent") is False
    assert numbers(text) <= {"1"}


def test_what_a_text_gave_is_remembered_and_forgotten_before_it_fills_the_memory() -> None:
    asked = []

    def length(text: str) -> int:
        asked.append(text)
        return len(text)

    remembering = text_module._remembered(length)
    assert [remembering("a"), remembering("a"), remembering("")] == [1, 1, 0]
    assert asked == ["a", ""]
    for n in range(3000):
        remembering(f"{n:05}" * 100)
    assert remembering("a") == 1
    assert asked.count("a") == 2
    assert remembering("02999" * 100) == 500
    assert asked.count("02999" * 100) == 1
