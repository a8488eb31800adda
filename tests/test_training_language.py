"""Training of language-model selectors, on a tiny random model and a toy pool."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from probed import make, workload
from test_language import tiny_adapter, tiny_base
from test_training_pairs import example
from typer.testing import CliRunner

from probes.export import export
from probes.pool import read_manifest
from selector_training.cli import app
from selector_training.comparison import adoption, comparison_text, evaluate
from selector_training.language import (
    LanguageSettings,
    last_checkpoint,
    train,
    unpack_gguf,
)
from selector_training.language import export as export_selector
from selector_training.pairs import read_examples
from splice.errors import SettingsError, WeightsError
from splice.language import LABELS, LanguageSelector, label_scores, left_padded, prompt_digest
from splice.records import Likelihoods
from splice.selector import RuleSelector, SelectorInput
from splice.selectors import open_selector

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
trainers = pytest.importorskip("selector_training.trainers")

# PEFT and TRL call by an old name what Transformers has given a new one.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]

TINY = LanguageSettings(
    rank=4, alpha=8, batch_size=4, accumulation=1, max_steps=2, eval_every=1, log_every=1
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    make(folder, 0, workloads={"train": workload(6), "validation": workload(3, begin=6)})
    return folder


def settings(base: Path, **changes: Any) -> LanguageSettings:
    return TINY.model_copy(update={"base": str(base), **changes})


# --- losses ----------------------------------------------------------------------------------

SPELLED = ((5,), (6, 7), (6, 8, 9))
"""Labels of one to three tokens."""
PROMPTS = ([20, 21, 22, 23], [24, 25], [26, 27, 28, 29, 30])
RIGHT = (0, 2, 1)


def preference_rows(labels: Sequence[Sequence[int]]) -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "input_ids": list(ids),
                "label": label,
                "weights": [float(k != label) for k in range(len(labels))],
                "place": place,
            }
            for place, (ids, label) in enumerate(zip(PROMPTS, RIGHT, strict=True))
        ]
    )


def preference_trainer(
    model: Any, base: Path, out: Path, rows: Any, labels: Sequence[Sequence[int]], **changes: Any
) -> Any:
    arguments = {"max_steps": 1, "save_strategy": "no", "beta": 0.1, "learning_rate": 1e-2}
    return trainers.PreferenceTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=3,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            max_length=None,
            remove_unused_columns=False,
            label_names=["label"],
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to="none",
            **{**arguments, **changes},
        ),
        labels=labels,
        reference_rows=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        train_dataset=rows,
        data_collator=trainers.collate,
    )


def plain_trainer(model: Any, base: Path, out: Path) -> Any:
    """TRL's own trainer; the data set is there because it asks for one."""
    return trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=str(out), bf16=False, use_cpu=True, beta=0.1, gradient_checkpointing=False
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": "new", "chosen": " A", "rejected": " B"}]
        ),
    )


