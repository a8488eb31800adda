"""Train a sub-agent that carries out what it can and abstains, in the wire form, from the rest.

Joint supervised fine-tuning on solvable requests and on abstentions (method 3.5). A prompt is what
the engine shows an agent that may abstain; it is read and not learned. A target is the task's
output or an abstention in its wire form.

    out/
        run.json        what the run is made of; one that differs is refused
        losses.jsonl    what was reported, a line a log step
        sft/            checkpoints to resume from
        agent/          what comes of it: weights as safetensors, agent.json, README.md

Examples come from labelled workloads (`Example.reference` holds `label`, and `gold_output` or
`rationale`) and from curated instances (`splice.ears.curation`). Of a workload the train split
is learned and the validation split chooses the checkpoint; of instances, which have no splits, a
tenth, drawn by the query, chooses.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TextIO, TypeAlias

from pydantic import Field, ValidationError

from selector_training.runs import (
    Count,
    RunRecord,
    best_entry,
    claim,
    last_checkpoint,
    lora_config,
    package_versions,
    require_training_packages,
    settings_rows,
    shared_arguments,
)
from splice import prompts
from splice.abstention import SOLVABLE, abstention_prompt, wire
from splice.ears.curation import Curated
from splice.ears.evaluation import agent_of, in_mode, interaction_of, messages_of
from splice.ears.interactions import LABELS, Interaction, Label
from splice.ears.record_files import numbered_records
from splice.errors import SettingsError, StoreError, WeightsError
from splice.files import read_text, write_whole
from splice.language import encoded_prompt, file_sha256, load_base
from splice.prompts import defuse, render
from splice.records import Abstention, ChatMessage, Query, Record, digest
from splice.rendering import question_block
from splice.text import norm
from splice.workflow import Workflow
from splice.workload import Options, Workload, find_loader

if TYPE_CHECKING:
    from datasets import Dataset

Split: TypeAlias = Literal["train", "validation"]

_SPLITS: Final[tuple[Split, ...]] = ("train", "validation")
_STEP: Final = 8
"""Sequences in a step over all processes, in the paper."""
_HELD_OUT: Final = 0.1
"""Share of curated instances that choose the checkpoint."""
_VALIDATION_CAP: Final = 0.25
"""Of a cap on the examples of a label: how much of it holds for the validation split."""


class AgentSettings(Record):
    """How an agent is trained. Defaults are the paper's, which had eight GPUs of 141 GB."""

    base: str = "Qwen/Qwen3-32B"
    """Causal language model with a chat template: a folder, or a name on the Hugging Face Hub."""
    lora: bool = False
    """Train a LoRA adapter on all linear layers but the output, in place of all parameters."""
    rank: Count = 16
    alpha: Count = 32
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    rate: Annotated[float, Field(gt=0.0)] | None = None
    """Highest learning rate; None: 1e-5 as in the paper, and 1e-4 with `lora`, which is usual for
    this rank and not tuned."""
    epochs: Count = 3
    batch_size: Count = 1
    """Sequences in one pass of one process."""
    accumulation: Count | None = None
    """Passes to a step; None: as many as make a step of eight sequences over all processes."""
    max_length: Count = 32_768
    """Tokens of prompt and target; longer examples are left out, as a cut one would teach to stop
    short."""
    packing: bool | None = None
    """Put several examples, which can't see each other, into one sequence of `max_length`; None: on
    GPUs, as on a CPU attention over so long a sequence costs more than padding does."""
    max_per_label: Count | None = None
    """Examples of a label that are learned, drawn by the seed; a quarter of that for validation."""
    max_steps: Count | None = None
    """None: as the epochs need."""
    eval_every: Count = 50
    """Steps between two checkpoints, each measured on the validation split."""
    patience: Count = 3
    """Checkpoints without a better one before training ends."""
    log_every: Count = 10
    """Steps between two reports."""
    seed: int = 0


class AgentExample(Record):
    """A request, what an agent is shown of it, and what it should reply."""

    id: str
    source: str
    """The workload, or the file of instances."""
    split: Split
    label: Label
    messages: tuple[ChatMessage, ...]
    """As the engine renders them for an agent that may abstain."""
    target: str


class AgentSource(Record):
    """Where examples come from, and what is used of it."""

    name: str
    files: Mapping[str, str]
    """SHA-256 by name of each file that was read."""
    train: Mapping[Label, int] = {}
    """Number of examples by label."""
    validation: Mapping[Label, int] = {}
    left_out: Mapping[str, int] = {}
    """Number of examples by why they are not used."""


