"""Every error of the library is raised by something that a user can do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import splice
from splice import errors
from splice.ledger import Account, Budget
from splice.prompts import render
from splice.records import Completion, Request, ToolSpec
from splice.tools import ToolMemory
from splice.workload import find_loader

ONE = splice.Workflow(nodes=(splice.Agent(id="one", role="You answer."),), edges=(), output="one")


def scripted(*replies: Any) -> splice.ScriptedModel:
    return splice.ScriptedModel({"one": replies})


def repair_a_trace_of_another_workflow(_: Path) -> None:
    base = splice.run(ONE, "Where?", model=scripted("Doha"))
    other = splice.Workflow(nodes=(splice.Agent(id="one", role="x"),), edges=(), output="one")
    splice.repair(other, base=base, model=scripted("Doha"))


def ask_a_server_that_is_gone(_: Path) -> None:
    async def no_wait(seconds: float) -> None: ...

    model = splice.Endpoint(
        model="m", base_url="http://127.0.0.1:9/v1", max_attempts=1, sleep=no_wait
    )

    async def ask() -> Completion:
        try:
            return await model.complete(Request(messages=()), lambda *_: None)
        finally:
            await model.aclose()

    asyncio.run(ask())


def spend_more_than_there_is(_: Path) -> None:
    async def reserve() -> None:
        await Account(Budget(max_tokens=10)).reserve(11, None)

    asyncio.run(reserve())


def write_anew_in_a_trial(_: Path) -> None:
    send = splice.Tool(
        spec=ToolSpec(name="send", description="", parameters={}), call=print, effects="write"
    )
    ToolMemory(()).recall("one", send, "{}")


def weights_that_are_none(folder: Path) -> None:
    pytest.importorskip("xllamacpp")
    (folder / "mine.gguf").write_bytes(b"PK")
    splice.LocalModel(path=folder / "mine.gguf")


def open_a_store_that_is_none(folder: Path) -> None:
    (folder / "letters").write_text("Dear all,\n", "utf-8")
    splice.TraceStore(folder / "letters")


RAISED: dict[type[errors.SpliceError], Callable[[Path], Any]] = {
    errors.WorkflowError: lambda _: splice.Workflow(nodes=(), edges=(), output="one"),
    errors.TraceMismatch: repair_a_trace_of_another_workflow,
    errors.QueryError: lambda _: splice.run(ONE, " ", model=scripted("Doha")),
    errors.SettingsError: lambda _: splice.run(
        ONE, "Where?", model={"a": scripted(), "b": scripted()}
    ),
    errors.DataError: lambda folder: find_loader("gsm8k")(folder, split="train", options={}),
    errors.PromptError: lambda _: render("agent_task", task="x"),
    errors.ModelError: ask_a_server_that_is_gone,
    errors.ScriptExhausted: lambda _: splice.run(ONE, "Where?", model=scripted()),
    errors.BudgetExceeded: spend_more_than_there_is,
    errors.WriteBlocked: write_anew_in_a_trial,
    errors.WeightsError: weights_that_are_none,
    errors.StoreError: open_a_store_that_is_none,
}


def classes() -> list[type[errors.SpliceError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, errors.SpliceError)]


@pytest.mark.parametrize("error", list(RAISED), ids=lambda error: error.__name__)
def test_the_error_is_raised_in_a_real_case_and_says_something(
    error: type[errors.SpliceError], tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        RAISED[error](tmp_path)
    assert type(raised.value) is error
    assert len(str(raised.value)) > 10


def test_no_error_class_is_there_for_nothing() -> None:
    assert set(classes()) == {errors.SpliceError, *RAISED}


def test_every_error_stands_in_the_tree_at_the_top() -> None:
    for error in classes():
        assert f"{error.__name__} " in f"{errors.__doc__} " or error is errors.SpliceError


@pytest.mark.parametrize("error", list(RAISED), ids=lambda error: error.__name__)
def test_every_error_can_be_caught_as_the_librarys(error: type[Exception]) -> None:
    assert issubclass(error, errors.SpliceError)
