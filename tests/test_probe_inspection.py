"""What a probe pool says, on pools whose numbers can be worked out by hand."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from probes.generate import generate
from probes.inspection import (
    FEW,
    Auc,
    Comparison,
    Group,
    Inspection,
    auc_by_question,
    inspect,
    share_by_question,
)
from probes.inspection_text import inspection_text, percent, relation, sections
from probes.plan import ProbeSettings
from probes.pool import Manifest, write_manifest
from probes.records import BaseRecord, ProbeRecord, base_id, classify, probe_id
from splice import Agent, Query, ScriptedModel, StoreError, Workflow
from splice.ledger import Spending
from splice.records import CandidateEdge, Diagnosis, ModelIdentity
from splice.report.display import WIDTH
from splice.statistics import Gain, Interval, auc, share
from splice.workload import Example, Workload


def base(query: str, **more: Any) -> BaseRecord:
    """A base run that scored 0 and was foreseen to score 0.5."""
    workload, rollout = more.get("workload", "toy"), more.get("rollout", 0)
    fields: dict[str, Any] = {
        "id": base_id(workload, query, rollout),
        "workload": workload,
        "split": "train",
        "query_id": query,
        "query": "0" * 32,
        "rollout": rollout,
        "workflow": "1" * 32,
        "answer": "base answer",
        "score": 0.0,
        "diagnosis": diagnosis(0.5),
        "ledger": Spending(n_calls=3, prompt_tokens=90, completion_tokens=10),
        "elapsed_s": 36.0,
    }
    return BaseRecord(**fields | more)


def diagnosis(base_score: float) -> Diagnosis:
    return Diagnosis(base_score=base_score, base_reasons=(), edges=(), admission="headroom")


def probe(
    of: BaseRecord, arm: Any = "edge", delta: float | None = None, **more: Any
) -> ProbeRecord:
    """A probe that is done if its score change is given; decisive if that is not 0."""
    ends = more.pop("ends", ("a", "b"))
    edge = CandidateEdge(source=ends[0], receiver=ends[1], kind=more.pop("kind", "parallel_branch"))
    fields: dict[str, Any] = {
        "id": probe_id(of.id, arm, ends),
        "base": of.id,
        "workload": of.workload,
        "split": of.split,
        "query_id": of.query_id,
        "rollout": of.rollout,
        "arm": arm,
        "edge": edge,
        "place": 0,
        "p_decisive": 0.5,
        "features": {},
        "outcome": "no_message",
        "ledger": Spending(n_calls=1, prompt_tokens=40, completion_tokens=10),
    }
    if delta is not None:
        fields |= {
            "outcome": "done",
            "answer": "candidate",
            "delta": delta,
            "outcome_class": classify(delta, 0.01),
            "is_decisive": delta != 0.0,
        }
    return ProbeRecord(**fields | more)


def manifest(**more: Any) -> Manifest:
    fields: dict[str, Any] = {
        "workload": "toy",
        "about": "Questions about toys.",
        "workflow": "1" * 32,
        "metrics": ("f1",),
        "metric": "f1",
        "models": (ModelIdentity(name="small", provider="scripted"),),
        "settings": ProbeSettings(),
    }
    return Manifest(**fields | more)


def pool(
    folder: Path,
    bases: Sequence[BaseRecord] = (),
    probes: Iterable[ProbeRecord] = (),
    per_shard: int = 256,
    **more: Any,
) -> Path:
    """Write a pool."""
    folder.mkdir(exist_ok=True)
    write_manifest(folder, manifest(**more))
    shard_of = {record.id: i // per_shard for i, record in enumerate(bases)}
    for record in bases:
        _append(folder / f"bases-{shard_of[record.id]:05}.jsonl", record)
    for record in probes:
        _append(folder / f"probes-{shard_of[record.base]:05}.jsonl", record)
    return folder


def _append(path: Path, record: BaseRecord | ProbeRecord) -> None:
    with path.open("a") as file:
        file.write(f"{record.model_dump_json()}\n")


def controlled(folder: Path, n: int, *, edge: float, resample: float, placebo: float) -> Path:
    """A pool of `n` questions: the share of each arm that turns a 0 into a 1, drawn apart."""
    lot = random.Random(n)
    bases = [base(f"q{i}") for i in range(n)]
    probes = []
    for name, share_of_arm in (("edge", edge), ("resample", resample), ("placebo", placebo)):
        fixed = set(lot.sample(range(n), round(share_of_arm * n)))
        probes += [probe(of, name, float(i in fixed)) for i, of in enumerate(bases)]
    return pool(folder, bases, probes)


def arm(inspection: Inspection, name: str, workload: str | None = None) -> Group:
    (found,) = [g for g in inspection.arms if (g.name, g.workload) == (name, workload)]
    return found


def against(inspection: Inspection, control: str, workload: str | None = None) -> Comparison:
    (found,) = [c for c in inspection.comparisons if (c.control, c.workload) == (control, workload)]
    return found


def text_of(folder: Path) -> str:
    text = inspection_text(inspect(folder))
    assert max(map(len, text.splitlines())) <= WIDTH
    return text


def spoken(text: str) -> str:
    """A page without its line breaks."""
    return " ".join(text.split())


def test_probes_are_counted_by_arm_outcome_and_class(tmp_path: Path) -> None:
    one, two = base("q1"), base("q2")
    probes = [
        probe(one, delta=0.4),
        probe(one, delta=-0.2, ends=("a", "c")),
        probe(one, "resample", 0.0),
        probe(two),
        probe(two, outcome="stopped", ends=("a", "c")),
        probe(two, outcome="failed", ends=("b", "c")),
        probe(two, delta=0.005, ends=("a", "d")),
    ]
    inspection = inspect(pool(tmp_path, [one, two], probes))
    edge = arm(inspection, "edge")
    assert (edge.n, edge.n_done, edge.n_no_message, edge.n_stopped, edge.n_failed) == (
        6,
        3,
        1,
        1,
        1,
    )
    assert (edge.n_beneficial, edge.n_neutral, edge.n_harmful) == (1, 1, 1)
    assert edge.decisive is not None
    assert (edge.decisive.n_hits, edge.decisive.n) == (3, 3)
    assert edge.moved is not None
    assert (edge.moved.n_hits, edge.moved.n) == (2, 3)
    assert edge.change is not None
    assert edge.change.value == pytest.approx(((0.4 - 0.2) / 2 + 0.005) / 2)
    assert arm(inspection, "resample").n_neutral == 1
    assert arm(inspection, "placebo").n == 0


def test_a_control_is_compared_with_the_edge_whose_receiver_it_shares(tmp_path: Path) -> None:
    one, two, three = base("q1"), base("q2"), base("q3")
    probes = [
        probe(one, delta=0.5, ends=("b", "c")),
        probe(one, delta=-1.0, ends=("a", "c")),
        probe(one, "placebo", 0.0, ends=("b", "c")),
        probe(two, delta=0.0),
        probe(two, "placebo", 0.25),
        probe(three, outcome="stopped"),
        probe(three, "placebo", 0.0),
    ]
    found = against(inspect(pool(tmp_path, [one, two, three], probes)), "placebo")
    assert (found.n_pairs, found.n_left_out) == (2, 1)
    assert (found.n_only_edge, found.n_only_control) == (1, 1)
    assert (found.n_better, found.n_worse) == (1, 1)
    assert found.change_edge == pytest.approx(0.25)
    assert found.change_control == pytest.approx(0.125)
    assert found.change.mean == pytest.approx(0.125)
    assert found.decisive.mean == 0.0


def test_rollouts_of_a_question_count_as_one_question(tmp_path: Path) -> None:
    bases = [base("q1"), base("q1", rollout=100), base("q2")]
    probes = [
        *(probe(of, delta=delta) for of, delta in zip(bases, (1.0, 0.0, 0.0), strict=True)),
        *(probe(of, "resample", 0.0) for of in bases),
    ]
    inspection = inspect(pool(tmp_path, bases, probes))
    found = against(inspection, "resample")
    assert (inspection.n_questions, inspection.n_bases) == (2, 3)
    assert (found.n_pairs, found.change.n) == (3, 2)
    assert found.change.mean == pytest.approx(0.25)


def test_edges_that_beat_both_controls_get_a_yes(tmp_path: Path) -> None:
    folder = controlled(tmp_path, 80, edge=0.6, resample=0.1, placebo=0.15)
    inspection = inspect(folder)
    assert (inspection.changes_more, inspection.scores_more) == ("yes", "yes")
    text = text_of(folder)
    assert (
        "change the answer more often than noise? YES: more than a resample and a placebo" in text
    )


@pytest.mark.parametrize(
    ("edge", "resample", "placebo", "reason"),
    [
        (0.5, 0.1, 0.5, "not told apart from a placebo"),
        (0.5, 0.5, 0.1, "not told apart from a resample"),
        (0.3, 0.3, 0.3, "not told apart from a resample and a placebo"),
        (0.1, 0.7, 0.1, "less than a resample; not told apart from a placebo"),
    ],
)
def test_edges_that_do_not_beat_both_controls_get_a_no(
    tmp_path: Path, edge: float, resample: float, placebo: float, reason: str
) -> None:
    folder = controlled(tmp_path, 80, edge=edge, resample=resample, placebo=placebo)
    inspection = inspect(folder)
    assert (inspection.changes_more, inspection.scores_more) == ("no", "no")
    text = spoken(text_of(folder))
    assert f"Do edges change the answer more often than noise? NO: {reason}." in text
    assert f"Do edges raise the score more than noise? NO: {reason}." in text


def test_edges_that_change_answers_for_the_worse_change_them_all_the_same(tmp_path: Path) -> None:
    bases = [base(f"q{i}", score=1.0) for i in range(40)]
    probes = [
        probe(of, name, delta)
        for of in bases
        for name, delta in (("edge", -1.0), ("resample", 0.0), ("placebo", 0.0))
    ]
    inspection = inspect(pool(tmp_path, bases, probes))
    assert (inspection.changes_more, inspection.scores_more) == ("yes", "no")


def test_few_questions_get_neither_interval_nor_verdict(tmp_path: Path) -> None:
    folder = controlled(tmp_path, FEW - 1, edge=1.0, resample=0.0, placebo=0.0)
    inspection = inspect(folder)
    assert (inspection.changes_more, inspection.scores_more) == ("unknown", "unknown")
    change = arm(inspection, "edge").change
    assert change is not None
    assert change.interval is None
    text = spoken(text_of(folder))
    assert f"UNKNOWN: fewer than {FEW} questions with a resample and a placebo" in text


def test_one_control_alone_never_makes_a_yes(tmp_path: Path) -> None:
    bases = [base(f"q{i}") for i in range(40)]
    probes = [probe(of, name, d) for of in bases for name, d in (("edge", 1.0), ("resample", 0.0))]
    folder = pool(tmp_path, bases, probes)
    assert inspect(folder).changes_more == "unknown"
    assert "questions with a placebo beside an edge" in spoken(text_of(folder))


def test_a_resample_that_only_copies_is_pointed_out(tmp_path: Path) -> None:
    silent = controlled(tmp_path / "a", 40, edge=0.5, resample=0.0, placebo=0.1)
    noisy = controlled(tmp_path / "b", 40, edge=0.5, resample=0.2, placebo=0.1)
    assert "No resample changed its answer" in text_of(silent)
    assert "No resample changed its answer" not in text_of(noisy)


def test_kinds_and_gap_edges_are_told_apart(tmp_path: Path) -> None:
    one, two = base("q1", gap_edges=(("a", "b"),)), base("q2")
    probes = [
        probe(one, delta=1.0, is_gap=True),
        probe(one, delta=0.0, is_gap=False, ends=("a", "c"), kind="distant_ancestor"),
        probe(two, is_gap=True),
        probe(two, delta=0.0, is_gap=False, ends=("a", "c"), kind="distant_ancestor"),
        probe(two, delta=0.0, is_gap=None, ends=("b", "c")),
    ]
    folder = pool(tmp_path, [one, two], probes)
    inspection = inspect(folder)
    assert [(g.name, g.n, g.n_done) for g in inspection.gaps] == [
        ("gap", 2, 1),
        ("other", 2, 2),
        ("unknown", 1, 1),
    ]
    assert [(g.name, g.n_done) for g in inspection.kinds] == [
        ("parallel_branch", 2),
        ("distant_ancestor", 2),
    ]
    assert inspection.gap_share is not None
    assert (inspection.gap_share.n_hits, inspection.gap_share.n) == (1, 3)
    assert "For 1 of 2 true gap edges nothing was found to deliver." in text_of(folder)


def test_where_gap_edges_are_unknown_it_is_said(tmp_path: Path) -> None:
    one = base("q1")
    folder = pool(tmp_path, [one], [probe(one, delta=1.0)])
    assert inspect(folder).gap_share is None
    assert "true gap edges is not known" in text_of(folder)


def test_a_heat_map_has_sources_before_their_receivers(tmp_path: Path) -> None:
    one, two = base("q1"), base("q2")
    probes = [
        probe(one, delta=1.0, ends=("z", "m")),
        probe(one, delta=0.0, ends=("m", "a")),
        probe(two, delta=0.0, ends=("z", "m")),
        probe(two, delta=0.5, ends=("z", "a")),
        probe(two, "placebo", 0.5, ends=("z", "m")),
    ]
    (heat_map,) = inspect(pool(tmp_path, [one, two], probes)).heat_maps
    assert heat_map.nodes == ("z", "m", "a")
    cells = {(c.source, c.receiver): c.probes for c in heat_map.cells}
    assert list(cells) == [("z", "m"), ("z", "a"), ("m", "a")]
    assert cells["z", "m"].n_done == 2
    assert cells["z", "m"].decisive == share(1, 2)


def test_workflows_that_disagree_on_the_order_of_nodes_are_mapped_all_the_same(
    tmp_path: Path,
) -> None:
    one, two = base("q1"), base("q2")
    probes = [probe(one, delta=0.0, ends=("b", "a")), probe(two, delta=0.0, ends=("a", "b"))]
    (heat_map,) = inspect(pool(tmp_path, [one, two], probes)).heat_maps
    assert heat_map.nodes == ("a", "b")
    assert len(heat_map.cells) == 2


def test_each_workload_of_a_merged_pool_has_rows_of_its_own(tmp_path: Path) -> None:
    left = [base(f"q{i}", score=1.0) for i in range(25)]
    right = [base(f"q{i}", workload="other") for i in range(30)]
    probes = [
        probe(of, name, delta)
        for of in left + right
        for name, delta in (("edge", float(of.workload == "other")), ("placebo", 0.0))
    ]
    parts = (
        manifest(),
        manifest(workload="other", about="Others."),
        manifest(workload="other", about="Others."),
    )
    folder = pool(tmp_path, left + right, probes, workload="other, toy", parts=parts)
    inspection = inspect(folder)
    assert inspection.workloads == ("other", "toy")
    assert inspection.n_questions == 55
    assert [origin.workload for origin in inspection.origins] == ["toy", "other"]
    assert [(s.workload, s.score and s.score.value) for s in inspection.splits] == [
        ("other", 0.0),
        ("toy", 1.0),
    ]
    assert against(inspection, "placebo").n_pairs == 55
    assert against(inspection, "placebo", "other").decisive.mean == 1.0
    assert against(inspection, "placebo", "toy").decisive.mean == 0.0
    assert [m.workload for m in inspection.heat_maps] == ["other", "toy"]
    assert [f.workload for f in inspection.foresight] == [None, "other", "toy"]
    text = text_of(folder)
    assert "Edge by edge: other" in text
    assert "  toy" in text


def test_foresight_ranks_probes_and_base_runs(tmp_path: Path) -> None:
    bases = [
        base(f"q{i}", score=float(i % 2), diagnosis=diagnosis(0.9 if i % 2 else 0.2))
        for i in range(40)
    ]
    probes = [
        probe(of, delta=float(i < 20) - of.score, p_decisive=0.8 if i < 20 else 0.1)
        for i, of in enumerate(bases)
        if of.score == 0.0
    ]
    (found,) = inspect(pool(tmp_path, bases, probes)).foresight
    assert found.edge is not None
    assert (found.edge.value, found.edge.n_true, found.edge.n) == (1.0, 10, 20)
    assert found.edge.interval == Interval(low=1.0, high=1.0)
    assert found.headroom is not None
    assert (found.headroom.value, found.headroom.n) == (1.0, 40)
    assert [(b.n, b.mean_actual) for b in found.calibration] == [(10, 0.0), (10, 1.0)]


def test_agreement_of_two_rollouts(tmp_path: Path) -> None:
    first = [base(f"q{i}", answer="same") for i in range(4)]
    second = [base(f"q{i}", rollout=100, answer="same" if i else "other") for i in range(4)]
    deltas = [(1.0, 1.0), (0.0, 0.0), (-1.0, -1.0), (0.0, 1.0)]
    probes = [
        probe(of, delta=delta)
        for pair, both in zip(zip(first, second, strict=True), deltas, strict=True)
        for of, delta in zip(pair, both, strict=True)
    ]
    probes += [probe(first[0], delta=0.0, ends=("a", "c"))]
    found = inspect(pool(tmp_path, first + second, probes)).agreement
    assert found is not None
    assert (found.answers.n_hits, found.answers.n, found.n_questions) == (3, 4, 4)
    assert found.classes is not None
    assert (found.classes.n_hits, found.n_probes) == (3, 4)
    # Labels b n h n against b n h b: chance is (1*2 + 2*1 + 1*1) / 16.
    assert found.kappa == pytest.approx((3 / 4 - 5 / 16) / (1 - 5 / 16))


def test_a_failed_base_run_has_no_score_and_no_partner(tmp_path: Path) -> None:
    bases = [base("q1", score=1.0), base("q1", rollout=100, failure="unreachable", score=None)]
    inspection = inspect(pool(tmp_path, bases))
    assert inspection.n_failed_bases == 1
    assert inspection.agreement is None
    (split,) = inspection.splits
    assert split.score is not None
    assert (split.n_questions, split.n_bases, split.n_failed, split.score.value) == (1, 2, 1, 1.0)


def test_spending_is_told_by_stage(tmp_path: Path) -> None:
    one, two = base("q1"), base("q2")
    folder = pool(tmp_path, [one, two], [probe(one, delta=0.0), probe(one, "placebo", 0.0)])
    used = {u.stage: u for u in inspect(folder).used}
    assert {s: (u.n, u.ledger.n_calls, u.ledger.tokens) for s, u in used.items()} == {
        "base": (2, 6, 200),
        "edge": (1, 1, 50),
        "resample": (0, 0, 0),
        "placebo": (1, 1, 50),
    }
    assert used["base"].elapsed_s == 72.0
    assert "all              4      8       0     300          75" in text_of(folder)


def test_an_unknown_price_makes_the_whole_unknown(tmp_path: Path) -> None:
    bases = [base("q1", ledger=Spending(n_calls=1, cost=None)), base("q2")]
    folder = pool(tmp_path, bases)
    assert inspect(folder).used[0].ledger.cost is None
    assert "unknown" in text_of(folder)


def test_an_empty_pool_says_so_in_words(tmp_path: Path) -> None:
    text = text_of(pool(tmp_path))
    assert "0 questions, 0 base runs (0 failed), 0 probes" in text
    for words in ("No base run yet.", "No probe yet.", "No edge is tried yet.", "UNKNOWN"):
        assert words in text


def test_a_pool_of_base_runs_alone_says_what_is_missing(tmp_path: Path) -> None:
    text = text_of(pool(tmp_path, [base("q1"), base("q2", score=1.0)]))
    assert "No probe yet." in text
    assert "train" in text


def test_a_pool_without_controls_says_what_is_missing(tmp_path: Path) -> None:
    bases = [base(f"q{i}") for i in range(30)]
    folder = pool(tmp_path, bases, [probe(of, delta=1.0) for of in bases])
    assert inspect(folder).comparisons == ()
    assert "questions with a resample and a placebo beside an edge" in spoken(text_of(folder))


def test_a_folder_without_a_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no probe pool"):
        inspect(tmp_path)


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    one = base("q1")
    folder = pool(tmp_path, [one], [probe(one, delta=1.0)])
    with (folder / "probes-00000.jsonl").open("a") as file:
        file.write('{"arm": "edge"}\nnonsense\n')
    inspection = inspect(folder)
    assert [(d.file, d.line) for d in inspection.damage] == [
        ("probes-00000.jsonl", 2),
        ("probes-00000.jsonl", 3),
    ]
    text = text_of(folder)
    assert "2 lines can't be read and are left out" in text
    assert "probes-00000.jsonl:3: not a probe record" in text


@pytest.mark.parametrize("delta", ["NaN", "Infinity", "null"])
def test_a_score_change_that_is_no_number_counts_as_failed(tmp_path: Path, delta: str) -> None:
    one, two = base("q1"), base("q2")
    folder = pool(tmp_path, [one, two], [probe(one, delta=0.25), probe(two, delta=0.5)])
    path = folder / "probes-00000.jsonl"
    path.write_text(path.read_text().replace('"delta":0.5', f'"delta":{delta}'))
    inspection = inspect(folder)
    edge = arm(inspection, "edge")
    assert (inspection.n_unusable, edge.n_done, edge.n_failed) == (1, 1, 1)
    assert edge.change is not None
    assert edge.change.value == 0.25
    assert "1 record without a finite score" in text_of(folder)


def test_the_order_of_records_and_shards_does_not_matter(tmp_path: Path) -> None:
    bases = [base(f"q{i}", score=0.1 * (i % 7)) for i in range(30)]
    lot = random.Random(1)
    probes = [
        probe(of, name, lot.choice((-0.1, 0.0, 0.3)), p_decisive=lot.random())
        for of in bases
        for name in ("edge", "resample", "placebo")
    ]
    one = inspect(pool(tmp_path / "a", bases, probes))
    lot.shuffle(bases)
    lot.shuffle(probes)
    assert inspect(pool(tmp_path / "b", bases, probes, per_shard=7)) == one


def test_an_inspection_survives_json(tmp_path: Path) -> None:
    inspection = inspect(controlled(tmp_path, 25, edge=0.5, resample=0.2, placebo=0.2))
    text = inspection.model_dump_json()
    assert Inspection.model_validate_json(text) == inspection
    assert json.loads(text)["changes_more"] in ("yes", "no")


def test_names_that_could_do_harm_are_made_visible(tmp_path: Path) -> None:
    bad = "\x1b[31mred\u202e" + "x" * 300
    one = base("q1", workload=bad)
    probes = [probe(one, delta=1.0, ends=(f"s{bad}", f"t{bad}"))]
    text = text_of(pool(tmp_path, [one], probes, workload=bad, about=f"line\n{bad}"))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_page_of_a_large_pool_fits_its_width(tmp_path: Path) -> None:
    bases = [
        base(f"q{i}", workload=name, score=0.5)
        for name in ("a-workload-of-a-long-name", "b-workload-of-a-long-name")
        for i in range(25)
    ]
    probes = [
        probe(of, name, delta, kind="distant_ancestor", is_gap=True)
        for of in bases
        for name, delta in (("edge", 0.5), ("resample", 0.5), ("placebo", -0.5))
    ]
    inspection = inspect(pool(tmp_path, bases, probes))
    grown = inspection.model_copy(
        update={
            "arms": tuple(_grown(group) for group in inspection.arms),
            "kinds": tuple(_grown(group) for group in inspection.kinds),
        }
    )
    assert max(map(len, inspection_text(grown).splitlines())) <= WIDTH


def _grown(group: Group) -> Group:
    """The same group with counts of the size of the paper's."""
    counts = {
        "n": 28_560,
        "n_done": 28_000,
        "n_no_message": 560,
        "n_beneficial": 4_000,
        "n_neutral": 20_000,
        "n_harmful": 4_000,
    }
    return group.model_copy(update=counts)


