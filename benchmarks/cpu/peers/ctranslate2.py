"""CTranslate2: whole batches by `generate_batch`, whose callback says when each token is there."""

import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cpu.peers import Loaded, Stamp, Unsupported, now

_COMPUTE = {16: "float32", 8: "int8"}
"""On CPUs it has no 16-bit type."""


def prepare(checkpoint: Path, target: Path, bits: int) -> None:
    if bits not in _COMPUTE:
        raise Unsupported("CTranslate2 multiplies 4-bit matrices on GPUs only")
    converter = import_module("ctranslate2.converters").TransformersConverter(
        str(checkpoint), low_cpu_mem_usage=True
    )
    converter.convert(str(target / "model"), quantization=_COMPUTE[bits])
    config = target / "model" / "config.json"
    said = json.loads(config.read_text())
    # Llama's tokenizer has no unknown token, and the loader takes no null for it.
    config.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def load(checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
    generator = import_module("ctranslate2").Generator(
        str(target / "model"), compute_type=_COMPUTE[bits], intra_threads=threads, inter_threads=1
    )
    words = json.loads((target / "model" / "vocabulary.json").read_text())
    return Loaded(Engine(generator, words), _COMPUTE[bits], version("ctranslate2"))


class Engine:
    def __init__(self, generator: Any, words: list[str]) -> None:
        self._generator, self._words = generator, words

    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        start = now()
        self._generate([prompt], 1, None)
        return start, now()

    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        stamps: list[Stamp] = []
        seen = 0

        def on_token(_: Any) -> bool:
            nonlocal seen
            seen += 1
            if seen % len(prompts) == 0:
                stamps.append(now())
            return False

        self._generate(prompts, steps + 1, on_token)
        return stamps

    def _generate(self, prompts: list[list[int]], count: int, on_token: Any) -> None:
        self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            callback=on_token,
        )
