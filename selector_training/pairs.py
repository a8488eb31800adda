"""Training examples for language-model selectors, and preference pairs, out of probe pools.

An example is a decisive probe: the case as a selector will see it, and how it turned out. Each
gives two pairs, its own label against either of the others (method 2.9). Splits are those of the
pool, by question; the test split is read only where it is asked for by name.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from probes.pool import Damage, Shard, read_shards, shard_path
from probes.records import Arm, BaseRecord, OutcomeClass, ProbeRecord
from splice.errors import SettingsError, StoreError
from splice.language import shown
from splice.prompts import one_line
from splice.queries import Split
from splice.records import Probability, Record, Trace
from splice.selector import SelectorInput
from splice.store import read_store

OUTCOMES: Final[tuple[OutcomeClass, ...]] = get_args(OutcomeClass)
"""Beneficial, neutral, harmful: the order of the labels A, B, C."""

TrainedView: TypeAlias = Literal["evidence", "nothing", "raw"]
"""What a selector is shown of a trial: its process evidence; nothing but the answers; or the message
with the replies of the nodes that ran again, before and after."""

View: TypeAlias = TrainedView | Literal["shuffled"]
"""The same, or the evidence of another question's trial."""

_SHUFFLE_SEED: Final = 0

_DEFAULT_ARMS: Final[tuple[Arm, ...]] = ("edge", "placebo")
_DEFAULT_SPLITS: Final[tuple[Split, ...]] = ("train", "validation")


class TrainingExample(Record):
    """A decisive probe, as a selector sees it, and how it turned out."""

    pool: str
    """Folder of the pool that it was read from."""
    probe: str
    """Id of the probe record. Another model's probe of the same edge has the same."""
    group: str
    """The question; all its examples are in one split."""
    workload: str
    split: Split
    arm: Arm
    case: SelectorInput
    outcome: OutcomeClass
    delta: float
    """Score of the candidate answer less that of the base answer."""
    block: str | None = None
    """What is shown in place of the evidence; None: the evidence."""

    @property
    def weight(self) -> float:
        """How much it counts, from 0.25 to 1: the more the answer's score moved, the more.

        Source: ours, method 2.9.
        """
        return min(1.0, abs(self.delta) + 0.25)


class PreferencePair(Record):
    """For one example: the label that is right, and one that is not."""

    example: TrainingExample
    chosen: OutcomeClass
    rejected: OutcomeClass
    weight: float
    """The example's, doubled where a harmful trial would be taken for a beneficial one."""


def preference_pairs(example: TrainingExample) -> tuple[PreferencePair, ...]:
    """Two pairs: the example's own label against each of the others, in the order of `OUTCOMES`."""
    return tuple(
        PreferencePair(
            example=example,
            chosen=example.outcome,
            rejected=rejected,
            weight=example.weight * _costliness(example.outcome, rejected),
        )
        for rejected in OUTCOMES
        if rejected != example.outcome
    )


def _costliness(outcome: OutcomeClass, rejected: OutcomeClass) -> float:
    return 2.0 if (outcome, rejected) == ("harmful", "beneficial") else 1.0


def balanced(examples: Sequence[TrainingExample], n: int, *, seed: int) -> tuple[int, ...]:
    """Draw examples so that each class of each workload comes equally often.

    The examples of a class that is rare come several times, all of them before any comes again;
    those of a frequent class may not come at all.

    Args:
        examples: to draw from.
        n: how many to draw.
        seed: of the choice and the order.

    Returns:
        Places of the drawn ones among `examples`; (n,), or none if there are no examples.
    """
    generator = random.Random(seed)
    cells: dict[tuple[str, OutcomeClass], list[int]] = {}
    for place, example in enumerate(examples):
        cells.setdefault((example.workload, example.outcome), []).append(place)
    for cell in cells.values():
        generator.shuffle(cell)
    turns = [cycle(cells[key]) for key in sorted(cells)]
    drawn = [next(turn) for turn in islice(cycle(turns), n)]
    generator.shuffle(drawn)
    return tuple(drawn)


def read_examples(
    folders: Collection[str | Path],
    *,
    splits: Collection[Split] = _DEFAULT_SPLITS,
    arms: Collection[Arm] = _DEFAULT_ARMS,
    base_scores: Mapping[str, float] | None = None,
    descriptions: Mapping[str, str] | None = None,
    view: View = "evidence",
    damage: list[Damage] | None = None,
) -> tuple[TrainingExample, ...]:
    """The decisive probes of pools.

    Args:
        folders: of the pools; they are read with their traces.
        splits: which to read; the test split only if it is among them.
        arms: which probes to read.
        base_scores: predicted base score by id of the base record, for questions that the predictor
            was fitted on from folds without them (method 2.9); None: those of the pool's diagnoses.
            Base runs of the same question by different models share an id, and so a score.
        descriptions: what a workflow does, by its name; None: those of the workflows that come with
            the library. A workflow that is not among them is described by its name.
        view: what the examples show of their trials.
        damage: gets the lines that are no records; what refers to them is left out.

    Raises:
        StoreError: a pool can't be read, or a question is in one split here and in another there.
        SettingsError: `base_scores` lacks a base record.
    """
    texts = shipped_descriptions() if descriptions is None else descriptions
    damage = damage if damage is not None else []
    found: list[TrainingExample] = []
    split_of: dict[str, Split] = {}
    for folder in folders:
        for shard in read_shards(folder, damage):
            for base in shard.bases.values():
                known = split_of.setdefault(_group(base), base.split)
                if known != base.split:
                    raise StoreError(
                        f"{folder}: question {base.query_id!r} is in the {base.split} split, and "
                        f"in another pool in the {known} split"
                    )
            decisive = list(_decisive(shard, splits, arms))
            traces = _traces(Path(folder), shard, damage) if decisive else {}
            for base, probe in decisive:
                ran = traces.get(base.trace or "")
                tried = traces.get(probe.trace or "")
                if ran is None or (view == "raw" and tried is None):
                    continue
                example = _example(str(folder), base, probe, ran, base_scores, texts)
                if view == "nothing":
                    example = example.model_copy(update={"block": "(not shown)"})
                elif view == "raw" and tried is not None:
                    block = raw_block(probe, ran, tried)
                    example = example.model_copy(update={"block": block})
                found.append(example)
    return _shuffled(found) if view == "shuffled" else tuple(found)


