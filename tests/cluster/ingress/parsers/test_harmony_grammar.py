"""What gpt-oss's channels may hold when a call is forced, a tool is strict or the answer has a format, as Baton's parser reads it.

`tests/clients/test_harmony.py` reads the same texts with openai-harmony."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from cluster.ingress.bodies.structured import schema_grammar
from cluster.ingress.parsers import harmony
from cluster.ingress.parsers.call_grammars import CallableTool
from cluster.ingress.parsers.harmony_grammar import harmony_grammar
from cluster.ingress.parsers.model_formats import ModelFormats, make_parser
from cluster.ingress.parsers.output_events import CallArguments, CallBegins, OutputEvent, Reasoning, Text
from core.plan import NewSeq, StepPlan
from core.types import Grammar, SamplingParams
from engine.execution.batch.batch import RankSeq
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import GuidanceMatchers, load_vocabulary
from kernels.torch.reference import reference_ops
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import TemplateTokenizer
from tests.engine.execution.sampling_now import sample

MARKS = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, harmony.END)
ENDS = (harmony.RETURN, harmony.CALL)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": CITY, "clock": CLOCK}
TOOLS = [CallableTool(name=name, schema=schema, strict=True) for name, schema in SCHEMAS.items()]
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}  # fmt: skip


class TinyHarmony:
    """A vocabulary of bytes and gpt-oss's marks, and random logits that keep to a grammar."""

    def __init__(self, folder: Path) -> None:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([*MARKS, *ENDS])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.size = tokenizer.get_vocab_size()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.special = {mark: vocabulary[mark] for mark in (*MARKS, *ENDS)}
        self.folder, self._tokenizer = folder, tokenizer
        self._vocabulary = load_vocabulary(folder, self.size)
        self._masks, self._ops = GrammarMasks(GuidanceMatchers(folder, self.size)), reference_ops()

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether it is complete with this text."""
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(self._tokenizer.encode(text).ids) and matcher.is_accepting()

    def say(self, grammar: str, seed: int) -> str | None:
        """A turn of random logits, with the end token that was sampled; None where it would not end."""
        ends = tuple(self.special[mark] for mark in ENDS)
        # Likely marks: a text of random bytes would hardly ever end.
        biases = tuple((token, 6.0) for token in self.special.values())
        sampling = SamplingParams(
            seed=seed,
            max_tokens=400,
            stop_token_ids=ends,
            logit_bias=biases,
            grammar=Grammar(text=grammar),
        )
        key, new = f"s{seed}", NewSeq(f"s{seed}", (1,), 1, sampling)
        seq, random = RankSeq(new), torch.Generator().manual_seed(seed)
        self._masks.begin(StepPlan(step=0, new=(new,), copies=(), work=(), drop=()))
        while seq.num_tokens <= sampling.max_tokens:
            logits = torch.randn(1, self.size, generator=random)
            token = sample(logits, [key], [seq], self._ops, self._masks.masks([key]))[0].token
            seq.append(token)
            if token in ends:
                return self._tokenizer.decode(
                    seq.tokens[1 : seq.num_tokens].tolist(), skip_special_tokens=False
                )
            self._masks.sampled({key: (token,)})
        return None


@dataclass(frozen=True)
class Wish:
    tools: list[CallableTool]
    must_call: bool
    answer: dict[str, Any] | None

    def grammar(self, special: dict[str, int]) -> str:
        answer = "" if self.answer is None else schema_grammar(self.answer)
        return harmony_grammar(special, self.tools, must_call=self.must_call, answer=answer)

    def check(self, calls: list[tuple[str, str]], final: str) -> None:
        """What a parser found in a turn."""
        assert len(calls) <= 1
        assert calls or not self.must_call
        for name, arguments in calls:
            assert name in {tool.name for tool in self.tools}
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if not calls and self.answer is not None:
            jsonschema.validate(json.loads(final), self.answer)


WISHES = {
    "required": Wish(TOOLS, True, None),
    "named": Wish(TOOLS[:1], True, None),
    "strict": Wish(TOOLS, False, None),
    "format": Wish([], False, ANSWER),
    "format or call": Wish(TOOLS, False, ANSWER),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyHarmony:
    return TinyHarmony(tmp_path_factory.mktemp("harmony"))


def turns(tiny: TinyHarmony, wish: Wish, count: int) -> list[str]:
    grammar = wish.grammar(tiny.special)
    return [turn for seed in range(count) if (turn := tiny.say(grammar, seed)) is not None]


def events(turn: str) -> list[OutputEvent]:
    parser = make_parser(ModelFormats("harmony", "harmony"), schemas=SCHEMAS, opened=False)
    return [*parser.push(turn), *parser.finish()]


@pytest.mark.parametrize("name", WISHES)
def test_random_turns_are_what_was_wished_for(tiny: TinyHarmony, name: str) -> None:
    found = turns(tiny, WISHES[name], 12)
    assert len(found) >= 6, "most of them end"
    for turn in found:
        heard = events(turn)
        names = [event.name for event in heard if isinstance(event, CallBegins)]
        arguments = "".join(event.text for event in heard if isinstance(event, CallArguments))
        calls = [(name, arguments) for name in names]
        # The final channel's text is the last message's; a word to the user may stand before it.
        final = turn.rpartition(harmony.MESSAGE)[2].removesuffix(harmony.RETURN).removesuffix(harmony.CALL)
        assert calls or "".join(event.text for event in heard if isinstance(event, Text)).endswith(final)
        WISHES[name].check(calls, final)


THOUGHT = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}Which?{harmony.END}{harmony.START}assistant"
CALL = f"{harmony.CHANNEL}commentary to=functions.weather {harmony.CONSTRAIN}json{harmony.MESSAGE}"
FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
WORD = f"{harmony.CHANNEL}commentary{harmony.MESSAGE}I look.{harmony.END}{harmony.START}assistant"


@pytest.mark.parametrize(
    ("name", "turn", "is_right"),
    [
        ("required", THOUGHT + CALL + '{"city": "Oslo"}', True),
        ("required", CALL + '{"city": "Oslo", "days": 3}', True),
        ("required", THOUGHT + WORD + CALL + '{"city": "Rome"}', True),
        ("required", THOUGHT + CALL + '{"city": "Bonn"}', False),
        ("required", THOUGHT + FINAL + "It rains.", False),
        ("named", CALL.replace("weather", "clock") + "{}", False),
        ("strict", THOUGHT + FINAL + "It rains.", True),
        ("strict", THOUGHT + CALL + '{"town": "Oslo"}', False),
        ("format", THOUGHT + FINAL + '{"ok": true}', True),
        ("format", THOUGHT + FINAL + "Yes.", False),
        ("format", CALL + '{"city": "Oslo"}', False),
        ("format or call", FINAL + '{"ok": false}', True),
        ("format or call", CALL + '{"city": "Oslo"}', True),
        ("format or call", FINAL + '{"city": "Oslo"}', False),
    ],
)
def test_turns_that_models_write(tiny: TinyHarmony, name: str, turn: str, is_right: bool) -> None:
    assert tiny.accepts(WISHES[name].grammar(tiny.special), turn) is is_right


def test_reasoning_is_free_and_apart(tiny: TinyHarmony) -> None:
    heard = events(THOUGHT + FINAL + '{"ok": true}' + harmony.RETURN)
    assert heard == [Reasoning("Which?"), Text('{"ok": true}')]


def test_a_tokenizer_without_a_mark_is_named(tiny: TinyHarmony) -> None:
    special = {mark: token for mark, token in tiny.special.items() if mark != harmony.CONSTRAIN}
    with pytest.raises(ValueError, match=r"no token <\|constrain\|>"):
        WISHES["required"].grammar(special)


FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"tools": [FUNCTION], "tool_choice": "required"}, CALL + '{"city": "Oslo"}', FINAL + "No."),
        ({"tools": [FUNCTION], "tool_choice": NAMED}, CALL + '{"city": "Oslo"}', FINAL + "No."),
        ({"tools": [STRICT]}, FINAL + "No.", CALL + '{"city": 1}'),
        ({"response_format": FORMAT}, THOUGHT + FINAL + '{"ok": true}', FINAL + "No."),
        ({"response_format": FORMAT, "tools": [FUNCTION]}, CALL + '{"city": "Oslo"}', FINAL + "No."),
        ({"structured_outputs": {"regex": "a+"}}, FINAL + "aaa", FINAL + "b"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, FINAL + "b", FINAL + "c"),
        ({"structured_outputs": {"grammar": 'root ::= "a" "b"'}}, FINAL + "ab", FINAL + "a"),
    ],
)
async def test_the_engine_gets_a_grammar_of_the_whole_turn(
    tiny: TinyHarmony, body: dict[str, Any], right: str, wrong: str
) -> None:
    tokenizer = TemplateTokenizer("<|channel|>")
    tokenizer.special_tokens = tiny.special
    settings = replace(SETTINGS, vocab_size=tiny.size, tokenizer_folder=tiny.folder)
    generator = FakeGenerator("x")
    answer = await Api(generator, settings, tokenizer=tokenizer).post(CHATS, {**CHAT, **body})
    assert answer.status_code == 200, answer.text
    grammar = generator.requests[0].sampling.grammar
    assert grammar is not None
    assert tiny.accepts(grammar.text, right)
    assert not tiny.accepts(grammar.text, wrong)