def test_the_pool_stands_beside_the_paper(tmp_path: Path) -> None:
    bases = [base(f"q{i}") for i in range(4)]
    probes = [
        probe(of, delta=float(i == 0), ends=ends, is_gap=False)
        for i, of in enumerate(bases)
        for ends in (("a", "b"), ("a", "c"))
    ]
    (paper,) = [s for s in sections(inspect(pool(tmp_path, bases, probes))) if s.key == "paper"]
    rows = {row[0]: (row[1], row[-1]) for row in paper.table}
    assert rows["questions"] == ("4", "14,280")
    assert rows["edges that ran"] == ("8", "28,560")
    assert rows["answer unchanged"] == ("6 (75.0%)", "20,106 (70.4%)")
    assert rows["decisive"] == ("2 (25.0%)", "8,454 (29.6%)")
    assert rows["questions with a decisive edge"] == ("1 (25.0%)", "5,143 (36.0%)")
    assert rows["true gap edges"] == ("0 (0.00%)", "613 (2.15%)")


def test_a_generated_pool_can_be_inspected(tmp_path: Path) -> None:
    def agent(name: str) -> Agent:
        return Agent(id=name, role="R", subtask=f"do {name}")

    nodes = tuple(map(agent, ("a", "b", "c", "w")))
    workflow = Workflow(
        name="w", nodes=nodes, edges=(("a", "w"), ("b", "w"), ("c", "w")), output="w"
    )
    examples = tuple(
        Example(
            query=Query(
                id=f"q{i}", text=f"Who made Film{i}?", context={"a": (f"Bo made Film{i}.",)}
            ),
            reference={"a": "Bo"},
            gap_edges=(("a", "b"),),
        )
        for i in range(6)
    )
    workload = Workload(
        name="toy",
        about="About films.",
        workflow=workflow,
        examples=examples,
        metrics=("f1",),
        score=lambda example, answer: {"f1": float("Bo" in (answer or ""))},
    )
    model = ScriptedModel(lambda request: f"Bo {len(request.messages[-1].content)}")
    settings = ProbeSettings(control_share=1.0)
    made = asyncio.run(generate({"train": workload}, model, tmp_path, probe=settings))
    inspection = inspect(tmp_path)
    assert made.manifest.counts is not None
    assert inspection.n_probes == made.manifest.counts.n_probes
    assert {g.name: g.n for g in inspection.arms if g.n} == dict(made.manifest.counts.by_arm)
    assert "Probe pool: toy" in text_of(tmp_path)


