"""API-Bank: dialogues dealt over agents, calls replayed strictly, stated calls scored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import realdata

import splice
from skeletons.api_bank import load
from skeletons.api_bank.dialogues import (
    SEARCHER,
    Called,
    Recordings,
    call_key,
    read_dialogues,
    receipt,
)
from skeletons.api_bank.workload import score
from skeletons.replay import NotRecorded, Parameter, legal_names, replay_tool
from splice.errors import DataError, SettingsError
from splice.executor import execute
from splice.records import Completion, Request, ToolRequest
from splice.tools import call_tool
from splice.workload import Example, Workload

TOKEN = {"username": "ana", "password": "pw1"}
MEETING = {"token": "t0k3n", "topic": "launch", "attendees": "['Bo', 'Cy']"}


def user(text: str) -> dict[str, Any]:
    return {"role": "User", "text": text}


def desk(text: str) -> dict[str, Any]:
    return {"role": "AI", "text": text}


def api(name: str, arguments: dict[str, Any], output: Any, exception: str | None = None) -> Any:
    result = {"input": arguments, "output": output, "exception": exception}
    return {"role": "API", "api_name": name, "param_dict": arguments, "result": result}


def dialogue(name: str, *turns: dict[str, Any], level: int = 1) -> dict[str, Any]:
    apis = sorted({turn["api_name"] for turn in turns if turn["role"] == "API"})
    n_calls = sum(turn["role"] == "API" for turn in turns)
    return {"id": name, "level": level, "n_calls": n_calls, "apis": apis, "turns": list(turns)}


MEET = dialogue(
    "meet",
    user("Please book a meeting."),
    desk("Sure. What is it about?"),
    user("It is about the launch, with Bo and Cy."),
    desk("Noted. Who are you?"),
    user("I am ana, password pw1."),
    api("GetToken", TOKEN, {"token": "t0k3n"}),
    api("AddMeeting", MEETING, "success"),
    desk("Done."),
    user("Thanks!"),
)
WIKI = dialogue("wiki", user("What is tea?"), api("Wiki", {"keyword": "tea"}, "A drink."))
TABLE = [
    {
        "name": "GetToken",
        "description": "Gives a token.",
        "input_parameters": {"username": {"type": "str", "description": "The user's name."}},
        "output_parameters": {},
    },
    {"name": "Wiki", "description": "Looks up.", "input_parameters": ["None"]},
]


def written(folder: Path, *rows: dict[str, Any], name: str = "test.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "apis.json").write_text(json.dumps(TABLE), "utf-8")
    return folder


def loaded(folder: Path, *rows: dict[str, Any]) -> Workload:
    return load(written(folder, *rows), split="test", options={})


def recordings(*rows: dict[str, Any]) -> Recordings:
    calls = [turn for row in rows for turn in row["turns"] if turn["role"] == "API"]
    return Recordings((f"row {n}", Called.model_validate(c)) for n, c in enumerate(calls))


def requests(*calls: tuple[str, dict[str, Any]]) -> Completion:
    asked = [
        ToolRequest(id=f"c{place}", name=name, arguments=json.dumps(arguments))
        for place, (name, arguments) in enumerate(calls)
    ]
    return Completion(text="", tool_requests=asked, finish_reason="tool_calls", model="scripted")


# --- what each node knows ---------------------------------------------------------------------


def test_the_users_later_turns_are_dealt_by_whom_they_are_about(tmp_path: Path) -> None:
    (example,) = loaded(tmp_path, MEET).examples
    assert example.query.text == "Please book a meeting."
    notes = {node: [d.text for d in docs] for node, docs in example.query.context.items()}
    assert notes["profile"] == ["Asked: Who are you?\nUser: I am ana, password pw1."]
    assert notes["request"] == [
        "Asked: What is it about?\nUser: It is about the launch, with Bo and Cy."
    ]
    assert "GetToken: Gives a token." in notes["finder"][0]
    assert example.gap_edges == (("profile", "caller"),)
    assert ("profile", "caller") in {
        (edge.source, edge.receiver) for edge in loaded(tmp_path, MEET).workflow.candidate_edges
    }


def test_a_dialogue_with_one_turn_has_no_gap(tmp_path: Path) -> None:
    (example,) = loaded(tmp_path, WIKI).examples
    assert example.gap_edges == ()
    assert example.query.context["profile"] == example.query.context["request"] == ()


def test_without_a_turn_about_the_user_every_second_one_goes_to_the_profile(
    tmp_path: Path,
) -> None:
    row = dialogue(
        "hotel",
        user("Book a room."),
        user("The Astoria."),
        user("From 2022-03-14."),
        api("Book", {"hotel": "Astoria", "start": "2022-03-14"}, 11),
    )
    (example,) = loaded(tmp_path, row).examples
    assert [d.text for d in example.query.context["profile"]] == ["User: From 2022-03-14."]
    assert example.gap_edges == (("profile", "caller"),)


def test_an_account_that_the_user_never_names_is_on_file(tmp_path: Path) -> None:
    row = dialogue("short", user("Log me in."), api("GetToken", TOKEN, {"token": "t0k3n"}))
    (example,) = loaded(tmp_path, row).examples
    assert [d.text for d in example.query.context["profile"]] == [
        "On file: username ana",
        "On file: password pw1",
    ]
    assert example.gap_edges == (("profile", "caller"),)


def test_what_an_earlier_call_returned_is_no_gap(tmp_path: Path) -> None:
    row = dialogue(
        "recovered",
        user("What is on, and who plays?"),
        user("a"),
        user("It is Hamlet."),
        api("Today", {}, "Hamlet"),
        api("Cast", {"play": "Hamlet"}, "Bo"),
    )
    (example,) = loaded(tmp_path, row).examples
    assert [d.text for d in example.query.context["profile"]] == ["User: It is Hamlet."]
    assert example.gap_edges == ()


def test_an_argument_in_other_words_leaves_the_gap_unknown(tmp_path: Path) -> None:
    row = dialogue(
        "date", user("Remind me."), user("a"), user("May 1st."), api("Add", {"d": "05-01"}, 1)
    )
    (example,) = loaded(tmp_path, row).examples
    assert example.gap_edges is None


def test_results_retold_by_the_desk_reach_no_note_holder(tmp_path: Path) -> None:
    row = dialogue(
        "retold",
        user("Book."),
        api("GetToken", TOKEN, {"token": "t0k3n"}),
        desk("Your token is t0k3n. What is the topic?"),
        user("launch"),
        api("AddMeeting", MEETING, "success"),
    )
    (example,) = loaded(tmp_path, row).examples
    assert "t0k3n" not in example.query.model_dump_json()


def test_searches_for_apis_and_failed_calls_are_not_asked_for(tmp_path: Path) -> None:
    row = dialogue(
        "found",
        user("What is tea?"),
        api(SEARCHER, {"keywords": "encyclopedia"}, [{"name": "Wiki"}]),
        api("Wiki", {"keyword": "te"}, None, exception="no such page"),
        api("Wiki", {"keyword": "tea"}, "A drink."),
        api("Wiki", {"keyword": "tea"}, "A drink."),
    )
    (example,) = loaded(tmp_path, row).examples
    assert [call["arguments"] for call in example.reference["calls"]] == [{"keyword": "tea"}]


def test_tools_differ_by_dialogue_and_include_other_apis(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, MEET, WIKI).examples
    assert first.workflow is not None
    assert second.workflow is not None
    assert {t.spec.name for t in first.workflow.tools} >= {"GetToken", "AddMeeting"}
    assert {t.spec.name for t in second.workflow.tools} == {"Wiki", "GetToken", "AddMeeting"}
    assert {tool.effects for tool in first.workflow.tools} == {"read"}
    again = loaded(tmp_path, MEET, WIKI)
    assert [e.query for e in again.examples] == [first.query, second.query]
    assert again.workflow_of(again.examples[0]).fingerprint == first.workflow.fingerprint


# --- strict replay ----------------------------------------------------------------------------


def test_arguments_are_compared_as_text() -> None:
    store = recordings(MEET)
    answer = store.answer("AddMeeting", {**MEETING, "attendees": ["Bo", "Cy"], "note": None})
    assert answer.endswith('result: "success"')


@pytest.mark.parametrize(
    "arguments",
    [{}, {"username": "ana"}, {**TOKEN, "x": "1"}, {**TOKEN, "password": "PW1"}],
)
def test_a_call_that_nobody_recorded_is_an_error_that_names_it(arguments: dict[str, Any]) -> None:
    with pytest.raises(NotRecorded) as caught:
        recordings(MEET, WIKI).answer("GetToken", arguments)
    message = str(caught.value)
    assert f"GetToken with the arguments {json.dumps(arguments)}" in message
    assert "1 recorded calls" in message
    assert ("pw1" in message) == ("pw1" in arguments.values())


async def test_a_miss_is_told_to_the_caller_and_recorded(tmp_path: Path) -> None:
    (example,) = loaded(tmp_path, WIKI).examples
    assert example.workflow is not None
    asked = ToolRequest(id="c", name="Wiki", arguments='{"keyword": "coffee"}')
    made = await call_tool("caller", asked, example.workflow.tools_by_name, None)
    assert made.outcome == "error"
    assert made.result.startswith('NotRecorded: no recording of Wiki with the arguments {"keyword"')
    assert "A drink" not in made.result


async def test_a_recorded_failure_fails_again() -> None:
    row = dialogue("f", api("Wiki", {"keyword": "x"}, None, exception="no such page"))
    wiki = recordings(row).tool("Wiki", {})
    asked = ToolRequest(id="c", name="Wiki", arguments='{"keyword": "x"}')
    made = await call_tool("caller", asked, {"Wiki": wiki}, None)
    assert (made.outcome, made.result) == ("error", "RecordedFailure: no such page")


def test_two_results_of_one_call_are_refused(tmp_path: Path) -> None:
    other = dialogue("wiki2", user("Tea?"), api("Wiki", {"keyword": " tea"}, "A leaf."))
    with pytest.raises(
        DataError, match=r"test\.jsonl:2 turns\.1: field 'result': Wiki has another"
    ):
        loaded(tmp_path, WIKI, other)


def test_recordings_come_from_all_split_files(tmp_path: Path) -> None:
    written(tmp_path, MEET, name="train.jsonl")
    workload = loaded(tmp_path, WIKI)
    assert len(workload.examples) == 1
    assert "3 recordings" in workload.about
    assert set(workload.sources) == {"train.jsonl", "test.jsonl", "apis.json"}


def test_a_tool_has_the_parameters_of_the_recordings() -> None:
    more = dialogue("w", api("Wiki", {"keyword": "a", "lang": "de"}, "x"))
    parameters = recordings(WIKI, more).tool("Wiki", {}).spec.parameters
    assert list(parameters["properties"]) == ["keyword", "lang"]
    assert parameters["required"] == ["keyword"]


@pytest.mark.parametrize(
    "name", ["from", "copy", "model_dump", "_x", "self", "call", "arguments", "array[]", "9", "x-y"]
)
async def test_any_argument_name_reaches_the_recordings(name: str) -> None:
    given: list[dict[str, Any]] = []

    def answer(arguments: Any) -> str:
        given.append(dict(arguments))
        return "ok"

    made = replay_tool("t", "", [Parameter(name=name), Parameter(name="city")], answer)
    (legal,) = set(made.spec.parameters["properties"]) - {"city"}
    asked = ToolRequest(id="c", name="t", arguments=json.dumps({legal: 1}))
    assert (await call_tool("caller", asked, {"t": made}, None)).result == "ok"
    assert given == [{name: 1}]


def test_names_that_become_alike_stay_apart() -> None:
    names = ["x-y", "x y", "arg_x_y", "x" * 80, "x" * 81]
    legal = legal_names(names)
    assert list(legal.values()) == names
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name) for name in legal)


# --- the score --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "calls", "f1"),
    [
        (None, 0.0, 0.0),
        ("NO CALLS", 0.0, 0.0),
        ('CALL Wiki {"keyword": "tea"}\nRESULT "A drink."', 1.0, 1.0),
        ('CALL Wiki {"keyword": "tea"}\nCALL Wiki {"keyword": "tea"}', 1.0, 1.0),
        ('CALL Wiki {"keyword": "tea"}\nCALL Wiki {"keyword": "te"}', 0.0, 2 / 3),
        ('CALL Wiki {"keyword": "tea", "lang": "en"}', 0.0, 0.0),
        ('CALL Wikis {"keyword": "tea"}', 0.0, 0.0),
        ('RESULT CALL Wiki {"keyword": "tea"}', 0.0, 0.0),
        ('CALL Wiki ["tea"]\nCALL Wiki {"keyword"\nCALL', 0.0, 0.0),
        ("CALL Wiki " + "[" * 100_000, 0.0, 0.0),
    ],
)
def test_stated_calls_are_scored_by_api_and_arguments(
    tmp_path: Path, answer: str | None, calls: float, f1: float
) -> None:
    (example,) = loaded(tmp_path, WIKI).examples
    assert score(example, answer) == pytest.approx({"calls": calls, "f1": f1})


# --- malformed data ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**WIKI, "turns": [{"role": "User"}]}, r":2: field 'turns\.0\.User\.text' is missing"),
        ({**WIKI, "turns": [{"role": "Cat", "text": ""}]}, r":2: field 'turns\.0'"),
        ({**WIKI, "extra": 1}, r":2: unknown field 'extra'"),
        ({**WIKI, "id": ""}, r":2: field 'id'"),
        ({**WIKI, "turns": [api("../x", {}, 1)]}, r":2: field 'turns\.0\.API\.api_name'"),
        ([], r":2: not a row"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(
    tmp_path: Path, row: Any, message: str
) -> None:
    with pytest.raises(DataError, match=r"test\.jsonl" + message):
        loaded(tmp_path, MEET, row)


def test_missing_files_options_and_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"val\.jsonl: No such file"):
        load(written(tmp_path, WIKI), split="validation", options={})
    with pytest.raises(SettingsError, match="unknown option 'host'"):
        load(tmp_path, split="test", options={"host": "x"})
    with pytest.raises(SettingsError, match="needs data"):
        load(None, split="test", options={})
    (tmp_path / "apis.json").write_text("{}")
    with pytest.raises(DataError, match=r"apis\.json: not a list"):
        load(tmp_path, split="test", options={})


def test_a_file_without_any_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dialogue has"):
        loaded(tmp_path, dialogue("empty"), dialogue("talk", user("Hi."), desk("Hi.")))


# --- end to end -------------------------------------------------------------------------------


def agents(**caller: Any) -> Any:
    """Replies of the other agents are fixed; the caller makes its calls, then gives receipts."""
    rounds = iter(caller["rounds"])

    def reply(request: Request) -> Any:
        if request.node != "caller":
            return {"profile": "ana, pw1", "request": "launch", "finder": "GetToken"}[
                str(request.node)
            ]
        asked = next(rounds, None)
        if asked is not None:
            return requests(*asked)
        results = [m.content for m in request.messages if m.role == "tool"]
        receipts = [found for text in results for found in re.findall(r"receipt: (\w+)", text)]
        return " ".join(receipts) or "none"

    return splice.ScriptedModel(reply)


async def run(example: Example, model: splice.ScriptedModel) -> splice.Trace:
    assert example.workflow is not None
    return await execute(example.workflow, example.query, model)


async def test_a_run_states_the_calls_that_were_made(tmp_path: Path) -> None:
    (example,) = loaded(tmp_path, MEET).examples
    rounds = [[("GetToken", TOKEN)], [("AddMeeting", {**MEETING, "attendees": ["Bo", "Cy"]})]]
    model = agents(rounds=rounds)
    trace = await run(example, model)
    assert trace.answer is not None
    assert trace.answer.split("\n") == [
        'CALL GetToken {"password": "pw1", "username": "ana"}',
        'RESULT {"token": "t0k3n"}',
        f"CALL AddMeeting {call_key(MEETING)}",
        'RESULT "success"',
    ]
    assert score(example, trace.answer) == {"calls": 1.0, "f1": 1.0}
    asked = next(r for r in model.requests if r.node == "caller")
    assert "pw1" not in " ".join(message.content for message in asked.messages)


async def test_a_call_that_missed_is_not_stated(tmp_path: Path) -> None:
    (example,) = loaded(tmp_path, MEET).examples
    rounds = [[("GetToken", TOKEN), ("GetToken", {"username": "bo"})]]
    trace = await run(example, agents(rounds=rounds))
    assert score(example, trace.answer) == pytest.approx({"calls": 0.0, "f1": 2 / 3})
    made = trace.by_node["caller"].tool_calls
    assert [call.outcome for call in made] == ["ok", "error"]


async def test_a_caller_that_makes_no_call_has_none_to_show(tmp_path: Path) -> None:
    (example,) = loaded(tmp_path, MEET).examples
    trace = await run(example, agents(rounds=[]))
    assert trace.answer == "NO CALLS"
    assert score(example, trace.answer) == {"calls": 0.0, "f1": 0.0}


# --- real data --------------------------------------------------------------------------------


def test_all_recorded_calls_of_the_real_data_replay() -> None:
    folder = realdata.data_set("api_bank")
    files = ("train.jsonl", "val.jsonl", "test.jsonl")
    calls = [
        turn
        for name in files
        for _, row in read_dialogues(folder / name)
        for turn in row.turns
        if isinstance(turn, Called)
    ]
    store = Recordings(("", call) for call in calls)
    assert len(store) == len({receipt(call) for call in calls}) == 244
    for call in calls:
        assert f"receipt: {receipt(call)}\n" in store.answer(call.api_name, call.param_dict)


@pytest.mark.parametrize(("split", "n"), [("train", 122), ("validation", 30), ("test", 50)])
async def test_the_gold_calls_of_real_dialogues_are_made_through_the_tools(
    split: Any, n: int
) -> None:
    workload = load(realdata.data_set("api_bank"), split=split, options={})
    assert len(workload.examples) == n
    for example in workload.examples:
        gold = [(call["name"], call["arguments"]) for call in example.reference["calls"]]
        trace = await run(example, agents(rounds=[gold]))
        assert score(example, trace.answer) == {"calls": 1.0, "f1": 1.0}
