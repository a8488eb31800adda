"""What every run that trains a language model has: a folder of its own, arguments, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from pydantic import Field, ValidationError

from splice._version import __version__
from splice.errors import SettingsError, StoreError
from splice.files import read_text, write_whole
from splice.language import require_extra
from splice.records import Record

if TYPE_CHECKING:
    from transformers import TrainerState

Count: TypeAlias = Annotated[int, Field(ge=1)]

_PACKAGES: Final = ("torch", "transformers", "peft", "trl", "accelerate")
_KEPT_CHECKPOINTS: Final = 2
"""The best one and the last one."""
_WARMUP: Final = 0.05
"""Share of the steps in which the learning rate rises."""


def require_training_packages() -> None:
    """Check that everything that training needs is installed.

    Raises:
        SettingsError: it is not.
    """
    require_extra()
    missing = [name for name in ("trl", "accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"training needs {', '.join(missing)}: pip install 'splice-repair[train]'"
        )


def package_versions() -> Mapping[str, str]:
    """Versions of what a model was trained with."""
    return {"splice-repair": __version__, **{name: version(name) for name in _PACKAGES}}


# --- the folder ------------------------------------------------------------------------------


class RunRecord(Record):
    """What a run is made of: `run.json`."""

    settings: Record
    prompt: str
    """Digest of the prompts' wording."""
    examples: str
    """Digest of all examples."""


def claim(out: Path, run: RunRecord) -> None:
    """Begin the run, or check that the one that was begun is this one.

    Raises:
        SettingsError: `out` holds another run.
        StoreError: `run.json` can't be read or written.
    """
    path = out / "run.json"
    if not path.exists():
        write_whole(path, f"{run.model_dump_json(indent=1)}\n")
        return
    try:
        known = type(run).model_validate_json(read_text(path, StoreError))
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    old, new = known.settings.model_dump(), run.settings.model_dump()
    differing = [name for name in new if old[name] != new[name]]
    differing += [
        name for name in ("prompt", "examples") if getattr(known, name) != getattr(run, name)
    ]
    if differing:
        raise SettingsError(
            f"{out} holds another run: {', '.join(differing)} differ; choose another folder"
        )


def settings_rows(settings: Record) -> str:
    """Settings as rows of a table of a model card."""
    return "".join(f"| {name} | {value} |\n" for name, value in settings.model_dump().items())


# --- arguments -------------------------------------------------------------------------------


def shared_arguments(
    folder: Path,
    *,
    batch_size: int,
    accumulation: int,
    max_steps: int | None,
    log_every: int,
    eval_every: int,
    seed: int,
    metric: str,
) -> dict[str, Any]:
    """Arguments of any trainer; nothing is sent to anybody.

    Args:
        folder: where checkpoints go.
        batch_size: examples in one pass of one process.
        accumulation: passes to a step.
        max_steps: None: as the epochs need.
        log_every: steps between two reports.
        eval_every: steps between two checkpoints, each measured on the validation split.
        seed: of the order of examples and of dropout.
        metric: what a checkpoint is chosen by; the less the better.
    """
    import torch

    is_on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(folder),
        "max_steps": max_steps or -1,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": is_on_gpu,
        "bf16": is_on_gpu,
        "lr_scheduler_type": "cosine",
        "warmup_steps": _WARMUP,
        "logging_steps": log_every,
        "eval_strategy": "steps",
        "eval_steps": eval_every,
        "save_strategy": "steps",
        "save_steps": eval_every,
        "save_total_limit": _KEPT_CHECKPOINTS,
        "load_best_model_at_end": True,
        "metric_for_best_model": metric,
        "greater_is_better": False,
        "seed": seed,
        "remove_unused_columns": False,
        "dataloader_pin_memory": is_on_gpu,
        "disable_tqdm": True,
        "report_to": "none",
    }


def lora_config(*, rank: int, alpha: int, dropout: float) -> Any:
    """A LoRA adapter on all linear layers but the output."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


# --- checkpoints -----------------------------------------------------------------------------


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end; None if there is none."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def best_entry(state: TrainerState, metric: str) -> Mapping[str, Any]:
    """What was reported of the checkpoint that was chosen.

    Raises:
        SettingsError: none has a finite value of the metric.
    """
    for entry in state.log_history:
        if entry["step"] == state.best_global_step and f"eval_{metric}" in entry:
            found: Mapping[str, Any] = entry
            return found
    raise SettingsError(
        f"no checkpoint has a finite {metric.replace('_', ' ')} on the validation split; lower the "
        "learning rate"
    )
