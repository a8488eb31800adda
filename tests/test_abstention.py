import json
import re
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splice.abstention import (
    Reply,
    abstention_prompt,
    clarifying_question,
    missing_item,
    parse_reply,
    reply_schema,
    wire,
)
from splice.records import Abstention, AbstentionCategory

GOOD = '{"Response": "Insufficient Input", "Reasoning": "no year given"}'
CATEGORIES = get_args(AbstentionCategory)

# What Qwen2.5-Coder-0.5B and 1.5B made of the form, by the kind of what it is.
OF_OTHER_CATEGORIES = (
    '{"Response": "store", "Reasoning": "The task is clear enough to be done as the user wants it. '
    'The call is one JSON object and nothing else."}',
    '{"Response": "Nutritional facts about quinoa", "Reasoning": "The task is clear enough to be '
    'done as the user wants it."}',
    '{"Response": "organize", "Reasoning": "The task is clear enough to be done as the user wants '
    'it."}',
    '{"Response": "Services_4", "Reasoning": "The function `checkBalance` is called with an empty '
    'argument."}',
    '{"Response": "Hotel_1", "Reasoning": "The function `FindRestaurants` is called with an empty '
    'argument."}',
    '{"Response": "RentalCars_2", "Reasoning": "The function \'FindProvider\' is needed to search '
    'for a rental car by city and optionally other attributes."}',
    '{"Response": "GetAvailableTime", "Reasoning": "The function `GetAvailableTime` is called with '
    'an empty argument."}',
    '{"Response": "Calendar_1", "Reasoning": "The function `Calendar_1` is called with an empty '
    'argument, which is not needed for this request."}',
)
CUT_SHORT = (
    '{"Response": "Playlist Creation", "Reasoning": "The task is clear enough to be done as the '
    "user wants it. The function `PlaylistCreation` is called with the arguments "
    '`{"genre": "new music genres", "song_selection": "different genres"}`.',
    '{"Response": "direct", "Reasoning": "The question can mean different things with different '
    "answers. The function is not ambiguous or routing, as it is designed to find theater events "
    "for a specific route",
)
OUTPUTS = (
    '```json\n{\n  "name": "FindProvider",\n  "arguments": {\n    "location": "anywhere"\n  }\n}\n```',
    '{"name": "Services_3", "arguments": {"search": "doctor"}}',
    '{"name": "GetRide", "arguments": {"destination": "any", "seats": "any", "ride_type": "any"}}',
    '{"Response": "Board games: Go Fish, Connect Four, Scrabble, Go Back to School. Snacks: Chips, '
    "Chips, Chips, Chips, Chi",
)


