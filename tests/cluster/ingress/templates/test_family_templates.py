"""What a family's own chat template renders as an assistant's calls is read as those calls, through its real tokenizer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.ingress.generation.chat_format import ChatFormat, PreparedChat
from cluster.ingress.generation.detokenize import TextStream
from cluster.ingress.parsers.output_events import OutputEvent, joined
from core.plan import NewSeq
from core.types import SamplingParams
from engine.execution.sampling.grammar_matcher import GuidanceMatchers
from models.text.tokenizer import load_tokenizer
from tests.cluster.ingress.api.harness import SETTINGS
from tests.cluster.ingress.api.templated import chat_asked
from tests.cluster.ingress.parsers.family_templates import FAMILIES, Family
from tests.cluster.ingress.parsers.recorded_texts import TWO_CALLS, WEATHER

EMBEDDED = Path(__file__).parents[4] / "models" / "embedded"
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]
CALLS = [
    {
        "id": "call_aaaaaaaaa",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
    },
    {"id": "call_bbbbbbbbb", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
]
ASK = {"role": "user", "content": "Weather?"}


def served(family: Family, folder: Path) -> Any:
    """The embedded model's tokenizer with the family's template and tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    inner: Any = AutoTokenizer.from_pretrained(str(folder))
    inner.add_special_tokens({"additional_special_tokens": list(family.special)})
    inner.add_tokens(list(family.added))
    inner.chat_template = family.template
    inner.save_pretrained(str(folder))
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_the_template_renders_are_read_as_those_calls(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = served(family, tmp_path)
    chat = ChatFormat(tokenizer, replace(SETTINGS, vocab_size=tokenizer.vocab_size))
    assert (chat.formats.tools, chat.formats.reasoning) == family.formats
    calls = CALLS[:1] if family.one_call else CALLS
    asked = prepared(chat)
    assert asked.opened == family.opened
    tokens = tokenizer.encode(said_by(family, chat, tokenizer, calls), add_special_tokens=False)
    text = TextStream(
        tokenizer,
        asked.prompt,
        skip_special_tokens=asked.hidden_tokens is None,
        hidden_tokens=asked.hidden_tokens or (),
    )
    parser = asked.new_parser()
    events: list[OutputEvent] = [event for token in tokens for event in parser.push(text.push(token))]
    events += [*parser.push(text.finish()), *parser.finish()]
    found = joined(events)[1 if family.opened else 0 :]
    wanted = TWO_CALLS[: 3 * len(calls)]
    assert [plain(event) for event in found] == [plain(event) for event in wanted]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "name", sorted(set(FAMILIES) - {"mistral", "gpt-oss"})
)  # they render ids, and another order
def test_the_masks_of_a_grammar_admit_those_calls(name: str, choice: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = served(family, tmp_path)
    chat = ChatFormat(tokenizer, replace(SETTINGS, vocab_size=tokenizer.vocab_size))
    grammar = prepared(chat, choice=choice).grammar
    assert grammar is not None
    said = said_by(family, chat, tokenizer, CALLS[:1]).lstrip()
    sampling = SamplingParams(grammar=grammar, stop_token_ids=(tokenizer.eos_token_id,))
    matchers = GuidanceMatchers(tmp_path, tokenizer.vocab_size)
    matching = matchers.start(NewSeq("k", (1,), 1, sampling), grammar)
    for token in (*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id):
        assert int(matching.mask.bits[token // 32]) >> (token % 32) & 1, tokenizer.decode([token])
        matching.advance((token,))


def prepared(chat: ChatFormat, *messages: dict[str, Any], choice: str = "", add: bool = True) -> PreparedChat:
    """With a strict tool where there is a `choice`."""
    tools = [{**tool, "function": {**tool["function"], "strict": bool(choice)}} for tool in TOOLS]
    body = {"model": "fake", "messages": [ASK, *messages], "tools": tools, "add_generation_prompt": add}
    return chat.prepare(*chat_asked({**body, "tool_choice": choice or "auto"}))


def said_by(family: Family, chat: ChatFormat, tokenizer: Any, calls: list[dict[str, Any]]) -> str:
    """What the model has said, by its template."""
    asked = prepared(chat)
    answered = prepared(chat, {"role": "assistant", "content": None, "tool_calls": calls}, add=False)
    before, after = (tokenizer.decode(p.prompt, skip_special_tokens=False) for p in (asked, answered))
    before = before.removesuffix("<think>\n")
    assert after.startswith(before)
    assert after.endswith(family.end)
    return ("Hm.</think>" if family.opened else "") + after[len(before) :].removesuffix(family.end)


def plain(event: Any) -> Any:
    """With arguments as objects: templates escape letters in their own ways."""
    return (event.index, json.loads(event.text)) if hasattr(event, "text") else event
