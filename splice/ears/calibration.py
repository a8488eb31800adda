"""Calibrating a judge: its guideline is revised until it decides a labelled seed set as people did.

    judge the seed set -> its errors -> a critic's revision -> somebody approves -> judge again

A third of the seed set is held out: each version is scored on it, and the critic never sees any of
it. The loop is that of EARS 3.2; what the paper leaves open is said where it is decided.

Everything lies in one folder: the judge's verdicts, and a file for each round. Whoever is stopped
goes on with the same command; no verdict is asked for and no revision is put before anybody twice.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

from pydantic import Field, ValidationError

from splice.ears.interactions import LABELS, Interaction, Label
from splice.ears.judging import (
    JUDGE_SETTINGS,
    Guideline,
    Verdict,
    VerdictFile,
    default_guideline,
    interaction_digest,
    judge_all,
    judge_name,
)
from splice.ears.record_files import problem_of_line
from splice.errors import DataError, ModelError, SettingsError
from splice.executor import book_call
from splice.files import read_text, write_whole
from splice.ledger import Account
from splice.models.protocol import ChatModel
from splice.prompts import defuse, excerpt, quote, render
from splice.records import (
    CallRecord,
    ChatMessage,
    ModelSettings,
    Probability,
    Record,
    Request,
    digest,
)

_MOST_CASES: Final = 8
_CASE_QUERY_ENDS: Final = (266, 134)
_CASE_CONTEXT_ENDS: Final = (400, 200)
"""What a critic is shown of the judge's errors: with a guideline it fits into 4,096 tokens."""

_MOST_GUIDELINE: Final = 8_000
"""Characters of a guideline that a critic may propose; the default one has about 1,300."""


class CalibrationSettings(Record):
    """When a calibration stops, and how its models are asked."""

    theta: Probability = 0.80
    """Accuracy that must be reached (the paper's example)."""
    stale_limit: Annotated[int, Field(ge=1)] = 2
    """Revisions without gain after which it stops, once `theta` is reached (EARS 3.2)."""
    max_rounds: Annotated[int, Field(ge=1)] = 10
    """Guidelines judged at most; the paper has no cap."""
    seed: int = 0
    """Of the draw of the third that is held out."""
    judge: ModelSettings = JUDGE_SETTINGS
    critic: ModelSettings = ModelSettings(max_tokens=2048)
    concurrency: Annotated[int, Field(ge=1)] = 8
    """Calls of the judge at a time."""


CALIBRATION_SETTINGS: Final = CalibrationSettings()


# --- scores ----------------------------------------------------------------------------------


class Confusion(Record):
    """How often the judge gave one label where another, or the same, is right."""

    truth: Label
    judged: Label | None
    """None: its reply could not be read."""
    n: int


class JudgeScore(Record):
    """How a judge did on labelled interactions with one version of a guideline."""

    n: Annotated[int, Field(ge=1)]
    n_right: int
    """A reply that can't be read is wrong."""
    confusions: tuple[Confusion, ...]
    """Cells of the confusion table that are not empty, the right ones included."""

    @property
    def accuracy(self) -> float:
        """Share that is right, in [0, 1]."""
        return self.n_right / self.n


def judge_score(truth: Sequence[Label], judged: Sequence[Label | None]) -> JudgeScore:
    """Score verdicts against labels.

    Raises:
        ValueError: there are none, or the rows do not pair up.
    """
    cells = Counter(zip(truth, judged, strict=True))
    if not cells:
        raise ValueError("no verdicts to score")
    return JudgeScore(
        n=len(truth),
        n_right=sum(n for (t, j), n in cells.items() if t == j),
        confusions=tuple(
            Confusion(truth=t, judged=j, n=cells[t, j])
            for t in LABELS
            for j in (*LABELS, None)
            if cells[t, j]
        ),
    )


def is_held_out(id: str, seed: int) -> bool:
    """Whether an interaction of a seed set belongs to the third that the critic never sees.

    It depends on nothing else, so that a seed set may grow: what a critic has seen is never held
    out later. The third is one on average.
    """
    return int(digest(f"{seed}:{id}"), 16) % 3 == 0


