"""Training of agents that abstain, on a tiny random model and hand-made requests."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from test_language import tiny_base
from test_training_language import Killed, KillingStream, losses
from typer.testing import CliRunner

from selector_training.agents import (
    AgentData,
    AgentSettings,
    capped,
    encoded,
    from_instances,
    from_workload,
    instance_messages,
    read_sources,
    train_agent,
)
from selector_training.cli import app
from selector_training.runs import last_checkpoint
from splice import prompts
from splice.abstention import parse_reply
from splice.ears.curation import Curated, from_traces, write_curated
from splice.ears.interactions import Interaction
from splice.errors import DataError, SettingsError, WeightsError
from splice.executor import execute
from splice.language import encoded_prompt
from splice.models.scripted import ScriptedModel
from splice.records import ChatMessage, Document, Query
from splice.workflow import Agent, Workflow
from splice.workload import Example, Workload

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
trainers = pytest.importorskip("selector_training.trainers")

# PEFT and TRL call by an old name what Transformers has given a new one.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY = AgentSettings(lora=True, rank=4, alpha=8, batch_size=2, accumulation=1, max_steps=2)


def taught(folder: Path, template: str | None) -> Path:
    """A tiny model with a chat template."""
    base = tiny_base(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    (base / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(base)
    return base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("base"), TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(base)


def settings(base: Path, **changes: Any) -> AgentSettings:
    quick = {"base": str(base), "eval_every": 1, "log_every": 1}
    return TINY.model_copy(update={**quick, **changes})


# --- a labelled workload ---------------------------------------------------------------------

CLERK = Agent(
    id="clerk",
    role="You book rooms.",
    subtask="Book what is asked for.",
    reply="One line.",
    documents=(Document(text="Room 4 has two beds."),),
)


def alone(agent: Agent) -> Workflow:
    return Workflow(name="desk", nodes=(agent,), edges=(), output=agent.id)


def request(number: int, text: str, **reference: Any) -> Example:
    return Example(
        query=Query(id=f"r{number}", text=text), reference=reference, workflow=alone(CLERK)
    )


def booking(number: int) -> Example:
    """Every other request lacks the day."""
    if number % 2:
        text, has = f"Book room {number}.", f"the day for room {number}"
        return request(number, text, label="Insufficient Input", rationale=has)
    text = f"Book room {number} on Monday."
    return request(number, text, label="Solvable", gold_output=f"book({number}, Monday)")


def rooms(*examples: Example) -> Workload:
    return Workload(
        name="rooms",
        about="Rooms to book.",
        workflow=alone(CLERK),
        examples=examples,
        metrics=("correct",),
        score=lambda example, answer: {"correct": 0.0},
        sources={"rooms.jsonl": "5" * 64},
    )


def load_rooms(data: Path | None, *, split: str, options: Any) -> Workload:
    """A loader: six requests to learn and three to choose by."""
    numbers = range(6) if split == "train" else range(6, 9)
    return rooms(*(booking(number) for number in numbers))


SOURCE = f"{__name__}:load_rooms"


@pytest.fixture(scope="module")
def data() -> AgentData:
    return read_sources([SOURCE])


async def read_in_a_run(agent: Agent, query: Query) -> tuple[ChatMessage, ...]:
    model = ScriptedModel({agent.id: ["done"]})
    await execute(alone(agent), query, model)
    return model.requests[0].messages


async def test_a_prompt_is_what_an_agent_reads_that_may_abstain() -> None:
    example = booking(1)
    (found,) = from_workload(rooms(example), "train").examples
    told = CLERK.model_copy(update={"may_abstain": True})
    assert found.messages == await read_in_a_run(told, example.query)
    assert "Insufficient Input" in found.messages[-1].content
    assert found.messages != await read_in_a_run(CLERK, example.query)


def test_a_target_is_the_gold_output_or_an_abstention_in_its_wire_form(data: AgentData) -> None:
    targets = {example.id: example.target for example in data.examples}
    assert targets["r4"] == "book(4, Monday)"
    reply = parse_reply(targets["r5"])
    assert reply.abstention is not None
    assert reply.abstention.category == "Insufficient Input"
    assert reply.abstention.rationale == "the day for room 5"
    splits = {example.id: example.split for example in data.examples}
    assert [splits[f"r{n}"] for n in (0, 5, 6, 8)] == ["train", "train", *2 * ["validation"]]


def test_what_has_no_gold_is_left_out_and_counted() -> None:
    found = from_workload(
        rooms(
            request(1, "a", label="Solvable", gold_output="  "),
            request(2, "b", label="Solvable", rationale="c"),
            request(3, "c", label="Misrouting", gold_output="c"),
            booking(4),
        ),
        "train",
    )
    assert [example.id for example in found.examples] == ["r4"]
    assert found.sources[0].left_out == {"no gold output": 2, "no rationale": 1}


def test_control_tokens_of_a_target_are_not_learned_as_such() -> None:
    gold = "book(1)<|im_end|>\n<|im_start|>user"
    found = from_workload(rooms(request(1, "a", label="Solvable", gold_output=gold)), "train")
    assert found.examples[0].target == "book(1)< |im_end|>\n< |im_start|>user"


def test_a_prompt_that_is_learned_does_not_choose_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overlapping(_: Any, *, split: str, options: Any) -> Workload:
        return rooms(*map(booking, range(4) if split == "train" else range(2, 6)))

    monkeypatch.setattr(f"{__name__}.load_rooms", overlapping)
    found = read_sources([SOURCE])
    chosen_by = [example.id for example in found.examples if example.split == "validation"]
    assert chosen_by == ["r4", "r5"]
    (source,) = found.sources
    assert source.left_out == {"of validation, and the prompt is learned": 2}
    assert source.files == {"rooms.jsonl": "5" * 64}


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        (request(1, "a", label="solvable"), DataError, r"'r1': label: 'solvable' is none of Solv"),
        (
            booking(1).model_copy(
                update={
                    "workflow": alone(
                        CLERK.model_copy(update={"may_abstain": True, "structured_replies": True})
                    )
                }
            ),
            SettingsError,
            "'clerk' of workflow 'desk' has tools or structured replies",
        ),
        (
            booking(1).model_copy(
                update={
                    "workflow": Workflow(
                        nodes=(CLERK, Agent(id="desk", role="You answer.")),
                        edges=(("clerk", "desk"),),
                        output="desk",
                    )
                }
            ),
            SettingsError,
            "is not one agent alone",
        ),
    ],
)
def test_a_workload_that_cannot_be_learned_is_refused(
    example: Example, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_workload(rooms(example), "train")


def test_a_cap_holds_for_each_label_and_a_quarter_of_it_for_validation(data: AgentData) -> None:
    found = capped(data, AgentSettings(max_per_label=2))
    labels = [(example.split, example.label) for example in found.examples]
    assert labels.count(("train", "Solvable")) == 2
    assert labels.count(("train", "Insufficient Input")) == 2
    assert labels.count(("validation", "Solvable")) == 1
    assert found.sources[0].left_out == {"over the cap on a label": 3}
    again = capped(data, AgentSettings(max_per_label=2))
    draws = {capped(data, AgentSettings(max_per_label=2, seed=n)).examples for n in range(8)}
    assert again == found
    assert len(draws) > 1


# --- curated instances -----------------------------------------------------------------------


async def interaction(agent: Agent, text: str, reply: str) -> Interaction:
    """What an agent was asked in a run, as it is collected."""
    model = ScriptedModel({agent.id: [reply]})
    trace = await execute(alone(agent), Query(text=text), model)
    (found,) = from_traces(alone(agent), [trace])
    return found


async def test_the_prompt_of_an_instance_is_what_its_agent_read() -> None:
    told = CLERK.model_copy(update={"may_abstain": True})
    found = await interaction(told, "Book a room.", "for which day?")
    assert instance_messages(found) == await read_in_a_run(told, Query(text="Book a room."))


async def test_an_agent_that_could_not_abstain_is_shown_what_it_reads_if_it_may() -> None:
    told = CLERK.model_copy(update={"may_abstain": True})
    found = await interaction(CLERK, "Book a room.", "for which day?")
    assert instance_messages(found) == await read_in_a_run(told, Query(text="Book a room."))


async def test_what_an_agent_was_told_of_its_workflow_is_kept() -> None:
    told = CLERK.model_copy(update={"may_abstain": True})
    found = await interaction(told, "Book a room.", "for which day?")
    context = f"{found.context}\nThe other agents:\n- cook: cooks"
    system, user = instance_messages(found)
    longer = instance_messages(found.model_copy(update={"context": context}))
    assert longer == (
        system,
        user.model_copy(update={"content": f"{user.content}\nThe other agents:\n- cook: cooks"}),
    )


async def test_a_context_by_hand_is_what_the_agent_is_told_about_itself() -> None:
    written = Interaction(
        id="1", source="s", agent="clerk", context="You book rooms.", query="Book a room."
    )
    bare = Agent(id="clerk", role="You book rooms.", may_abstain=True)
    read = await read_in_a_run(bare, Query(text="Book a room."))
    assert instance_messages(written) == read


def curated(number: int, **changes: Any) -> Curated:
    fields = {
        "interaction": Interaction(
            id=f"i{number}",
            source="s",
            agent="clerk",
            context="You book rooms.",
            query=f"Book room {number}.",
            reply="booked",
        ),
        "disposition": "accepted",
        "reason": "agreement",
        "label": "Solvable",
        "target": "booked",
        "votes": (),
    }
    return Curated(**{**fields, **changes})


def test_a_tenth_of_the_instances_is_held_out_by_their_query(tmp_path: Path) -> None:
    path = tmp_path / "instances.jsonl"
    rows = [curated(number) for number in range(400)]
    again = [
        row.model_copy(update={"interaction": row.interaction.model_copy(update={"id": f"{n}"})})
        for n, row in enumerate(rows)
    ]
    write_curated(path, [*rows, *again, curated(900, label=None, target=None)])
    found = from_instances(path)
    assert found.sources[0].left_out == {"no target": 1}
    assert len(found.sources[0].files["instances.jsonl"]) == 64
    splits = [example.split for example in found.examples]
    assert splits[:400] == splits[400:]
    assert 0.05 < splits.count("validation") / 800 < 0.15


def test_a_line_that_is_no_instance_is_named(tmp_path: Path) -> None:
    path = tmp_path / "instances.jsonl"
    path.write_text(curated(1).model_dump_json() + "\n{}\n", "utf-8")
    with pytest.raises(DataError, match=r"instances\.jsonl:2: "):
        from_instances(path)


# --- what is learned -------------------------------------------------------------------------


def batch(data: AgentData, tokenizer: Any, *, is_flat: bool = False) -> dict[str, Any]:
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=is_flat
    )
    found: dict[str, Any] = collate([encoded(tokenizer, example) for example in data.examples[:3]])
    return found


def test_the_prompt_is_read_as_in_use_and_the_target_is_learned(
    data: AgentData, tokenizer: Any
) -> None:
    example = data.examples[1]
    row = encoded(tokenizer, example)
    prompt = encoded_prompt(tokenizer, example.messages)
    n = len(prompt)
    assert row["input_ids"][:n] == prompt
    assert row["labels"][:n] == [-100] * n
    assert row["labels"][n:] == row["input_ids"][n:]
    assert tokenizer.decode(row["labels"][n:]) == f"{example.target}</s>\n"


def test_the_loss_is_that_of_the_target_alone_as_worked_out_by_hand(
    data: AgentData, tokenizer: Any, base: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    rows = [encoded(tokenizer, example) for example in data.examples[:3]]
    total, n_tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            n = sum(label == -100 for label in row["labels"])
            scores = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
            for place in range(n, len(row["input_ids"])):
                total -= float(scores[place - 1, row["input_ids"][place]])
                n_tokens += 1
        found = trainers.target_loss(model, batch(data, tokenizer))
        in_a_step = trainers.target_loss(model, batch(data, tokenizer), 7)
        packed = trainers.target_loss(model, batch(data, tokenizer, is_flat=True))
    assert found.item() == pytest.approx(total / n_tokens, rel=1e-5)
    assert in_a_step.item() == pytest.approx(total / 7, rel=1e-5)
    assert packed.item() == pytest.approx(total / n_tokens, rel=1e-5)


def test_the_loss_and_its_gradient_are_those_of_trl(
    data: AgentData, tokenizer: Any, base: Path, tmp_path: Path
) -> None:
    found = {}
    for kind in (trl.SFTTrainer, trainers.AgentTrainer):
        trainer = kind(
            model=transformers.AutoModelForCausalLM.from_pretrained(base),
            args=trl.SFTConfig(
                output_dir=str(tmp_path),
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                report_to="none",
            ),
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_list(
                [encoded(tokenizer, example) for example in data.examples]
            ),
        )
        loss = trainer.compute_loss(trainer.model, batch(data, tokenizer))
        loss.backward()
        found[kind] = loss, trainer.model.get_input_embeddings().weight.grad
    (theirs, moved), (ours, moved_too) = found.values()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(moved_too, moved)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (TEMPLATE.replace("assistant: {% endif", "assistant: <think>{% endif"), "otherwise once"),
    ],
)
def test_a_chat_template_that_cannot_be_learned_from_is_refused(
    data: AgentData, base: Path, template: str | None, message: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    with pytest.raises(WeightsError, match=message):
        encoded(tokenizer, data.examples[0])


def test_the_end_is_learned_where_the_template_closes_no_turn(data: AgentData, base: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE.replace("</s>", "")
    assert encoded(tokenizer, data.examples[0])["labels"][-1] == tokenizer.eos_token_id


# --- a whole run -----------------------------------------------------------------------------


def weights_in(folder: Path, name: str = "adapter_model.safetensors") -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / name))


@pytest.fixture(scope="module")
def run(
    base: Path, data: AgentData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, str]:
    """A run of two steps: its folder, what it returned, what it reported."""
    out, progress = tmp_path_factory.mktemp("run"), io.StringIO()
    trained = train_agent(data, out, settings(base), progress=progress)
    return out, trained, progress.getvalue()


def test_a_run_leaves_an_adapter_and_what_is_known_about_it(run: Any, base: Path) -> None:
    out, trained, _ = run
    assert trained.folder == out / "agent"
    assert {path.name for path in trained.folder.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "agent.json",
        "README.md",
    }
    card = json.loads((trained.folder / "agent.json").read_text("utf-8"))
    assert card["prompt"] == prompts.version()
    assert len(card["weights"]["adapter_model.safetensors"]) == 64
    assert card["settings"]["base"] == card["base"] == str(base)
    assert {"torch", "transformers", "peft", "trl"} <= set(card["packages"])
    (source,) = card["sources"]
    assert source["files"] == {"rooms.jsonl": "5" * 64}
    assert source["train"] == {"Solvable": 3, "Insufficient Input": 3}
    assert source["validation"] == {"Solvable": 2, "Insufficient Input": 1}
    readme = (trained.folder / "README.md").read_text("utf-8")
    assert "| rooms | train | 3 | 0 | 3 | 0 | 0 |" in readme
    assert f"| rooms | rooms.jsonl | {'5' * 64} |" in readme
    assert f"{trained.card.loss:.4f} nats" in readme


def test_what_is_learned_is_told_before_and_losses_are_kept(run: Any) -> None:
    out, _, reported = run
    first, *lines = reported.splitlines()
    assert first == (
        "train: 3 Solvable, 3 Insufficient Input; validation: 2 Solvable, 1 Insufficient Input"
    )
    entries = [entry for entry in losses(out) if "loss" in entry]
    assert [(entry["stage"], entry["step"]) for entry in entries] == [("sft", 1), ("sft", 2)]
    assert sum(line.startswith("sft 2/2  loss ") for line in lines) == 1
    assert any("eval_loss" in line for line in lines)


def test_the_checkpoint_with_the_least_validation_loss_is_kept(
    run: Any, base: Path, data: AgentData, tokenizer: Any
) -> None:
    import peft

    out, trained, _ = run
    found = {entry["step"]: entry["eval_loss"] for entry in losses(out) if "eval_loss" in entry}
    assert trained.card.loss == min(found.values())
    assert found[trained.card.best_step] == trained.card.loss
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, str(trained.folder)).eval()
    chosen_by = [example for example in data.examples if example.split == "validation"]
    with torch.no_grad():
        pairs = [
            trainers.target_loss(model, batch(data._replace(examples=part), tokenizer))
            for part in (tuple(chosen_by[:2]), tuple(chosen_by[2:]))
        ]
    assert trained.card.loss == pytest.approx((2 * pairs[0] + pairs[1]).item() / 3, rel=1e-4)


def test_checkpoints_hold_no_pickled_arguments(run: Any) -> None:
    checkpoint = last_checkpoint(run[0] / "sft")
    assert checkpoint is not None
    names = {path.name for path in checkpoint.iterdir()}
    assert "adapter_model.safetensors" in names
    assert "training_args.bin" not in names


def test_a_run_that_was_killed_goes_on_to_the_same_end(
    run: Any, base: Path, data: AgentData, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train_agent(data, tmp_path, settings(base), progress=KillingStream("sft 2/2  loss"))
    again = io.StringIO()
    trained = train_agent(data, tmp_path, settings(base), progress=again)
    assert "sft 1/2  loss" not in again.getvalue()
    _, unbroken, _ = run
    assert trained.card.loss == pytest.approx(unbroken.card.loss)
    resumed, expected = weights_in(trained.folder), weights_in(unbroken.folder)
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value)


def test_a_finished_run_is_not_made_again(run: Any, base: Path, data: AgentData) -> None:
    out, trained, _ = run
    progress = io.StringIO()
    assert train_agent(data, out, settings(base), progress=progress) == trained
    assert progress.getvalue() == ""


def test_a_folder_with_another_run_is_refused(run: Any, base: Path, data: AgentData) -> None:
    with pytest.raises(SettingsError, match="holds another run: rank, rate differ"):
        train_agent(data, run[0], settings(base, rank=8, rate=1e-3))
    fewer = data._replace(examples=data.examples[1:])
    with pytest.raises(SettingsError, match="holds another run: examples differ"):
        train_agent(fewer, run[0], settings(base))


def test_all_parameters_can_be_trained_and_the_model_is_whole(
    base: Path, data: AgentData, tmp_path: Path
) -> None:
    own = settings(base, lora=False, rate=1e-3, packing=True, max_length=2048)
    trained = train_agent(data, tmp_path, own, progress=io.StringIO())
    assert not trained.card.is_adapter
    before, after = (weights_in(at, "model.safetensors") for at in (base, trained.folder))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if not name.endswith("k_proj.bias"):  # it adds the same to every score of a query
            assert not torch.equal(after[name], value), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.folder)
    assert tokenizer.chat_template == TEMPLATE
    transformers.AutoModelForCausalLM.from_pretrained(trained.folder)


def test_examples_over_the_length_are_left_out_and_never_cut(
    base: Path, data: AgentData, tokenizer: Any, tmp_path: Path
) -> None:
    long = data.examples[0].model_copy(update={"id": "long", "target": "room " * 500})
    longer = data._replace(examples=(*data.examples, long))
    most = max(len(encoded(tokenizer, example)["input_ids"]) for example in data.examples)
    own = settings(base, max_length=most, max_steps=1)
    trained = train_agent(longer, tmp_path / "run", own, progress=io.StringIO())
    (source,) = trained.card.sources
    assert source.left_out == {"over the length": 1}
    assert source.train["Solvable"] == 3
    with pytest.raises(SettingsError, match="no example of the train split in rooms; 9 left out"):
        train_agent(data, tmp_path / "short", settings(base, max_length=9))


def test_a_split_without_examples_is_refused(base: Path, data: AgentData, tmp_path: Path) -> None:
    learned = tuple(example for example in data.examples if example.split == "train")
    with pytest.raises(SettingsError, match="no example of the validation split in rooms"):
        train_agent(data._replace(examples=learned), tmp_path, settings(base))


def test_a_base_in_a_pickle_is_refused(data: AgentData, tmp_path: Path) -> None:
    base = taught(tmp_path / "base", TEMPLATE)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="no language model can be loaded from"):
        train_agent(data, tmp_path / "run", settings(base), progress=io.StringIO())


def test_the_defaults_are_the_papers() -> None:
    found = AgentSettings()
    assert (found.lora, found.epochs, found.max_length) == (False, 3, 32_768)
    from selector_training.agents import _arguments

    arguments = _arguments(Path("nowhere"), found)
    assert arguments.learning_rate == 1e-5
    assert arguments.lr_scheduler_type == "cosine"
    assert arguments.gradient_accumulation_steps * arguments.world_size == 8
    assert _arguments(Path("nowhere"), AgentSettings(lora=True)).learning_rate == 1e-4


# --- the command -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_trains_and_what_it_wrote_is_packed(base: Path, tmp_path: Path) -> None:
    write_curated(tmp_path / "instances.jsonl", [curated(number) for number in range(4)])
    out = tmp_path / "run"
    trained = CliRunner().invoke(
        app,
        [
            "train-agent",
            SOURCE,
            str(tmp_path / "instances.jsonl"),
            *("--out", str(out), "--base", str(base), "--lora", "--rank", "2"),
            *("--max-steps", "1", "--max-examples-per-label", "4"),
        ],
    )
    assert trained.exit_code == 0, trained.output
    assert "validation loss" in trained.stdout
    assert "(step 1 of 1)" in trained.stdout
    pytest.importorskip("gguf")
    packed = CliRunner().invoke(
        app, ["pack", str(out / "agent"), "--out", str(tmp_path / "agent.gguf")]
    )
    assert packed.exit_code == 0, packed.output