def _shuffled(examples: Sequence[TrainingExample]) -> tuple[TrainingExample, ...]:
    """The examples, each with the evidence of another question's trial of the same split.

    Questions are put in a drawn order, and each takes from the next; format and length stay.
    """
    found = list(examples)
    for split in dict.fromkeys(example.split for example in examples):
        places: dict[str, list[int]] = {}
        for place, example in enumerate(examples):
            if example.split == split:
                places.setdefault(example.group, []).append(place)
        groups = sorted(places)
        random.Random(_SHUFFLE_SEED).shuffle(groups)
        for group, giver in zip(groups, groups[1:] + groups[:1], strict=True):
            for place, given in zip(places[group], cycle(places[giver]), strict=False):
                case = examples[place].case
                evidence = examples[given].case.evidence
                case = case.model_copy(update={"evidence": evidence})
                found[place] = examples[place].model_copy(update={"case": case})
    return tuple(found)


def raw_block(probe: ProbeRecord, base: Trace, trial: Trace) -> str:
    """The message, and the replies of the nodes that ran again, before and after, each shortened."""
    message = probe.message.text if probe.message is not None else None
    lines = ["message to the receiver:", shown(message)]
    for node in probe.rerun:
        for when, trace in (("before", base), ("after", trial)):
            (run,) = (run for run in trace.node_runs if run.node == node)
            lines += [f"reply of {one_line(node)} {when}:", shown(run.output)]
    return "\n".join(lines)


def _decisive(
    shard: Shard, splits: Collection[Split], arms: Collection[Arm]
) -> Iterator[tuple[BaseRecord, ProbeRecord]]:
    """Decisive probes with their base records."""
    for probe in shard.probes.values():
        base = shard.bases[probe.base]
        if probe.is_decisive and probe.arm in arms and base.split in splits:
            yield base, probe


def _group(base: BaseRecord) -> str:
    return f"{base.workload}/{base.query_id}"


def _traces(folder: Path, shard: Shard, damage: list[Damage]) -> Mapping[str, Trace]:
    """Traces of a shard, by id."""
    path = shard_path(folder, "traces", shard.number)
    contents = read_store(path)
    damage.extend(
        Damage(file=path.name, line=line.line, reason=line.reason) for line in contents.damage
    )
    return contents.traces


def _example(
    pool: str,
    base: BaseRecord,
    probe: ProbeRecord,
    trace: Trace,
    base_scores: Mapping[str, float] | None,
    descriptions: Mapping[str, str],
) -> TrainingExample:
    """An example with the case as `splice.line` would put it to a selector."""
    return TrainingExample.model_validate(
        {
            "pool": pool,
            "probe": probe.id,
            "group": _group(base),
            "workload": base.workload,
            "split": base.split,
            "arm": probe.arm,
            "case": {
                "question": trace.query.text,
                "workflow": descriptions.get(trace.workflow) or trace.workflow,
                "base_score": _base_score(base, base_scores),
                "base_answer": base.answer,
                "candidate_answer": probe.answer,
                "evidence": probe.evidence,
            },
            "outcome": probe.outcome_class,
            "delta": probe.delta,
        }
    )


def _base_score(base: BaseRecord, base_scores: Mapping[str, float] | None) -> Probability:
    if base_scores is not None:
        if base.id not in base_scores:
            raise SettingsError(
                f"no predicted base score is given for base record {base.id!r} "
                f"({base.workload}, question {base.query_id!r})"
            )
        return base_scores[base.id]
    if base.diagnosis is None:
        raise StoreError(f"base record {base.id!r} has probes and no diagnosis")
    return base.diagnosis.base_score


@cache
def shipped_descriptions() -> Mapping[str, str]:
    """What the workflows that come with the library do, by name."""
    found: dict[str, str] = {}
    for folder in files("skeletons").iterdir():
        tables = (_workflow(item) for item in folder.iterdir()) if folder.is_dir() else ()
        found |= {table["name"]: table["description"] for table in tables if table}
    return found


def _workflow(item: Any) -> Mapping[str, str] | None:
    """Name and description in a workflow's file; None if it is no such file."""
    if not item.name.endswith(".toml"):
        return None
    table = tomllib.loads(item.read_text("utf-8"))
    return table if "name" in table and "description" in table else None
