"""`baton quantize`: write a checkpoint with its matrices in fewer bits, as other engines read it too."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

console = Console(stderr=True, highlight=False)


def quantize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or hub id of full precision.")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    to: Annotated[
        Literal["fp8", "int8", "int4", "nvfp4"],
        typer.Option(
            help="The numbers of its layers' matrices: 8 bits with a scale per row, or 4 per group."
        ),
    ],
) -> None:
    """Round a checkpoint's matrices to the nearest numbers of fewer bits, and write them as compressed-tensors."""
    from rich.progress import Progress  # noqa: PLC0415 (--help does not need it)

    from models.quantising.quantised_copy import write_quantised  # noqa: PLC0415 (seconds, which --help does not need)

    with Progress(console=console, transient=True) as progress:
        task: Any = progress.add_task(f"{model} to {to}", total=None)
        num_bytes = write_quantised(
            model, to, out, lambda done, whole: progress.update(task, completed=done, total=whole)
        )
    console.print(f"[green]{out}: {num_bytes / 1e9:,.2f} GB of weights[/], for baton serve --model {out}")
