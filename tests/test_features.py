"""Features: what learned parts may look at, and that none of it is an answer or the future."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from splice import features
from splice.features import (
    ANSWER_FEATURES,
    ATTRIBUTION,
    CASE_FEATURES,
    EDGE_FEATURES,
    EVIDENCE_FEATURES,
    QUERY_FEATURES,
    case_features,
    evidence_features,
)
from splice.records import Evidence, Trial
from splice.workload import Example

EVIDENCE = Evidence(
    move_w=0.5,
    move_len=-0.5,
    n_add=4,
    n_del=2,
    msg_only=0.25,
    ctx_only=0.25,
    both=0.25,
    untraceable=0.25,
    uptake=0.5,
    is_ignored=False,
    del_supported=1.0,
    focus_new=0.5,
    focus_old=0.0,
    num_msg=0.0,
    num_ctx=0.0,
    num_untraceable=0.0,
    num_dropped=0.0,
    survival=(0.75, 0.5),
    surv_final=0.5,
    is_absorbed=False,
    ans_change=1.0,
    ans_len_ratio=2.0,
    is_number_changed=True,
    copies_source=0.5,
    is_abstention_resolved=True,
    is_abstention_new=False,
    is_answer_refusal_resolved=True,
    is_answer_refusal_new=False,
)


@pytest.mark.parametrize("table", [QUERY_FEATURES, EDGE_FEATURES, CASE_FEATURES])
def test_names_are_unique_and_every_feature_says_what_it_is(
    table: tuple[features.Feature, ...],
) -> None:
    assert len({feature.name for feature in table}) == len(table)
    for feature in table:
        assert feature.low < feature.high
        assert feature.definition.endswith(".")


def test_each_field_of_the_evidence_is_a_feature() -> None:
    derived = {"survival_first", "survival_last", "n_depths"}
    names = {feature.name for feature in EVIDENCE_FEATURES}
    assert names - derived == set(Evidence.model_fields) - {"survival"}
    assert names >= ATTRIBUTION


def test_evidence_becomes_numbers() -> None:
    found = evidence_features(EVIDENCE)
    assert list(found) == [feature.name for feature in EVIDENCE_FEATURES]
    assert found["survival_first"] == 0.75
    assert found["survival_last"] == 0.5
    assert found["n_depths"] == 2
    assert found["is_abstention_resolved"] == 1.0
    alone = evidence_features(EVIDENCE.model_copy(update={"survival": ()}))
    assert [alone[name] for name in ("survival_first", "survival_last", "n_depths")] == [0, 0, 0]


def test_a_case_adds_what_is_known_about_the_answers() -> None:
    found = case_features(0.25, "not found", "Doha airport", EVIDENCE)
    assert list(found) == [feature.name for feature in CASE_FEATURES]
    assert {feature.name: found[feature.name] for feature in ANSWER_FEATURES} == {
        "base_score": 0.25,
        "base_declines": 1.0,
        "base_words": 2.0,
        "new_declines": 0.0,
        "new_words": 2.0,
    }


# --- nothing can be seen that is not known yet -----------------------------------------------


def reachable(annotation: object) -> Iterator[type]:
    """Every class that values of this type can hold, however deep."""
    waiting, seen = [annotation], set[object]()
    while waiting:
        found = waiting.pop()
        waiting += typing.get_args(found)
        if isinstance(found, type) and found not in seen:
            seen.add(found)
            yield found
            if issubclass(found, BaseModel):
                waiting += [field.annotation for field in found.model_fields.values()]
            else:
                waiting += getattr(found, "__annotations__", {}).values()


def seen_by(function: object) -> set[type]:
    hints = typing.get_type_hints(function)
    return {found for name, hint in hints.items() if name != "return" for found in reachable(hint)}


BASE = (features.query_features, features.edge_features)
TRIAL = (features.evidence_features, features.case_features)


@pytest.mark.parametrize("function", [*BASE, *TRIAL])
def test_no_feature_can_see_a_reference(function: object) -> None:
    seen = seen_by(function)
    assert Example not in seen
    for found in seen:
        if issubclass(found, BaseModel):
            fields = set(found.model_fields)
            assert not fields & {"reference", "answers", "gold", "score", "scores", "gap_edges"}


@pytest.mark.parametrize("function", BASE)
def test_features_of_queries_and_edges_can_see_nothing_of_a_trial(function: object) -> None:
    assert not seen_by(function) & {Trial, Evidence}


def test_the_check_itself_sees_what_a_record_holds() -> None:
    def cheating(trial: Trial, example: Example) -> None: ...

    cheating.__annotations__ = {"trial": Trial, "example": Example}
    assert {Trial, Example} <= seen_by(cheating)


def test_features_import_nothing_that_holds_references() -> None:
    source = inspect.getsource(features)
    assert "splice.workload" not in source
    assert "splice.queries" not in source


def test_stages_are_as_the_functions_say() -> None:
    assert {feature.stage for feature in (*QUERY_FEATURES, *EDGE_FEATURES)} == {"base"}
    assert {feature.stage for feature in EVIDENCE_FEATURES} == {"trial"}