class AgentCard(Record):
    """What is known about a trained agent: `agent.json`."""

    base: str
    is_adapter: bool
    weights: Mapping[str, str]
    """SHA-256 by name of each safetensors file."""
    prompt: str
    """Digest of the wording of agents' prompts."""
    examples: str
    """Digest of the examples: prompts, targets, splits."""
    sources: tuple[AgentSource, ...]
    settings: AgentSettings
    n_steps: int
    best_step: int
    """Of the checkpoint that was chosen."""
    loss: float
    """Mean cross-entropy of a target's token, in nats, on the validation split."""
    packages: Mapping[str, str]


class TrainedAgent(Record):
    """A finished run."""

    folder: Path
    """Of the weights: a model, or an adapter."""
    card: AgentCard


class AgentData(NamedTuple):
    """Examples that were read."""

    examples: tuple[AgentExample, ...]
    sources: tuple[AgentSource, ...]
    """Without the counts of what is used."""


class _Run(RunRecord):
    """What a run is made of: `run.json`."""

    settings: AgentSettings
    sources: tuple[AgentSource, ...]


_DEFAULTS: Final = AgentSettings()


# --- reading ---------------------------------------------------------------------------------


def read_sources(sources: Sequence[str], options: Options | None = None) -> AgentData:
    """Read examples of every source.

    An example whose prompt is learned is left out of the validation split.

    Args:
        sources: each a file of curated instances, by its ending `.jsonl`, or a workload: `NAME` or
            `NAME=DATA`.
        options: settings of the workloads.

    Raises:
        DataError: a file is missing or malformed, or an example is not labelled.
        SettingsError: there is no such workload or option; see also `from_workload`.
    """
    read = []
    for source in sources:
        if source.endswith(".jsonl"):
            read.append(from_instances(source))
            continue
        name, _, data = source.partition("=")
        load = find_loader(name)
        path = Path(data) if data else None
        read += [
            from_workload(load(path, split=split, options=options or {}), split)
            for split in _SPLITS
        ]
    return _joined(read)


def from_workload(workload: Workload, split: Split) -> AgentData:
    """Examples of a labelled workload.

    Those without a gold output, or without a rationale, are left out.

    Raises:
        DataError: an example is not labelled.
        SettingsError: its agent has tools or structured replies, or is not alone.
    """
    found, left_out = [], Counter[str]()
    for example in workload.examples:
        labelled = interaction_of(workload, example)
        assert labelled.label is not None
        target = _target(labelled.label, example.reference.get("gold_output"), labelled.rationale)
        if target is None:
            left_out["no gold output" if labelled.label == SOLVABLE else "no rationale"] += 1
            continue
        found.append(
            AgentExample(
                id=example.query.id,
                source=workload.name,
                split=split,
                label=labelled.label,
                messages=_read_by_agent(workload.workflow_of(example), example.query),
                target=target,
            )
        )
    source = AgentSource(name=workload.name, files=workload.sources, left_out=left_out)
    return AgentData(tuple(found), (source,))


def _target(label: Label, output: object, rationale: str | None) -> str | None:
    """What should be replied; None: the workload does not say."""
    # A control token of a chat format in a target would be learned as one.
    if label == SOLVABLE:
        return defuse(output).strip() or None if isinstance(output, str) else None
    return wire(Abstention(category=label, rationale=defuse(rationale))) if rationale else None


def _read_by_agent(workflow: Workflow, query: Query) -> tuple[ChatMessage, ...]:
    """What the one agent of a workflow reads if it may abstain, as the engine shows it.

    Raises:
        SettingsError: there is another node, or the agent has tools or structured replies.
    """
    agent = agent_of(workflow)
    if agent.tools or agent.structured_replies:
        raise SettingsError(
            f"agent {agent.id!r} of workflow {workflow.name!r} has tools or structured replies, "
            "which prompts of training don't show"
        )
    return messages_of(in_mode(workflow, "prompted"), query)


def from_instances(path: str | Path) -> AgentData:
    """Examples of curated instances.

    Raises:
        DataError: the file can't be read, or a line is no curated instance.
    """
    path = Path(path)
    found, left_out = [], Counter[str]()
    for _, row in numbered_records(path, Curated):
        if row.target is None or row.label is None:
            left_out["no target"] += 1
            continue
        found.append(
            AgentExample(
                id=row.interaction.id,
                source=path.name,
                split=_split_of(row.interaction.query),
                label=row.label,
                messages=instance_messages(row.interaction),
                target=defuse(row.target),
            )
        )
    source = AgentSource(name=path.name, files={path.name: file_sha256(path)}, left_out=left_out)
    return AgentData(tuple(found), (source,))