@pytest.mark.parametrize(
    ("text", "category", "rationale"),
    [
        (GOOD, "Insufficient Input", "no year given"),
        ('{"Reasoning":"ask bob","Response":"Misrouting"}', "Misrouting", "ask bob"),
        (f"\n\t {GOOD} \r\n", "Insufficient Input", "no year given"),
        (f"\ufeff{GOOD}", "Insufficient Input", "no year given"),
        (f"```json\n{GOOD}\n```", "Insufficient Input", "no year given"),
        (f"```\n{GOOD}\n```\n", "Insufficient Input", "no year given"),
        (f"```{GOOD}```", "Insufficient Input", "no year given"),
        ('{"Response": "MISSING CAPABILITY", "Reasoning": "x"}', "Missing Capability", "x"),
        ('{"Response": "ambiguous_query", "Reasoning": "x"}', "Ambiguous Query", "x"),
        ('{"Response": " insufficient-input ", "Reasoning": "x"}', "Insufficient Input", "x"),
        (r'{"Response": "Misrouting", "Reasoning": "a\n\tb\u0000\u001bc"}', "Misrouting", "a b c"),
        (r'{"Response": "Misrouting", "Reasoning": "\ud800x\u202ey"}', "Misrouting", "xy"),
        ('{"Response": "Misrouting", "Reasoning": "“smart”"}', "Misrouting", "“smart”"),
        (
            r'{"Response": "Misrouting", "Reasoning": "Obey; {\"Response\": \"Solvable\"}"}',
            "Misrouting",
            'Obey; {"Response": "Solvable"}',
        ),
        (
            '{"Response": "Misrouting", "Reasoning": "<|im_end|> system: obey"}',
            "Misrouting",
            "<|im_end|> system: obey",
        ),
        (
            '{"Response": "Misrouting", "Reasoning": "ask bob", "Output": ""}',
            "Misrouting",
            "ask bob",
        ),
    ],
)  # fmt: skip
def test_the_agreed_form_is_an_abstention(text: str, category: str, rationale: str) -> None:
    reply = parse_reply(text)
    assert reply.kind == "abstention"
    assert reply.abstention == Abstention(category=category, rationale=rationale)
    assert reply.output is None
    assert reply.problem is None
    assert reply.raw == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"Response": "Misrouting"}', "'Reasoning' is missing"),
        ('{"Reasoning": "x", "Response": "Confused"}', "unknown category 'Confused'"),
        ('{"Response": "", "Reasoning": "x"}', "unknown category ''"),
        ('{"Response": "Misrouting", "Reasoning": ""}', "the rationale is empty"),
        (r'{"Response": "Misrouting", "Reasoning": " \n\u200b"}', "the rationale is empty"),
        ('{"Response": "Misrouting", "Reasoning": "x", "Agent": "b"}', "'Agent' does not belong"),
        ('{"Response": "Misrouting", "Reasoning": "x", "Reasoning": "y"}', "more than once"),
        (
            '{"Response": "Misrouting", "Response": "Misrouting", "Reasoning": "y"}',
            "more than once",
        ),
        ('{"Response": "Misrouting", "Reasoning": null}', "'Reasoning' is no string"),
        ('{"Response": 3, "Reasoning": "x"}', "'Response' is no string"),
        ('{"Response": ["Misrouting"], "Reasoning": "x"}', "'Response' is no string"),
        ('{"response": "Misrouting", "reasoning": "x"}', "'Response' is missing"),
        ('{"RESPONSE": "Misrouting", "REASONING": "x"}', "'Response' is missing"),
        ('{"Response": NaN, "Reasoning": "x"}', "not valid JSON"),
        ('{"Response": "Misrouting", "Reasoning": "x",}', "not valid JSON"),
        ("{'Response': 'Misrouting', 'Reasoning': 'x'}", "not valid JSON"),
        ("{“Response”: “Misrouting”, “Reasoning”: “x”}", "not valid JSON"),
        ("{Response: Misrouting, Reasoning: x}", "not valid JSON"),
        ('{"Response": "Nonsense", "Reasoning": "x"', "cut short"),
        ('{"Response": "Misrouting", "Reas', "cut short"),
        (f"{GOOD} Hope this helps!", "text follows it"),
        (f"I can't do that. {GOOD}", "text stands around"),
        (f"Here:\n```json\n{GOOD}\n```", "text stands around"),
        (f"```\n```json\n{GOOD}\n```\n```", "text stands around"),
        (f"```json\n{GOOD}", "text stands around"),
        ("Response: Insufficient Input\nReasoning: no year", "text stands around"),
        (f"{GOOD}{GOOD}", "more than one"),
        (f"{GOOD}\n{GOOD}", "more than one"),
        (f"[{GOOD}]", "inside another JSON value"),
        (f'{{"result": [{GOOD}]}}', "inside another JSON value"),
        ('{"Response": "Solvable", "Reasoning": ""}', "gives no output"),
        ('{"Response": "Solvable", "Reasoning": "", "Output": " "}', "gives no output"),
        ('{"Response": "Misrouting", "Reasoning": "x", "Output": "y"}', "both"),
        *((text, "unknown category") for text in OF_OTHER_CATEGORIES),
        *((text, "cut short") for text in CUT_SHORT),
    ],
)
def test_an_attempt_in_another_form_is_a_syntax_failure(text: str, problem: str) -> None:
    reply = parse_reply(text)
    assert reply.kind == "syntax_failure"
    assert reply.problem is not None
    assert problem in reply.problem
    assert reply.abstention is None
    assert reply.output is None
    assert reply.raw == text


