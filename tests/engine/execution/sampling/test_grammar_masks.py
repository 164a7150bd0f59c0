"""Masks of grammars: what random logits sample under them keeps to the schema, and a sequence that comes from elsewhere goes on
alike."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer, grammar_from

from cluster.ingress.bodies.structured import schema_grammar
from core.plan import NewSeq, StepPlan
from core.types import Grammar, SamplingParams, ThinkingBudget
from engine.execution.batch.batch import RankSeq
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import (
    GuidanceMatchers,
    Mask,
    Matchers,
    Matching,
    load_vocabulary,
)
from kernels.torch.reference import reference_ops
from models.files.hub import resolve
from tests.engine.execution.sampling_now import sample
from tests.patience import PATIENCE_S

FOLDER = resolve("embedded")
VOCAB, END, OPS = 4096, 0, reference_ops()
VOCABULARY = LLTokenizer(str(FOLDER / "tokenizer.json"), n_vocab=VOCAB)
MATCHERS = GuidanceMatchers(FOLDER, VOCAB)
MASKS = GrammarMasks(MATCHERS)
YES_OR_NO = grammar_from("regex", "yes|no")


def begin(*new: NewSeq, drop: tuple[str, ...] = ()) -> None:
    MASKS.begin(StepPlan(step=0, new=new, copies=(), work=(), drop=drop))


def test_masks_of_a_model_that_cannot_compute_a_token_again_are_never_late() -> None:
    """A state that has taken a token in cannot be asked once more for what follows it."""

    class Slow(Matchers):
        def __init__(self, takes_s: float) -> None:
            self._takes_s = takes_s

        def start(self, new: NewSeq, grammar: Grammar) -> Matching:
            asked.wait(self._takes_s)
            return MATCHERS.start(new, grammar)

    new = NewSeq("slow", (1, 2), 2, params(YES_OR_NO))
    for puts_off, takes_s in ((True, PATIENCE_S), (False, 0.05)):
        masks, asked = GrammarMasks(Slow(takes_s), puts_off=puts_off), Event()
        masks.begin(StepPlan(step=0, new=(new,), copies=(), work=(), drop=()))
        assert masks.late(["slow"]) == ({"slow"} if puts_off else set())
        asked.set()


class Watched(Matchers):
    """Allows all tokens. Keeps whose masks were made, together and alone. Those made together take long."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def start(self, new: NewSeq, grammar: Grammar) -> "Watch":
        return Watch(new.key, self.made)

    def advance(self, sampled: Sequence[tuple["Watch", Sequence[int]]]) -> None:
        self.made.append("".join(watch.key for watch, _ in sampled))
        Event().wait(0.02)


