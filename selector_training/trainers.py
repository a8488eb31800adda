"""The trainers: what is ours in them, on top of Transformers and TRL.

The two of a selector look at the log-probabilities of the labels alone
(`splice.language.label_scores`), so both train what the selector computes in use, with the same
code. That of agents learns whole replies.

Checkpoints are for resuming, not for sharing: beside the adapter (safetensors) and the state of the
run (JSON) they hold the optimiser, the schedule and the random numbers as PyTorch files, which
Transformers reads with `weights_only=True`, that is without running what may be in them. A
DeepSpeed checkpoint is read by DeepSpeed without that guard. So resume only what you trained
yourself; the exported folder holds none of these files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import numpy
import torch
from torch.nn import functional
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import DPOTrainer, SFTTrainer

from splice.errors import SettingsError
from splice.language import label_scores, left_padded

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import EvalPrediction

_POLICY: Final = "default"
_REFERENCE: Final = "ref"
"""Names of the two adapters, as PEFT and TRL give them."""

NOT_LEARNED: Final = -100
"""Stands among a row's labels for a token that is read and not learned."""


# --- batches ---------------------------------------------------------------------------------


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows as one batch.

    Args:
        rows: each with the prompt's `input_ids`; the place of its `label`; three `weights`, that of
            the pair with each label, 0 for its own; and its `place` among the rows that a
            reference is computed for.

    Returns:
        `input_ids` and `attention_mask`, (n, longest), padded on the left; `label` and `place`,
        (n,); `weights`, (n, 3).
    """
    ids, mask = left_padded([row["input_ids"] for row in rows], pad=0)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "label": torch.tensor([row["label"] for row in rows]),
        "weights": torch.tensor([row["weights"] for row in rows]),
        "place": torch.tensor([row["place"] for row in rows]),
    }


# --- losses ----------------------------------------------------------------------------------


def supervised_loss(scores: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of the right label's tokens, averaged over the batch.

    Args:
        scores: (n, 3) log-probabilities of the labels over the whole vocabulary.
        label: (n,) places of the right ones.
    """
    return -scores.gather(1, label[:, None]).mean()


def preference_loss(
    scores: Tensor, reference: Tensor, label: Tensor, weights: Tensor, beta: float
) -> Tensor:
    """Weighted DPO loss, averaged over the pairs of the right label with each of the others.

    `-w * log sigmoid(beta * ((log pi(y+) - log ref(y+)) - (log pi(y-) - log ref(y-))))`

    Args:
        scores: (n, 3) log-probabilities of the labels by the policy.
        reference: (n, 3) the same by the reference.
        label: (n,) places of the right ones, y+.
        weights: (n, 3) weight of the pair with each label as y-; 0 for the right one.
        beta: how strongly the policy is held to the reference.

    Source: Rafailov et al. 2023, equation 7. The weights are ours (method 2.9).
    """
    ratios = scores - reference
    margins = beta * (ratios.gather(1, label[:, None]) - ratios)
    n_pairs = scores.shape[0] * (scores.shape[1] - 1)
    return -(weights * functional.logsigmoid(margins)).sum() / n_pairs


def target_loss(
    model: Any, batch: Mapping[str, Tensor], n_tokens: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of the tokens that are learned; logits are computed where these are, only.

    Args:
        model: a causal language model.
        batch: `labels`, (n, longest), and what else the model takes.
        n_tokens: what the sum is divided by; None: the number of learned tokens in the batch.
    """
    labels = batch["labels"][:, 1:]
    is_learned = labels != NOT_LEARNED
    places = is_learned.any(0).nonzero()[:, 0]
    read = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**read, use_cache=False, logits_to_keep=places).logits
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels[:, places].flatten(),
        ignore_index=NOT_LEARNED,
        reduction="sum",
    )
    return total / (is_learned.sum() if n_tokens is None else n_tokens)


# --- calibration -----------------------------------------------------------------------------


def log_loss(scores: NDArray[Any], label: NDArray[Any], temperature: float = 1.0) -> float:
    """Mean of -log of the right label's share among the three.

    Args:
        scores: (n, 3) log-probabilities of the labels.
        label: (n,) places of the right ones.
        temperature: divides the scores.
    """
    scaled = scores.astype(numpy.float64) / temperature
    highest = scaled.max(axis=1, keepdims=True)
    totals = numpy.log(numpy.exp(scaled - highest).sum(axis=1)) + highest[:, 0]
    return float((totals - scaled[numpy.arange(len(label)), label]).mean())


def fit_temperature(scores: NDArray[Any], label: NDArray[Any]) -> float:
    """The temperature, from 0.05 to 20, that makes the log loss least."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda log_temperature: log_loss(scores, label, math.exp(log_temperature)),
        bounds=(math.log(0.05), math.log(20.0)),
        method="bounded",
    )
    return math.exp(float(found.x))