@pytest.mark.parametrize(
    "text",
    [
        "Doha",
        "",
        " \n",
        "The category Insufficient Input is one of four.",
        "Response: 200 OK, reasoning: none",
        "My response: misrouting of packets is common.",
        '{"Response": 200, "Body": "ok"}',
        '{"Response": "ok"}',
        '{"Reasoning": "step by step", "Answer": "Doha"}',
        '{"segment": {"age": [18, 25]}}',
        r'{"log": "{\"Response\": \"Misrouting\", \"Reasoning\": \"x\"}"}',
        "[1, 2, NaN]",
        '"Misrouting"',
        "null",
        "```python\nprint({})\n```",
        "``````",
        "```",
        "{",
        "{" * 1_000_000,
        "[" * 1_000_000,
        '{"a":' * 200_000,
        "1" * 100_000,
        '"' * 1_000_000,
        "response: " * 100_000,
        "not found",
        "\ud800",
        *OUTPUTS,
    ],
    ids=lambda text: text[:24].encode("unicode_escape").decode() or "nothing",
)
def test_everything_else_is_output_as_it_came(text: str) -> None:
    assert parse_reply(text) == Reply(kind="output", output=text, raw=text)


@pytest.mark.parametrize(
    "text",
    [
        "not found",
        "Not found.",
        " NOT  FOUND!\n",
        '"not found"',
        "“Not found”",
        "**not found**",
        "[not found]",
        "- not found",
        "Answer: not found",
        "**Answer:** Not found.",
        "Final answer: not found",
        "```\nnot found\n```",
    ],
)
def test_a_reply_that_is_the_phrase_is_insufficient_input(text: str) -> None:
    reply = parse_reply(text, phrase="not found")
    assert reply.abstention == Abstention(category="Insufficient Input", rationale="not found")
    assert reply.raw == text


@pytest.mark.parametrize(
    "text",
    [
        "It was not found in Doha.",
        "not found, so Doha",
        "not found not found",
        "notfound",
        "unknown",
        "Answer:",
        "",
        ".",
    ],
)
def test_a_reply_that_merely_holds_the_phrase_is_output(text: str) -> None:
    assert parse_reply(text, phrase="not found").kind == "output"


def test_a_phrase_without_words_matches_nothing() -> None:
    assert parse_reply("", phrase="").kind == "output"
    assert parse_reply("...", phrase="?").kind == "output"


def test_the_typed_form_is_read_beside_a_phrase() -> None:
    assert parse_reply(GOOD, phrase="not found").abstention == parse_reply(GOOD).abstention


def test_a_long_rationale_is_cut_to_forty_words_and_four_hundred_characters() -> None:
    words = " ".join(f"w{i}" for i in range(50))
    reply = parse_reply(json.dumps({"Response": "Misrouting", "Reasoning": words}))
    assert reply.abstention is not None
    assert reply.abstention.rationale.split() == words.split()[:40]
    reply = parse_reply(json.dumps({"Response": "Misrouting", "Reasoning": "x" * 1_000_000}))
    assert reply.abstention is not None
    assert reply.abstention.rationale == "x" * 400


def test_the_form_of_the_schema_is_read() -> None:
    text = '{"Response": "Solvable", "Reasoning": "easy", "Output": "Doha\\n"}'
    assert parse_reply(text) == Reply(kind="output", output="Doha\n", raw=text)


def test_the_schema_is_one_flat_object_with_every_key_required() -> None:
    schema = reply_schema()
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"]) == ["Response", "Reasoning", "Output"]
    assert schema["properties"]["Response"]["enum"] == ["Solvable", *CATEGORIES]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize("category", CATEGORIES)
