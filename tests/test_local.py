from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splice.errors import ModelError, SettingsError, WeightsError
from splice.models import local, weights
from splice.models.endpoint import Endpoint
from splice.models.local import LocalModel
from splice.models.protocol import ChatModel
from splice.models_cli import app
from splice.records import ChatMessage, Completion, ModelSettings, Price, Request

NOT_REALLY_WEIGHTS = b"GGUF, but what follows is no model"
WANTED = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def ask(text: str, **changes: Any) -> Request:
    schema = changes.pop("response_schema", None)
    return Request(
        messages=(ChatMessage(role="user", content=text),),
        settings=ModelSettings(**{"max_tokens": 24, **changes}),
        response_schema=schema,
    )


def no_retry(reason: str, status: int | None, elapsed_s: float) -> None:
    raise AssertionError(f"an attempt was repeated: {reason}, {status}")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for tests that need no weights."""
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("SPLICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPLICE_LOCAL_MODEL", raising=False)
    return tmp_path / "cache" / "models"


@pytest.fixture
def file(own_cache: Path, tmp_path: Path) -> Path:
    """A file that looks like weights from afar."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(NOT_REALLY_WEIGHTS)
    return path


# --- choosing --------------------------------------------------------------------------------


def test_without_the_extra_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"pip install 'splice-repair\[local\]'"):
        LocalModel()


@pytest.mark.usefixtures("own_cache")
def test_weights_that_are_not_here_are_named_with_the_command_that_fetches_them() -> None:
    with pytest.raises(WeightsError, match=r"`splice models pull qwen2\.5-coder-1\.5b` .*1,117 MB"):
        LocalModel("1.5b")


@pytest.mark.usefixtures("own_cache")
def test_the_default_is_the_small_coder() -> None:
    with pytest.raises(WeightsError, match=r"pull qwen2\.5-coder-0\.5b"):
        LocalModel()


@pytest.mark.usefixtures("own_cache")
def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingsError, match=r"'llama'.*smollm2-135m"):
        LocalModel("llama")


def test_a_file_of_ones_own_needs_no_name(file: Path) -> None:
    model = LocalModel(path=file)
    identity = model.identity(None)
    assert (identity.name, identity.provider) == ("mine", "local")
    assert identity.digest == hashlib.sha256(NOT_REALLY_WEIGHTS).hexdigest()
    assert (identity.version or "").startswith("xllamacpp 20")
    assert isinstance(model, ChatModel)


def test_a_file_of_ones_own_can_be_given_a_name(file: Path) -> None:
    assert LocalModel("house", path=file).identity("house").name == "house"


def test_the_variable_names_the_file_only_where_no_model_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLICE_LOCAL_MODEL", str(file))
    assert LocalModel().identity(None).name == "mine"
    with pytest.raises(WeightsError, match="pull smollm2-135m"):
        LocalModel("135m")


def test_a_file_that_is_no_gguf_is_refused(file: Path) -> None:
    file.write_bytes(b"PK\3\4")
    with pytest.raises(WeightsError, match=r"mine\.gguf is no GGUF file"):
        LocalModel(path=file)


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(WeightsError, match=r"can't read the weights .*none\.gguf"):
        LocalModel(path=file.with_name("none.gguf"))


