"""The loop stops by its rule, what is held out stays so, rounds can be trusted and gone on with."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splice.ears.calibration import (
    Calibration,
    CalibrationSettings,
    JudgeScore,
    Revision,
    calibrate,
    guideline_diff,
    is_held_out,
    judge_score,
    keeps_held_out,
    read_rounds,
    stop_reason,
)
from splice.ears.interactions import Interaction
from splice.ears.judging import Guideline
from splice.errors import DataError, ModelError, SettingsError
from splice.models.scripted import ScriptedModel
from splice.records import Request

# --- the stop rule ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "reason"),
    [
        ([], None),
        ([0.5], None),
        ([0.9], None),
        ([0.9, 0.9], None),
        ([0.9, 0.8], None),
        ([0.9, 0.8, 0.7], "calibrated"),
        ([0.8, 0.8, 0.8], "calibrated"),
        ([0.79, 0.79, 0.79], None),
        ([0.5, 0.4, 0.3, 0.9], None),
        ([0.5, 0.4, 0.3, 0.9, 0.9, 0.9], "calibrated"),
        ([0.9, 0.8, 0.91, 0.9], None),
        ([0.9, 0.8, 0.91, 0.9, 0.91], "calibrated"),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], None),
        ([0.1 * k for k in range(10)], "max_rounds"),
        ([0.5] * 9, None),
        ([0.5] * 10, "max_rounds"),
        ([0.5] * 7 + [0.9] * 3, "calibrated"),
        ([0.5] * 8 + [0.9] * 2, "max_rounds"),
        ([1.0], "no_errors"),
        ([0.5, 1.0], "no_errors"),
    ],
)
def test_it_stops_once_the_threshold_is_met_and_two_revisions_won_nothing(
    accuracies: list[float], reason: str | None
) -> None:
    assert stop_reason(accuracies) == reason


@given(st.lists(st.floats(0.0, 0.99), min_size=1, max_size=12))
def test_the_rule_is_that_of_the_paper_step_by_step(accuracies: list[float]) -> None:
    settings = CalibrationSettings(theta=0.5, max_rounds=100)
    best, stale = float("-inf"), 0
    for accuracy in accuracies:
        if accuracy > best:
            best, stale = accuracy, 0
        else:
            stale += 1
    expected = "calibrated" if best >= 0.5 and stale >= 2 else None
    assert stop_reason(accuracies, settings) == expected


# --- a seed set, a judge and a critic --------------------------------------------------------

MARK = re.compile(r"(?:Shown|Secret)-\d+")


def row(k: int, held_out: bool) -> Interaction:
    """Even numbers are solvable, odd ones lack a capability."""
    mark = f"{'Secret' if held_out else 'Shown'}-{k}"
    return Interaction(
        id=f"row{k}",
        source="made",
        agent=f"agent-{mark}",
        context=f"You were told {mark}.",
        query=f"Please do {mark}.",
        reply=f"reply-{mark}",
        label="Missing Capability" if k % 2 else "Solvable",
        rationale=f"because of {mark}" if k % 2 else None,
    )


SEED_SET = [row(k, is_held_out(f"row{k}", 0)) for k in range(24)]
N_HELD_OUT = sum(is_held_out(f"row{k}", 0) for k in range(24))


def verdict(label: str, rationale: str) -> str:
    verdict, reason = {
        "Solvable": ("solvable", "none"),
        "Missing Capability": ("not_solvable", "missing_capability"),
    }[label]
    return json.dumps({"rationale": rationale, "verdict": verdict, "reason": reason})


def judging(request: Request) -> str:
    """A judge that is right about the numbers below the one that its guideline gives."""
    text = request.messages[0].content
    (skill,) = re.findall(r"SKILL (\d+)", text.partition("What the agent was told")[0])
    k = int(MARK.findall(text)[0].split("-")[1])
    is_odd = bool(k % 2)
    is_right = k < int(skill)
    return verdict("Missing Capability" if is_odd == is_right else "Solvable", f"seen {k}")


def critics(*skills: object) -> ScriptedModel:
    """A critic whose proposals give these skills, in turn."""
    replies = [f"They overlook it.\n\n**Revised guideline:**\nSKILL {skill}\n" for skill in skills]
    return ScriptedModel({"judge": replies}, name="critic")


def skilled(skill: int) -> Guideline:
    return Guideline(version=1, text=f"SKILL {skill}")


def yes(_: Revision) -> bool:
    return True


async def calibrated(
    folder: Path, critic: ScriptedModel, *, begin: int = 8, approve=yes, **more
) -> Calibration:
    seed_set = more.pop("seed_set", SEED_SET)
    judge = more.pop("judge", None) or ScriptedModel(judging)
    return await calibrate(
        seed_set, judge, critic, approve, folder, guideline=skilled(begin), **more
    )


def texts(found: Calibration) -> list[str]:
    return [made.guideline.text for made in found.rounds]


# --- the loop --------------------------------------------------------------------------------


async def test_versions_are_judged_until_two_revisions_win_nothing(tmp_path: Path) -> None:
    found = await calibrated(tmp_path, critics(22, 21, 20))
    assert found.stop_reason == "calibrated"
    assert texts(found) == ["SKILL 8", "SKILL 22", "SKILL 21", "SKILL 20"]
    assert [made.guideline.version for made in found.rounds] == [1, 2, 3, 4]
    parents = [made.guideline.parent for made in found.rounds]
    assert parents == [None, *(made.guideline.digest for made in found.rounds[:-1])]
    assert found.best == found.rounds[1]
    assert found.is_met
    assert found.rounds[-1].proposal is None


async def test_scores_are_those_of_the_two_parts(tmp_path: Path) -> None:
    found = await calibrated(tmp_path, critics(24))
    first, last = found.rounds
    assert found.stop_reason == "no_errors"
    assert (last.score.n, last.held_out.n) == (24 - N_HELD_OUT, N_HELD_OUT)
    assert last.held_out.accuracy == 1.0
    shown = [k for k in range(24) if not is_held_out(f"row{k}", 0)]
    assert first.score.n_right == sum(k < 8 for k in shown)
    assert first.score.n_right + first.held_out.n_right == 8


async def test_a_label_that_is_as_right_is_no_error(tmp_path: Path) -> None:
    seed_set = [
        made.model_copy(update={"also_right": ("Solvable", "Missing Capability")})
        for made in SEED_SET
    ]
    found = await calibrated(tmp_path, critics(), seed_set=seed_set)
    assert found.stop_reason == "no_errors"
    assert [made.score.accuracy for made in found.rounds] == [1.0]


async def test_the_critic_never_reads_anything_that_is_held_out(tmp_path: Path) -> None:
    critic = critics(10, 12, 11, 14, 9, 13)
    settings = CalibrationSettings(max_rounds=7)
    approve = keeps_held_out
    await calibrated(tmp_path, critic, approve=approve, settings=settings)
    assert len(critic.requests) == 6
    for request in critic.requests:
        text = request.messages[0].content
        assert "Shown-" in text
        assert "Secret-" not in text
        assert "reply-" not in text


async def test_the_critic_reads_confusions_cases_and_what_was_turned_down(tmp_path: Path) -> None:
    critic = critics(12, 13)
    settings = CalibrationSettings(max_rounds=3)
    await calibrated(tmp_path, critic, approve=lambda _: False, settings=settings)
    first, second = (request.messages[0].content for request in critic.requests)
    assert "> SKILL 8" in first
    assert re.search(r"^Missing Capability -> Solvable \(\d+\)$", first, re.MULTILINE)
    assert re.search(r"^Solvable -> Missing Capability \(\d+\)$", first, re.MULTILINE)
    assert first.count("The request:") == 8
    assert "Judge's reason:\n> seen " in first
    assert "Experts' reason:\n> because of Shown-" in first
    assert "(none)" in first
    assert "> SKILL 12" in second


async def test_a_refused_revision_leaves_the_guideline_and_counts_as_no_gain(
    tmp_path: Path,
) -> None:
    judge = ScriptedModel(judging)
    found = await calibrated(
        tmp_path, critics(23, 24), begin=22, approve=lambda _: False, judge=judge
    )
    assert found.stop_reason == "calibrated"
    assert texts(found) == ["SKILL 22"] * 3
    assert found.best.number == 1
    # The seed set once, and the held-out third with each proposal.
    assert len(judge.requests) == 24 + 2 * N_HELD_OUT


async def test_the_default_approver_refuses_what_lowers_the_held_out_accuracy(
    tmp_path: Path,
) -> None:
    found = await calibrated(
        tmp_path,
        critics(4, 16, 12),
        begin=10,
        approve=keeps_held_out,
        settings=CalibrationSettings(max_rounds=4),
    )
    assert texts(found) == ["SKILL 10", "SKILL 10", "SKILL 16", "SKILL 16"]
    proposals = [made.proposal for made in found.rounds[:-1]]
    assert [proposal and proposal.is_approved for proposal in proposals] == [False, True, False]
    assert found.stop_reason == "max_rounds"
    assert not found.is_met
    # A version's number is used once, even if it was refused.
    assert [made.guideline.version for made in found.rounds] == [1, 1, 3, 3]


async def test_the_approver_sees_both_guidelines_with_their_held_out_scores(
    tmp_path: Path,
) -> None:
    seen: list[Revision] = []

    def approve(revision: Revision) -> bool:
        seen.append(revision)
        return True

    found = await calibrated(tmp_path, critics(24), approve=approve)
    (revision,) = seen
    assert (revision.current, revision.proposed) == tuple(m.guideline for m in found.rounds)
    assert revision.current_held_out == found.rounds[0].held_out
    assert revision.proposed_held_out == found.rounds[1].held_out
    assert revision.patterns == "They overlook it."


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("I would not change it.", "no line says REVISED GUIDELINE"),
        ("REVISED GUIDELINE\na\nREVISED GUIDELINE\nb", "more than one line"),
        ("Why.\nREVISED GUIDELINE\n ", "the guideline is empty"),
        ("REVISED GUIDELINE\n```\n```", "the guideline is empty"),
        ("REVISED GUIDELINE\nSKILL 8", "one that there was before"),
        ("REVISED GUIDELINE\n" + "x" * 8001, "more than 8000 characters"),
    ],
)
async def test_a_proposal_that_cant_be_used_is_put_before_nobody(
    tmp_path: Path, reply: str, problem: str
) -> None:
    def never(_: Revision) -> bool:
        raise AssertionError("asked")

    critic = ScriptedModel({"judge": [reply]})
    settings = CalibrationSettings(max_rounds=2)
    found = await calibrated(tmp_path, critic, approve=never, settings=settings)
    proposal = found.rounds[0].proposal
    assert proposal is not None
    assert problem in (proposal.problem or "")
    assert proposal.guideline is None
    assert texts(found) == ["SKILL 8"] * 2


async def test_a_guideline_in_code_fences_is_taken_out_of_them(tmp_path: Path) -> None:
    critic = ScriptedModel({"judge": ["Why.\n## Revised guideline\n```text\nSKILL 24\n```"]})
    assert texts(await calibrated(tmp_path, critic))[-1] == "SKILL 24"


async def test_unreadable_verdicts_are_wrong_and_shown_to_the_critic(tmp_path: Path) -> None:
    def muddled(request: Request) -> str:
        return "well" if "Shown" in request.messages[0].content else judging(request)

    critic = critics(9)
    found = await calibrated(
        tmp_path,
        critic,
        judge=ScriptedModel(muddled),
        settings=CalibrationSettings(max_rounds=2),
    )
    assert found.rounds[0].score.accuracy == 0.0
    assert {cell.judged for cell in found.rounds[0].score.confusions} == {None}
    asked = critic.requests[0].messages[0].content
    assert "Solvable -> a reply that can't be read" in asked
    assert "it holds no verdict" in asked


async def test_the_order_of_the_seed_set_does_not_matter(tmp_path: Path) -> None:
    shuffled = list(SEED_SET)
    random.Random(3).shuffle(shuffled)
    asked = []
    for name, seed_set in (("a", SEED_SET), ("b", shuffled)):
        critic = critics(16, 24)
        await calibrated(tmp_path / name, critic, seed_set=seed_set)
        asked.append([request.messages for request in critic.requests])
    assert asked[0] == asked[1]


# --- outages, resumption, files --------------------------------------------------------------


async def test_an_outage_of_the_judge_is_no_error_of_its_guideline(tmp_path: Path) -> None:
    def failing(request: Request) -> str | Exception:
        is_down = "Shown-1." in request.messages[0].content
        return ModelError("down") if is_down else judging(request)

    with pytest.raises(ModelError, match=r"no answer about 1 of .*\(no answer: down\)"):
        await calibrated(tmp_path, critics(), judge=ScriptedModel(failing))
    assert read_rounds(tmp_path) == ()
    judge = ScriptedModel(judging)
    await calibrated(tmp_path, critics(24), judge=judge)
    # What was left of the first version, and the second one.
    assert len(judge.requests) == (1 + N_HELD_OUT) + 24


async def test_a_calibration_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = await calibrated(tmp_path / "whole", critics(16, 20, 19, 18))
    n_approved = 0

    def approve(_: Revision) -> bool:
        nonlocal n_approved
        n_approved += 1
        return True

    judge = ScriptedModel(judging)
    parts = tmp_path / "parts"
    with pytest.raises(ModelError):
        await calibrated(parts, critics(16, 20), approve=approve, judge=judge)
    assert len(read_rounds(parts)) == 3
    again = await calibrated(parts, critics(19, 18), approve=approve, judge=judge)
    assert texts(again) == texts(whole)
    assert [made.score for made in again.rounds] == [made.score for made in whole.rounds]
    assert n_approved == 4
    assert len(judge.requests) == 5 * 24


async def test_a_finished_calibration_asks_nobody(tmp_path: Path) -> None:
    first = await calibrated(tmp_path, critics(24))
    seen = []
    second = await calibrated(tmp_path, critics(), judge=ScriptedModel({}), on_round=seen.append)
    assert second == first
    assert tuple(seen) == first.rounds == read_rounds(tmp_path)


async def test_more_rounds_may_be_added_to_a_finished_calibration(tmp_path: Path) -> None:
    settings = CalibrationSettings(max_rounds=1)
    first = await calibrated(tmp_path, critics(), settings=settings)
    assert first.stop_reason == "max_rounds"
    second = await calibrated(tmp_path, critics(24))
    assert texts(second) == ["SKILL 8", "SKILL 24"]


async def test_a_changed_file_is_found_out(tmp_path: Path) -> None:
    found = await calibrated(tmp_path, critics(16, 24))
    path = tmp_path / "round-002.json"
    data = path.read_text("utf-8")
    stored = json.loads(data)
    assert json.loads((tmp_path / "round-003.json").read_text("utf-8"))["digest"] == found.digest

    stored["round"]["score"]["n_right"] += 1
    path.write_text(json.dumps(stored), "utf-8")
    with pytest.raises(DataError, match=r"round-002\.json: digest: "):
        read_rounds(tmp_path)

    path.write_text((tmp_path / "round-001.json").read_text("utf-8"), "utf-8")
    with pytest.raises(DataError, match=r"round-002\.json: before: "):
        read_rounds(tmp_path)

    path.write_text(data.replace('"number"', '"numbers"'), "utf-8")
    with pytest.raises(DataError, match=r"round-002\.json: round\.number"):
        read_rounds(tmp_path)

    path.write_text(json.dumps(json.loads(data)), "utf-8")
    assert read_rounds(tmp_path) == found.rounds


async def test_a_folder_of_another_calibration_is_refused(tmp_path: Path) -> None:
    await calibrated(tmp_path, critics(24))
    with pytest.raises(SettingsError, match="began with another guideline"):
        await calibrated(tmp_path, critics(), begin=9)
    with pytest.raises(SettingsError, match="another judge, or on another seed set"):
        await calibrated(tmp_path, critics(), seed_set=SEED_SET[1:])
    with pytest.raises(SettingsError, match="another judge, or on another seed set"):
        await calibrated(tmp_path, critics(), name="somebody else")


async def test_a_seed_set_has_labels_ids_and_two_parts(tmp_path: Path) -> None:
    unlabelled = SEED_SET[0].model_copy(update={"label": None})
    with pytest.raises(DataError, match="'row0' has no label"):
        await calibrated(tmp_path, critics(), seed_set=[unlabelled, *SEED_SET[1:]])
    with pytest.raises(DataError, match="'row1' is there twice"):
        await calibrated(tmp_path, critics(), seed_set=[*SEED_SET, SEED_SET[1]])
    for seed_set in ([], SEED_SET[:1]):
        with pytest.raises(SettingsError, match="too small"):
            await calibrated(tmp_path, critics(), seed_set=seed_set)


# --- parts -----------------------------------------------------------------------------------


def test_a_third_is_held_out_and_another_seed_holds_out_another() -> None:
    ids = [f"id{k}" for k in range(3000)]
    drawn = [is_held_out(id, 0) for id in ids]
    assert 900 < sum(drawn) < 1100
    both = sum(a and is_held_out(id, 1) for a, id in zip(drawn, ids, strict=True))
    assert 250 < both < 420


def test_scores_count_every_cell() -> None:
    score = judge_score(["Solvable", "Solvable", "Misrouting"], ["Solvable", None, "Solvable"])
    cells = [(cell.truth, cell.judged, cell.n) for cell in score.confusions]
    assert cells == [
        ("Solvable", "Solvable", 1),
        ("Solvable", None, 1),
        ("Misrouting", "Solvable", 1),
    ]
    assert (score.n_right, score.n, score.accuracy) == (1, 3, 1 / 3)
    with pytest.raises(ValueError, match="no verdicts"):
        judge_score([], [])


def held_out(n_right: int) -> JudgeScore:
    return JudgeScore(n=3, n_right=n_right, confusions=())


@pytest.mark.parametrize(
    ("before", "after", "is_kept"), [(2, 2, True), (2, 3, True), (2, 1, False)]
)
def test_equal_held_out_accuracy_is_good_enough(before: int, after: int, is_kept: bool) -> None:
    revision = Revision(
        current=skilled(1),
        current_held_out=held_out(before),
        proposed=skilled(2),
        proposed_held_out=held_out(after),
        patterns="",
    )
    assert keeps_held_out(revision) is is_kept


def test_a_diff_shows_what_changes_and_nothing_that_moves_a_cursor() -> None:
    before = Guideline(version=1, text="one\ntwo\nthree")
    after = Guideline(version=3, text="one\n2\x1b[2J\nthree")
    assert guideline_diff(before, after).splitlines() == [
        "--- version 1",
        "+++ version 3",
        "@@ -1,3 +1,3 @@",
        " one",
        "-two",
        "+2[2J",
        " three",
    ]
    assert guideline_diff(before, before) == ""
