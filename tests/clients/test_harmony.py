"""Turns of random weights under gpt-oss's grammar, read by OpenAI's own parser.

openai-harmony's vocabulary is no part of its package: js-tiktoken has the same ranks, and the parser checks their digest."""

import base64
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.clients.run_client import install_npm, install_python, said
from tests.cluster.ingress.parsers.test_harmony_grammar import WISHES, TinyHarmony, turns

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]


def write_vocabulary(ranks: Path, to: Path) -> None:
    """A line for each token, in tiktoken's form, from lines of a name, the first rank and tokens that follow each other."""
    found = re.search(r'"?bpe_ranks"?:\s*("(?:[^"\\]|\\.)*")', ranks.read_text())
    assert found
    tokens: dict[int, str] = {}
    for line in filter(None, json.loads(found[1]).split("\n")):
        _, first, *run = line.split(" ")
        tokens |= {int(first) + i: token for i, token in enumerate(run)}
    assert base64.b64decode(tokens[0])
    to.write_text("".join(f"{tokens[rank]} {rank}\n" for rank in sorted(tokens)))


async def test_openais_parser_finds_what_was_wished_for(tmp_path: Path) -> None:
    packages, vocabularies = tmp_path / "packages", tmp_path / "vocabularies"
    install_python("openai-harmony", packages)
    install_npm("js-tiktoken", tmp_path)
    vocabularies.mkdir()
    write_vocabulary(
        tmp_path / "node_modules" / "js-tiktoken" / "dist" / "ranks" / "o200k_base.js",
        vocabularies / "o200k_base.tiktoken",
    )
    tiny = TinyHarmony(tmp_path)
    found = [(name, turn) for name, wish in WISHES.items() for turn in turns(tiny, wish, 12)]
    assert len(found) >= 40, "most of them end"
    (tmp_path / "turns.json").write_text(json.dumps([turn for _, turn in found]))
    lines = await said(
        [sys.executable, str(Path(__file__).with_name("harmony_reader.py")), "turns.json"],
        tmp_path,
        PYTHONPATH=str(packages),
        TIKTOKEN_ENCODINGS_BASE=str(vocabularies),
    )
    for (name, turn), line in zip(found, lines, strict=True):
        messages = json.loads(line)
        calls = [m for m in messages if m["recipient"] is not None]
        assert all(m["channel"] == "commentary" and m["recipient"].startswith("functions.") for m in calls)
        assert all(m["content_type"] == "<|constrain|>json" for m in calls)
        assert messages[-1]["channel"] == ("commentary" if calls else "final"), turn
        called = [(m["recipient"].removeprefix("functions."), m["text"]) for m in calls]
        WISHES[name].check(called, messages[-1]["text"])