# --- revisions -------------------------------------------------------------------------------


class Revision(Record):
    """A proposed guideline as it is put before whoever approves it."""

    current: Guideline
    current_held_out: JudgeScore
    proposed: Guideline
    proposed_held_out: JudgeScore
    patterns: str
    """What the critic says about the judge's errors; may be empty."""


Approve: TypeAlias = Callable[[Revision], bool]
"""Whether to go on with a proposed guideline: the human in the loop."""


def keeps_held_out(revision: Revision) -> bool:
    """Approve what does not lower the accuracy on the held-out third.

    It stands in for a person. Scores on the held-out third are then no longer quite those of a set
    that had no say, as it chose among the versions.
    """
    return revision.proposed_held_out.accuracy >= revision.current_held_out.accuracy


def guideline_diff(before: Guideline, after: Guideline) -> str:
    """What changed between two guidelines, as a unified diff.

    Free of control characters, so that it can be shown in a terminal.
    """
    lines = difflib.unified_diff(
        defuse(before.text).splitlines(),
        defuse(after.text).splitlines(),
        f"version {before.version}",
        f"version {after.version}",
        lineterm="",
    )
    return "\n".join(lines)


class Proposal(Record):
    """What a critic made of the errors of one round."""

    patterns: str = ""
    """What it says about them."""
    guideline: Guideline | None = None
    """None: there is none to be read, or it is not new; see `problem`."""
    held_out: JudgeScore | None = None
    """Of the proposed guideline; None if there is none."""
    is_approved: bool = False
    problem: str | None = None
    reply: str
    """What the critic wrote."""
    calls: tuple[CallRecord, ...] = ()


# --- rounds ----------------------------------------------------------------------------------

StopReason: TypeAlias = Literal["calibrated", "no_errors", "max_rounds"]
"""Why a calibration came to its end.

`calibrated`: the threshold is met and the last revisions, as many as the limit says, won nothing.
`no_errors`: the judge is right everywhere, so that nothing is left to revise and nothing to win.
`max_rounds`: there were as many rounds as may be; `Calibration.is_met` says whether the best
guideline meets the threshold.
"""


class Round(Record):
    """One guideline judged, and what came of its errors."""

    number: Annotated[int, Field(ge=1)]
    guideline: Guideline
    score: JudgeScore
    """On the two thirds that the critic may see; what the loop goes by."""
    held_out: JudgeScore
    """On the third that is for reporting."""
    proposal: Proposal | None = None
    """None: the loop ended here, or was stopped here."""


class Calibration(Record):
    """A finished calibration."""

    rounds: Annotated[tuple[Round, ...], Field(min_length=1)]
    stop_reason: StopReason
    theta: Probability
    digest: str
    """Of the last round's file, which stands for all of them: whoever keeps it can tell later
    whether one was changed."""

    @property
    def best(self) -> Round:
        """The first round with the highest accuracy: its guideline is the result."""
        return max(self.rounds, key=lambda made: (made.score.accuracy, -made.number))

    @property
    def is_met(self) -> bool:
        """Whether the best guideline meets the threshold."""
        return self.best.score.accuracy >= self.theta


def stop_reason(
    accuracies: Sequence[float], settings: CalibrationSettings = CALIBRATION_SETTINGS
) -> StopReason | None:
    """Why to stop after rounds with these accuracies; None: go on.

    A round whose proposal was refused leaves the guideline as it is, so that the next one has the
    same accuracy and counts as a revision without gain.

    Source: EARS 3.2; `no_errors` spares rounds that could win nothing, and the cap is ours.
    """
    best, n_stale = -math.inf, 0
    for accuracy in accuracies:
        best, n_stale = (accuracy, 0) if accuracy > best else (best, n_stale + 1)
    if best >= settings.theta and n_stale >= settings.stale_limit:
        return "calibrated"
    if accuracies and accuracies[-1] == 1.0:
        return "no_errors"
    return "max_rounds" if len(accuracies) >= settings.max_rounds else None


