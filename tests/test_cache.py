import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopbackServer, Reply

from splice.errors import ModelError, SettingsError, StoreError
from splice.models.cache import CachedModel
from splice.models.endpoint import Endpoint
from splice.models.protocol import ChatModel
from splice.models.scripted import ScriptedModel
from splice.records import (
    ChatMessage,
    Completion,
    ModelIdentity,
    ModelSettings,
    Price,
    Request,
    TokenLogprob,
    ToolRequest,
    ToolSpec,
    Usage,
)

SEARCH = ToolSpec(name="search", description="Find.", parameters={"type": "object"})
SUM = ToolSpec(name="sum", description="Add.", parameters={"type": "object"})


def ask(text: str = "Where?", **fields: Any) -> Request:
    return Request(messages=(ChatMessage(role="user", content=text),), **fields)


def numbered(**fields: Any) -> ScriptedModel:
    """A model whose every answer is another one, so that two answers tell two calls."""
    count = iter(range(1000))
    return ScriptedModel(lambda request: f"answer {next(count)}", **fields)


def no_retry(reason: str, status: int | None, elapsed_s: float) -> None:
    raise AssertionError("no attempt is repeated here")


async def texts(model: ChatModel, *requests: Request) -> list[str]:
    return [(await model.complete(request, no_retry)).text for request in requests]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sqlite"


def test_cached_model_is_a_chat_model() -> None:
    assert isinstance(CachedModel(numbered()), ChatModel)


async def test_an_equal_request_is_answered_from_the_cache_and_says_so() -> None:
    inner = numbered()
    model = CachedModel(inner)
    first = await model.complete(ask(), no_retry)
    again = await model.complete(ask(), no_retry)
    assert first.is_cached is False
    assert again == first.model_copy(update={"is_cached": True})
    assert len(inner.requests) == 1


async def test_stage_node_and_query_are_no_part_of_the_key() -> None:
    model = CachedModel(numbered())
    places = [
        ask(),
        ask(stage="trial"),
        ask(node="writer"),
        ask(query_id="q7"),
    ]
    assert set(await texts(model, *places)) == {"answer 0"}


def different_requests() -> list[Request]:
    call = ToolRequest(id="c", name="search", arguments="{}")
    system = ChatMessage(role="system", content="Where?")
    user = ChatMessage(role="user", content="Where?")
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_tokens": 7},
        {"seed": 1},
        {"seed": None},
        {"stop": ("x",)},
        {"logprobs": 0},
        {"logprobs": 3},
    ]
    return [
        ask(),
        ask("Where"),
        ask("Where?\x00"),
        ask("Where?\ud800"),
        ask(rollout=1),
        ask(rollout=2),
        ask(tools=(SEARCH,)),
        ask(tools=(SUM,)),
        ask(tools=(SEARCH, SUM)),
        ask(tools=(SUM, SEARCH)),
        ask(response_schema={"type": "object"}),
        ask(response_schema={"type": "array"}),
        *(ask(settings=ModelSettings(**change)) for change in changes),
        Request(messages=(system,)),
        Request(messages=(user, user)),
        Request(messages=(user, ChatMessage(role="assistant", content=""))),
        Request(messages=(user, ChatMessage(role="assistant", content="", tool_requests=(call,)))),
        Request(messages=(user, ChatMessage(role="tool", content="", tool_request_id="a"))),
        Request(messages=(user, ChatMessage(role="tool", content="", tool_request_id="b"))),
    ]


async def test_requests_that_differ_in_anything_the_model_sees_share_no_record() -> None:
    requests = different_requests()
    model = CachedModel(numbered())
    answers = await texts(model, *requests)
    assert len(set(answers)) == len(requests)
    assert await texts(model, *requests) == answers


async def test_k_rollouts_give_k_records() -> None:
    model = CachedModel(numbered())
    rollouts = [ask(rollout=k) for k in range(30)]
    assert await texts(model, *rollouts) == [f"answer {k}" for k in range(30)]


async def test_the_order_of_the_fields_of_a_schema_makes_no_difference() -> None:
    model = CachedModel(numbered())
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert set(await texts(model, ask(response_schema=one), ask(response_schema=other))) == {
        "answer 0"
    }


@pytest.mark.parametrize(
    "other",
    [
        {"name": "m2"},
        {"provider": "elsewhere"},
        {"digest": "weights 2"},
        {"version": "2"},
    ],
)
async def test_models_that_differ_in_their_identity_share_no_record(
    path: Path, other: dict[str, str]
) -> None:
    known = {"name": "m", "provider": "mine", "digest": "weights 1", "version": "1"}

    class Named(ScriptedModel):
        def __init__(self, text: str, identity: ModelIdentity) -> None:
            super().__init__(lambda request: text)
            self._identity = identity

        def identity(self, name: str | None) -> ModelIdentity:
            return self._identity

    one = CachedModel(Named("one", ModelIdentity(**known)), path)
    two = CachedModel(Named("two", ModelIdentity(**{**known, **other})), path)
    assert await texts(one, ask()) == ["one"]
    assert await texts(two, ask()) == ["two"]
    assert await texts(one, ask()) == ["one"]
    # Both can be replayed from the one file, the later one first where they contradict.
    assert await texts(CachedModel.replay(path), ask()) == ["two"]


