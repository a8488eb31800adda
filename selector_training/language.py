"""Train the language-model tier of selectors from probe pools, and compare tiers.

Two stages on a LoRA adapter, the backbone frozen (method 2.9): cross-entropy on the label, then DPO
from there. Of all checkpoints of both stages the one with the least three-class log loss on the
validation split is exported.

    out/
        run.json        what the run is made of; one that differs is refused
        losses.jsonl    what was reported, a line a log step
        sft/, dpo/      checkpoints to resume from, the adapter chosen in the stage, and `done.json`
        selector/       what is exported: two files of the adapter, selector.json, README.md

On several GPUs by `accelerate launch --config_file selector_training/configs/<one>.yaml`; every
process calls `train` with the same arguments. A run that was killed goes on where it was if `train`
is called again.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TextIO,
    TypeAlias,
    get_args,
)

from pydantic import Field

from probes.pool import read_manifest
from probes.records import Arm
from selector_training.pairs import (
    OUTCOMES,
    TrainedView,
    TrainingExample,
    balanced,
    preference_pairs,
    read_examples,
)
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
from splice.errors import SettingsError, StoreError, WeightsError
from splice.files import read_text, write_whole
from splice.language import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LABELS,
    SelectorCard,
    encoded_labels,
    encoded_prompt,
    file_sha256,
    load_base,
    prompt_digest,
    read_card,
    require_extra,
    selector_messages,
)
from splice.learned import TrainingPool
from splice.records import Probability, Record, digest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

Stage: TypeAlias = Literal["sft", "dpo"]


class LanguageSettings(Record):
    """How a language-model selector is trained."""

    base: str = "Qwen/Qwen2.5-7B-Instruct"
    """Causal language model: a folder, or a name on the Hugging Face Hub."""
    arms: tuple[Arm, ...] = ("edge", "placebo")
    """Probes to learn from. A placebo shows what a change that nothing caused looks like."""
    rank: Count = 16
    alpha: Count = 32
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Of the adapter, which is on all linear layers but the output."""
    sft_rate: Annotated[float, Field(gt=0.0)] = 1e-4
    """Learning rate of stage 1; usual for LoRA of this rank, not tuned."""
    dpo_rate: Annotated[float, Field(gt=0.0)] = 5e-6
    """Learning rate of stage 2."""
    beta: Annotated[float, Field(gt=0.0)] = 0.1
    """How strongly stage 2 is held to the adapter of stage 1."""
    epochs: Count = 1
    """Of each stage; one is as many class-balanced draws as there are examples."""
    batch_size: Count = 8
    """Examples in one pass of one process."""
    accumulation: Count = 2
    """Passes to a step."""
    max_steps: Count | None = None
    """Steps of each stage; None: as the epochs need."""
    eval_every: Count = 50
    """Steps between two checkpoints, each measured on the validation split."""
    patience: Count = 3
    """Checkpoints without a better one before a stage ends."""
    log_every: Count = 10
    """Steps between two reports."""
    seed: int = 0
    view: TrainedView = "evidence"
    """What is shown of a trial; a selector of another view can be compared, and not used."""


class StageResult(Record):
    """How a stage ended: `done.json`."""

    stage: Stage
    n_steps: int
    best_step: int
    """Of the checkpoint that was chosen."""
    log_loss: float
    """Three-class, on the validation split, at `temperature`."""
    accuracy: Probability
    temperature: float
    """The one that makes the log loss on the validation split least."""


class Trained(Record):
    """A finished run."""

    folder: Path
    """Of the exported selector."""
    stages: tuple[StageResult, ...]
    chosen: Stage
    """The stage whose adapter was exported."""


class _Run(RunRecord):
    """What a run is made of: `run.json`. The digest of its examples covers their base scores."""

    settings: LanguageSettings
    pools: tuple[TrainingPool, ...]
    n_train: int
    n_validation: int


class _Data(NamedTuple):
    """What both stages train on, encoded."""

    drawn: Dataset
    """Class-balanced draws from `fitted`."""
    fitted: Dataset
    """Every example of the train split once, at its `place`."""
    validation: Dataset
    labels: Sequence[Sequence[int]]


_DEFAULTS: Final = LanguageSettings()


