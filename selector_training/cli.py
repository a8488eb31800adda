"""`splice selector`: learned parts from tables of probe pools, language models, agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from probes.records import Arm

app = typer.Typer(
    help="Fit and train what decides: boosted trees on tables, language models on pools; and "
    "agents that abstain.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TablePaths = Annotated[
    list[Path],
    typer.Argument(metavar="TABLES...", help="Folders that `splice probes export` wrote."),
]


@app.command()
def fit(
    tables: TablePaths,
    out: Annotated[Path, typer.Option("--out", help="Folder for the learned parts.")],
    seed: Annotated[int, typer.Option(help="Of the folds.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Threads; the result is the same.")] = 1,
) -> None:
    """Fit boosted trees on the training questions of exported tables.

    Writes card.json, the trees and a model card, and prints how they do on the validation split.
    """
    from selector_training.evaluation import evaluate as run_evaluation
    from selector_training.evaluation import report_text
    from selector_training.fit import FitSettings, write
    from selector_training.fit import fit as run_fit
    from selector_training.tables import read_tables

    settings = FitSettings(seed=seed, n_jobs=jobs)
    read = read_tables(tables)
    own = read.of_split("train")
    n_questions, n_probes = len(own.questions), len(own.probes)
    _say(f"fitting on {n_questions:,} training questions with {n_probes:,} probes", err=True)
    fitted = run_fit(read, settings)
    text = report_text(run_evaluation(fitted, read, "validation", settings))
    write(fitted, out, text)
    _say(text)
    for name in ("decisive", "beneficial", "selector"):
        if name not in fitted.texts:
            _say(
                f"note: no part {name!r}: too few training questions, or no better than a constant "
                "out of fold",
                err=True,
            )
    _say(f"wrote the parts {', '.join(fitted.texts)} into {out}", err=True)


PoolPaths = Annotated[
    list[Path],
    typer.Argument(metavar="POOLS...", help="Pools that `splice probes generate` made."),
]


@app.command()
def train(
    pools: PoolPaths,
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; it can be resumed.")],
    base: Annotated[
        str, typer.Option(help="Causal language model: a folder, or a name on the Hub.")
    ] = "Qwen/Qwen2.5-7B-Instruct",
    tables: Annotated[
        list[Path] | None,
        typer.Option(help="Exported tables of the pools, for out-of-fold base scores."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Of each stage.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Examples in one pass of one process.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes to a step.")] = 2,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Of each stage.")] = None,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between reports.")] = 10,
    seed: Annotated[int, typer.Option(help="Of draws and of the adapter.")] = 0,
    view: Annotated[
        Literal["evidence", "nothing", "raw"],
        typer.Option(help="What is shown of a trial; other than evidence: for comparison only."),
    ] = "evidence",
) -> None:
    """Train a language model as selector: SFT, then DPO, a LoRA adapter on a frozen base.

    Started again with the same --out it goes on where it stopped. On several GPUs by
    `accelerate launch --config_file selector_training/configs/... -m selector_training train ...`.
    """
    from selector_training.language import LanguageSettings
    from selector_training.language import train as run_training

    settings = LanguageSettings(
        base=base,
        epochs=epochs,
        batch_size=batch,
        accumulation=accumulate,
        max_steps=max_steps,
        eval_every=eval_every,
        log_every=log_every,
        seed=seed,
        view=view,
    )
    scores = _base_scores(tables)
    trained = run_training(pools, out, settings, base_scores=scores)
    for stage in trained.stages:
        _say(
            f"{stage.stage}: validation log loss {stage.log_loss:.3f}, accuracy "
            f"{stage.accuracy:.2f} (step {stage.best_step} of {stage.n_steps})"
        )
    _say(f"wrote the selector of stage {trained.chosen} into {trained.folder}", err=True)


@app.command()
def train_agent(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES...",
            help="Curated instances (a .jsonl file), or a labelled workload: NAME or NAME=DATA.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; it can be resumed.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Setting of the workloads."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="Causal language model: a folder, or a name on the Hub.")
    ] = "Qwen/Qwen3-32B",
    lora: Annotated[
        bool, typer.Option("--lora", help="A LoRA adapter in place of all parameters.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 16,
    alpha: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 32,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate; default: 1e-5, with --lora 1e-4.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in one pass of one process.")] = 1,
    accumulate: Annotated[
        int | None,
        typer.Option(min=1, help="Passes to a step; default: to make eight over all processes."),
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=1, help="Tokens; longer examples are left out.")
    ] = 32_768,
    packing: Annotated[
        bool | None,
        typer.Option(
            "--packing/--no-packing", help="Several examples in a sequence; default: on GPUs."
        ),
    ] = None,
    max_examples_per_label: Annotated[
        int | None,
        typer.Option(min=1, help="Learn no more of a label; a quarter of that for validation."),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between reports.")] = 10,
    seed: Annotated[int, typer.Option(help="Of draws, of the order and of the adapter.")] = 0,
) -> None:
    """Train an agent to abstain where it should: SFT on solvable requests and abstentions.

    Of a workload the train split is learned and the validation split chooses the checkpoint.
    Started again with the same --out it goes on where it stopped. On several GPUs by
    `accelerate launch --config_file selector_training/configs/... -m selector_training ...`.
    """
    from selector_training.agents import AgentSettings, read_sources
    from selector_training.agents import train_agent as run_training
    from splice.evaluate_cli import parsed_options

    settings = AgentSettings(
        base=base,
        lora=lora,
        rank=rank,
        alpha=alpha,
        rate=rate,
        epochs=epochs,
        batch_size=batch,
        accumulation=accumulate,
        max_length=max_length,
        packing=packing,
        max_per_label=max_examples_per_label,
        max_steps=max_steps,
        eval_every=eval_every,
        log_every=log_every,
        seed=seed,
    )
    data = read_sources(sources, parsed_options(option or []))
    trained = run_training(data, out, settings)
    card = trained.card
    _say(f"validation loss {card.loss:.4f} (step {card.best_step} of {card.n_steps})")
    _say(f"wrote the agent into {trained.folder}", err=True)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of learned parts.")],
    tables: TablePaths,
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="Which part of the questions.")
    ] = "validation",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure learned parts on a split: base scores, edges, and what they would adopt."""
    from selector_training.evaluation import evaluate as run_evaluation
    from selector_training.evaluation import report_text
    from selector_training.fit import FitSettings, read_fitted
    from selector_training.tables import read_tables

    report = run_evaluation(read_fitted(folder), read_tables(tables), split, FitSettings())
    if as_json:
        typer.echo(report.model_dump_json())
    else:
        _say(report_text(report))


