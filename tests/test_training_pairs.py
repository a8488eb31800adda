"""Training examples and preference pairs out of probe pools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from probed import WORKFLOW, make, workload
from test_selector import case

from probes.pool import Damage, read_shards
from probes.records import BaseRecord, OutcomeClass, ProbeRecord
from selector_training.pairs import (
    TrainingExample,
    balanced,
    preference_pairs,
    read_examples,
    shipped_descriptions,
)
from splice.errors import SettingsError, StoreError
from splice.language import selector_messages


def example(outcome: OutcomeClass, delta: float, n: int = 0, **changes: object) -> TrainingExample:
    fields = {"pool": "p", "probe": f"probe{n}", "group": f"toy/q{n}", "workload": "toy"}
    return TrainingExample.model_validate(
        {
            **fields,
            "split": "train",
            "arm": "edge",
            "case": case(("Rome", f"Doha {n}")),
            "outcome": outcome,
            "delta": delta,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    make(
        folder,
        0,
        workloads={
            "train": workload(8),
            "validation": workload(4, begin=8),
            "test": workload(4, begin=12),
        },
    )
    return folder


def records(pool: Path) -> tuple[dict[str, BaseRecord], dict[str, ProbeRecord]]:
    (shard,) = read_shards(pool)
    return dict(shard.bases), dict(shard.probes)


# --- pairs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "delta", "pairs"),
    [
        ("beneficial", 0.5, [("neutral", 0.75), ("harmful", 0.75)]),
        ("beneficial", 1.0, [("neutral", 1.0), ("harmful", 1.0)]),
        ("neutral", 0.0, [("beneficial", 0.25), ("harmful", 0.25)]),
        ("harmful", -0.5, [("beneficial", 1.5), ("neutral", 0.75)]),
        ("harmful", -1.0, [("beneficial", 2.0), ("neutral", 1.0)]),
    ],
)
def test_the_label_is_preferred_to_both_others_and_the_costly_error_counts_double(
    outcome: OutcomeClass, delta: float, pairs: list[tuple[str, float]]
) -> None:
    found = preference_pairs(example(outcome, delta))
    assert {pair.chosen for pair in found} == {outcome}
    assert [(pair.rejected, pair.weight) for pair in found] == pairs


def test_classes_of_each_workload_are_drawn_equally_often() -> None:
    given = [
        *(example("neutral", 0.0, n) for n in range(40)),
        *(example("beneficial", 1.0, n) for n in range(40, 44)),
        *(example("harmful", -1.0, n, workload="other") for n in range(44, 46)),
    ]
    drawn = [given[place] for place in balanced(given, 30, seed=0)]
    cells = Counter((found.workload, found.outcome) for found in drawn)
    assert cells == {("toy", "neutral"): 10, ("toy", "beneficial"): 10, ("other", "harmful"): 10}
    rare = Counter(found.probe for found in drawn if found.outcome == "beneficial")
    assert sorted(rare.values()) == [2, 2, 3, 3]
    assert len({found.probe for found in drawn if found.outcome == "neutral"}) == 10


def test_the_same_seed_draws_the_same_and_another_seed_others() -> None:
    given = [example("neutral", 0.0, n) for n in range(20)]
    assert balanced(given, 20, seed=3) == balanced(given, 20, seed=3)
    assert balanced(given, 20, seed=3) != balanced(given, 20, seed=4)
    assert balanced([], 5, seed=0) == ()


# --- pools -----------------------------------------------------------------------------------


def test_each_decisive_probe_of_the_two_splits_is_an_example(pool: Path) -> None:
    bases, probes = records(pool)
    found = {example.probe: example for example in read_examples([pool])}
    assert set(found) == {
        id
        for id, probe in probes.items()
        if probe.is_decisive and probe.arm != "resample" and probe.split != "test"
    }
    assert {"edge", "placebo"} == {example.arm for example in found.values()}
    for id, given in found.items():
        probe, base = probes[id], bases[probes[id].base]
        assert given.case.question == f"When was the director of Film {base.query_id[1:]} born?"
        assert given.case.base_answer == base.answer != given.case.candidate_answer == probe.answer
        assert given.case.evidence == probe.evidence
        assert base.diagnosis is not None
        assert given.case.base_score == base.diagnosis.base_score
        assert (given.outcome, given.delta, given.split) == (
            probe.outcome_class,
            probe.delta,
            base.split,
        )
        assert given.group == f"toy/{base.query_id}"


def test_the_test_split_is_read_only_where_it_is_asked_for(pool: Path) -> None:
    assert {found.split for found in read_examples([pool])} == {"train", "validation"}
    asked = read_examples([pool], splits=["test"])
    assert {found.split for found in asked} == {"test"}


def test_arms_can_be_chosen(pool: Path) -> None:
    assert {found.arm for found in read_examples([pool], arms=["edge"])} == {"edge"}


def test_base_scores_can_come_from_folds_without_the_question(pool: Path) -> None:
    scores = {id: 0.125 for id in records(pool)[0]}
    found = read_examples([pool], base_scores=scores)
    assert {example.case.base_score for example in found} == {0.125}
    with pytest.raises(SettingsError, match="no predicted base score is given for base record"):
        read_examples([pool], base_scores={})


def test_a_workflow_is_described_as_it_describes_itself_or_by_its_name(pool: Path) -> None:
    assert {found.case.workflow for found in read_examples([pool])} == {WORKFLOW.name}
    told = read_examples([pool], descriptions={WORKFLOW.name: "Films and years."})
    assert {found.case.workflow for found in told} == {"Films and years."}


def test_workflows_that_come_with_the_library_describe_themselves() -> None:
    found = shipped_descriptions()
    assert found["multihop-parallel"].startswith("Three researchers with private documents")
    assert {"toolbench", "chain", "gsm8k"} <= set(found)


def test_shuffled_evidence_is_that_of_another_question_of_the_same_split(pool: Path) -> None:
    whole = read_examples([pool])
    shuffled = read_examples([pool], view="shuffled")
    for real, given in zip(whole, shuffled, strict=True):
        assert given.case.model_copy(update={"evidence": real.case.evidence}) == real.case
        assert (given.probe, given.outcome, given.block) == (real.probe, real.outcome, None)
        others = [
            other.case.evidence
            for other in whole
            if other.split == given.split and other.group != given.group
        ]
        assert given.case.evidence in others
    assert [e.case.evidence for e in shuffled] != [e.case.evidence for e in whole]
    assert read_examples([pool], view="shuffled") == shuffled


def test_other_views_take_the_place_of_the_evidence(pool: Path) -> None:
    probes = records(pool)[1]
    for found in read_examples([pool], view="raw"):
        (asked,) = selector_messages(found.case, found.block)
        message = probes[found.probe].message
        assert message is not None
        assert f"> {message.text.splitlines()[0]}" in asked.content
        for node in probes[found.probe].rerun:
            assert f"reply of {node} before:\n> " in asked.content
            assert f"reply of {node} after:\n> " in asked.content
        assert "movement: receiver" not in asked.content
    for found in read_examples([pool], view="nothing"):
        (asked,) = selector_messages(found.case, found.block)
        assert "measured on both runs:\n(not shown)\n" in asked.content


def test_what_a_damaged_line_takes_with_it_is_left_out_and_the_line_is_named(
    tmp_path: Path,
) -> None:
    make(tmp_path, 4)
    whole = read_examples([tmp_path])
    path = tmp_path / "traces-00000.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    place, line = next(
        (place, line) for place, line in enumerate(lines) if '"kind":"query"' in line
    )
    path.write_text("".join([*lines[:place], line[:-9] + "\n", *lines[place + 1 :]]), "utf-8")
    damage: list[Damage] = []
    left = read_examples([tmp_path], damage=damage)
    assert 0 < len(left) < len(whole)
    assert ("traces-00000.jsonl", place + 1) in {(found.file, found.line) for found in damage}


def test_a_question_that_is_in_two_splits_of_two_pools_is_refused(
    pool: Path, tmp_path: Path
) -> None:
    make(tmp_path, 0, workloads={"validation": workload(2)})
    with pytest.raises(StoreError, match="question 'q0' is in the validation split, and in"):
        read_examples([pool, tmp_path])


def test_a_folder_that_is_no_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no probe pool"):
        read_examples([tmp_path])