def train(
    pools: Collection[str | Path],
    out: str | Path,
    settings: LanguageSettings = _DEFAULTS,
    *,
    base_scores: Mapping[str, float] | None = None,
    descriptions: Mapping[str, str] | None = None,
    progress: TextIO | None = None,
) -> Trained:
    """Train a selector, or go on training it.

    Args:
        pools: folders of probe pools; their train split is fitted, their validation split chooses.
        out: folder of the run.
        settings: how to train.
        base_scores: as for `read_examples`; should be out-of-fold for the train split.
        descriptions: as for `read_examples`.
        progress: where reports go, a line each; None: standard error.

    Raises:
        SettingsError: a package is missing, a split holds no decisive probe, `out` holds another
            run, or no checkpoint of a stage has a finite loss.
        StoreError: a pool can't be read, or a file can't be written.
        WeightsError: the base can't be loaded.
    """
    require_training_packages()
    out = Path(out)
    progress = progress if progress is not None else sys.stderr
    examples = read_examples(
        pools,
        arms=settings.arms,
        base_scores=base_scores,
        descriptions=descriptions,
        view=settings.view,
    )
    for split in ("train", "validation"):
        if not any(example.split == split for example in examples):
            names = ", ".join(map(str, pools)) or "no pool"
            raise SettingsError(f"no decisive probe of the {split} split in {names}")
    run = _run_record(settings, pools, examples)
    processes = _arguments("sft", out / "sft", settings).distributed_state
    if processes.is_main_process:
        claim(out, run)
    processes.wait_for_everyone()

    stages = tuple(_stage(stage, out, examples, settings, progress) for stage in get_args(Stage))
    best = min(stages, key=lambda result: result.log_loss)
    folder = out / "selector"
    if processes.is_main_process:
        _export(out / best.stage / "adapter", folder, run, best)
    processes.wait_for_everyone()
    return Trained(folder=folder, stages=stages, chosen=best.stage)


# --- the run ---------------------------------------------------------------------------------


def _run_record(
    settings: LanguageSettings,
    pools: Collection[str | Path],
    examples: Sequence[TrainingExample],
) -> _Run:
    texts = [example.model_dump_json(exclude={"pool"}) for example in examples]
    n_train = sum(example.split == "train" for example in examples)
    return _Run(
        settings=settings,
        prompt=prompt_digest(settings.view),
        pools=tuple(
            _training_pool(Path(folder), [e for e in examples if e.pool == str(folder)])
            for folder in pools
        ),
        n_train=n_train,
        n_validation=len(examples) - n_train,
        examples=digest("\n".join(texts)),
    )


def _training_pool(folder: Path, examples: Sequence[TrainingExample]) -> TrainingPool:
    """A pool, and how much of it is used."""
    manifest = read_manifest(folder)
    return TrainingPool(
        name=folder.name,
        sha256=sha256((folder / "manifest.json").read_bytes()).hexdigest(),
        workloads=tuple(sorted({example.workload for example in examples})),
        models=tuple(model.name for model in manifest.models),
        n_questions=len({example.group for example in examples}),
        n_probes=len(examples),
    )


# --- stages ----------------------------------------------------------------------------------


def _stage(
    stage: Stage,
    out: Path,
    examples: Sequence[TrainingExample],
    settings: LanguageSettings,
    progress: TextIO,
) -> StageResult:
    """Train a stage, or go on with it, unless it is done."""
    folder = out / stage
    if (folder / "done.json").exists():
        return StageResult.model_validate_json(read_text(folder / "done.json", StoreError))
    # First of all, as they tell `load_base` what the weights will be spread over.
    arguments = _arguments(stage, folder, settings)
    tokenizer, base = load_base(settings.base)
    data = _encoded(tokenizer, examples, settings)
    journal = out / "losses.jsonl"
    common = {"args": arguments, **_common(stage, tokenizer, data, journal, settings, progress)}
    if stage == "sft":
        trainer = _supervised(base, settings, common)
    else:
        trainer = _preferential(base, out / "sft" / "adapter", data.fitted, common)
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    result = _result(stage, trainer)
    trainer.save_model(str(folder / "adapter"))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_whole(folder / "done.json", f"{result.model_dump_json(indent=1)}\n")
    # The next stage loads the base again: that of this stage may be spread over many devices.
    trainer.accelerator.free_memory()
    del trainer, common, base
    gc.collect()
    return result


def _encoded(
    tokenizer: Any, examples: Sequence[TrainingExample], settings: LanguageSettings
) -> _Data:
    from datasets import Dataset

    fitted = [example for example in examples if example.split == "train"]
    chosen_by = [example for example in examples if example.split == "validation"]
    rows = [_row(tokenizer, example, place) for place, example in enumerate(fitted)]
    drawn = balanced(fitted, len(fitted) * settings.epochs, seed=settings.seed)
    return _Data(
        drawn=Dataset.from_list([rows[place] for place in drawn]),
        fitted=Dataset.from_list(rows),
        validation=Dataset.from_list(
            [_row(tokenizer, example, place) for place, example in enumerate(chosen_by)]
        ),
        labels=encoded_labels(tokenizer),
    )