@dataclass
class Watch:
    key: str
    made: list[str]
    mask: Mask = field(default_factory=lambda: Mask(np.full(VOCAB // 32, -1, np.int32)))

    def advance(self, tokens: Sequence[int]) -> None:
        self.made.append(self.key)

    def behind(self, drafts: Sequence[int]) -> list[Mask]:
        return [self.mask for _ in drafts]


def test_masks_are_made_together_and_alone_after_these_took_long() -> None:
    """Behind a new grammar, and where one of several took long, nobody knows whose masks are slow."""
    watched, keys = Watched(), ["a", "b", "c"]
    masks = GrammarMasks(watched)
    new = tuple(NewSeq(key, (1, 2), 2, params(YES_OR_NO)) for key in keys)
    masks.begin(StepPlan(step=0, new=new, copies=(), work=(), drop=()))
    for _ in range(4):
        masks.sampled(dict.fromkeys(keys, (7,)))
        assert masks.masks(keys) is not None  # all are made
    alone, again = watched.made[:3], watched.made[4:7]
    assert [sorted(alone), sorted(again)] == [keys, keys]
    assert [watched.made[3], *watched.made[7:]] == ["abc", "abc"]


def params(grammar: str | Grammar, **more: Any) -> SamplingParams:
    grammar = Grammar(text=grammar) if isinstance(grammar, str) else grammar
    ends = {"stop_token_ids": (END,), "masked_until_min": (END,), "max_tokens": 400}
    return SamplingParams(**{**ends, "grammar": grammar, **more})


def generated(seed: int, sampling: SamplingParams, favoured: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Tokens that random logits give, up to the end token or max_tokens. `favoured` are likelier than all others."""
    key, seq = f"g{seed}", RankSeq(NewSeq(f"g{seed}", (1, 2), 2, sampling))
    begin(NewSeq(key, (1, 2), 2, sampling))
    random = torch.Generator().manual_seed(seed)
    while seq.num_tokens < 2 + sampling.max_tokens:
        logits = torch.randn(1, VOCAB, generator=random) * 3
        logits[0, list(favoured)] += 20.0
        token = sample(logits, [key], [seq], OPS, MASKS.masks([key]))[0].token
        seq.append(token)
        MASKS.sampled({key: (token,)})
        if token == END:
            break
    begin(drop=(key,))
    return tuple(seq.tokens[2 : seq.num_tokens].tolist())


def text(tokens: tuple[int, ...]) -> str:
    return VOCABULARY.decode_bytes([token for token in tokens if token != END]).decode("utf-8", "replace")


NAMES = st.text("abcdefgh", min_size=1, max_size=6)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(
        lambda a, b: {"type": "number", "minimum": a, "exclusiveMaximum": a + b},
        st.integers(-9, 9),
        st.integers(1, 9),
    ),
    st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b},
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    st.builds(
        lambda words: {"enum": words},
        st.lists(st.one_of(NAMES, st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
    ),
    st.builds(lambda word: {"const": word}, NAMES),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-f]{2,4}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": "string", "format": "ipv4"},
            {"type": ["integer", "null"], "multipleOf": 5, "minimum": 0, "maximum": 100},
        ]
    ),
)


def _object(members: dict[str, Any], num_required: int, extra: bool) -> dict[str, Any]:
    schema = {"type": "object", "properties": members, "required": list(members)[:num_required]}
    return schema | ({} if extra else {"additionalProperties": False})


NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3), st.just(False)),
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
        st.builds(lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)  # fmt: skip
SCHEMAS = NESTED | st.builds(
    lambda leaf: {"$defs": {"d": leaf}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3},
    LEAVES,
)


@settings(max_examples=50)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_masks_made_together_are_those_made_alone(schemas: list[dict[str, Any]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    alone, together = (
        [
            MATCHERS.start(NewSeq("k", (1,), 1, params(text := schema_grammar(schema))), Grammar(text=text))
            for schema in schemas
        ]
        for _ in range(2)
    )
    for _ in range(6):
        sampled = [(int(rng.choice(allowed(each.mask))),) for each in alone]
        MATCHERS.advance([*zip(together, sampled, strict=True)])
        for one, other, tokens in zip(alone, together, sampled, strict=True):
            one.advance(tokens)
            assert np.array_equal(one.mask.bits, other.mask.bits)
            assert (one.mask.is_complete, one.mask.run) == (other.mask.is_complete, other.mask.run)


def allowed(mask: Mask) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little"))


@settings(max_examples=300)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_a_finished_output_keeps_to_its_schema(schema: dict[str, Any], seed: int, temperature: float) -> None:
    got = generated(seed, params(schema_grammar(schema), temperature=temperature, seed=seed))
    if got[-1] == END:
        jsonschema.validate(json.loads(text(got)), schema)


def test_most_outputs_of_bounded_schemas_finish() -> None:
    """Else the test above would say little."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
    }
    grammar = schema_grammar({**schema, "additionalProperties": False})
    assert sum(generated(seed, params(grammar))[-1] == END for seed in range(20)) >= 15


@settings(max_examples=25)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_a_sequence_that_goes_on_elsewhere_has_the_same_masks(schema: dict[str, Any], seed: int) -> None:
    sampling = params(schema_grammar(schema), max_tokens=30)
    tokens = generated(seed, sampling)
    begin(NewSeq("here", (1, 2), 2, sampling))
    for count, token in enumerate(tokens):
        here = MASKS.masks(["here"])
        if count % 7 == 0 or count == len(tokens) - 1:
            begin(NewSeq("there", (1, 2, *tokens[:count]), 2, sampling))
            there = MASKS.masks(["there"])
            assert here is not None
            assert there is not None
            assert np.array_equal(here.bits, there.bits)
            assert here.complete == there.complete
        MASKS.sampled({"here": (token,)})
    begin(drop=("here", "there"))


def test_rows_without_a_grammar_sample_what_they_sample_alone() -> None:
    free = SamplingParams(seed=7)
    bound = params(YES_OR_NO, seed=7)
    begin(NewSeq("bound", (1,), 1, bound))
    logits = torch.randn(3, VOCAB)
    seqs = [RankSeq(NewSeq("k", (1,), 1, each)) for each in (free, bound, free)]
    alone = sample(logits[[0, 2]].clone(), ["a", "b"], [seqs[0], seqs[2]], OPS)
    beside = sample(logits.clone(), ["a", "bound", "b"], seqs, OPS, MASKS.masks(["a", "bound", "b"]))
    assert [beside[0].token, beside[2].token] == [one.token for one in alone]
    assert text((beside[1].token,))[0] in "yn"


def test_the_end_is_allowed_only_where_the_output_is_complete() -> None:
    for seed in range(5):
        assert re.fullmatch("yes|no", text(got := generated(seed, params(YES_OR_NO), favoured=(END,))))
        assert got[-1] == END


def test_a_complete_output_ends_before_its_minimum() -> None:
    got = generated(1, params(YES_OR_NO, min_tokens=50))
    assert text(got) in ("yes", "no")
    assert got[-1] == END


def test_a_bias_and_penalties_cannot_break_out() -> None:
    biased = params(YES_OR_NO, logit_bias=((77, 100.0),), repetition_penalty=1.5, presence_penalty=2.0)
    assert text(generated(3, biased)) in ("yes", "no")


def test_reasoning_is_free_and_the_grammar_begins_behind_it() -> None:
    opened = params(Grammar(text=YES_OR_NO, think_end=50), max_tokens=60)
    tokens = (9, 8, 7, 50)
    begin(NewSeq("k", (1, 2, *tokens[:3]), 2, opened))
    within = MASKS.masks(["k"])
    assert within is not None
    assert np.unpackbits(within.bits.view(np.uint8), bitorder="little").sum() == VOCAB - 1  # all but the end
    MASKS.sampled({"k": (50,)})
    behind = MASKS.masks(["k"])
    assert behind is not None
    allowed = np.flatnonzero(np.unpackbits(behind.bits.view(np.uint8)[0], bitorder="little"))
    assert {text((token,))[0] for token in allowed.tolist()} == {"y", "n"}
    begin(drop=("k",))


def test_a_model_that_opens_its_reasoning_itself_may_do_so_at_the_beginning_alone() -> None:
    sampling = params(Grammar(text=YES_OR_NO, think_begin=40, think_end=50))
    straight = generated(1, sampling)
    assert text(straight) in ("yes", "no")
    thoughtful = generated(2, sampling, favoured=(40,))
    assert thoughtful[:2] == (40, 40), "within the reasoning everything goes"
    budget = ThinkingBudget(max_tokens=3, begin=(40,), end=(50,), forced=(50,))
    ended = generated(
        3, params(Grammar(text=YES_OR_NO, think_begin=40, think_end=50), thinking=budget), favoured=(40,)
    )
    assert ended[4] == 50
    assert text(ended[5:]) in ("yes", "no")


def test_a_grammar_that_hits_a_limit_ends_its_own_output_alone() -> None:
    costly = params(grammar_from("regex", "(a?){3000}a{3000}"))
    begin(NewSeq("free", (1,), 1, params(YES_OR_NO)))
    assert generated(5, costly)[-1] == END
    assert (masks := MASKS.masks(["free"])) is not None
    assert not masks.complete
    begin(drop=("free",))


def test_nobody_but_a_grammar_waits_for_the_tokenizer_which_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    read, go_on = list[Path](), Event()

    def slowly(folder: Path, vocab_size: int) -> LLTokenizer:
        read.append(folder)
        assert go_on.wait(PATIENCE_S)
        return load_vocabulary(folder, vocab_size)

    monkeypatch.setattr("engine.execution.sampling.grammar_matcher.load_vocabulary", slowly)
    several = [GrammarMasks(GuidanceMatchers(tmp_path, VOCAB)) for _ in range(3)]
    for masks in several:
        new = (NewSeq("free", (1,), 1, SamplingParams()), NewSeq("bound", (1,), 1, params(YES_OR_NO)))
        masks.begin(StepPlan(step=0, new=new, copies=(), work=(), drop=()))
        assert masks.late(["free", "bound"]) == {"bound"}
        assert masks.masks(["free"]) is None
    go_on.set()
    for masks in several:
        found = masks.masks(["bound"])
        assert found is not None
        assert {text((token,))[0] for token in allowed(Mask(found.bits[0])).tolist()} == {"y", "n"}
    assert read == [tmp_path.resolve()]


def test_a_dead_end_is_told_from_an_output_that_is_complete() -> None:
    nothing = Grammar(text='start: "yes " X\nX: /b/ & /c/')
    yes = tuple(VOCABULARY.tokenize_str("yes "))
    for grammar, said in ((nothing, yes), (Grammar(text=YES_OR_NO), tuple(VOCABULARY.tokenize_str("yes")))):
        mask = MATCHERS.start(NewSeq("k", (1, *said), 1, params(grammar)), grammar).mask
        assert mask.is_complete
        assert allowed(mask).tolist() == [END]
        assert ("'yes '" in mask.dead_end) == (grammar is nothing)
    drafting = MATCHERS.start(NewSeq("k", (1,), 1, params(nothing)), nothing)
    assert len(drafting.behind(yes)) == len(yes) - 1


def test_a_stop_token_that_the_grammar_needs_is_a_dead_end() -> None:
    grammar = Grammar(text='start: "a"')
    (needed,) = VOCABULARY.tokenize_str("a")
    sampling = params(grammar, stop_token_ids=(needed,))
    assert MATCHERS.start(NewSeq("k", (1,), 1, sampling), grammar).mask.dead_end


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    masks = GrammarMasks(GuidanceMatchers(tmp_path, VOCAB))
    masks.begin(StepPlan(step=0, new=(NewSeq("k", (1,), 1, params(YES_OR_NO)),), copies=(), work=(), drop=()))
    with pytest.raises((OSError, ValueError), match=r"tokenizer\.json"):
        masks.masks(["k"])