@app.command()
def compare(
    pools: PoolPaths,
    selectors: Annotated[
        list[str],
        typer.Option("--selector", help="`rules`, or a folder of a trained one; several."),
    ],
    split: Annotated[
        Literal["train", "validation"], typer.Option(help="Which part of the questions.")
    ] = "validation",
    tables: Annotated[
        list[Path] | None,
        typer.Option(help="Exported tables of the pools, for learned base scores."),
    ] = None,
    view: Annotated[
        Literal["evidence", "shuffled", "nothing", "raw"],
        typer.Option(help="What is shown of the trials; nothing, raw: to selectors trained on it."),
    ] = "evidence",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Give selectors of any tier, and always adopting, the same decisive trials, and count."""
    import asyncio
    import json

    from selector_training.comparison import Adoption, adoption, comparison_text
    from selector_training.comparison import evaluate as measure
    from selector_training.pairs import read_examples
    from splice.errors import SettingsError
    from splice.language import LanguageSelector
    from splice.selector import Selector
    from splice.selectors import open_selector

    def opened(name: str) -> Selector:
        if view in ("nothing", "raw"):
            return LanguageSelector(name, view=view)
        return open_selector(name)

    scores = _base_scores(tables)
    arms: tuple[Arm, ...] = ("edge",)
    examples = read_examples(pools, splits=(split,), arms=arms, base_scores=scores, view=view)
    if not examples:
        names = ", ".join(map(str, pools))
        raise SettingsError(
            f"no decisive trial of the {split} split in {names}, or none with its trace; exported "
            "tables have no traces, and go to --tables"
        )
    found: dict[str, Adoption] = {"always": adoption(examples, [True] * len(examples))}
    for name in selectors:
        found[name] = asyncio.run(measure(opened(name), examples))
    if as_json:
        for name, row in found.items():
            typer.echo(json.dumps({"selector": name, **row.model_dump(mode="json")}))
    else:
        _say(comparison_text(found))


@app.command()
def export(
    selector: Annotated[
        Path, typer.Argument(metavar="SELECTOR", help="Folder `selector` of a run of `train`.")
    ],
    out: Annotated[Path, typer.Option("--out", help="A new or empty folder.")],
    base: Annotated[
        str | None, typer.Option(help="Name by which others get the base model.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Base and adapter as one model, for any server.")
    ] = False,
) -> None:
    """Copy a trained language model for others, without what resuming needs."""
    from selector_training.language import export as run_export

    _say(f"wrote {run_export(selector, out, base=base, merged=merged)}", err=True)


@app.command()
def unpack(
    gguf: Annotated[Path, typer.Argument(metavar="GGUF", help="Weights of a language model.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for tokenizer and safetensors.")],
) -> None:
    """Write the weights of a GGUF file out as a base that can be trained on.

    They are as coarse as the file has them: good for a try, not for a result.
    """
    from selector_training.language import unpack_gguf

    _say(f"wrote {unpack_gguf(gguf, out)}", err=True)


@app.command()
def pack(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Folder of a trained LoRA adapter.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The GGUF file to write.")],
    base: Annotated[
        str | None, typer.Option(help="Where its base is now, if it was elsewhere in training.")
    ] = None,
) -> None:
    """Write an adapter as a GGUF file, for llama.cpp and the embedded model.

    It is used by `--model NAME+FILE`, where NAME is the embedded model that it was trained on.
    """
    from selector_training.adapters import write_gguf

    _say(f"wrote {write_gguf(adapter, out, base=base)}", err=True)


def _base_scores(tables: list[Path] | None) -> dict[str, float] | None:
    """Learned base scores by base run; None: those of the pools' diagnoses."""
    if not tables:
        return None
    from selector_training.fit import FitSettings, predicted_scores
    from selector_training.tables import read_tables

    return predicted_scores(read_tables(tables), FitSettings())


def _say(text: str, err: bool = False) -> None:
    """Print text; names in it may come from a file of anybody's."""
    from splice.report.display import visible

    typer.echo(visible(text), err=err)