def _split_of(query: str) -> Split:
    """The split of an instance: requests that are worded alike stay together."""
    share = int(digest(norm(query))[:8], 16) / 0x1_0000_0000
    return "validation" if share < _HELD_OUT else "train"


def instance_messages(interaction: Interaction) -> tuple[ChatMessage, ...]:
    """What an agent that may abstain reads, from the context of an interaction.

    A context of the engine's making is taken apart where its system message ended. If the agent
    was not told how to abstain, that is added, without what only its workflow knows. Any other
    context is what an agent is told about itself.
    """
    told, line, rest = interaction.context.partition(render("agent_system", role="").strip())
    system = told + line if line else render("agent_system", role=defuse(interaction.context))
    user = rest.strip("\n") or question_block(Query(text=interaction.query))
    rules = abstention_prompt()
    # No line of foreign text can pass for the first one of the rules: each of theirs is quoted.
    if rules.splitlines()[0] not in user.splitlines():
        user = f"{user}\n\n{rules}"
    return (
        ChatMessage(role="system", content=system),
        ChatMessage(role="user", content=user),
    )


def _joined(read: Iterable[AgentData]) -> AgentData:
    """All examples, and sources of which a workload's two splits are one."""
    examples: list[AgentExample] = []
    sources: dict[str, AgentSource] = {}
    for data in read:
        examples += data.examples
        for source in data.sources:
            known = sources.get(source.name, source.model_copy(update={"left_out": {}}))
            sources[source.name] = known.model_copy(
                update={
                    "files": {**known.files, **source.files},
                    "left_out": Counter(known.left_out) + Counter(source.left_out),
                }
            )
    data = AgentData(tuple(examples), tuple(sources.values()))
    learned = {example.messages for example in examples if example.split == "train"}
    kept = [
        example
        for example in examples
        if example.split == "train" or example.messages not in learned
    ]
    return _kept(data, kept, "of validation, and the prompt is learned")


def _kept(data: AgentData, examples: Sequence[AgentExample], reason: str) -> AgentData:
    """The data with these of its examples; the others are counted as left out."""
    gone = Counter(example.source for example in data.examples)
    gone.subtract(example.source for example in examples)

    def counted(source: AgentSource) -> AgentSource:
        if not gone[source.name]:
            return source
        left_out = {**source.left_out, reason: gone[source.name]}
        return source.model_copy(update={"left_out": left_out})

    return AgentData(tuple(examples), tuple(map(counted, data.sources)))


def capped(data: AgentData, settings: AgentSettings) -> AgentData:
    """The data with no more examples of a label and split than the settings allow."""
    if settings.max_per_label is None:
        return data
    caps = {
        "train": settings.max_per_label,
        "validation": max(1, round(settings.max_per_label * _VALIDATION_CAP)),
    }
    drawn = sorted(
        range(len(data.examples)),
        key=lambda place: digest(f"{settings.seed}\0{place}\0{data.examples[place].id}"),
    )
    n_taken = Counter[tuple[Split, Label]]()
    taken = []
    for place in drawn:
        example = data.examples[place]
        if n_taken[example.split, example.label] < caps[example.split]:
            n_taken[example.split, example.label] += 1
            taken.append(place)
    kept = [data.examples[place] for place in sorted(taken)]
    return _kept(data, kept, "over the cap on a label")


# --- training --------------------------------------------------------------------------------