def _row(tokenizer: Any, example: TrainingExample, place: int) -> dict[str, Any]:
    """An example as `trainers.collate` takes it."""
    weights = dict.fromkeys(OUTCOMES, 0.0)
    for pair in preference_pairs(example):
        weights[pair.rejected] = pair.weight
    return {
        "input_ids": encoded_prompt(tokenizer, selector_messages(example.case, example.block)),
        "label": OUTCOMES.index(example.outcome),
        "weights": list(weights.values()),
        "place": place,
    }


def _supervised(base: Any, settings: LanguageSettings, common: Mapping[str, Any]) -> Trainer:
    """Trainer of stage 1, with a new adapter."""
    from peft import get_peft_model
    from transformers import set_seed

    from selector_training.trainers import SupervisedTrainer

    set_seed(settings.seed)  # the adapter begins at random
    adapter = lora_config(rank=settings.rank, alpha=settings.alpha, dropout=settings.dropout)
    model = get_peft_model(base, adapter, autocast_adapter_dtype=not _is_sharded(common["args"]))
    return SupervisedTrainer(model=model, **common)


def _preferential(
    base: Any, adapter: Path, reference_rows: Dataset, common: Mapping[str, Any]
) -> Trainer:
    """Trainer of stage 2, from the adapter of stage 1."""
    from peft import PeftModel

    from selector_training.trainers import PreferenceTrainer

    model = PeftModel.from_pretrained(
        base,
        str(adapter),
        is_trainable=True,
        autocast_adapter_dtype=not _is_sharded(common["args"]),
    )
    return PreferenceTrainer(model=model, reference_rows=reference_rows, **common)


def _is_sharded(arguments: Any) -> bool:
    """Whether DeepSpeed spreads the parameters, which it does for those of one type only."""
    plugin = arguments.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def _arguments(stage: Stage, folder: Path, settings: LanguageSettings) -> Any:
    """Arguments of a stage's trainer; nothing is sent to anybody."""
    from transformers import TrainingArguments
    from trl import DPOConfig

    shared = shared_arguments(
        folder,
        batch_size=settings.batch_size,
        accumulation=settings.accumulation,
        max_steps=settings.max_steps,
        log_every=settings.log_every,
        eval_every=settings.eval_every,
        seed=settings.seed,
        metric="log_loss",
    ) | {"num_train_epochs": 1, "label_names": ["label"]}
    with warnings.catch_warnings():
        # Not all versions that are supported know the new name, and TRL uses the old one itself.
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        if stage == "sft":
            return TrainingArguments(learning_rate=settings.sft_rate, **shared)
        return DPOConfig(
            learning_rate=settings.dpo_rate,
            beta=settings.beta,
            disable_dropout=False,
            max_length=None,
            **shared,
        )


def _common(
    stage: Stage,
    tokenizer: Any,
    data: _Data,
    journal: Path,
    settings: LanguageSettings,
    progress: TextIO,
) -> dict[str, Any]:
    """What both trainers get."""
    from transformers import EarlyStoppingCallback

    from selector_training.trainers import Journal, collate, validation_metrics

    return {
        "labels": data.labels,
        "processing_class": tokenizer,
        "train_dataset": data.drawn,
        "eval_dataset": data.validation,
        "data_collator": collate,
        "compute_metrics": validation_metrics,
        "callbacks": [
            EarlyStoppingCallback(early_stopping_patience=settings.patience),
            Journal(stage, journal, progress),
        ],
    }


def _result(stage: Stage, trainer: Trainer) -> StageResult:
    """How the chosen checkpoint did on the validation split."""
    entry = best_entry(trainer.state, "log_loss")
    return StageResult(
        stage=stage,
        n_steps=trainer.state.global_step,
        best_step=entry["step"],
        log_loss=entry["eval_log_loss"],
        accuracy=entry["eval_accuracy"],
        temperature=entry["eval_temperature"],
    )


# --- export ----------------------------------------------------------------------------------


