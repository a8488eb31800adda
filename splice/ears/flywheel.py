"""The data flywheel: calibrate a judge, curate, train, evaluate, and again until it stops paying.

    folder/
        cycles.jsonl    a line for each cycle, made of the results of three commands
        cycle-1/        where the commands of the first cycle put them, if they are run as proposed
            calibration/  curation/  agent/  evaluation/

A cycle keeps what may be compared with the next one, and the SHA-256 of the files it was read from.

Source: EARS 3.4, Figure 1.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import ValidationError

from splice.ears.calibration import Calibration, JudgeScore, Round
from splice.ears.curation import Tally, is_settled
from splice.ears.ensemble import CurationCard
from splice.ears.evaluation import AbstentionResult
from splice.ears.interactions import Label
from splice.ears.record_files import problem_of_line, records_in
from splice.errors import DataError, SettingsError, StoreError
from splice.files import read_text
from splice.lines import check_regular, resumed
from splice.records import ModelIdentity, Record
from splice.report.display import WIDTH, aligned, shortened, visible, wrap
from splice.statistics import Share, share

CALIBRATION_FILE: Final = "calibration.json"
CURATION_FILE: Final = "card.json"
EVALUATION_FILE: Final = "result.json"
"""What the three commands leave in their folders."""
GUIDELINE_FILE: Final = "guideline.txt"
INSTANCES_FILE: Final = "instances.jsonl"
COMMAND_FILE: Final = "command.txt"
"""The command that made what lies in a folder."""

_CYCLES: Final = "cycles.jsonl"


class CalibrationCard(Record):
    """A finished calibration and where it comes from: `calibration.json`."""

    schema_version: Literal[1] = 1
    engine_version: str
    source: str
    """File or workload of the seed set."""
    judge: ModelIdentity
    critic: ModelIdentity
    calibration: Calibration

    def text(self) -> str:
        """The rounds as a table, and what came of them."""
        made = self.calibration
        best = made.best
        accuracy = f"{best.score.accuracy:.3f}"
        is_met = "met" if made.is_met else "not met"
        return "\n".join(
            [
                *aligned([_ROUND_COLUMNS, *map(round_cells, made.rounds)]),
                "",
                *wrap(
                    f"Best: version {best.guideline.version}, accuracy {accuracy} on what the "
                    f"critic may see; the threshold of {made.theta:g} is {is_met}. "
                    f"Stopped: {_STOPPED[made.stop_reason]}.",
                    WIDTH,
                ),
            ]
        )


_ROUND_COLUMNS = ("round", "version", "n", "accuracy", "held out", "accuracy", "95% interval", "")

_STOPPED: Final = {
    "calibrated": "the threshold is met and the last revisions won nothing",
    "no_errors": "the judge is right everywhere",
    "max_rounds": "there were as many rounds as may be",
}


def round_cells(made: Round) -> tuple[str, ...]:
    """A round as a line of a table: version, accuracies, decision."""
    held_out = judged_share(made.held_out)
    return (
        f"{made.number}",
        f"{made.guideline.version}",
        f"{made.score.n:,}",
        f"{made.score.accuracy:.3f}",
        f"{made.held_out.n:,}",
        f"{held_out.value:.3f}",
        f"{held_out.interval:.3f}",
        _decision(made),
    )


def _decision(made: Round) -> str:
    proposal = made.proposal
    if proposal is None:
        return "last"
    if proposal.guideline is None:
        return f"no revision: {shortened(proposal.problem or 'none', 40)}"
    return f"version {proposal.guideline.version} {'' if proposal.is_approved else 'not '}approved"


def judged_share(score: JudgeScore) -> Share:
    """A judge's accuracy with its interval."""
    found = share(score.n_right, score.n)
    assert found is not None  # a score has at least one interaction
    return found


# --- cycles ----------------------------------------------------------------------------------


class CategoryCount(Record):
    """What became of the interactions that most judges put into one category."""

    category: Label | None
    """None: no one label has most votes."""
    accepted: int
    unresolved: int
    """Without an accepted label: kept, dropped, or for a person."""


class ResultFile(Record):
    """A file that a cycle was read from."""

    path: str
    sha256: str


class Cycle(Record):
    """One turn of the flywheel: one line of `cycles.jsonl`."""

    schema_version: Literal[1] = 1
    number: int
    guideline: str
    """Digest of the guideline that the calibration came to."""
    guideline_version: int
    seed_accuracy: Share
    """Of the judge on what the critic may see of the seed set."""
    held_out_accuracy: Share
    """On the third that is held out."""
    categories: tuple[CategoryCount, ...]
    arm: str
    """The evaluation's last arm: the agent that the cycle came to."""
    model: ModelIdentity
    passed: Share
    """Overall pass of that arm."""
    before: Share | None
    """Overall pass of the evaluation's first arm; None: there is but one."""
    files: Mapping[str, ResultFile]
    """By `calibration`, `curation` and `evaluation`."""