def train_agent(
    data: AgentData,
    out: str | Path,
    settings: AgentSettings = _DEFAULTS,
    *,
    progress: TextIO | None = None,
) -> TrainedAgent:
    """Train an agent, or go on training it.

    Args:
        data: what `read_sources` gave.
        out: folder of the run.
        settings: how to train.
        progress: where reports go, a line each; None: standard error.

    Raises:
        SettingsError: a package is missing, a split holds no example, `out` holds another run, or
            no checkpoint has a finite loss.
        StoreError: a file can't be written.
        WeightsError: the base can't be loaded, or its chat template can't be trained on.
    """
    require_training_packages()
    from selector_training.trainers import Journal

    out = Path(out)
    progress = progress if progress is not None else sys.stderr
    data = capped(data, settings)
    _check_splits(data)
    folder = out / "agent"
    # First of all, as they tell `load_base` what the weights will be spread over.
    arguments = _arguments(out / "sft", settings)
    processes = arguments.distributed_state
    run = _Run(
        settings=settings,
        prompt=prompts.version(),
        examples=digest("\n".join(example.model_dump_json() for example in data.examples)),
        sources=data.sources,
    )
    if processes.is_main_process:
        claim(out, run)
    processes.wait_for_everyone()
    if (folder / "agent.json").exists():
        return TrainedAgent(folder=folder, card=_read_card(folder / "agent.json"))

    tokenizer, base = load_base(settings.base)
    rows = [encoded(tokenizer, example) for example in data.examples]
    is_short = [len(row["input_ids"]) <= settings.max_length for row in rows]
    data = _kept(data, list(compress(data.examples, is_short)), "over the length")
    _check_splits(data)
    if processes.is_main_process:
        progress.write(_told(data))
    trainer = _trainer(
        base,
        arguments,
        settings,
        processing_class=tokenizer,
        callbacks=[Journal("sft", out / "losses.jsonl", progress)],
        **_datasets(data.examples, list(compress(rows, is_short))),
    )
    checkpoint = last_checkpoint(out / "sft")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    if processes.is_main_process:
        if not settings.lora:
            tokenizer.save_pretrained(str(folder))
        _write_card(folder, run, data, trainer.state)
    processes.wait_for_everyone()
    return TrainedAgent(folder=folder, card=_read_card(folder / "agent.json"))


def _check_splits(data: AgentData) -> None:
    for split in _SPLITS:
        if not any(example.split == split for example in data.examples):
            names = ", ".join(source.name for source in data.sources) or "no source"
            raise SettingsError(f"no example of the {split} split in {names}{_reasons(data)}")


def _reasons(data: AgentData) -> str:
    """Why examples were left out, as the end of a sentence."""
    found = Counter[str]()
    for source in data.sources:
        found.update(source.left_out)
    return "".join(f"; {n} left out: {reason}" for reason, n in sorted(found.items()))


def _told(data: AgentData) -> str:
    """A line for people: what is learned, what chooses, what is left out."""
    parts = []
    for split in _SPLITS:
        counted = Counter(example.label for example in data.examples if example.split == split)
        shown = ", ".join(f"{counted[label]} {label}" for label in LABELS if counted[label])
        parts.append(f"{split}: {shown}")
    return f"{'; '.join(parts)}{_reasons(data)}\n"


def encoded(tokenizer: Any, example: AgentExample) -> dict[str, list[int]]:
    """An example as token ids, with labels for those of the target.

    Prompt and target are encoded apart, so that the prompt has the tokens that it has in use. What
    the chat template puts around a reply belongs to the target: the end of the turn, and where
    there is one an empty thought before it.

    Raises:
        WeightsError: there is no chat template, or it writes a prompt otherwise once it has a reply.
    """
    from selector_training.trainers import NOT_LEARNED

    if tokenizer.chat_template is None:
        raise WeightsError("the base has no chat template, so it can't be asked as an agent")
    turns = [{"role": message.role, "content": message.content} for message in example.messages]
    reply = {"role": "assistant", "content": example.target}
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*turns, reply], tokenize=False)
    if not whole.startswith(prompt):
        raise WeightsError(
            "the chat template of the base writes a prompt otherwise once it has a reply, so what "
            "is learned would follow another prompt than in use"
        )
    read = encoded_prompt(tokenizer, example.messages)
    learned = tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id not in learned:
        # Some templates close no turn, and then nothing would teach the model to stop.
        learned = [*learned, tokenizer.eos_token_id]
    return {"input_ids": [*read, *learned], "labels": [NOT_LEARNED] * len(read) + learned}


def _datasets(
    examples: Sequence[AgentExample], rows: Sequence[dict[str, list[int]]]
) -> dict[str, Dataset]:
    """Encoded examples of each split, by the name that a trainer has for it."""
    from datasets import Dataset

    names = {"train": "train_dataset", "validation": "eval_dataset"}
    return {
        names[split]: Dataset.from_list(
            [row for example, row in zip(examples, rows, strict=True) if example.split == split]
        )
        for split in _SPLITS
    }


def _trainer(base: Any, arguments: Any, settings: AgentSettings, **more: Any) -> Any:
    """A trainer of all parameters, or of a new adapter."""
    from transformers import EarlyStoppingCallback

    from selector_training.trainers import AgentTrainer

    if arguments.packing and find_spec("flash_attn") is not None:
        # Other ways of attending hold a mask of the square of the sequence.
        base.set_attn_implementation("flash_attention_2")
    adapter = None
    if settings.lora:
        adapter = lora_config(rank=settings.rank, alpha=settings.alpha, dropout=settings.dropout)
    elif arguments.deepspeed_plugin is None:
        # A step at this rate is less than bfloat16 can add; DeepSpeed keeps a finer copy itself.
        base = base.float()
    trainer = AgentTrainer(model=base, args=arguments, peft_config=adapter, **more)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=settings.patience))
    return trainer