def move_policy(model: Any) -> None:
    """Take the trained adapter away from the reference, the same way each time."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        if ".default." in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.1 * noise)


def test_the_loss_is_that_of_trl_for_the_same_completions(base: Path, tmp_path: Path) -> None:
    rows = preference_rows(SPELLED)
    ours = preference_trainer(tiny_adapter(base), base, tmp_path / "ours", rows, SPELLED)
    plain = plain_trainer(tiny_adapter(base), base, tmp_path / "plain")
    ours.compute_reference()
    move_policy(ours.model)
    move_policy(plain.model)
    pairs = [
        {"prompt_ids": ids, "chosen_ids": [*SPELLED[label]], "rejected_ids": [*SPELLED[other]]}
        for ids, label in zip(PROMPTS, RIGHT, strict=True)
        for other in range(3)
        if other != label
    ]
    whole = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=0)(pairs)
    ours.model.eval()
    plain.model.eval()
    loss = ours.compute_loss(ours.model, trainers.collate(rows.to_list()))
    expected = plain.compute_loss(plain.model, whole)
    assert abs(loss.item() - expected.item()) < 1e-5
    assert abs(loss.item() - math.log(2)) > 1e-3


def test_a_pair_counts_by_its_weight() -> None:
    scores = torch.tensor([[-1.0, -2.0, -3.0]])
    reference = torch.tensor([[-2.0, -2.0, -2.0]])
    weights = torch.tensor([[0.0, 2.0, 0.5]])
    loss = trainers.preference_loss(scores, reference, torch.tensor([0]), weights, beta=0.1)
    expected = (2.0 * math.log1p(math.exp(-0.1)) + 0.5 * math.log1p(math.exp(-0.2))) / 2
    assert loss.item() == pytest.approx(expected)


def test_stage_1_is_the_cross_entropy_of_the_right_label() -> None:
    scores = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    assert trainers.supervised_loss(scores, torch.tensor([1, 2])).item() == pytest.approx(4.0)


def test_a_batch_is_padded_on_the_left() -> None:
    batch = trainers.collate(
        [
            {"input_ids": [7, 8, 9], "label": 0, "weights": [0.0, 1.0, 1.0], "place": 4},
            {"input_ids": [5], "label": 2, "weights": [2.0, 1.0, 0.0], "place": 1},
        ]
    )
    assert batch["input_ids"].tolist() == [[7, 8, 9], [0, 0, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["label"].tolist() == [0, 2]
    assert batch["weights"].tolist() == [[0.0, 1.0, 1.0], [2.0, 1.0, 0.0]]
    assert batch["place"].tolist() == [4, 1]


# --- calibration -----------------------------------------------------------------------------


def test_the_temperature_undoes_what_the_scores_were_multiplied_by() -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(0)
    true = generator.normal(size=(4000, 3))
    odds = numpy.exp(true) / numpy.exp(true).sum(axis=1, keepdims=True)
    label = numpy.array([generator.choice(3, p=row) for row in odds])
    assert trainers.fit_temperature(3.0 * true, label) == pytest.approx(3.0, rel=0.1)
    assert trainers.log_loss(3.0 * true, label, 3.0) == pytest.approx(
        -numpy.log(odds[numpy.arange(4000), label]).mean()
    )


def test_scores_that_say_nothing_cost_the_logarithm_of_three() -> None:
    numpy = pytest.importorskip("numpy")
    found = trainers.log_loss(numpy.full((5, 3), -9.0), numpy.array([0, 1, 2, 0, 1]))
    assert found == pytest.approx(math.log(3))


# --- stages ----------------------------------------------------------------------------------


def parameters(model: Any, *, is_adapter: bool) -> dict[str, Any]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if ("lora_" in name) == is_adapter and ".ref." not in name
    }


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_two_steps_move_the_adapter_and_leave_the_backbone(
    base: Path, tmp_path: Path, stage: str
) -> None:
    rows, model = preference_rows(SPELLED), tiny_adapter(base)
    if stage == "dpo":
        trainer = preference_trainer(model, base, tmp_path, rows, SPELLED, max_steps=2)
    else:
        trainer = trainers.SupervisedTrainer(
            model=model,
            labels=SPELLED,
            train_dataset=rows,
            data_collator=trainers.collate,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=2,
                learning_rate=1e-2,
                save_strategy="no",
                remove_unused_columns=False,
                use_cpu=True,
                dataloader_pin_memory=False,
                disable_tqdm=True,
                report_to="none",
            ),
        )
    backbone, adapter = parameters(model, is_adapter=False), parameters(model, is_adapter=True)
    assert math.isfinite(trainer.train().training_loss)
    for name, before in backbone.items():
        assert torch.equal(model.get_parameter(name), before), name
    for name, before in adapter.items():
        assert not torch.equal(model.get_parameter(name), before), name


def test_the_right_label_scores_above_the_others_after_overfitting(
    base: Path, tmp_path: Path
) -> None:
    rows, model = preference_rows(SPELLED), tiny_adapter(base)
    batch = left_padded(PROMPTS, pad=0)
    with torch.no_grad():
        before = label_scores(model, *batch, SPELLED).argmax(1)
    assert before.tolist() != list(RIGHT)
    preference_trainer(
        model, base, tmp_path, rows, SPELLED, max_steps=40, learning_rate=3e-2, beta=0.5
    ).train()
    with torch.no_grad():
        after = label_scores(model.eval(), *batch, SPELLED).argmax(1)
    assert after.tolist() == list(RIGHT)


# --- a whole run -----------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a signal that ends the process."""


