"""llama.cpp's side of `benchmarks.engine.gguf_parity`, in the environment that has its library.

`gguf_logits_peer FILE OUT TOKEN...` writes the logits (tokens, vocabulary) of one prompt, as numpy's file, and prints llama.cpp's
version."""

import ctypes
import sys
from pathlib import Path

import numpy as np

from benchmarks.cpu.peers.llama_cpp import Engine, open_library


def main() -> None:
    path, out, prompt = sys.argv[1], Path(sys.argv[2]), [int(token) for token in sys.argv[3:]]
    library = open_library()
    log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_errors_alone)
    library.llama_log_set(log, None)
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    if not model:
        sys.exit(1)
    np.save(out, Engine(library, model, 1).logits(prompt))
    print(library.llama_version().decode())


def _errors_alone(level: int, text: bytes, _: object) -> None:
    if level >= 4:
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