def test_one_mark_a_question_gives_wilsons_interval() -> None:
    for n_hits, n in [(0, 7), (7, 7), (3, 10), (1, 100), (50, 100)]:
        found = share_by_question((("toy", f"q{i}"), i < n_hits) for i in range(n))
        wanted = share(n_hits, n)
        assert found is not None
        assert wanted is not None
        assert found.interval.low == pytest.approx(wanted.interval.low, abs=1e-12)
        assert found.interval.high == pytest.approx(wanted.interval.high, abs=1e-12)


def test_marks_that_agree_within_their_question_count_once() -> None:
    twice = share_by_question((("toy", f"q{i}"), i < 12) for i in range(40) for _ in range(2))
    once = share(12, 40)
    assert twice is not None
    assert once is not None
    assert (twice.n_hits, twice.n) == (24, 80)
    assert twice.interval.low == pytest.approx(once.interval.low)
    assert (
        share_by_question((("toy", "q"), True) for _ in range(50)).interval == share(1, 1).interval
    )  # type: ignore[union-attr]


def test_no_marks_have_no_share() -> None:
    assert share_by_question(()) is None
    assert percent(None) == "-"


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 200])
def test_the_interval_of_a_share_holds_the_truth_as_often_as_promised(n: int) -> None:
    """Two probes a question, in a third of the questions all alike; naive intervals hold less."""
    lot = random.Random(n)
    truth, n_held, n_naive, n_times = 0.3, 0, 0, 600
    for _ in range(n_times):
        marks = []
        for i in range(n):
            first = lot.random() < truth
            second = first if lot.random() < 0.7 else lot.random() < truth
            marks += [(("toy", f"q{i}"), first), (("toy", f"q{i}"), second)]
        found = share_by_question(marks)
        naive = share(sum(mark for _, mark in marks), len(marks))
        assert found is not None
        assert naive is not None
        n_held += found.interval.low <= truth <= found.interval.high
        n_naive += naive.interval.low <= truth <= naive.interval.high
    assert 0.93 <= n_held / n_times <= 0.975
    assert n_naive / n_times < 0.9


