"""Cycles made of three results, when they stop paying, what comes next; and the table over `k`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import test_ears_evaluation as desk

from splice.ears.calibration import Calibration, JudgeScore, Proposal, Round
from splice.ears.curation import CurationSettings, curate
from splice.ears.ensemble import (
    AbstentionScore,
    EnsembleTable,
    curation_card,
    ensemble_table,
    judge_card,
)
from splice.ears.evaluation import DEFAULT_ARMS, Arm
from splice.ears.flywheel import (
    CalibrationCard,
    Cycle,
    add_cycle,
    flywheel,
    pass_rates,
    read_cycles,
)
from splice.ears.interactions import Interaction, Label
from splice.ears.judging import Guideline, Verdict, interaction_digest
from splice.errors import DataError, SettingsError
from splice.records import CallRecord, ModelIdentity, Usage

MODEL = ModelIdentity(name="m", provider="scripted")
GUIDELINE = Guideline(version=2, text="Decide well.")

# --- an ensemble -----------------------------------------------------------------------------

S, M, I = "Solvable", "Misrouting", "Insufficient Input"  # noqa: E741


def interaction(n: int, label: Label | None = None, **more: object) -> Interaction:
    fields = {"source": "made", "agent": "desk", "context": "You book.", "reply": "booked", **more}
    return Interaction.model_validate(
        {"id": f"i{n}", "query": f"Book number {n}.", "label": label, **fields}
    )


def verdict(about: Interaction, judge: str, label: Label | None, **more: object) -> Verdict:
    fields = {"guideline": GUIDELINE.digest, "rationale": "number", "reply": "...", **more}
    shown = interaction_digest(about)
    return Verdict.model_validate({"interaction": shown, "judge": judge, "label": label, **fields})


def table_of(rows: list[tuple[Interaction, list[Label | None]]]) -> EnsembleTable:
    verdicts = [
        verdict(about, f"j{place}", label)
        for about, labels in rows
        for place, label in enumerate(labels)
    ]
    made = curate([about for about, _ in rows], verdicts, CurationSettings(k=1))
    found = ensemble_table(made.rows)
    assert found is not None
    return found


LABELLED = [
    # Four judges who agree are right, three mostly, two seldom.
    (interaction(0, M), [M, M, M, M]),
    (interaction(1, M), [M, M, M, M]),
    (interaction(2, M), [M, M, M, S]),
    (interaction(3, S), [M, M, M, S]),
    (interaction(4, I), [M, M, S, I]),
    (interaction(5, S), [M, M, S, I]),
    (interaction(6, I), [I, S, S, S]),
    (interaction(7, S), [S, S, S, None]),
]


def test_precision_rises_and_recall_falls_with_k() -> None:
    found = table_of(LABELLED)
    assert (found.n, found.n_abstentions) == (8, 5)
    assert [score.n_accepted for score in found.by_k] == [6, 6, 4, 2]
    precision = [hits(score.precision) for score in found.by_k]
    recall = [hits(score.recall) for score in found.by_k]
    assert precision == [(3, 6), (3, 6), (3, 4), (2, 2)]
    assert recall == [(3, 5), (3, 5), (3, 5), (2, 5)]
    for one, next_ in zip(found.by_k, found.by_k[1:], strict=False):
        assert share_of(one.precision) <= share_of(next_.precision)
        assert share_of(one.recall) >= share_of(next_.recall)
        assert share_of(one.any_precision) <= share_of(next_.any_precision)
        assert share_of(one.any_recall) >= share_of(next_.any_recall)


def test_any_abstention_counts_whatever_the_category() -> None:
    first = table_of(LABELLED).by_k[0]
    # Number 4 is accepted as the wrong category.
    assert (hits(first.any_precision), hits(first.any_recall)) == ((4, 6), (4, 5))


def test_each_judge_alone_is_scored_too() -> None:
    found = {score.way: score for score in table_of(LABELLED).judges}
    assert list(found) == ["j0", "j1", "j2", "j3"]
    assert hits(found["j0"].precision) == (4, 7)
    assert hits(found["j0"].recall) == (4, 5)
    assert hits(found["j3"].recall) == (3, 5)


def test_a_label_that_is_as_right_counts_and_nothing_calls_for_what_can_be_carried_out() -> None:
    rows = [
        (interaction(0, I, also_right=(M,)), [M]),
        (interaction(1, M, also_right=(S,)), [M]),
        (interaction(2, M, also_right=(S,)), [S]),
    ]
    (score,) = table_of(rows).by_k
    assert (hits(score.precision), hits(score.recall)) == ((2, 2), (1, 1))


def test_without_a_known_label_there_is_no_table() -> None:
    about = interaction(0)
    assert ensemble_table(curate([about], [verdict(about, "j", M)]).rows) is None


def test_the_table_has_a_line_for_each_k_and_judge() -> None:
    cells = [line.split() for line in table_of(LABELLED).text().splitlines()]
    assert ["k", "=", "4", "2", "1.000"] in [row[:5] for row in cells]
    assert ["j0", "7", "0.571"] in [row[:3] for row in cells]


def hits(found: object) -> tuple[int, int]:
    return found.n_hits, found.n  # type: ignore[attr-defined]


def share_of(found: object) -> float:
    return found.value  # type: ignore[attr-defined]


def test_a_judges_cost_counts_each_verdict_once() -> None:
    about = interaction(0)
    calls = (
        CallRecord(
            stage="judge",
            model="m",
            outcome="ok",
            usage=Usage(prompt_tokens=30, completion_tokens=4),
            elapsed_s=0.5,
        ),
    )
    one, other = verdict(about, "j", M, calls=calls), verdict(interaction(1), "j", None)
    card = judge_card("j", MODEL, GUIDELINE.digest, [one, one, other])
    assert (card.spending.n_calls, card.spending.tokens, card.elapsed_s) == (1, 34, 0.5)
    assert card.n_unreadable == 1


# --- results ---------------------------------------------------------------------------------


def calibrated(folder: Path, guideline: Guideline = GUIDELINE) -> Path:
    """A calibration of two rounds, the second with `guideline`."""
    first = Guideline(version=1, text="Decide.")
    rounds = (
        Round(
            number=1,
            guideline=first,
            score=JudgeScore(n=10, n_right=6, confusions=()),
            held_out=JudgeScore(n=5, n_right=3, confusions=()),
            proposal=Proposal(guideline=guideline, is_approved=True, reply="..."),
        ),
        Round(
            number=2,
            guideline=guideline,
            score=JudgeScore(n=10, n_right=9, confusions=()),
            held_out=JudgeScore(n=5, n_right=4, confusions=()),
        ),
    )
    made = Calibration(rounds=rounds, stop_reason="max_rounds", theta=0.8, digest="d" * 32)
    card = CalibrationCard(
        engine_version="0", source="seed.jsonl", judge=MODEL, critic=MODEL, calibration=made
    )
    folder.mkdir(parents=True)
    (folder / "calibration.json").write_text(card.model_dump_json(), "utf-8")
    return folder


def curated(folder: Path) -> Path:
    rows = [about for about, _ in LABELLED]
    verdicts = [
        verdict(about, f"j{place}", label)
        for about, labels in LABELLED
        for place, label in enumerate(labels)
    ]
    judges = [judge_card(f"j{place}", MODEL, GUIDELINE.digest, verdicts) for place in range(4)]
    card = curation_card("rows.jsonl", curate(rows, verdicts), judges, {})
    folder.mkdir(parents=True)
    (folder / "card.json").write_text(card.model_dump_json(), "utf-8")
    return folder


async def results(folder: Path, number: int, n_right: int = 6) -> dict[str, Path]:
    """The three results of a cycle whose last arm passes `n_right` and one of ten."""
    here = folder / f"cycle-{number}"

    def replying(request: object) -> str:
        n = desk.number_in(request)  # type: ignore[arg-type]
        return f"booked {n}" if n < n_right else "booked nothing"

    await desk.evaluated(
        here / "evaluation",
        model=desk.ScriptedModel(replying),
        arms=[*DEFAULT_ARMS, Arm(name=f"tuned{number}", mode="prompted")],
    )
    return {
        "calibration": calibrated(here / "calibration"),
        "curation": curated(here / "curation"),
        "evaluation": here / "evaluation",
    }


# --- cycles ----------------------------------------------------------------------------------


async def test_a_cycle_keeps_what_is_compared_with_the_next(tmp_path: Path) -> None:
    made = add_cycle(tmp_path, **await results(tmp_path, 1, n_right=4))
    assert read_cycles(tmp_path) == (made,)
    assert (made.number, made.guideline_version, made.guideline) == (1, 2, GUIDELINE.digest)
    assert hits(made.seed_accuracy) == (9, 10)
    assert hits(made.held_out_accuracy) == (4, 5)
    assert (made.arm, hits(made.passed), hits(made.before)) == ("tuned1", (4, 10), (4, 10))
    by_category = {row.category: (row.accepted, row.unresolved) for row in made.categories}
    # By most votes: 0 to 5 are misrouting, of which all four judges agree on two.
    assert by_category == {"Misrouting": (2, 4), "Solvable": (0, 2)}
    assert Path(made.files["curation"].path) == tmp_path / "cycle-1" / "curation" / "card.json"


async def test_cycles_are_numbered_and_none_is_recorded_twice(tmp_path: Path) -> None:
    first, second = await results(tmp_path, 1), await results(tmp_path, 2)
    add_cycle(tmp_path, **first)
    assert add_cycle(tmp_path, **second).number == 2
    with pytest.raises(SettingsError, match="is the evaluation of cycle 1 already"):
        add_cycle(tmp_path, **first)
    assert len(read_cycles(tmp_path)) == 2


async def test_a_result_that_is_missing_is_named_with_the_command_that_writes_it(
    tmp_path: Path,
) -> None:
    found = await results(tmp_path, 1)
    with pytest.raises(DataError, match=r"gone/card\.json: .*`splice ears curate` writes it"):
        add_cycle(tmp_path, **{**found, "curation": tmp_path / "gone"})
    (found["calibration"] / "calibration.json").write_text('{"schema_version": 1}', "utf-8")
    with pytest.raises(DataError, match=r"calibration\.json: engine_version: Field required"):
        add_cycle(tmp_path, **found)
    assert read_cycles(tmp_path) == ()


async def test_a_curation_without_the_calibrated_guideline_is_refused(tmp_path: Path) -> None:
    found = await results(tmp_path, 1)
    other = calibrated(tmp_path / "other", Guideline(version=3, text="Decide otherwise."))
    with pytest.raises(SettingsError, match=f"they had {GUIDELINE.digest[:12]}"):
        add_cycle(tmp_path, **{**found, "calibration": other})


def test_a_line_that_is_no_cycle_is_named(tmp_path: Path) -> None:
    (tmp_path / "cycles.jsonl").write_text('{"number": "one"}\n', "utf-8")
    with pytest.raises(DataError, match=r"cycles\.jsonl:1: number: "):
        read_cycles(tmp_path)


async def cycles(folder: Path, *n_right: int) -> tuple[Cycle, ...]:
    for number, n in enumerate(n_right, 1):
        add_cycle(folder, **await results(folder, number, n))
    return read_cycles(folder)


async def test_it_is_settled_once_two_cycles_won_nothing(tmp_path: Path) -> None:
    # All arms of a cycle pass alike here, so before the first cycle it was as after it.
    assert pass_rates(await cycles(tmp_path, 4)) == [40.0, 40.0]
    assert not flywheel(tmp_path).is_settled
    add_cycle(tmp_path, **await results(tmp_path, 2, 5))
    add_cycle(tmp_path, **await results(tmp_path, 3, 5))
    assert not flywheel(tmp_path).is_settled
    add_cycle(tmp_path, **await results(tmp_path, 4, 5))
    found = flywheel(tmp_path)
    assert found.is_settled
    assert found.next_step.command is None
    assert "Settled: the pass rate won less than 0.2 points" in found.text()


# --- what to run next ------------------------------------------------------------------------


def test_a_new_flywheel_begins_with_a_calibration(tmp_path: Path) -> None:
    found = flywheel(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    out = tmp_path / "new" / "cycle-1" / "calibration"
    assert found.next_step.command == shlex.join(
        ["splice", "ears", "calibrate", "SEED_SET", "--out", str(out)]
    )
    assert "No cycle is recorded yet." in found.text()


async def test_the_next_command_is_told_by_what_lies_there(tmp_path: Path) -> None:
    here = tmp_path / "cycle-1"

    def command() -> str:
        return flywheel(tmp_path).next_step.command or ""

    calibrated(here / "calibration")
    judge = f"NAME=MODEL,{here}/calibration/guideline.txt"
    assert command() == f"splice ears curate INTERACTIONS --judge {judge} --out {here}/curation"
    curated(here / "curation")
    instances = f"{here}/curation/instances.jsonl"
    assert command() == f"splice selector train-agent {instances} --out {here}/agent"
    (here / "agent").mkdir()
    assert command() == f"splice ears evaluate WORKLOAD --out {here}/evaluation"
    await desk.evaluated(here / "evaluation")
    assert command() == (
        f"splice ears flywheel {tmp_path} --add --calibration {here}/calibration "
        f"--curation {here}/curation --evaluation {here}/evaluation"
    )


async def test_a_later_cycle_repeats_the_commands_with_its_own_folders(tmp_path: Path) -> None:
    await cycles(tmp_path, 4)
    one, two = tmp_path / "cycle-1", tmp_path / "cycle-2"
    commands = {
        "calibration": f"splice ears calibrate 'my seed.jsonl' --theta 0.9 --out {one}/calibration",
        "curation": "splice ears curate rows.jsonl --out somewhere "
        f"--judge a=m,{one}/calibration/guideline.txt",
    }
    for part, command in commands.items():
        (one / part / "command.txt").write_text(command, "utf-8")
    assert flywheel(tmp_path).next_step.command == (
        f"splice ears calibrate 'my seed.jsonl' --theta 0.9 --out {two}/calibration "
        f"--guideline {one}/calibration/guideline.txt"
    )
    calibrated(two / "calibration")
    assert flywheel(tmp_path).next_step.command == (
        f"splice ears curate rows.jsonl --out {two}/curation "
        f"--judge a=m,{two}/calibration/guideline.txt"
    )


async def test_files_that_changed_since_are_named(tmp_path: Path) -> None:
    await cycles(tmp_path, 4)
    assert flywheel(tmp_path).changed == ()
    card = tmp_path / "cycle-1" / "curation" / "card.json"
    card.write_text(card.read_text("utf-8") + " ", "utf-8")
    found = flywheel(tmp_path)
    assert found.changed == (str(card),)
    assert "Gone, or not as it was:" in found.text()


async def test_the_page_has_a_line_for_each_cycle(tmp_path: Path) -> None:
    await cycles(tmp_path, 4, 5)
    rows = [line.split() for line in flywheel(tmp_path).text().splitlines()]
    short = f"({GUIDELINE.digest[:8]})"
    assert ["2", "version", "2", short, "0.900", "0.800"] in [row[:6] for row in rows]
    assert [row[-2:] for row in rows if row[:2] == ["1", "version"]] == [["tuned1", "scripted"]]


def test_a_calibration_shows_its_rounds_and_what_came_of_them(tmp_path: Path) -> None:
    text = CalibrationCard.model_validate_json(
        (calibrated(tmp_path / "c") / "calibration.json").read_text("utf-8")
    ).text()
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "1", "10", "0.600", "5", "0.600"] in [row[:6] for row in rows]
    assert "version 2 approved" in text
    assert "the threshold of 0.8 is met" in text
    assert "there were as many rounds as may be" in text


def test_scores_are_records() -> None:
    empty = AbstentionScore(
        way="k = 1", n_accepted=0, precision=None, recall=None, any_precision=None, any_recall=None
    )
    table = EnsembleTable(n=1, n_abstentions=0, by_k=(empty,), judges=())
    assert EnsembleTable.model_validate_json(table.model_dump_json()) == table
