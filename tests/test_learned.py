"""Learned parts: read from a folder, checked, and used in place of the hand-set scores."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightgbm
import numpy
import pytest
from test_features import EVIDENCE

import splice
from splice.diagnosis import diagnose
from splice.errors import WeightsError
from splice.features import CASE_FEATURES, EDGE_FEATURES, QUERY_FEATURES
from splice.learned import Card, OutcomePart, Part, Range, ScorePart, explain, load_learned
from splice.models.scripted import ScriptedModel
from splice.records import Evidence, Trace
from splice.selector import Selector, SelectorInput
from splice.workflow import Agent, Workflow

NAMES = {
    "headroom": [feature.name for feature in QUERY_FEATURES],
    "decisive": [feature.name for feature in EDGE_FEATURES],
    "beneficial": [feature.name for feature in EDGE_FEATURES],
    "selector": [feature.name for feature in CASE_FEATURES],
}

WORKFLOW = Workflow(
    nodes=(
        Agent(id="routes", role="You know routes.", subtask="Where does the flight stop?"),
        Agent(id="visas", role="You know visas.", subtask="How long may one stay there?"),
        Agent(id="desk", role="You answer.", subtask="Answer the question."),
    ),
    edges=(("routes", "desk"), ("visas", "desk")),
    output="desk",
)


def traced(**said: str) -> Trace:
    replies = {"routes": "Doha", "visas": "not found", "desk": "31 hours"} | said
    model = ScriptedModel({node: [reply] for node, reply in replies.items()})
    return splice.run(WORKFLOW, "How long may I stay at the stop from Lisbon?", model=model)


Rule = Callable[[dict[str, float]], int]


def trees(names: Sequence[str], rule: Rule, objective: str, **params: Any) -> str:
    """Trees that have learned a rule over features drawn from 0 and 1."""
    draw = random.Random(0)
    rows = [[float(draw.randint(0, 1)) for _ in names] for _ in range(400)]
    data = lightgbm.Dataset(
        numpy.array(rows),
        [rule(dict(zip(names, row, strict=True))) for row in rows],
        feature_name=list(names),
        params={"verbosity": -1},
    )
    settings = {"objective": objective, "num_leaves": 4, "num_threads": 1, "verbosity": -1}
    return lightgbm.train({**settings, **params}, data, 40).model_to_string()


TEXTS = {
    "headroom": trees(NAMES["headroom"], lambda row: int(not row["a_declines"]), "binary"),
    "decisive": trees(NAMES["decisive"], lambda row: int(row["w_declines"]), "binary"),
    "beneficial": trees(NAMES["beneficial"], lambda row: int(not row["w_declines"]), "binary"),
    "selector": trees(
        NAMES["selector"],
        lambda row: 0 if row["is_abstention_resolved"] else 2 if row["is_ignored"] else 1,
        "multiclass",
        num_class=3,
    ),
}


def part_of(name: str, text: str, **more: Any) -> Part:
    kind = OutcomePart if name == "selector" else ScorePart
    return kind(
        file=f"{name}.txt",
        sha256=sha256(text.encode()).hexdigest(),
        features=tuple(Range(name=feature, low=0.0, high=100.0) for feature in NAMES[name]),
        n_rows=400,
        **more,
    )


def folder_of(path: Path, *names: str, **more: Any) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / f"{name}.txt").write_text(TEXTS[name], "utf-8")
    card = Card(**{name: part_of(name, TEXTS[name]) for name in names}, **more)
    (path / "card.json").write_text(card.model_dump_json(), "utf-8")
    return path


# --- diagnosis -------------------------------------------------------------------------------


def test_learned_scores_take_the_place_of_the_hand_set_ones(tmp_path: Path) -> None:
    learned = load_learned(folder_of(tmp_path / "parts", "headroom", "decisive"))
    answered, declined = traced(), traced(desk="not found")
    assert learned.diagnose(WORKFLOW, answered).base_score > 0.9
    assert learned.diagnose(WORKFLOW, declined).base_score < 0.1
    found = learned.diagnose(WORKFLOW, answered)
    assert found.edges[0].edge.receiver == "visas"
    assert found.edges[0].p_decisive > 0.9
    assert all(scored.p_beneficial is None for scored in found.edges)


def test_what_may_be_tried_stays_as_the_heuristics_say(tmp_path: Path) -> None:
    learned = load_learned(folder_of(tmp_path / "parts", "headroom", "decisive"))
    trace = traced()
    ours, theirs = learned.diagnose(WORKFLOW, trace), diagnose(WORKFLOW, trace)
    assert {scored.edge for scored in ours.edges} == {scored.edge for scored in theirs.edges}
    assert ours.admission == theirs.admission


def test_edges_may_be_ordered_by_the_chance_that_they_help(tmp_path: Path) -> None:
    workflow = WORKFLOW.changed(
        nodes=(*WORKFLOW.nodes[:2], Agent(id="hotels", role="hotels"), WORKFLOW.nodes[2]),
        edges=(*WORKFLOW.edges, ("hotels", "desk")),
    )
    replies = {"routes": ["Doha"], "visas": ["not found"], "hotels": ["Ritz"], "desk": ["1"]}
    trace = splice.run(workflow, "How long?", model=ScriptedModel(replies))
    folder = folder_of(tmp_path / "parts", "decisive", "beneficial")
    by_change = load_learned(folder).diagnose(workflow, trace).edges
    by_gain = load_learned(folder, rank_by="beneficial").diagnose(workflow, trace).edges
    assert by_change[0].edge.receiver == "visas"
    assert by_gain[0].edge.receiver == "hotels"
    assert by_gain[0].p_beneficial is not None
    assert by_gain[0].p_beneficial > (by_gain[-1].p_beneficial or 0.0)


def test_ordering_by_help_needs_the_part_that_predicts_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "decisive")
    with pytest.raises(WeightsError, match="beneficial"):
        load_learned(folder, rank_by="beneficial")


def test_a_folder_without_parts_changes_nothing(tmp_path: Path) -> None:
    learned = load_learned(folder_of(tmp_path / "parts"))
    trace = traced()
    assert learned.diagnose(WORKFLOW, trace) == diagnose(WORKFLOW, trace)
    assert learned.selector is None


def test_calibration_bends_the_prediction(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    flat = part_of("headroom", TEXTS["headroom"], slope=0.0, intercept=0.0)
    (folder / "card.json").write_text(Card(headroom=flat).model_dump_json(), "utf-8")
    assert load_learned(folder).diagnose(WORKFLOW, traced()).base_score == 0.5


def test_an_explanation_names_what_moved_a_prediction_the_most(tmp_path: Path) -> None:
    learned = load_learned(folder_of(tmp_path / "parts", "headroom", "decisive"))
    explained = explain(WORKFLOW, traced(desk="not found"), learned)
    assert explained.base_score[0].feature == "a_declines"
    assert explained.base_score[0].log_odds < 0
    first = explained.edges[0].contributions[0]
    assert (first.feature, first.value) == ("w_declines", 1.0)
    assert first.log_odds > 0
    assert len(explained.edges) == len(explained.diagnosis.edges)


def test_features_outside_of_the_training_range_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    part = part_of("headroom", TEXTS["headroom"])
    narrow = tuple(
        Range(name=known.name, low=0.0, high=1.0 if known.name == "q_words" else 100.0)
        for known in part.features
    )
    card = Card(headroom=part.model_copy(update={"features": narrow}))
    (folder / "card.json").write_text(card.model_dump_json(), "utf-8")
    assert load_learned(folder).diagnose(WORKFLOW, traced()).outside == ("q_words",)
    assert diagnose(WORKFLOW, traced()).outside == ()


def test_a_feature_that_never_varied_in_training_is_named_where_it_does(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "decisive")
    part = part_of("decisive", TEXTS["decisive"])
    silent = Range(name="n_truncated", low=1.0, high=1.0)
    card = Card(decisive=part.model_copy(update={"constant": (silent,)}))
    (folder / "card.json").write_text(card.model_dump_json(), "utf-8")
    assert load_learned(folder).diagnose(WORKFLOW, traced()).outside == ("n_truncated",)


# --- selector --------------------------------------------------------------------------------


def case(**evidence: Any) -> SelectorInput:
    return SelectorInput(
        question="q",
        workflow="w",
        base_score=0.5,
        base_answer="Riga",
        candidate_answer="Doha",
        evidence=EVIDENCE.model_copy(update=evidence),
    )


async def test_outcomes_follow_the_evidence(tmp_path: Path) -> None:
    selector = load_learned(folder_of(tmp_path / "parts", "selector")).selector
    assert isinstance(selector, Selector)
    better = await selector.judge(case(is_abstention_resolved=True))
    worse = await selector.judge(case(is_abstention_resolved=False, is_ignored=True))
    same = await selector.judge(case(is_abstention_resolved=False, is_ignored=False))
    assert better.beneficial > 0.8
    assert worse.harmful > 0.8
    assert same.neutral > 0.8
    for found in (better, worse, same):
        assert found.beneficial + found.neutral + found.harmful == pytest.approx(1.0)


async def test_a_higher_temperature_makes_outcomes_more_alike(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "selector")
    sharp = load_learned(folder).selector
    warm = part_of("selector", TEXTS["selector"], temperature=100.0)
    (folder / "card.json").write_text(Card(selector=warm).model_dump_json(), "utf-8")
    flat = load_learned(folder).selector
    assert sharp is not None
    assert flat is not None
    asked = case(is_abstention_resolved=True)
    assert (await flat.judge(asked)).beneficial < 0.4 < (await sharp.judge(asked)).beneficial


async def test_evidence_unlike_that_of_training_is_named(tmp_path: Path) -> None:
    selector = load_learned(folder_of(tmp_path / "parts", "selector")).selector
    assert selector is not None
    assert (await selector.judge(case(n_add=4))).outside == ("move_len",)
    assert (await selector.judge(case(n_add=400, move_len=0.5))).outside == ("n_add",)


# --- folders ---------------------------------------------------------------------------------


def test_a_file_that_was_changed_is_refused_with_both_lists_of_features(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    path = folder / "headroom.txt"
    path.write_text(path.read_text("utf-8").replace("leaf_value=", "leaf_value=9"), "utf-8")
    with pytest.raises(WeightsError, match=r"SHA-256 differs(.|\n)*there: q_words(.|\n)*expected"):
        load_learned(folder)


def test_trees_over_other_features_than_the_card_says_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    other = trees(["x", *NAMES["headroom"][1:]], lambda row: int(row["x"]), "binary")
    (folder / "headroom.txt").write_text(other, "utf-8")
    card = Card(headroom=part_of("headroom", other))
    (folder / "card.json").write_text(card.model_dump_json(), "utf-8")
    with pytest.raises(WeightsError, match=r"there: x, q_items(.|\n)*expected: q_words, q_items"):
        load_learned(folder)


def test_features_that_this_version_does_not_compute_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    card = json.loads((folder / "card.json").read_text("utf-8"))
    card["headroom"]["features"][0]["name"] = "gold_answer"
    (folder / "card.json").write_text(json.dumps(card), "utf-8")
    with pytest.raises(WeightsError, match=r"there: gold_answer(.|\n)*expected: q_words"):
        load_learned(folder)


def test_a_selector_needs_three_groups_of_trees(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts")
    text = trees(NAMES["selector"], lambda row: int(row["is_ignored"]), "binary")
    (folder / "selector.txt").write_text(text, "utf-8")
    card = Card(selector=part_of("selector", text))
    (folder / "card.json").write_text(card.model_dump_json(), "utf-8")
    with pytest.raises(WeightsError, match="1 groups of trees instead of 3"):
        load_learned(folder)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("card.json", "{", "card.json"),
        ("card.json", '{"schema_version": 2}', "schema_version"),
        ("card.json", '{"headroom": {"file": "../x.txt"}}', "headroom.file"),
        ("headroom.txt", None, "headroom.txt"),
    ],
)
def test_folders_that_are_none_are_refused(
    tmp_path: Path, name: str, text: str | None, match: str
) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text, "utf-8")
    with pytest.raises(WeightsError, match=match):
        load_learned(folder)


def test_text_that_holds_no_trees_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "parts", "headroom")
    (folder / "headroom.txt").write_text("cos\nsystem\n(S'true'\ntR.", "utf-8")
    card = Card(headroom=part_of("headroom", "cos\nsystem\n(S'true'\ntR."))
    (folder / "card.json").write_text(card.model_dump_json(), "utf-8")
    with pytest.raises(WeightsError, match="no trees of LightGBM"):
        load_learned(folder)


def test_every_field_of_the_evidence_can_be_read() -> None:
    assert set(Evidence.model_fields) - {"survival"} <= set(NAMES["selector"])