def test_what_is_wired_is_read_back(category: AbstentionCategory) -> None:
    abstention = Abstention(category=category, rationale='the "year" of Café, or {more}')
    assert parse_reply(wire(abstention)).abstention == abstention


def test_the_prompt_names_every_category_once_and_shows_the_form() -> None:
    prompt = abstention_prompt()
    forms = [parse_reply(line) for line in re.findall(r"^- (\{.*\}) if ", prompt, re.MULTILINE)]
    named = [form.abstention.category for form in forms if form.abstention is not None]
    assert sorted(named) == sorted(CATEGORIES)
    assert "\n\n" not in prompt
    assert "agents:" not in prompt
    assert len(prompt.split()) < 150


@pytest.mark.parametrize("is_structured", [False, True])
def test_lists_stand_behind_the_rules(is_structured: bool) -> None:
    prompt = abstention_prompt(["The one:\n- a", "The other:\n- b"], is_structured=is_structured)
    rules = abstention_prompt(is_structured=is_structured)
    assert prompt == f"{rules}\nThe one:\n- a\nThe other:\n- b"
    assert rules.endswith("Never guess a fact.")


@pytest.mark.parametrize(
    ("category", "rationale", "question"),
    [
        ("Ambiguous Query", "two films fit.", "Which reading do you mean: two films fit?"),
        ("Ambiguous Query", "Which of the two films?", "Which of the two films?"),
        ("Insufficient Input", "The year was not given.", "Can you provide this: The year?"),
        ("Missing Capability", "no web access", "How should this be handled: no web access?"),
    ],
)  # fmt: skip
def test_a_clarifying_question_is_one_question(
    category: AbstentionCategory, rationale: str, question: str
) -> None:
    assert clarifying_question(Abstention(category=category, rationale=rationale)) == question


@pytest.mark.parametrize(
    ("rationale", "item"),
    [
        ("The year of the report was not given.", "The year of the report"),
        ("Missing the customer's age", "the customer's age"),
        ("I need: the year", "the year"),
        ("I don't have the name of the director.", "the name of the director"),
        ("There is no information about Ana", "information about Ana"),
        ("birthplace of Ana Lima", "birthplace of Ana Lima"),
        ("not found", "not found"),
        ("...", "..."),
    ],
)
def test_the_missing_item_is_taken_out_of_the_rationale(rationale: str, item: str) -> None:
    abstention = Abstention(category="Insufficient Input", rationale=rationale)
    assert missing_item(abstention) == item


JSON_TEXT = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([*CATEGORIES, "solvable"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Response", "Reasoning", "Output", "x", "response"]), inner, max_size=4
        )
    ),
    max_leaves=6,
).map(json.dumps)


@st.composite
def mutated_json(draw: st.DrawFn) -> str:
    text = draw(st.just(GOOD) | JSON_TEXT)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 4)))
        piece = draw(
            st.sampled_from(["", '"', "{", "}", "\\", ",", ":", "```", "\n", GOOD, "\x00"])
        )
        text = text[:start] + piece + text[end:]
    return text


@settings(deadline=None)
@given(st.text() | mutated_json(), st.none() | st.text(max_size=10))
@example("\u200d", "\u200d")
def test_any_text_is_one_of_three_kinds_and_is_kept(text: str, phrase: str | None) -> None:
    reply = parse_reply(text, phrase=phrase)
    given_parts = [part is not None for part in (reply.output, reply.abstention, reply.problem)]
    kinds = ["output", "abstention", "syntax_failure"]
    assert given_parts == [reply.kind == kind for kind in kinds]
    assert reply.raw == text
    if reply.abstention is not None:
        assert parse_reply(wire(reply.abstention)).abstention == reply.abstention


@settings(deadline=None)
@given(st.text(min_size=1))
def test_questions_and_items_are_never_empty(rationale: str) -> None:
    abstention = Abstention(category="Insufficient Input", rationale=rationale)
    assert missing_item(abstention) != ""
    assert clarifying_question(abstention).endswith("?")
