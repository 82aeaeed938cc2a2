"""Commands on checkpoints: import, export, generate."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

convert_app = typer.Typer(
    no_args_is_help=True, help="Read and write checkpoints of Hugging Face's transformers; read GGUF files."
)

Family = Annotated[
    str | None,
    typer.Option(help="`model_type` to write. Default: that of its source, or the one that fits."),
]


class _Bar:
    """A progress bar over tensors."""

    def __init__(self, console: Console, what: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task(what, total=None)

    def __call__(self, name: str, total: int) -> None:
        self.progress.update(self.task, total=total, advance=1)


@convert_app.command("import")
def import_command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A folder with a config.json, or a .gguf file.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where our checkpoint goes: a new folder.")],
) -> None:
    """Make a checkpoint of ours from one of Hugging Face's, or from a GGUF file.

    Only safetensors and GGUF are read; nothing in them is executed. Values keep their dtype.

    Example: `brigata convert import ~/models/SmolLM2-135M smollm2`
    """
    from brigata.describe.parameters import count_parameters
    from brigata.model.gguf import import_gguf
    from brigata.model.huggingface import import_checkpoint

    console = Console()
    bar = _Bar(console, "importing")
    with bar.progress:
        if source.suffix == ".gguf":
            spec = import_gguf(source, folder, bar)
        else:
            spec = import_checkpoint(source, folder, bar)
    console.print(
        f"wrote {folder}: {count_parameters(spec):,} parameters; now: brigata generate {folder} \"...\", or "
        f"[model] path = \"{folder}\" in a job",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


@convert_app.command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint of ours.")],
    target: Annotated[Path, typer.Argument(metavar="DEST", help="A new folder.")],
    family: Family = None,
) -> None:
    """Write a checkpoint of ours as one that transformers' `from_pretrained` reads.

    Example: `brigata convert export runs/demo/checkpoint demo-hf`
    """
    from brigata.model.huggingface import export_checkpoint

    console = Console()
    bar = _Bar(console, "exporting")
    with bar.progress:
        written = export_checkpoint(folder, target, family, bar)
    console.print(f"wrote {target} ({written})", highlight=False, soft_wrap=True, markup=False)


def generate_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint of ours.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of this sum.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp64.")] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Continue a text, token by token, in this process.

    Example: `brigata generate smollm2 "The capital of France is" --tokens 20`
    """
    from brigata.train.continuation import Continuation

    continuation = Continuation.open(folder, precision)
    if as_json:
        made = list(continuation.stream(prompt, tokens, temperature, top_p, seed))
        typer.echo(json.dumps({"prompt": prompt, "text": "".join(made), "tokens": continuation.made}))
        return
    typer.echo(prompt, nl=False)
    for piece in continuation.stream(prompt, tokens, temperature, top_p, seed):
        typer.echo(piece, nl=False)
    typer.echo()
