"""Selectors by name or folder, and what happens where one can't be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_learned import WORKFLOW, folder_of

import splice
from splice.errors import ModelError, WeightsError
from splice.learned import EvidenceSelector
from splice.models.scripted import ScriptedModel
from splice.records import CallRecord, Likelihoods, RepairResult, Usage
from splice.selector import RuleSelector, Selector, SelectorInput
from splice.selectors import open_selector

CALL = CallRecord(stage="select", model="judge", outcome="ok", usage=Usage(prompt_tokens=90))


class Asking:
    """A selector that asks a model."""

    async def judge(self, case: SelectorInput) -> Likelihoods:
        return Likelihoods(beneficial=1.0, neutral=0.0, harmful=0.0, calls=(CALL,))


class Unreachable:
    """A selector whose model is gone."""

    async def judge(self, case: SelectorInput) -> Likelihoods:
        raise ModelError("no answer from model 'judge'", reason="connection")


def repaired(selector: Selector | str | Path | None) -> RepairResult:
    replies = {
        "routes": ["Doha", "Doha"],
        "visas": ["not found", "31 hours"],
        "desk": ["unknown", "31 hours"],
    }
    question = "How long may I stay at the stop from Lisbon?"
    return splice.repair(WORKFLOW, question, model=ScriptedModel(replies), selector=selector)


def test_rules_are_meant_where_nothing_is_named() -> None:
    assert isinstance(open_selector(None), RuleSelector)
    assert isinstance(open_selector("rules"), RuleSelector)
    given = Asking()
    assert open_selector(given) is given


def test_a_folder_of_learned_parts_gives_its_selector(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "selector")
    assert isinstance(open_selector(folder), EvidenceSelector)
    assert isinstance(open_selector(str(folder)), EvidenceSelector)


def test_folders_without_a_selector_are_refused_before_the_first_call(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither card\.json"):
        open_selector(tmp_path)
    folder = folder_of(tmp_path / "parts", "headroom")
    with pytest.raises(WeightsError, match="hold no selector"):
        open_selector(folder)
    model = ScriptedModel({})
    with pytest.raises(WeightsError):
        splice.repair(WORKFLOW, "How long?", model=model, selector=tmp_path / "nowhere")
    assert model.requests == []


def test_a_repair_takes_a_folder_of_learned_parts(tmp_path: Path) -> None:
    result = repaired(folder_of(tmp_path / "parts", "selector"))
    assert result.decision.likelihoods is not None
    assert result.decision.likelihoods.beneficial > 0.99


def test_what_a_selector_asks_is_counted() -> None:
    result = repaired(Asking())
    assert result.answer == "31 hours"
    assert result.calls[-1] == CALL


def test_where_the_selector_can_not_be_asked_the_answer_is_kept_and_the_result_says_why() -> None:
    result = repaired(Unreachable())
    assert result.answer == "unknown"
    assert result.decision.action == "retain"
    assert "could not be asked: no answer from model 'judge'" in result.decision.reason
    assert result.trial is not None