def _export(adapter: Path, folder: Path, run: _Run, best: StageResult) -> None:
    """Copy the chosen adapter, and write down what it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
            shutil.copyfile(adapter / name, folder / name)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}") from None
    card = SelectorCard(
        base=run.settings.base,
        adapter_sha256=file_sha256(folder / ADAPTER_WEIGHTS),
        labels=LABELS,
        temperature=best.temperature,
        prompt=run.prompt,
        pools=run.pools,
        packages=package_versions(),
    )
    write_whole(folder / "selector.json", f"{card.model_dump_json(indent=1)}\n")
    write_whole(folder / "README.md", _model_card(card, run, best))


def _model_card(card: SelectorCard, run: _Run, best: StageResult) -> str:
    """The README of an exported selector."""
    pools = "".join(
        f"| {pool.name} | {', '.join(pool.workloads)} | {', '.join(pool.models)} "
        f"| {pool.n_questions} | {pool.n_probes} |\n"
        for pool in card.pools
    )
    packages = ", ".join(f"{name} {number}" for name, number in card.packages.items())
    return f"""\
---
base_model: {json.dumps(card.base)}
library_name: peft
tags: [splice-repair, lora]
---

# A selector for SPLICE

After a trial of a missing edge in a workflow of agents it tells how likely the new answer is
better than the old one, as good, or worse. It is a LoRA adapter on `{card.base}`.

    from splice.language import LanguageSelector

    selector = LanguageSelector("<this folder>")

## On the validation split

{run.n_validation} examples, at temperature {best.temperature:.3f}: three-class log loss
{best.log_loss:.4f}, accuracy {best.accuracy:.4f}. The checkpoint (stage {best.stage}, step
{best.best_step} of {best.n_steps}) and the temperature were chosen on the same examples, so the
numbers flatter it a little. Classes were balanced in training and are not in use: the temperature
corrects how sure it is, not how common the classes are.

## Trained on

{run.n_train} decisive probes of the train split, {run.n_validation} of the validation split.

| pool | workloads | models | questions | probes |
| --- | --- | --- | --- | --- |
{pools}
## Settings

| setting | value |
| --- | --- |
{settings_rows(run.settings)}
Prompt {card.prompt}. {packages}.
"""


def export(
    selector: str | Path, out: str | Path, *, base: str | None = None, merged: bool = False
) -> Path:
    """Copy a trained selector for others.

    Args:
        selector: its folder, `selector` in that of a run.
        out: folder to write to, new or empty.
        base: name by which others get the base; None: as it was named in training, which may be a
            folder of this machine.
        merged: write base and adapter as one model, for servers that load no adapters; it is asked
            through `splice.language.EndpointSelector` with the temperature of `selector.json`.

    Raises:
        SettingsError: `out` holds something.
        StoreError: a file can't be written.
        WeightsError: the folder holds no trained selector, or its base can't be loaded.
    """
    selector, out = Path(selector), Path(out)
    card = read_card(selector)
    if out.exists() and any(out.iterdir()):
        raise SettingsError(f"{out} is not empty; choose a new folder")
    named = card.model_copy(update={"base": base or card.base})
    if merged:
        _merge(selector, card.base, out)
    else:
        config = json.loads(read_text(selector / ADAPTER_CONFIG, WeightsError))
        config["base_model_name_or_path"] = named.base
        write_whole(out / ADAPTER_CONFIG, f"{json.dumps(config, indent=1)}\n")
        shutil.copyfile(selector / ADAPTER_WEIGHTS, out / ADAPTER_WEIGHTS)
    readme = read_text(selector / "README.md", WeightsError)
    write_whole(out / "README.md", readme.replace(card.base, named.base))
    write_whole(out / "selector.json", f"{named.model_dump_json(indent=1)}\n")
    return out


def _merge(selector: Path, base: str, out: Path) -> None:
    from peft import PeftModel

    tokenizer, model = load_base(base)
    PeftModel.from_pretrained(model, str(selector)).merge_and_unload().save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))


# --- a small base ----------------------------------------------------------------------------


def unpack_gguf(path: str | Path, out: str | Path) -> Path:
    """Write a GGUF model out as safetensors, to train an adapter on.

    Done once: reading GGUF takes up to a minute and a half, and a model that was read from it can
    be neither trained nor saved before it is told that it is quantised no longer. The weights stay
    as coarse as they were: a stand-in for the published ones.

    Args:
        path: the GGUF file.
        out: folder for weights and tokenizer.

    Returns:
        `out`, for `LanguageSettings.base`.

    Raises:
        SettingsError: the package `gguf` is not installed.
        WeightsError: the file can't be read as a model.
    """
    require_extra()
    if find_spec("gguf") is None:
        raise SettingsError("reading GGUF files needs gguf: pip install gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, out = Path(path), Path(out)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype="float32"
        )
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"{path}: no model can be read from it: {error}") from None
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    return out
