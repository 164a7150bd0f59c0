"""llama.cpp's side of `benchmarks.engine.gguf_tokens`, in the environment that has its library: `gguf_peer FOLDER TEXTS`.

Prints, for each GGUF file of a folder, the ids of each text; null for a file that it refuses to load."""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu.peers.llama_cpp import ModelParams, open_library

_VOCABULARY_ONLY = 72
"""Where the parameters of a model have the flag `vocab_only`, after which come `check_tensors` and `use_extra_bufts`."""
_FLAGS = [False, False, True]
"""What the library has these three as."""


def main() -> None:
    folder, texts = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    library = open_library()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(quiet, None)
    tokenize = library.llama_tokenize
    tokenize.restype = ctypes.c_int32
    ids, flag = (ctypes.POINTER(ctypes.c_int32), ctypes.c_int32), ctypes.c_bool
    tokenize.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, *ids, flag, flag)
    found = {path.stem: _ids(library, path, texts) for path in sorted(folder.glob("*.gguf"))}
    print(json.dumps({"version": library.llama_version().decode(), "ids": found}))


def _ids(library: Any, path: Path, texts: list[str]) -> list[list[int]] | None:
    model = library.llama_model_load_from_file(str(path).encode(), _vocabulary_only(library))
    if not model:
        return None
    vocabulary = library.llama_model_get_vocab(model)
    found: list[list[int]] = []
    for text in texts:
        written = text.encode()
        room = (ctypes.c_int32 * (len(written) + 8))()
        count = library.llama_tokenize(vocabulary, written, len(written), room, len(room), False, True)
        found.append(list(room[:count]))
    return found


def _vocabulary_only(library: Any) -> ModelParams:
    params = library.llama_model_default_params()
    flags = (ctypes.c_bool * ctypes.sizeof(params)).from_buffer(params)
    if list(flags[_VOCABULARY_ONLY : _VOCABULARY_ONLY + 3]) != _FLAGS:
        raise RuntimeError("this release of llama.cpp has its parameters elsewhere")
    flags[_VOCABULARY_ONLY] = True
    return params


if __name__ == "__main__":
    main()