async def test_of_equal_requests_at_the_same_time_one_is_sent() -> None:
    inner = numbered(latency_s=0.01)
    model = CachedModel(inner)
    completions = await asyncio.gather(*(model.complete(ask(), no_retry) for _ in range(50)))
    assert {completion.text for completion in completions} == {"answer 0"}
    assert sum(not completion.is_cached for completion in completions) == 1
    assert len(inner.requests) == 1


async def test_different_requests_do_not_wait_for_each_other() -> None:
    inner = numbered(latency_s=0.2)
    model = CachedModel(inner)
    async with asyncio.timeout(5):
        await asyncio.gather(*(model.complete(ask(str(i)), no_retry) for i in range(200)))
    assert len(inner.requests) == 200


async def test_a_cancelled_request_leaves_the_next_one_to_ask() -> None:
    inner = numbered(latency_s=0.05)
    model = CachedModel(inner)
    first = asyncio.create_task(model.complete(ask(), no_retry))
    second = asyncio.create_task(model.complete(ask(), no_retry))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).text == "answer 0"
    assert (await second).is_cached is False
    assert first.cancelled()
    assert len(inner.requests) == 2


async def test_an_error_is_not_cached() -> None:
    replies: list[Any] = [ModelError("down", reason="server_error"), "Doha"]
    model = CachedModel(ScriptedModel({"run": replies}))
    with pytest.raises(ModelError, match="down"):
        await model.complete(ask(), no_retry)
    assert await texts(model, ask(), ask()) == ["Doha", "Doha"]


def test_a_file_outlives_the_model_that_wrote_it(path: Path) -> None:
    first = asyncio.run(texts(CachedModel(numbered(), path), ask("a"), ask("b")))
    untouched = ScriptedModel({})
    assert asyncio.run(texts(CachedModel(untouched, path), ask("a"), ask("b"))) == first
    assert untouched.requests == []


def test_one_model_serves_one_event_loop_after_the_other() -> None:
    model = CachedModel(numbered(latency_s=0.001))

    async def at_once() -> list[Completion]:
        return await asyncio.gather(*(model.complete(ask(), no_retry) for _ in range(5)))

    assert {c.text for c in asyncio.run(at_once()) + asyncio.run(at_once())} == {"answer 0"}


async def test_everything_in_a_completion_comes_back(path: Path) -> None:
    full = Completion(
        text="a\x00b\ud800 \u2028 \U0001f600",
        tool_requests=(ToolRequest(id="c", name="search", arguments="{not json"),),
        finish_reason="tool_calls",
        usage=Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=3, reasoning_tokens=2),
        model="m-2026",
        logprobs=(TokenLogprob(token="a", logprob=-0.1, top=(("a", -0.1), ("b", -2.5))),),
    )
    model = CachedModel(ScriptedModel({"run": [full]}), path)
    assert await model.complete(ask(), no_retry) == full
    assert await model.complete(ask(), no_retry) == full.model_copy(update={"is_cached": True})


async def test_record_always_asks_and_keeps_the_latest(path: Path) -> None:
    model = CachedModel(numbered(), path, mode="record")
    assert await texts(model, ask(), ask()) == ["answer 0", "answer 1"]
    assert await texts(CachedModel.replay(path), ask()) == ["answer 1"]


async def test_replay_answers_from_the_file_alone(path: Path) -> None:
    recorded = CachedModel(numbered(name="m"), path, mode="record")
    requests = [ask("a"), ask("b"), ask("a", settings=ModelSettings(name="n")), ask("a", rollout=1)]
    answers = await texts(recorded, *requests)
    model = CachedModel.replay(path)
    assert await texts(model, *requests) == answers
    assert (await model.complete(ask("a"), no_retry)).is_cached
    assert model.identity(None) == ModelIdentity(name="m", provider="scripted")
    assert model.identity("n") == ModelIdentity(name="n", provider="scripted")
    assert model.price(None) is None
    await model.aclose()