def read_cycles(folder: str | Path) -> tuple[Cycle, ...]:
    """The cycles that were recorded, in order; none if there is no such file.

    Raises:
        StoreError: the file can't be read.
        DataError: a line is no cycle; the message names file, line and field.
    """
    path = Path(folder) / _CYCLES
    check_regular(path)
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}") from None
    return tuple(records_in(path, data, Cycle))


def add_cycle(
    folder: str | Path, *, calibration: str | Path, curation: str | Path, evaluation: str | Path
) -> Cycle:
    """Record a cycle from the folders of its three results.

    Raises:
        DataError: a result is missing or malformed; the message names the file and the field.
        SettingsError: no judge of the curation had the guideline that the calibration came to, or
            the evaluation is that of a cycle that is recorded already.
        StoreError: the file of cycles can't be written, or another command works on it.
    """
    path = Path(folder) / _CYCLES
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path.parent}: {error.strerror}") from None
    file, data = resumed(path)
    try:
        known = tuple(records_in(path, data, Cycle))
        cycle = _cycle(len(known) + 1, Path(calibration), Path(curation), Path(evaluation))
        for earlier in known:
            if earlier.files["evaluation"].sha256 == cycle.files["evaluation"].sha256:
                raise SettingsError(
                    f"{cycle.files['evaluation'].path} is the evaluation of cycle "
                    f"{earlier.number} already"
                )
        file.append(cycle.model_dump_json().encode() + b"\n")
    finally:
        file.close()
    return cycle


def _cycle(number: int, calibration: Path, curation: Path, evaluation: Path) -> Cycle:
    made, made_file = _result(calibration / CALIBRATION_FILE, CalibrationCard, "calibrate")
    card, card_file = _result(curation / CURATION_FILE, CurationCard, "curate")
    result, result_file = _result(evaluation / EVALUATION_FILE, AbstentionResult, "evaluate")
    best = made.calibration.best
    used = {judge.guideline for judge in card.judges}
    if best.guideline.digest not in used:
        raise SettingsError(
            f"{card_file.path}: no judge had the guideline that {calibration} came to "
            f"({best.guideline.digest[:12]}); they had {', '.join(sorted(g[:12] for g in used))}"
        )
    first, last = result.arms[0], result.arms[-1]
    passed = last.scores.overall
    if passed is None:
        raise DataError(f"{result_file.path}: arms: the last one has no examples")
    return Cycle(
        number=number,
        guideline=best.guideline.digest,
        guideline_version=best.guideline.version,
        seed_accuracy=judged_share(best.score),
        held_out_accuracy=judged_share(best.held_out),
        categories=tuple(map(_counted, card.tallies)),
        arm=last.arm.name,
        model=last.model,
        passed=passed,
        before=None if first is last else first.scores.overall,
        files={"calibration": made_file, "curation": card_file, "evaluation": result_file},
    )


def _counted(tally: Tally) -> CategoryCount:
    return CategoryCount(
        category=tally.category,
        accepted=tally.accepted,
        unresolved=tally.kept + tally.dropped + tally.human,
    )


R = TypeVar("R", bound=Record)


def _result(path: Path, kind: type[R], command: str) -> tuple[R, ResultFile]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; `splice ears {command}` writes it")
    text = read_text(path, DataError)
    try:
        found = kind.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{path}: {problem_of_line(error)}") from None
    return found, ResultFile(path=str(path), sha256=sha256(path.read_bytes()).hexdigest())


# --- the state -------------------------------------------------------------------------------


class Step(Record):
    """What to do next."""

    why: str
    command: str | None
    """None: there is nothing to run."""


class Flywheel(Record):
    """Where a flywheel stands."""

    cycles: tuple[Cycle, ...]
    is_settled: bool
    """The pass rate won less than 0.2 points in each of the last two cycles."""
    changed: tuple[str, ...]
    """Files of cycles that are gone, or not as they were."""
    next_step: Step

    def text(self) -> str:
        """The cycles as a table, and what to run next."""
        lines = list(_cycle_table(self.cycles)) if self.cycles else ["No cycle is recorded yet."]
        for path in self.changed:
            lines += wrap(f"Gone, or not as it was: {path}", WIDTH)
        command = self.next_step.command
        return "\n".join(
            [
                *lines,
                "",
                *wrap(f"{'Settled' if self.is_settled else 'Next'}: {self.next_step.why}.", WIDTH),
                *([f"  {visible(command)}"] if command is not None else []),
            ]
        )


def flywheel(folder: str | Path) -> Flywheel:
    """Where the flywheel in a folder stands.

    Raises:
        StoreError, DataError: as `read_cycles`.
    """
    folder = Path(folder)
    cycles = read_cycles(folder)
    settled = is_settled(pass_rates(cycles))
    return Flywheel(
        cycles=cycles,
        is_settled=settled,
        changed=tuple(
            file.path
            for cycle in cycles
            for file in cycle.files.values()
            if not _is_as_it_was(file)
        ),
        next_step=_SETTLED if settled else next_step(folder, cycles),
    )