class KillingStream(io.StringIO):
    """Ends the run when a line begins like this."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def write(self, text: str) -> int:
        if text.startswith(self._beginning):
            raise Killed
        return super().write(text)


def losses(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "losses.jsonl").read_text("utf-8").splitlines()]


def weights_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def run(base: Path, pool: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """A run of two steps a stage: its folder, what it returned, what it reported."""
    out, progress = tmp_path_factory.mktemp("run"), io.StringIO()
    trained = train([pool], out, settings(base), progress=progress)
    return out, trained, progress.getvalue()


def test_a_run_exports_an_adapter_and_what_is_known_about_it(run: Any, pool: Path) -> None:
    out, trained, _ = run
    assert trained.folder == out / "selector"
    assert {path.name for path in trained.folder.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "selector.json",
        "README.md",
    }
    card = json.loads((trained.folder / "selector.json").read_text("utf-8"))
    assert card["labels"] == list(LABELS)
    assert card["prompt"] == prompt_digest()
    assert card["temperature"] > 0
    assert {"torch", "transformers", "peft", "trl"} <= set(card["packages"])
    (used,) = card["pools"]
    assert used["n_probes"] == len(read_examples([pool]))
    assert used["models"] == [model.name for model in read_manifest(pool).models]


def test_the_stage_with_the_least_log_loss_is_exported(run: Any) -> None:
    out, trained, _ = run
    assert [stage.stage for stage in trained.stages] == ["sft", "dpo"]
    best = min(trained.stages, key=lambda stage: stage.log_loss)
    assert trained.chosen == best.stage
    chosen = weights_in(out / best.stage / "adapter")
    exported = weights_in(trained.folder)
    assert all(torch.equal(chosen[name], exported[name]) for name in chosen)
    text = (trained.folder / "README.md").read_text("utf-8")
    assert f"log loss\n{best.log_loss:.4f}" in text


async def test_the_exported_selector_does_on_the_validation_split_what_was_measured(
    run: Any, pool: Path
) -> None:
    _, trained, _ = run
    validation = [found for found in read_examples([pool]) if found.split == "validation"]
    found = await evaluate(LanguageSelector(trained.folder), validation)
    best = min(trained.stages, key=lambda stage: stage.log_loss)
    assert found.log_loss == pytest.approx(best.log_loss, abs=1e-4)
    assert found.accuracy == pytest.approx(best.accuracy)


def test_losses_are_kept_and_told_a_line_a_step(run: Any) -> None:
    out, _, reported = run
    entries = [entry for entry in losses(out) if "loss" in entry]
    assert [(entry["stage"], entry["step"]) for entry in entries] == [
        ("sft", 1),
        ("sft", 2),
        ("dpo", 1),
        ("dpo", 2),
    ]
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    lines = reported.splitlines()
    assert sum(line.startswith("sft 2/2  loss ") for line in lines) == 1
    assert any("eval_log_loss" in line for line in lines)


def test_checkpoints_hold_no_pickled_arguments_and_no_reference(run: Any) -> None:
    out, _, _ = run
    checkpoint = last_checkpoint(out / "dpo")
    assert checkpoint is not None
    names = {path.name for path in checkpoint.iterdir()}
    assert "adapter_model.safetensors" in names
    assert not {"training_args.bin", "ref"} & names


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step, files in ((9, ["trainer_state.json"]), (10, ["trainer_state.json"]), (11, [])):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}", "utf-8")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("moment", ["sft 2/2  loss", "dpo 2/2  loss"])
def test_a_run_that_was_killed_goes_on_to_the_same_end(
    run: Any, base: Path, pool: Path, tmp_path: Path, moment: str
) -> None:
    with pytest.raises(Killed):
        train([pool], tmp_path, settings(base), progress=KillingStream(moment))
    again = io.StringIO()
    trained = train([pool], tmp_path, settings(base), progress=again)
    assert f"{moment[:3]} 1/2  loss" not in again.getvalue()
    whole, unbroken, _ = run
    assert trained.stages == unbroken.stages
    assert [(e["stage"], e["step"], "loss" in e) for e in losses(tmp_path)] == [
        (e["stage"], e["step"], "loss" in e) for e in losses(whole)
    ]
    for stage in ("sft", "dpo"):
        resumed, expected = (
            weights_in(tmp_path / stage / "adapter"),
            weights_in(whole / stage / "adapter"),
        )
        for name, value in expected.items():
            torch.testing.assert_close(resumed[name], value)


def test_a_finished_run_is_not_made_again(run: Any, base: Path, pool: Path) -> None:
    out, trained, _ = run
    progress = io.StringIO()
    assert train([pool], out, settings(base), progress=progress) == trained
    assert progress.getvalue() == ""


def test_a_folder_with_another_run_is_refused(run: Any, base: Path, pool: Path) -> None:
    out, _, _ = run
    with pytest.raises(SettingsError, match="holds another run: rank, beta differ"):
        train([pool], out, settings(base, rank=8, beta=0.2))


def test_a_pool_without_a_validation_split_is_refused(base: Path, tmp_path: Path) -> None:
    make(tmp_path / "pool", 3)
    with pytest.raises(SettingsError, match="no decisive probe of the validation split in"):
        train([tmp_path / "pool"], tmp_path / "run", settings(base))


@pytest.mark.parametrize("name", ["single_gpu", "fsdp", "zero2", "zero3"])
def test_accelerate_reads_the_configurations(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    folder = Path(str(pytest.importorskip("selector_training").__file__)).parent / "configs"
    found = load_config_from_file(str(folder / f"{name}.yaml"))
    assert found.mixed_precision == "bf16"
    assert found.num_machines == 1


# --- a small base ----------------------------------------------------------------------------


def test_a_file_that_is_no_gguf_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"PK\x03\x04 and so on")
    error, message = (
        (WeightsError, "no model can be read from it")
        if find_spec("gguf")
        else (SettingsError, "pip install gguf")
    )
    with pytest.raises(error, match=message):
        unpack_gguf(tmp_path / "mine.gguf", tmp_path / "out")


# --- comparison ------------------------------------------------------------------------------


class Sure:
    """Takes every candidate answer for better."""

    async def judge(self, case: SelectorInput) -> Likelihoods:
        return Likelihoods(beneficial=0.7, neutral=0.2, harmful=0.1)


async def test_selectors_are_compared_by_accuracy_log_loss_and_gain() -> None:
    examples = [
        example("beneficial", 0.5, 0),
        example("neutral", 0.0, 1),
        example("harmful", -0.25, 2),
    ]
    found = await evaluate(Sure(), examples)
    assert (found.n, found.n_adopted, found.n_fixed, found.n_broken) == (3, 3, 1, 1)
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.log_loss == pytest.approx(-math.log(0.7 * 0.2 * 0.1) / 3)
    assert found.expected_gain.mean == pytest.approx(0.25 / 3)
    assert found.expected_gain.n == 3


async def test_a_trial_that_is_not_adopted_gains_and_loses_nothing() -> None:
    sure_of_it = example("harmful", -1.0).case.model_copy(update={"base_score": 0.99})
    found = await evaluate(Sure(), [example("harmful", -1.0, case=sure_of_it)])
    assert (found.n_adopted, found.expected_gain.mean) == (0, 0.0)


def test_adopting_some_counts_them_and_averages_by_question() -> None:
    examples = [
        example("beneficial", 1.0, 0),
        example("harmful", -0.5, 1),
        example("neutral", 0.0, 2),
    ]
    same = examples[1].model_copy(update={"group": examples[0].group})
    found = adoption([examples[0], same, examples[2]], [True, True, False])
    assert (found.n, found.n_adopted, found.n_fixed, found.n_broken) == (3, 2, 1, 1)
    # Two questions: (1 - 0.5) / 2 and 0.
    assert (found.expected_gain.n, found.expected_gain.mean) == (2, pytest.approx(0.125))
    row = comparison_text({"always": found}).splitlines()[1].split()
    assert row[:6] == ["always", "3", "2", "1", "1", "+0.125"]
    assert row[-2:] == ["-", "-"]
    with pytest.raises(ValueError, match="shorter"):
        adoption(examples, [True])


async def test_any_tier_can_be_measured(pool: Path) -> None:
    examples = read_examples([pool])
    found = await evaluate(RuleSelector(), examples)
    assert found.n == len(examples)
    with pytest.raises(ValueError, match="no examples"):
        await evaluate(RuleSelector(), [])


async def test_a_selector_of_another_view_is_compared_and_not_used(
    base: Path, pool: Path, tmp_path: Path
) -> None:
    own = settings(base).model_copy(update={"view": "nothing"})
    trained = train([pool], tmp_path, own, progress=io.StringIO())
    with pytest.raises(WeightsError, match="trained on another prompt"):
        LanguageSelector(trained.folder)
    shown = read_examples([pool], splits=["validation"], view="nothing")
    found = await evaluate(LanguageSelector(trained.folder, view="nothing"), shown)
    best = min(trained.stages, key=lambda stage: stage.log_loss)
    assert found.log_loss == pytest.approx(best.log_loss, abs=1e-4)


# --- for others ------------------------------------------------------------------------------


def test_an_export_names_the_base_as_others_get_it_and_scores_the_same(
    run: Any, base: Path, tmp_path: Path
) -> None:
    trained = run[0] / "selector"
    out = export_selector(trained, tmp_path / "out", base="somebody/model")
    assert {path.name for path in out.iterdir()} == {path.name for path in trained.iterdir()}
    for name in ("adapter_config.json", "selector.json", "README.md"):
        assert str(base) not in (out / name).read_text("utf-8")
    ours, theirs = LanguageSelector(trained), LanguageSelector(out, base=base)
    assert ours.card.model_copy(update={"base": "somebody/model"}) == theirs.card
    with pytest.raises(SettingsError, match="not empty"):
        export_selector(trained, out)


def test_a_merged_export_is_one_model_with_the_scores_of_base_and_adapter(
    run: Any, base: Path, tmp_path: Path
) -> None:
    out = export_selector(run[0] / "selector", tmp_path / "merged", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    both = peft.PeftModel.from_pretrained(model, run[0] / "selector").eval()
    ids, mask = left_padded(PROMPTS, pad=0)
    with torch.inference_mode():
        wanted = label_scores(both, ids, mask, SPELLED)
        found = label_scores(merged, ids, mask, SPELLED)
    assert torch.allclose(found, wanted, atol=1e-5)


# --- the commands ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_trains_and_its_selector_is_compared_and_used(
    base: Path, pool: Path, tmp_path: Path
) -> None:
    runner, out = CliRunner(), tmp_path / "run"
    export(pool, tmp_path / "tables", format="csv")
    options = ["--tables", str(tmp_path / "tables")]
    once = ["train", str(pool), "--out", str(out), "--base", str(base), *options]
    trained = runner.invoke(app, [*once, "--max-steps", "1", "--eval-every", "1", "--batch", "2"])
    assert trained.exit_code == 0, trained.output
    assert "sft: validation log loss" in trained.stdout
    assert "dpo: validation log loss" in trained.stdout

    selector = str(out / "selector")
    chosen = ["--selector", "rules", "--selector", selector]
    compared = runner.invoke(app, ["compare", str(pool), *chosen, *options])
    assert compared.exit_code == 0, compared.output
    assert [line.split()[0] for line in compared.stdout.splitlines()[:4]] == [
        "selector",
        "always",
        "rules",
        selector,
    ]
    assert isinstance(open_selector(selector), LanguageSelector)

    exported = runner.invoke(app, ["export", selector, "--out", str(tmp_path / "out")])
    assert exported.exit_code == 0, exported.output
    assert isinstance(open_selector(tmp_path / "out"), LanguageSelector)


def test_selectors_are_not_compared_on_a_folder_without_trials(pool: Path, tmp_path: Path) -> None:
    export(pool, tmp_path / "tables", format="csv")
    compared = CliRunner().invoke(
        app, ["compare", str(tmp_path / "tables"), "--selector", "rules"], catch_exceptions=True
    )
    assert isinstance(compared.exception, SettingsError)
    assert "go to --tables" in str(compared.exception)
