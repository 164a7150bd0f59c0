"""llama.cpp by its C API, from the prebuilt library that npm's `@node-llama-cpp/linux-x64` carries.

Parameters go by value in structs that change between releases. They are large enough to be passed in memory, so a struct that is
longer than the library's own serves any release: only the leading fields must be where they are here, which `_context` sees."""

import ctypes
import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.peers import Loaded, Stamp, now

_PACKAGE = "@node-llama-cpp/linux-x64"
_FILE_TYPES = {8: 7, 5: 15, 4: 2}
"""llama.h's LLAMA_FTYPE_MOSTLY_Q8_0, _Q4_K_M (which takes 4.8 bits) and _Q4_0."""
_NAMES = {16: "BF16", 8: "Q8_0", 5: "Q4_K_M", 4: "Q4_0"}
_BATCH = 2048
"""Tokens of one call, as many as llama.cpp has by default."""


class ModelParams(ctypes.Structure):
    _fields_ = (("whole", c_void_p * 32),)


class _ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("rest", c_void_p * 64),
    )


class _QuantizeParams(ctypes.Structure):
    _fields_ = (("nthread", c_int32), ("ftype", c_int), ("rest", c_void_p * 32))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_version": (c_char_p, ()),
    "llama_print_system_info": (c_char_p, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (_ContextParams, ()),
    "llama_model_quantize_default_params": (_QuantizeParams, ()),
    "llama_model_quantize": (c_uint32, (c_char_p, c_char_p, POINTER(_QuantizeParams))),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, _ContextParams)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_free": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_batch_init": (_Batch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (c_int32, (c_void_p, _Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
}


def prepare(checkpoint: Path, target: Path, bits: int) -> None:
    """Have the library itself quantise the GGUF beside the checkpoint, as `llama-quantize` does."""
    plain, out = checkpoint.with_suffix(".gguf"), target / f"{_NAMES[bits]}.gguf"
    if bits == 16:
        out.symlink_to(plain.resolve())
        return
    library = open_library()
    params = library.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, _FILE_TYPES[bits]
    if library.llama_model_quantize(str(plain).encode(), str(out).encode(), byref(params)):
        raise RuntimeError("llama_model_quantize failed")


def load(checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
    library = open_library()
    model = library.llama_model_load_from_file(
        str(target / f"{_NAMES[bits]}.gguf").encode(), library.llama_model_default_params()
    )
    if not model:
        raise RuntimeError("llama_model_load_from_file failed")
    carried = json.loads((_package() / "package.json").read_text())["version"]
    version = f"{library.llama_version().decode()} in {_PACKAGE}@{carried}"
    instructions = library.llama_print_system_info().decode().strip()
    return Loaded(Engine(library, model, threads), _NAMES[bits], version, instructions)


def _package() -> Path:
    return Path(sys.prefix) / "node_modules" / _PACKAGE


def open_library() -> Any:
    (folder,) = (_package() / "bins").iterdir()
    ggml = CDLL(str(next(folder.glob("libggml.*so*"))), mode=ctypes.RTLD_GLOBAL)
    library = CDLL(str(next(folder.glob("libllama.*so*"))))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    # The fastest of its builds for this processor.
    ggml.ggml_backend_load_all_from_path(c_char_p(str(folder).encode()))
    library.llama_backend_init()
    return library


class Engine:
    def __init__(self, library: Any, model: int, threads: int) -> None:
        self._library, self._model, self._threads = library, model, threads
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        with self._context(1, len(prompt) + 1) as context:
            start = now()
            self._prompt(context, 0, prompt)
            return start, now()

    def logits(self, prompt: list[int]) -> np.ndarray:
        """Return those behind each token, (tokens, vocabulary)."""
        with self._context(1, len(prompt) + 1) as context:
            entries = [(token, place, 0) for place, token in enumerate(prompt)]
            return np.stack(self._computed(context, entries, range(len(prompt))))

    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        length = len(prompts[0])
        with self._context(len(prompts), length + steps + 1) as context:
            tokens = [self._prompt(context, row, prompt) for row, prompt in enumerate(prompts)]
            stamps = [now()]
            for step in range(steps):
                tokens = self._decode(
                    context, [(tokens[row], length + step, row) for row in range(len(prompts))]
                )
                stamps.append(now())
        return stamps

    def _prompt(self, context: int, row: int, prompt: list[int]) -> int:
        """Compute it by as many calls as it takes; return the next token."""
        found: list[int] = []
        for at in range(0, len(prompt), _BATCH):
            part = prompt[at : at + _BATCH]
            entries = [(token, at + place, row) for place, token in enumerate(part)]
            found = self._decode(context, entries, wanted=[len(part) - 1])
        return found[0]

    def _decode(
        self, context: int, entries: list[tuple[int, int, int]], wanted: list[int] | None = None
    ) -> list[int]:
        """Each entry is token, position and sequence. Return what follows those that are `wanted`, or all."""
        outputs = range(len(entries)) if wanted is None else wanted
        return [int(logits.argmax()) for logits in self._computed(context, entries, outputs)]

    def _computed(
        self, context: int, entries: list[tuple[int, int, int]], outputs: Sequence[int]
    ) -> list[np.ndarray]:
        batch = self._library.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for at, (token, place, row) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, place, 1
            batch.seq_id[at][0], batch.logits[at] = row, at in outputs
        if self._library.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found = [
            np.ctypeslib.as_array(self._library.llama_get_logits_ith(context, at), (self._vocabulary,)).copy()
            for at in outputs
        ]
        self._library.llama_batch_free(batch)
        return found

    @contextmanager
    def _context(self, sequences: int, length: int) -> Generator[int]:
        library = self._library
        params = library.llama_context_default_params()
        # Each sequence's part is a multiple of 256, so more than this is there.
        params.n_ctx = sequences * -(-length // 256) * 256
        params.n_batch, params.n_seq_max = _BATCH, sequences
        context = library.llama_init_from_model(self._model, params)
        there = context and (library.llama_n_ctx(context), library.llama_n_seq_max(context))
        if there != (params.n_ctx, sequences):
            raise RuntimeError(f"this release of llama.cpp has other parameters: {there}")
        library.llama_set_n_threads(context, self._threads, self._threads)
        try:
            yield context
        finally:
            library.llama_free(context)