def _arguments(folder: Path, settings: AgentSettings) -> Any:
    """Arguments of the trainer; nothing is sent to anybody."""
    import torch
    from trl import SFTConfig

    is_on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings():
        # Not all versions that are supported know the new name, and TRL uses the old one itself.
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        arguments = SFTConfig(
            learning_rate=settings.rate or (1e-4 if settings.lora else 1e-5),
            num_train_epochs=settings.epochs,
            max_length=settings.max_length,
            packing=is_on_gpu if settings.packing is None else settings.packing,
            **shared_arguments(
                folder,
                batch_size=settings.batch_size,
                accumulation=settings.accumulation or 1,
                max_steps=settings.max_steps,
                log_every=settings.log_every,
                eval_every=settings.eval_every,
                seed=settings.seed,
                metric="loss",
            ),
        )
    if settings.accumulation is None:
        n_at_once = settings.batch_size * arguments.world_size
        arguments.gradient_accumulation_steps = max(1, _STEP // n_at_once)
    return arguments


# --- what comes of it ------------------------------------------------------------------------


def _write_card(folder: Path, run: _Run, data: AgentData, state: Any) -> None:
    best = best_entry(state, "loss")
    card = AgentCard(
        base=run.settings.base,
        is_adapter=run.settings.lora,
        weights={path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))},
        prompt=run.prompt,
        examples=run.examples,
        sources=tuple(_counted(source, data.examples) for source in data.sources),
        settings=run.settings,
        n_steps=state.global_step,
        best_step=best["step"],
        loss=best["eval_loss"],
        packages=package_versions(),
    )
    write_whole(folder / "README.md", _model_card(card))
    # Last of all: that it is there means that the run is finished.
    write_whole(folder / "agent.json", f"{card.model_dump_json(indent=1)}\n")


def _counted(source: AgentSource, examples: Sequence[AgentExample]) -> AgentSource:
    """A source with the number of its examples that are used."""
    found = Counter(
        (example.split, example.label) for example in examples if example.source == source.name
    )
    counts: dict[str, Mapping[Label, int]] = {
        split: {label: found[split, label] for label in LABELS if found[split, label]}
        for split in _SPLITS
    }
    return source.model_copy(update=counts)


def _read_card(path: Path) -> AgentCard:
    try:
        return AgentCard.model_validate_json(read_text(path, StoreError))
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _model_card(card: AgentCard) -> str:
    """The README of a trained agent."""
    counts = "".join(
        f"| {source.name} | {split} | "
        + " | ".join(str(getattr(source, split).get(label, 0)) for label in LABELS)
        + " |\n"
        for source in card.sources
        for split in _SPLITS
    )
    files = "".join(
        f"| {source.name} | {name} | {sha256} |\n"
        for source in card.sources
        for name, sha256 in source.files.items()
    )
    left_out = "".join(
        f"- {source.name}: {n} ({reason})\n"
        for source in card.sources
        for reason, n in source.left_out.items()
    )
    left_out = left_out or "- nothing\n"
    what = "a LoRA adapter on" if card.is_adapter else "a full fine-tune of"
    library = "peft" if card.is_adapter else "transformers"
    packages = ", ".join(f"{name} {number}" for name, number in card.packages.items())
    return f"""\
---
base_model: {json.dumps(card.base)}
library_name: {library}
tags: [splice-repair, abstention]
---

# An agent for SPLICE that abstains

It carries out what it was given if that is enough, and otherwise replies with an abstention: one
of four categories, and why. It is {what} `{card.base}`, and it expects the prompts that SPLICE
gives an agent with `may_abstain`.

## On the validation split

Cross-entropy of a target's token: {card.loss:.4f} nats (step {card.best_step} of {card.n_steps}).
The checkpoint was chosen on the same examples, so the number flatters it a little. How often it
abstains rightly is not in it: `splice ears` measures that.

## Trained on

| source | split | {" | ".join(LABELS)} |
| --- | --- |{" --- |" * len(LABELS)}
{counts}
Left out:

{left_out}
| source | file | SHA-256 |
| --- | --- | --- |
{files}
## Settings

| setting | value |
| --- | --- |
{settings_rows(card.settings)}
Prompts {card.prompt}. Examples {card.examples}. {packages}.
"""