def pass_rates(cycles: Sequence[Cycle]) -> list[float]:
    """Overall pass rate before the first cycle, where it is known, and after each, in points."""
    first = [cycle.before for cycle in cycles[:1] if cycle.before is not None]
    return [100 * found.value for found in (*first, *(cycle.passed for cycle in cycles))]


def _is_as_it_was(file: ResultFile) -> bool:
    try:
        return sha256(Path(file.path).read_bytes()).hexdigest() == file.sha256
    except OSError:
        return False


_SETTLED: Final = Step(
    why="the pass rate won less than 0.2 points in each of the last two cycles", command=None
)


def next_step(folder: Path, cycles: Sequence[Cycle]) -> Step:
    """The next command of the cycle that comes after these.

    It is told by what lies in that cycle's folder. A command of the cycle before is repeated with
    other folders; what only its user can know stands in capitals where there was none.
    """
    here = folder / f"cycle-{len(cycles) + 1}"
    last = cycles[-1] if cycles else None
    calibration, curation, evaluation = (
        here / name for name in ("calibration", "curation", "evaluation")
    )
    if not (calibration / CALIBRATION_FILE).is_file():
        given = _again(last, "calibration", here) or ["splice", "ears", "calibrate", "SEED_SET"]
        if last is not None:
            guideline = Path(last.files["calibration"].path).parent / GUIDELINE_FILE
            given = _with(given, "--guideline", str(guideline))
        return _step("calibrate the judge", _with(given, "--out", str(calibration)))
    if not (curation / CURATION_FILE).is_file():
        given = _again(last, "curation", here) or [
            *("splice", "ears", "curate", "INTERACTIONS"),
            *("--judge", f"NAME=MODEL,{calibration / GUIDELINE_FILE}"),
        ]
        return _step(
            "curate what the agent met since, with the calibrated judge among the judges",
            _with(given, "--out", str(curation)),
        )
    if (evaluation / EVALUATION_FILE).is_file():
        command = ["splice", "ears", "flywheel", str(folder), "--add"]
        for name, path in zip(_PARTS, (calibration, curation, evaluation), strict=True):
            command += [f"--{name}", str(path)]
        return _step("record the cycle", command)
    agent = here / "agent"
    if not agent.is_dir():
        instances = str(curation / INSTANCES_FILE)
        command = ["splice", "selector", "train-agent", instances, "--out", str(agent)]
        return _step("train the agent on the instances", command)
    given = _again(last, "evaluation", here) or ["splice", "ears", "evaluate", "WORKLOAD"]
    return _step(
        "evaluate, with the trained agent as the last arm", _with(given, "--out", str(evaluation))
    )


_PARTS: Final = ("calibration", "curation", "evaluation")


def _step(why: str, command: Sequence[str]) -> Step:
    return Step(why=why, command=shlex.join(command))


def _again(last: Cycle | None, part: str, here: Path) -> list[str] | None:
    """The command of the last cycle, with the folders of the cycle `here`; None: it is not known."""
    if last is None:
        return None
    folders = {name: str(Path(last.files[name].path).parent) for name in _PARTS}
    try:
        words = shlex.split(read_text(Path(folders[part]) / COMMAND_FILE, DataError))
    except (DataError, ValueError):
        return None
    for name, folder in folders.items():
        words = [word.replace(folder, str(here / name)) for word in words]
    return words or None


def _with(words: Sequence[str], option: str, value: str) -> list[str]:
    """A command with one value of an option."""
    if option not in words[:-1]:
        return [*words, option, value]
    place = words.index(option)
    return [*words[: place + 1], value, *words[place + 2 :]]


_CYCLE_COLUMNS = (
    "cycle",
    "guideline",
    "seed set",
    "held out",
    "95% interval",
    "accepted",
    "unresolved",
    "passed",
    "95% interval",
    "arm",
    "model",
)


def _cycle_table(cycles: Sequence[Cycle]) -> Iterator[str]:
    yield from aligned([_CYCLE_COLUMNS, *map(_cycle_cells, cycles)])
    last = cycles[-1]
    yield ""
    yield from aligned(
        [
            (f"cycle {last.number}: most judges say", "accepted", "unresolved"),
            *(
                (row.category or "no one label", f"{row.accepted:,}", f"{row.unresolved:,}")
                for row in last.categories
            ),
        ]
    )


def _cycle_cells(cycle: Cycle) -> tuple[str, ...]:
    return (
        f"{cycle.number}",
        f"version {cycle.guideline_version} ({cycle.guideline[:8]})",
        f"{cycle.seed_accuracy.value:.3f}",
        f"{cycle.held_out_accuracy.value:.3f}",
        f"{cycle.held_out_accuracy.interval:.3f}",
        f"{sum(row.accepted for row in cycle.categories):,}",
        f"{sum(row.unresolved for row in cycle.categories):,}",
        f"{cycle.passed.value:.3f}",
        f"{cycle.passed.interval:.3f}",
        shortened(cycle.arm, 20),
        shortened(cycle.model.name, 30),
    )