@pytest.mark.parametrize("numbers", [{"threads": 0}, {"context": -1}])
def test_numbers_below_one_are_refused(file: Path, numbers: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        LocalModel(path=file, **numbers)


async def test_another_models_name_is_refused(file: Path) -> None:
    model = LocalModel(path=file)
    with pytest.raises(SettingsError, match=r"'gpt'.*'mine' runs"):
        model.identity("gpt")
    with pytest.raises(SettingsError, match="'gpt'"):
        model.price("gpt")
    with pytest.raises(SettingsError, match="'gpt'"):
        await model.complete(ask("hello", name="gpt"), no_retry)


def test_a_local_model_costs_nothing(file: Path) -> None:
    assert LocalModel(path=file).price(None) == Price(prompt=0, completion=0)


async def test_a_model_that_was_not_used_can_be_closed(file: Path) -> None:
    await LocalModel(path=file).aclose()


async def test_weights_that_cannot_be_loaded_are_a_mistake_in_the_settings(file: Path) -> None:
    model = LocalModel(path=file)
    with pytest.raises(SettingsError, match=r"can't serve .*mine\.gguf with a context of 4096"):
        await model.complete(ask("hello"), no_retry)


def test_choosing_a_model_loads_neither_llama_nor_a_client(file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from splice.models.local import LocalModel;"
        f"LocalModel(path=Path({str(file)!r}));"
        "print([name for name in ('xllamacpp', 'openai', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


# --- the commands ----------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_the_list_tells_names_and_what_is_missing() -> None:
    shown = CliRunner().invoke(app, ["list"])
    assert shown.exit_code == 0
    for known in weights.known():
        assert re.search(rf"{re.escape(known.name)} .*no\s*$", shown.stdout, re.MULTILINE)


def test_the_list_as_json_is_complete(own_cache: Path) -> None:
    rows = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert [row["name"] for row in rows] == [known.name for known in weights.known()]
    assert rows[0]["path"] == str(own_cache / weights.known()[0].file)
    assert rows[0]["is_present"] is False


@pytest.mark.usefixtures("own_cache")
def test_the_path_of_missing_weights_is_an_exit_with_advice_and_no_output() -> None:
    shown = CliRunner().invoke(app, ["path", "135m"])
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert "splice models pull smollm2-135m" in shown.stderr


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("command", ["path", "pull", "serve"])
def test_commands_let_an_unknown_name_through_as_our_error(command: str) -> None:
    assert isinstance(CliRunner().invoke(app, [command, "7b"]).exception, SettingsError)


# --- the real thing --------------------------------------------------------------------------


@pytest.fixture
def small() -> Path:
    """The smallest known weights."""
    pytest.importorskip("xllamacpp")
    if not weights.is_present("smollm2-135m"):
        pytest.skip("the weights of smollm2-135m are not here: splice models pull smollm2-135m")
    return weights.path_of("smollm2-135m")


@pytest.fixture
async def model(small: Path) -> AsyncIterator[LocalModel]:
    chosen = LocalModel("smollm2-135m")
    yield chosen
    await chosen.aclose()


@pytest.mark.live
async def test_a_reply_has_text_usage_and_the_models_name(model: LocalModel) -> None:
    completion = await model.complete(ask("Name a colour.", max_tokens=5), no_retry)
    assert completion.text
    assert completion.model == "smollm2-135m"
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 5
    assert (completion.usage.prompt_tokens or 0) > 5
    assert completion.usage.cached_tokens == 0


@pytest.mark.live
async def test_the_model_answers_to_its_short_name(model: LocalModel) -> None:
    completion = await model.complete(ask("Hello", name="135m", max_tokens=2), no_retry)
    assert completion.model == "smollm2-135m"


@pytest.mark.live
async def test_the_same_requests_give_the_same_bytes_alone_and_queued(model: LocalModel) -> None:
    requests = [ask(f"Tell me something about the number {n}.") for n in range(8)]
    alone = [await model.complete(request, no_retry) for request in requests]
    queued = await asyncio.gather(*(model.complete(request, no_retry) for request in requests))
    again = [await model.complete(request, no_retry) for request in reversed(requests)]
    assert [reply.text for reply in queued] == [reply.text for reply in alone]
    assert [reply.text for reply in reversed(again)] == [reply.text for reply in alone]
    assert len({reply.text for reply in alone}) > 1


@pytest.mark.live
async def test_one_model_can_be_used_from_several_event_loops(model: LocalModel) -> None:
    async def once() -> Completion:
        completion = await model.complete(ask("Hello", max_tokens=4), no_retry)
        await model.aclose()
        return completion

    here = await once()
    there = await asyncio.to_thread(lambda: asyncio.run(once()))
    assert there.text == here.text


@pytest.mark.live
async def test_models_of_one_file_share_a_server_under_their_own_names(
    model: LocalModel, small: Path
) -> None:
    await model.complete(ask("Hello", max_tokens=1), no_retry)
    n_servers = len(local._servers)
    other = LocalModel("house", path=small)
    completion = await other.complete(ask("Hello", max_tokens=1), no_retry)
    await other.aclose()
    assert completion.model == "house"
    assert len(local._servers) == n_servers


@pytest.mark.live
async def test_a_schema_is_enforced(model: LocalModel) -> None:
    request = ask("Which city is the capital of France?", response_schema=WANTED, max_tokens=64)
    completion = await model.complete(request, no_retry)
    assert isinstance(json.loads(completion.text)["city"], str)


@pytest.mark.live
async def test_log_probabilities_come_with_the_tokens(model: LocalModel) -> None:
    completion = await model.complete(ask("Hello", max_tokens=3, logprobs=2), no_retry)
    assert completion.logprobs is not None
    assert [len(token.top) for token in completion.logprobs] == [2, 2, 2]


@pytest.mark.live
async def test_a_prompt_over_the_context_fails_with_both_sizes(model: LocalModel) -> None:
    with pytest.raises(ModelError, match=r"\d{4,} tokens.*4096") as caught:
        await model.complete(ask("word " * 5000), no_retry)
    assert caught.value.reason == "bad_request"


@pytest.mark.live
async def test_the_server_keeps_to_itself(model: LocalModel) -> None:
    import httpx2

    await model.complete(ask("Hello", max_tokens=1), no_retry)
    [server] = [
        running
        for (loaded, *key), running in local._servers.items()
        if loaded.adapter is None and key == [1, 4096]
    ]
    root = server.base_url.removesuffix("/v1")
    assert root.startswith("http://127.0.0.1:")
    async with httpx2.AsyncClient(headers={"Origin": "http://elsewhere.example"}) as client:
        stranger = await client.post(f"{root}/v1/chat/completions", json={"messages": []})
        assert stranger.status_code == 401
        client.headers["Authorization"] = f"Bearer {server.api_key}"
        slots = await client.get(f"{root}/slots")
        assert slots.status_code == 501
        page = await client.get(f"{root}/")
        assert page.status_code == 404
        assert not page.headers["Access-Control-Allow-Origin"]


@pytest.mark.live
def test_nothing_is_printed_and_the_process_ends(small: Path) -> None:
    request = ask("Hello", max_tokens=4).model_dump_json()
    code = (
        "import asyncio\n"
        "from splice.models.local import LocalModel\n"
        "from splice.records import Request\n"
        f"request = Request.model_validate_json({request!r})\n"
        "assert asyncio.run(LocalModel('135m').complete(request, print)).text\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.live
@pytest.mark.usefixtures("small")
def test_a_served_model_answers_until_it_is_interrupted() -> None:
    # A shell starts what runs in its background with this signal ignored, and children inherit that.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from splice.models_cli import app; app()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "135m", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline() + process.stderr.readline()
        found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", said)
        assert found, said
        served = Endpoint(model="smollm2-135m", base_url=found[1], api_key=found[2])
        completion = asyncio.run(served.complete(ask("Hello", max_tokens=3), no_retry))
        assert completion.usage.completion_tokens == 3
    finally:
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert rest.endswith("stopped\n")
