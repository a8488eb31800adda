"""`splice models`: fetch and serve the weights of the embedded local models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from splice.models.weights import Progress

app = typer.Typer(
    help="Fetch, find and serve the embedded local models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="Name or short name, as in `splice models list`.")]


@app.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the known models and whether they are here."""
    from splice.models import weights

    here = {known.name: weights.is_present(known.name) for known in weights.known()}
    if as_json:
        import json

        rows = [
            known.model_dump(exclude={"mirrors"})
            | {"path": str(weights.path_of(known.name)), "is_present": here[known.name]}
            for known in weights.known()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "short name", box=None, pad_edge=False)
    table.add_column("MB", justify="right")
    table.add_column("licence")
    table.add_column("here")
    for known in weights.known():
        size = f"{known.n_bytes / 1e6:,.0f}"
        is_here = "yes" if here[known.name] else "no"
        table.add_row(known.name, known.alias, size, known.licence, is_here)
    Console().print(table)


@app.command()
def pull(name: Name) -> None:
    """Fetch the weights of a model, check them, and print their path."""
    from splice.models import weights

    known = weights.find(name)
    with _bar(known.title, known.n_bytes) as progress:
        path = weights.pull(known.name, progress=progress)
    typer.echo(path)


@app.command()
def path(name: Name) -> None:
    """Print where the weights of a model lie; exit with 1 if they don't."""
    from splice.models import weights

    known = weights.find(name)
    if not weights.is_present(known.name):
        typer.echo(
            f"{known.name} is not here; `splice models pull {known.name}` fetches it "
            f"({known.n_bytes / 1e6:,.0f} MB)",
            err=True,
        )
        raise typer.Exit(1)
    typer.echo(weights.path_of(known.name))


@app.command()
def serve(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name or short name. Left out: $SPLICE_LOCAL_MODEL, else the default model."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8173,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of prompt and reply.")] = 4096,
) -> None:
    """Serve a model on 127.0.0.1 for any OpenAI-compatible client, until Ctrl-C."""
    import threading

    from splice.models.local import choose, split_name, start_server

    known, adapter = split_name(name)
    file, names = choose(known)
    try:
        server = start_server(
            file, name=names[0], threads=threads, context=context, port=port, adapter=adapter
        )
        typer.echo(
            f"{names[0]} at {server.base_url}, one request at a time. In another shell:\n"
            f"  export OPENAI_BASE_URL={server.base_url} OPENAI_API_KEY={server.api_key}\n"
            "Ctrl-C stops it.",
            err=True,
        )
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)


@contextmanager
def _bar(title: str, n_bytes: int) -> Iterator[Progress]:
    """Show a progress bar on standard error, unless it is no terminal."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=n_bytes)
        yield lambda n_done, n_all: bar.update(task, completed=n_done, total=n_all)
