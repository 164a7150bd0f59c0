"""`baton profile`: measures the real engine's steps on this machine and writes the step-time model that simulations read."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.output_files import check_writable


def profile(
    output: Annotated[Path, typer.Argument(help="File to write (JSON).")],
    model: Annotated[str, typer.Option(help="A Hugging Face folder or hub id; `embedded`.")] = "embedded",
    repeats: Annotated[int, typer.Option(min=1, help="Times each step is measured; the median counts.")] = 5,
) -> None:
    """Measure steps of the real engine over a grid of prompts, batches and contexts, and fit the step-time model."""
    check_writable(output)
    from baton.step_measurement import measured_profile  # noqa: PLC0415 (seconds, which --help does not need)

    result, decode_error, prompt_error = measured_profile(model, repeats)
    output.write_text(result.model_dump_json(indent=2) + "\n")
    Console().print(
        f"{output}: decode steps {decode_error:.1%} off in the mean, prompt steps {prompt_error:.1%}"
    )
