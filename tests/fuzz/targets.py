"""Every parser that reads what others send, as a function of bytes. What it raises is a find: each parser's own refusal is expected
where it is named, and nowhere else.

`make fuzz TARGET=http SECONDS=60` searches with atheris, which sees what code each input reaches. The tests try what was kept
(`corpus/`) and bytes of hypothesis."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fuzz.file_targets import fuzz_api_keys, fuzz_batch_lines, fuzz_images
from tests.fuzz.frame_targets import fuzz_kv_frames
from tests.fuzz.http_targets import fuzz_bodies, fuzz_http, fuzz_json, fuzz_upload
from tests.fuzz.peer_targets import fuzz_kv, fuzz_mail, fuzz_messages, fuzz_session
from tests.fuzz.text_targets import fuzz_outputs, fuzz_schemas, fuzz_sse, fuzz_structured, fuzz_template_calls

Target = Callable[[bytes], None]
_FUNCTIONS: tuple[Target, ...] = (
    *(fuzz_http, fuzz_json, fuzz_bodies, fuzz_upload),
    *(fuzz_messages, fuzz_session, fuzz_mail, fuzz_kv, fuzz_kv_frames),
    *(fuzz_outputs, fuzz_schemas, fuzz_structured, fuzz_sse, fuzz_template_calls),
    *(fuzz_images, fuzz_batch_lines, fuzz_api_keys),
)
TARGETS: Mapping[str, Target] = {one.__name__.removeprefix("fuzz_"): one for one in _FUNCTIONS}
CORPUS = Path(__file__).parent / "corpus"


def kept(name: str) -> list[bytes]:
    """Return a target's kept inputs; an empty one where there are none yet. The file has each as a text, whose characters are its
    bytes."""
    path = CORPUS / f"{name}.json"
    if not path.exists():
        return [b""]
    return [text.encode("latin-1") for text in json.loads(path.read_text())]


def keep(name: str, inputs: list[bytes]) -> None:
    texts = [data.decode("latin-1") for data in inputs]
    (CORPUS / f"{name}.json").write_text(json.dumps(texts, indent=0) + "\n")