async def test_replay_never_asks_the_model_that_it_is_given(path: Path) -> None:
    await texts(CachedModel(numbered(), path), ask("a"))
    inner = numbered(price=Price(prompt=1, completion=1))
    model = CachedModel(inner, path, mode="replay")
    assert await texts(model, ask("a")) == ["answer 0"]
    with pytest.raises(ModelError):
        await model.complete(ask("b"), no_retry)
    assert inner.requests == []
    assert model.price(None) == Price(prompt=1, completion=1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("b", node="writer"), "node 'writer' to the default model"),
        (ask("b", stage="generate"), "stage 'generate'"),
        (ask("a", settings=ModelSettings(name="n"), node="w"), "model 'n'"),
        (ask("a", rollout=3), "rollout 3"),
    ],
)
async def test_a_request_that_was_not_recorded_is_named(
    path: Path, request_: Request, words: str
) -> None:
    await texts(CachedModel(numbered(), path), ask("a"))
    with pytest.raises(ModelError) as caught:
        await CachedModel.replay(path).complete(request_, no_retry)
    assert caught.value.reason == "not_recorded"
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


async def test_the_identity_of_a_model_that_was_not_recorded_is_an_error(path: Path) -> None:
    await texts(CachedModel(numbered(), path), ask())
    with pytest.raises(ModelError, match="nothing is recorded for model 'n'"):
        CachedModel.replay(path).identity("n")


def test_replay_without_a_file_makes_none(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no file"):
        CachedModel.replay(path)
    assert not path.exists()
    with pytest.raises(SettingsError, match="path"):
        CachedModel(numbered(), mode="replay")


@pytest.mark.parametrize("mode", ["cache", "record"])
def test_a_model_to_ask_is_needed_to_ask(mode: Any) -> None:
    with pytest.raises(SettingsError, match=mode):
        CachedModel(None, mode=mode)


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_file_of_another_kind_is_refused_and_left_alone(path: Path, mode: Any) -> None:
    path.write_text("my diary " * 1000)
    with pytest.raises(StoreError, match=path.name):
        CachedModel(numbered(), path, mode=mode)
    assert path.read_text() == "my diary " * 1000


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        CachedModel(numbered(), tmp_path)


def test_folders_of_the_file_are_made(tmp_path: Path) -> None:
    asyncio.run(texts(CachedModel(numbered(), tmp_path / "a" / "b" / "c.sqlite"), ask()))
    assert (tmp_path / "a" / "b" / "c.sqlite").is_file()


def change(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_store_of_a_later_version_is_refused(path: Path, mode: Any) -> None:
    asyncio.run(texts(CachedModel(numbered(), path), ask()))
    change(path, "PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="99"):
        CachedModel(numbered(), path, mode=mode)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"text": 1}', '{"text": "a", "evil": "b"}'])
async def test_a_damaged_record_is_an_error_that_names_the_file(path: Path, text: str) -> None:
    model = CachedModel(numbered(), path)
    await texts(model, ask())
    change(path, f"UPDATE completions SET completion = '{text}'")
    with pytest.raises(StoreError, match=path.name):
        await model.complete(ask(), no_retry)


def test_after_closing_the_file_alone_can_be_copied(path: Path, tmp_path: Path) -> None:
    model = CachedModel(numbered(), path)
    asyncio.run(texts(model, ask()))
    asyncio.run(model.aclose())
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(path.read_bytes())
    assert asyncio.run(texts(CachedModel.replay(copy), ask())) == ["answer 0"]
    assert asyncio.run(texts(model, ask("more"))) == ["answer 1"]


async def test_two_models_share_one_file_at_the_same_time(path: Path) -> None:
    one, two = CachedModel(numbered(name="one"), path), CachedModel(numbered(name="two"), path)
    requests = [ask(str(i)) for i in range(50)]
    await asyncio.gather(texts(one, *requests), texts(two, *requests))
    again = CachedModel(ScriptedModel({}, name="one"), path)
    assert await texts(again, *requests) == [f"answer {i}" for i in range(50)]


def test_the_file_holds_json_and_no_key_of_the_server(path: Path) -> None:
    with LoopbackServer(lambda request: Reply(text="Doha")) as server:
        inner = Endpoint(model="m", base_url=server.base_url, api_key="sk-very-secret-1")
        model = CachedModel(inner, path)
        asyncio.run(texts(model, ask(), ask()))
        asyncio.run(model.aclose())
    assert server.n_requests == 1
    assert b"sk-very-secret" not in path.read_bytes()
    connection = sqlite3.connect(path)
    rows = list(connection.execute("SELECT completion FROM completions"))
    connection.close()
    assert [json.loads(text)["text"] for (text,) in rows] == ["Doha"]


async def test_the_inner_model_tells_identity_and_price_and_is_closed() -> None:
    class Closing(ScriptedModel):
        n_closed = 0

        async def aclose(self) -> None:
            self.n_closed += 1

    inner = Closing({}, name="m", price=Price(prompt=1, completion=2))
    model = CachedModel(inner)
    assert model.identity(None) == inner.identity(None)
    assert model.price("m") == inner.price("m")
    await model.aclose()
    assert inner.n_closed == 1