def validation_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """What a checkpoint is chosen by: log loss at the temperature that it would be given."""
    scores, label = prediction.predictions, prediction.label_ids
    temperature = fit_temperature(scores, label)
    return {
        "log_loss": log_loss(scores, label, temperature),
        "accuracy": float((scores.argmax(axis=1) == label).mean()),
        "temperature": temperature,
    }


# --- trainers --------------------------------------------------------------------------------


class _Discreet:
    """What all trainers share: they tell nobody, and pickle nothing. Stands before `Trainer`."""

    def _save(self, output_dir: str | None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the adapter that is trained, or else the model; called by `Trainer`."""
        trainer: Any = self
        if not trainer.args.should_save:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        only: dict[str, Any] = {}
        if hasattr(model, "peft_config"):
            # Without being told that embeddings are not trained PEFT asks the Hub about them.
            only = {"selected_adapters": [_POLICY], "save_embedding_layers": False}
        model.save_pretrained(output_dir or trainer.args.output_dir, state_dict=state_dict, **only)

    def _send_telemetry(self) -> None:
        """Tell nobody."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Leave the model card to the export."""


class _LabelTraining(_Discreet):
    """What both stages of a selector share. Stands before `Trainer` among the bases."""

    labels: Sequence[Sequence[int]]
    loss_is_scaled_for_ga = False
    """Our losses are means over a batch, so accumulated ones are averaged by the Trainer."""

    def label_loss(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss of a batch, from the scores of its labels."""
        raise NotImplementedError

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Loss of a training batch; called by `Trainer`."""
        return self.label_loss(self._scores(model, inputs), inputs)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Three-class log loss, scores and labels of a batch; called by `Trainer`."""
        trainer: Any = self
        inputs = trainer._prepare_inputs(inputs)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            scores = self._scores(model, inputs)
        return functional.cross_entropy(scores, inputs["label"]), scores, inputs["label"]

    def _scores(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        return label_scores(model, inputs["input_ids"], inputs["attention_mask"], self.labels)


class SupervisedTrainer(_LabelTraining, Trainer):  # type: ignore[misc]
    """Stage 1: cross-entropy on the tokens of the right label."""

    def __init__(self, *, labels: Sequence[Sequence[int]], **trainer: Any) -> None:
        """Keep the labels; the rest is for `Trainer`."""
        self.labels = labels
        if trainer["args"].gradient_checkpointing:
            trainer["model"].enable_input_require_grads()
        super().__init__(**trainer)
        self.remove_callback(PrinterCallback)
        if self.args.n_gpu > 1:
            raise SettingsError(
                "several GPUs are visible to one process: use `accelerate launch`, or make one GPU "
                "visible by CUDA_VISIBLE_DEVICES"
            )

    def label_loss(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The right labels' cross-entropy."""
        return supervised_loss(scores, batch["label"])


class PreferenceTrainer(_LabelTraining, DPOTrainer):  # type: ignore[misc]
    """Stage 2: DPO from the adapter that the model comes with, which is also the reference.

    TRL prepares model, adapter and reference for whatever the run is distributed over. What differs
    from its plain trainer:

    - The answers of a pair differ in one label, so a prompt is run once for all its pairs and the
      logits are computed where labels begin, instead of a whole sequence for each answer.
    - Log-probabilities of the reference are computed once, when training begins.
    - Each pair has a weight.
    - No end-of-text token follows the label: whether the model would stop after it says nothing
      about the case, and in use it is not asked to.
    - Dropout stays on for the policy, as in stage 1; the reference is computed without.
    - Nothing is told to anybody: TRL would report the kind of training to its authors.

    With weights of 1 and without dropout its loss is the one of `trl.DPOTrainer` for the same
    completions.
    """

    def __init__(
        self, *, labels: Sequence[Sequence[int]], reference_rows: Dataset, **trainer: Any
    ) -> None:
        """Keep the labels; the rest is for `DPOTrainer`.

        Args:
            labels: token ids of each label.
            reference_rows: every row that is trained on, at its `place`.
            trainer: arguments of `DPOTrainer`.
        """
        self.labels = labels
        self._reference_rows = reference_rows
        self._reference: Tensor | None = None
        super().__init__(**trainer)
        self.remove_callback(PrinterCallback)
        self.add_callback(_ReferenceFirst(self))

    def compute_reference(self) -> None:
        """Score the rows by the reference, each process its part."""
        with self._reference_in_place():
            found = self.predict(self._reference_rows).predictions
        self._reference = torch.from_numpy(found).to(self.args.device)

    def label_loss(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """DPO of the right label against each of the others."""
        assert self._reference is not None
        reference = self._reference[batch["place"]]
        return preference_loss(scores, reference, batch["label"], batch["weights"], self.beta)

    @contextmanager
    def _reference_in_place(self) -> Iterator[None]:
        """The reference adapter is used instead of the one that is trained."""
        model = self.accelerator.unwrap_model(self.model)
        model.set_adapter(_REFERENCE)
        try:
            yield
        finally:
            model.set_adapter(_POLICY)

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        """Leave the rows as they are: they are encoded already."""
        return dataset


class _ReferenceFirst(TrainerCallback):  # type: ignore[misc]
    """Scores the rows by the reference once the model is where it will be trained."""

    def __init__(self, trainer: PreferenceTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer.compute_reference()


class AgentTrainer(_Discreet, SFTTrainer):  # type: ignore[misc]
    """Supervised fine-tuning on targets, with prompts that are read and not learned.

    TRL's trainer, which computes logits only where a target's tokens are, but on GPUs alone: on a
    CPU it computes all. So there it is done here, with the same loss. A step of a 135M model with
    450 tokens, 35 of them learned, takes 6.8 s in place of 10.7 s on one core.
    """

    def __init__(self, **trainer: Any) -> None:
        """Make a `SFTTrainer` that prints nothing."""
        super().__init__(**trainer)
        self.remove_callback(PrinterCallback)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Loss of a batch; called by `Trainer`."""
        if self.args.device.type != "cpu" or self.args.world_size > 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return target_loss(model, inputs, num_items_in_batch)


class Journal(TrainerCallback):  # type: ignore[misc]
    """Keeps what a stage reports: a line for people, and a line of a file for curves.

    Lines of the file: `{"stage": "dpo", "step": 10, "loss": 0.61, ...}`. A run that goes on after a
    kill drops those of steps that it makes again.
    """

    def __init__(self, stage: str, path: Path, progress: TextIO) -> None:
        """Say where to write.

        Args:
            stage: name of the stage.
            path: the file.
            progress: where the lines for people go.
        """
        self._stage = stage
        self._path = path
        self._progress = progress

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Forget what will be made again."""
        if state.is_world_process_zero and self._path.exists():
            lines = self._path.read_text("utf-8").splitlines()
            kept = [line for line in lines if not self._is_ahead(line, state.global_step)]
            self._path.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **_: Any,
    ) -> None:
        """Write down what is reported."""
        if not state.is_world_process_zero:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        entry = {"stage": self._stage, "step": state.global_step, **numbers}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self._progress.write(f"{self._stage} {state.global_step}/{state.max_steps}  {shown}\n")

    def _is_ahead(self, line: str, step: int) -> bool:
        try:
            entry = json.loads(line)
        except ValueError:
            return True  # cut off by a kill
        return bool(entry["stage"] == self._stage and entry["step"] > step)