# --- the loop --------------------------------------------------------------------------------


async def calibrate(
    seed_set: Sequence[Interaction],
    judge: ChatModel,
    critic: ChatModel,
    approve: Approve,
    folder: str | Path,
    *,
    guideline: Guideline | None = None,
    name: str | None = None,
    settings: CalibrationSettings = CALIBRATION_SETTINGS,
    account: Account | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Calibration:
    """Revise a guideline until a judge decides a seed set well enough, or go on with that.

    The order of the seed set does not matter.

    Args:
        seed_set: interactions with their labels.
        judge: who is calibrated.
        critic: who reads the judge's errors and proposes revisions.
        approve: asked about each revision.
        folder: of verdicts and rounds. What it holds already is not made again.
        guideline: to begin with; None: the annotation hierarchy.
        name: what the judge is called; None: as its model.
        settings: when to stop, and how to ask.
        account: spending to reserve calls from.
        on_round: told of each guideline that was judged, those of earlier commands included.

    Raises:
        DataError: an interaction has no label, an id is there twice, or a file in the folder is
            not as it was written.
        SettingsError: the seed set is too small to hold out a third, or the folder holds another
            calibration.
        ModelError: judge or critic give no answer; what there is so far is safe.
        BudgetExceeded: the critic's call would go over the budget; likewise.
        StoreError: the folder can't be written, or another command works on it.
    """
    folder = Path(folder)
    first = guideline or default_guideline()
    parts = _parts(seed_set, settings.seed)
    name = name or judge_name(judge, settings.judge)
    with VerdictFile(folder / "verdicts.jsonl") as known:
        at_work = _Work(parts, judge, critic, approve, known, name, settings, account)
        rounds = _Rounds(folder, at_work.about())
        if rounds.made and rounds.made[0].guideline != first:
            raise SettingsError(f"{folder} holds a calibration that began with another guideline")
        for made in rounds.made:
            _tell(on_round, made)
        while True:
            if rounds.is_complete:
                rounds.add(await at_work.judged(rounds.made, first))
                _tell(on_round, rounds.made[-1])
            reason = stop_reason([made.score.accuracy for made in rounds.made], settings)
            if reason is not None:
                break
            rounds.complete(await at_work.proposed(rounds.made))
    return Calibration(
        rounds=tuple(rounds.made), stop_reason=reason, theta=settings.theta, digest=rounds.digest
    )


def _tell(on_round: Callable[[Round], None] | None, made: Round) -> None:
    if on_round is not None:
        on_round(made)


class _Labelled(NamedTuple):
    """An interaction of the seed set with what people say about it."""

    interaction: Interaction
    label: Label

    @property
    def right(self) -> tuple[Label, ...]:
        """The label, and those that are as right."""
        return (self.label, *self.interaction.also_right)


class _Parts(NamedTuple):
    """A seed set in two parts, each by id."""

    shown: tuple[_Labelled, ...]
    held_out: tuple[_Labelled, ...]


def _parts(seed_set: Sequence[Interaction], seed: int) -> _Parts:
    """Check a seed set and hold out a third.

    Raises:
        DataError: an interaction has no label, or an id is there twice.
        SettingsError: one of the parts would be empty.
    """
    rows: dict[str, _Labelled] = {}
    for interaction in sorted(seed_set, key=lambda row: row.id):
        if interaction.label is None:
            raise DataError(f"interaction {interaction.id!r} has no label: a seed set needs one")
        if interaction.id in rows:
            raise DataError(f"interaction {interaction.id!r} is there twice")
        rows[interaction.id] = _Labelled(interaction, interaction.label)
    parts = _Parts(
        shown=tuple(row for id, row in rows.items() if not is_held_out(id, seed)),
        held_out=tuple(row for id, row in rows.items() if is_held_out(id, seed)),
    )
    if not parts.shown or not parts.held_out:
        raise SettingsError(
            f"a seed set of {len(rows)} interactions is too small to hold out a third"
        )
    return parts


class _Work:
    """What is asked of judge, critic and approver in one calibration."""

    def __init__(
        self,
        parts: _Parts,
        judge: ChatModel,
        critic: ChatModel,
        approve: Approve,
        known: VerdictFile,
        name: str,
        settings: CalibrationSettings,
        account: Account | None,
    ) -> None:
        self.parts = parts
        self.judge = judge
        self.critic = critic
        self.approve = approve
        self.known = known
        self.name = name
        self.settings = settings
        self.account = account

    def about(self) -> str:
        """Digest of what the accuracies are about: seed set, its parts, and judge."""
        rows = [
            [(row.interaction.id, interaction_digest(row.interaction), row.right) for row in part]
            for part in self.parts
        ]
        return digest(repr((self.name, rows)))

    async def judged(self, rounds: Sequence[Round], first: Guideline) -> Round:
        """The next round: the last one's proposal if it was approved, else its guideline again."""
        guideline = _guideline_after(rounds[-1]) if rounds else first
        return Round(
            number=len(rounds) + 1,
            guideline=guideline,
            score=await self._score(guideline, self.parts.shown),
            held_out=await self._score(guideline, self.parts.held_out),
        )

    async def proposed(self, rounds: Sequence[Round]) -> Proposal:
        """What the critic makes of the last round's errors, put before the approver."""
        last = rounds[-1]
        verdicts = await self._verdicts(last.guideline, self.parts.shown)
        calls: list[CallRecord] = []
        request = Request(
            messages=(
                ChatMessage(role="user", content=critic_prompt(rounds, self.parts.shown, verdicts)),
            ),
            settings=self.settings.critic.model_copy(update={"temperature": 0.0}),
            stage="judge",
        )
        completion = await book_call(self.critic, request, self.account, calls)
        proposal = _read_proposal(defuse(completion.text), rounds)
        proposal = proposal.model_copy(update={"calls": tuple(calls)})
        if proposal.guideline is None:
            return proposal
        held_out = await self._score(proposal.guideline, self.parts.held_out)
        revision = Revision(
            current=last.guideline,
            current_held_out=last.held_out,
            proposed=proposal.guideline,
            proposed_held_out=held_out,
            patterns=proposal.patterns,
        )
        return proposal.model_copy(
            update={"held_out": held_out, "is_approved": self.approve(revision)}
        )

    async def _score(self, guideline: Guideline, part: Sequence[_Labelled]) -> JudgeScore:
        verdicts = await self._verdicts(guideline, part)
        return judge_score([row.label for row in part], [verdict.label for verdict in verdicts])

    async def _verdicts(
        self, guideline: Guideline, part: Sequence[_Labelled]
    ) -> tuple[Verdict, ...]:
        """Verdicts on one part; an outage is no verdict and must not count as an error.

        A label that is as right as the known one is taken for it.
        """
        verdicts = await judge_all(
            [row.interaction for row in part],
            guideline,
            self.judge,
            name=self.name,
            settings=self.settings.judge,
            known=self.known,
            concurrency=self.settings.concurrency,
            account=self.account,
        )
        missing = [verdict for verdict in verdicts if not verdict.is_answered]
        if missing:
            raise ModelError(
                f"judge {self.name!r} gave no answer about {len(missing)} of {len(verdicts)} "
                f"interactions ({missing[0].problem}); those that it gave are kept",
                reason="no_answer",
            )
        return tuple(
            verdict.model_copy(update={"label": row.label})
            if verdict.label in row.right
            else verdict
            for row, verdict in zip(part, verdicts, strict=True)
        )


def _guideline_after(last: Round) -> Guideline:
    """The guideline that the next round judges."""
    proposal = last.proposal
    if proposal is None or proposal.guideline is None or not proposal.is_approved:
        return last.guideline
    return proposal.guideline


# --- the critic ------------------------------------------------------------------------------


def critic_prompt(
    rounds: Sequence[Round], part: Sequence[tuple[Interaction, Label]], verdicts: Sequence[Verdict]
) -> str:
    """What a critic is asked about the last round.

    Args:
        rounds: all so far.
        part: interactions that the critic may see, with their labels.
        verdicts: what the judge said about them in the last round.
    """
    last = rounds[-1]
    wrong = [
        _Error(interaction, label, verdict)
        for (interaction, label), verdict in zip(part, verdicts, strict=True)
        if label != verdict.label
    ]
    confusions = [cell for cell in last.score.confusions if cell.truth != cell.judged]
    confusions.sort(key=lambda cell: -cell.n)
    return render(
        "judge_critic",
        guideline=quote(last.guideline.text),
        n_right=str(last.score.n_right),
        n=str(last.score.n),
        confusions="\n".join(
            f"{cell.truth} -> {_shown_label(cell.judged)} ({cell.n})" for cell in confusions
        ),
        cases="\n\n".join(_case(error) for error in _chosen(wrong, confusions)),
        refused=_turned_down(rounds),
    )


def _turned_down(rounds: Sequence[Round]) -> str:
    """The latest proposal that was of no use: more of them would crowd out the cases."""
    for made in reversed(rounds):
        proposal = made.proposal
        if proposal is None or proposal.is_approved:
            continue
        if proposal.guideline is None:
            return quote(f"The reply could not be used: {proposal.problem}.")
        return quote(proposal.guideline.text)
    return "(none)"


class _Error(NamedTuple):
    """A verdict that differs from the label."""

    interaction: Interaction
    label: Label
    verdict: Verdict


def _chosen(wrong: Sequence[_Error], confusions: Sequence[Confusion]) -> list[_Error]:
    """Errors to show: from each confusion in turn, the commonest first."""
    by_cell: dict[tuple[Label, Label | None], list[_Error]] = defaultdict(list)
    for error in wrong:
        by_cell[error.label, error.verdict.label].append(error)
    columns = [by_cell[cell.truth, cell.judged] for cell in confusions]
    in_turn = chain.from_iterable(zip_longest(*columns))
    return list(islice((error for error in in_turn if error is not None), _MOST_CASES))


def _case(error: _Error) -> str:
    """One error as the critic reads it."""
    said = error.verdict.rationale or error.verdict.problem
    return "\n".join(
        (
            f"Experts: {error.label}. Judge: {_shown_label(error.verdict.label)}.",
            "The agent was told:",
            excerpt(error.interaction.context, *_CASE_CONTEXT_ENDS),
            "The request:",
            excerpt(error.interaction.query, *_CASE_QUERY_ENDS),
            *_said("Experts' reason:", error.interaction.rationale),
            *_said("Judge's reason:", said),
        )
    )


def _said(who: str, what: str | None) -> Iterator[str]:
    if what:
        yield who
        yield quote(what)


def _shown_label(label: Label | None) -> str:
    return label or "a reply that can't be read"


_MARK = re.compile(r"^[ \t*_#`]*revised guideline[ \t*_`:.]*$", re.IGNORECASE | re.MULTILINE)
_FENCE = re.compile(r"\A```[\w+-]*\n(.*?)\n?```\Z", re.DOTALL)


def _read_proposal(reply: str, rounds: Sequence[Round]) -> Proposal:
    """Read a critic's reply: the patterns, the one line that marks it, and the guideline."""
    parts = _MARK.split(reply)
    if len(parts) != 2:
        n = "no line" if len(parts) == 1 else "more than one line"
        return Proposal(problem=f"{n} says REVISED GUIDELINE", reply=reply)
    patterns, text = (part.strip() for part in parts)
    text = _FENCE.sub(r"\1", text).strip()
    guideline = None
    problem = _problem_of_guideline(text, rounds)
    if problem is None:
        guideline = Guideline(
            version=1 + max(_versions(rounds)), text=text, parent=rounds[-1].guideline.digest
        )
    return Proposal(patterns=patterns, guideline=guideline, problem=problem, reply=reply)


def _problem_of_guideline(text: str, rounds: Sequence[Round]) -> str | None:
    if not text:
        return "the guideline is empty"
    if len(text) > _MOST_GUIDELINE:
        return f"the guideline has more than {_MOST_GUIDELINE} characters"
    if any(digest(text) == guideline.digest for guideline in _guidelines(rounds)):
        return "the guideline is one that there was before"
    return None


def _guidelines(rounds: Sequence[Round]) -> Iterator[Guideline]:
    """Every guideline that was judged or proposed."""
    for made in rounds:
        yield made.guideline
        if made.proposal is not None and made.proposal.guideline is not None:
            yield made.proposal.guideline


def _versions(rounds: Sequence[Round]) -> Iterator[int]:
    return (guideline.version for guideline in _guidelines(rounds))


# --- rounds on the disk ----------------------------------------------------------------------


class _Stored(Record):
    """A round as it stands in its file."""

    schema_version: Literal[1] = 1
    about: str
    """Digest of seed set and judge."""
    before: str | None
    """Digest of the file of the round before; None: it is the first."""
    round: Round
    digest: str
    """Of all the rest."""

    def is_intact(self) -> bool:
        """Whether the digest is that of the rest."""
        return self.digest == _digest_of(self.about, self.before, self.round)


def _digest_of(about: str, before: str | None, made: Round) -> str:
    return digest(f"{about}\n{before}\n{made.model_dump_json()}")


def _round_path(folder: Path, number: int) -> Path:
    return folder / f"round-{number:03}.json"


def read_rounds(folder: str | Path) -> tuple[Round, ...]:
    """The rounds of a calibration: each version of the guideline with its scores.

    Each file holds a digest of itself and that of the file before, so that a change to one of them
    shows unless all that follow are made again; `Calibration.digest` shows that too.

    Raises:
        DataError: a file can't be read, or is not as it was written; the message names it.
    """
    return tuple(stored.round for stored in _stored_rounds(Path(folder)))


def _stored_rounds(folder: Path) -> Iterator[_Stored]:
    before: str | None = None
    number = 1
    while (path := _round_path(folder, number)).exists():
        try:
            stored = _Stored.model_validate_json(read_text(path, DataError))
        except ValidationError as error:
            raise DataError(f"{path}: {problem_of_line(error)}") from None
        if not stored.is_intact():
            raise DataError(f"{path}: digest: the file is not as it was written")
        if stored.before != before or stored.round.number != number:
            raise DataError(f"{path}: before: a round before it is not as it was")
        yield stored
        before = stored.digest
        number += 1


class _Rounds:
    """The rounds of one calibration and their files."""

    def __init__(self, folder: Path, about: str) -> None:
        stored = list(_stored_rounds(folder))
        if any(one.about != about for one in stored):
            raise SettingsError(
                f"{folder} holds the calibration of another judge, or on another seed set: "
                "choose another folder"
            )
        self.made = [one.round for one in stored]
        self._digests = [one.digest for one in stored]
        self._folder = folder
        self._about = about

    @property
    def is_complete(self) -> bool:
        """Whether the next round may begin."""
        return not self.made or self.made[-1].proposal is not None

    @property
    def digest(self) -> str:
        """Digest of the last file."""
        return self._digests[-1]

    def add(self, made: Round) -> None:
        """Keep a round whose errors nobody has looked at yet."""
        before = self._digests[-1] if self._digests else None
        self._write(made, before)
        self.made.append(made)

    def complete(self, proposal: Proposal) -> None:
        """Keep what came of the last round's errors."""
        made = self.made[-1].model_copy(update={"proposal": proposal})
        self._digests.pop()
        self._write(made, self._digests[-1] if self._digests else None)
        self.made[-1] = made

    def _write(self, made: Round, before: str | None) -> None:
        stored = _Stored(
            about=self._about,
            before=before,
            round=made,
            digest=_digest_of(self._about, before, made),
        )
        write_whole(_round_path(self._folder, made.number), f"{stored.model_dump_json(indent=1)}\n")
        self._digests.append(stored.digest)