def test_the_auc_is_that_of_the_statistics_and_lies_within_its_interval() -> None:
    lot = random.Random(3)
    rows = []
    for i in range(60):
        for _ in range(2):
            mark = lot.random() < 0.4
            rows.append((("toy", f"q{i}"), round(lot.random() + 0.3 * mark, 1), mark))
    found = auc_by_question(rows)
    assert isinstance(found, Auc)
    assert found.value == auc([row[1] for row in rows], [row[2] for row in rows])
    assert found.interval is not None
    assert found.interval.low < found.value < found.interval.high
    assert 0.1 < found.interval.high - found.interval.low < 0.35


def test_an_auc_needs_both_marks_and_its_interval_some_questions() -> None:
    assert auc_by_question([(("toy", "q1"), 0.5, True)]) is None
    found = auc_by_question([(("toy", "q1"), 0.5, True), (("toy", "q2"), 0.4, False)])
    assert found is not None
    assert (found.value, found.interval) == (1.0, None)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.2, "more than"),
        (-0.2, -0.1, "less than"),
        (-0.1, 0.1, "not told apart from"),
        (0.0, 0.0, "not told apart from"),
    ],
)
def test_a_difference_is_put_in_words(low: float, high: float, words: str) -> None:
    gain = Gain(mean=(low + high) / 2, interval=Interval(low=low, high=high), p_value=1.0, n=50)
    assert relation(gain) == words
