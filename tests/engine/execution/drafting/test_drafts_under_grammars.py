"""Draft tokens of sequences with a grammar, forced runs among them: tokens and log-probabilities are those of one masked token at
a time."""

import asyncio
import random
from collections.abc import Sequence as SeqOf
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from llguidance import grammar_from

from cluster.ingress.bodies.structured import schema_grammar
from core.clock import WallClock
from core.config.cluster_config import EngineConfig
from core.kv import KVLayout, KVShard
from core.plan import FailedSeq, NewSeq
from core.reports import WorkCounts
from core.types import Grammar, Request, SamplingParams, TokenId, TokenOut
from engine.execution.drafting.draft_head import DraftHead
from engine.execution.drafting.draft_kv import draft_layers
from engine.execution.drafting.draft_model import DraftModel
from engine.execution.drafting.proposing import Proposer, Proposing
from engine.execution.inline_group import InlineGroup
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import Runner
from engine.execution.sampling.grammar_masks import GRACE_S, GrammarMasks
from engine.execution.sampling.grammar_matcher import GuidanceMatchers, Mask, Matchers, Matching
from engine.execution.sampling.step_sampling import StepSampler
from engine.loop import Engine
from engine.planning.speculation.drafter import Drafter
from engine.planning.speculation.speculator import Speculator, make_speculator
from engine.planning.step_scheduler import StepScheduler
from models.causal_model import CausalModel
from models.drafting.drafting_head import DraftingHead
from models.drafting.eagle import load_eagle, read_eagle
from models.families.table import read_spec
from models.files.hub import resolve
from models.registry import LoadOptions, load_model
from tests.engine.execution.drafting.test_speculation import Adversary, num_states
from tests.engine.execution.test_launching import agree
from tests.engine.fifo_policy import FifoPolicy
from tests.even_steps import EvenSteps
from tests.models.checkpoints import CPU, FAMILIES, HYBRID
from tests.models.eagle_checkpoints import make_eagle, make_target
from tests.models.served import make_served_as
from tests.patience import PATIENCE_S

VOCAB, END, CONTEXT = 4096, 0, 128
MATCHERS = GuidanceMatchers(resolve("embedded"), VOCAB)
KEYS = ("customer_identifier", "shipping_address", "is_confirmed", "number_of_items")
FORCED = {
    "type": "object",
    "properties": {key: {"enum": [1, 2]} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
SCHEMAS = (
    schema_grammar(FORCED, whitespace_flexible=False, whitespace_pattern=None),
    schema_grammar(FORCED),
    schema_grammar({"type": "array", "items": {"enum": ["international", "interoperable"]}, "minItems": 2}),
    schema_grammar({"type": "object", "properties": {"message": {"type": "string", "maxLength": 12}}, "required": ["message"]}),
    grammar_from("regex", "(the quick brown fox |jumps over )+"),
    grammar_from("regex", "(abc){9}d?"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    tokens: dict[str, list[TokenOut]]
    work: WorkCounts
    num_preempted: int


class Answers:
    """core.ports.EngineEvents"""

    def __init__(self, count: int) -> None:
        self.tokens: dict[str, list[TokenOut]] = {}
        self.done = asyncio.Event()
        self._left = count

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        for token in tokens:
            self.tokens.setdefault(token.request_id, []).append(token)
            self._left -= token.finish is not None
        if not self._left:
            self.done.set()

    def on_stuck(self, keys: list[str]) -> None:
        raise AssertionError(f"{keys} are stuck")

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        raise AssertionError(f"nothing sends {paused} and {lost} on")

    def on_failed(self, failed: SeqOf[FailedSeq]) -> None:
        raise AssertionError(f"{failed} have no images")

    def on_error(self, error: BaseException) -> None:
        raise error


async def said(
    model: CausalModel,
    asked: SeqOf[Request],
    *,
    plain: bool = False,
    drafter: Drafter | None = None,
    draft: CausalModel | None = None,
    head: DraftingHead | None = None,
    head_layout: KVLayout | None = None,
    matchers: Matchers = MATCHERS,
    grace_s: float = GRACE_S,
    num_blocks: int = 400,
    lookahead: bool = True,
    **keys: Any,
) -> Said:
    """What an engine answers. `plain`: without any draft token. `drafter`: in place of the configuration's. `draft`, and `head`
    with its KV: of `speculate="draft:..."` and `"eagle:..."`. `grace_s`: how long masks are waited for."""
    config = EngineConfig(**{"block_size": 4, **keys})
    shard, states = KVShard.whole(model.spec.kv_layout(4, "float32")), num_states(model)
    pool = KVPool(shard, num_blocks, memoryview(bytearray(shard.pool_bytes(num_blocks))))
    grammars = GrammarMasks(matchers, puts_off=not states, grace_s=grace_s)
    proposer: Proposer | None = None
    if draft is not None:
        layers = draft_layers(KVShard.whole(draft.spec.kv_layout(4, "float32")), num_blocks, CPU)
        proposer = DraftModel(draft, layers, 4, VOCAB)
    elif head is not None:
        assert head_layout is not None
        proposer = DraftHead(head, KVShard.whole(head_layout), num_blocks)
    hear = proposer.hear if proposer is not None else None
    runner = Runner(
        model, pool, 4, sampler=StepSampler(model, grammars), on_hidden=hear, num_state_blocks=states
    )
    speculator = Speculator(drafter, config, CONTEXT) if drafter else make_speculator(config, CONTEXT)
    scheduler = StepScheduler(
        config,
        num_blocks,
        CONTEXT,
        FifoPolicy(),
        speculator=None if plain else speculator,
        num_state_blocks=states,
    )
    step = runner.step if proposer is None else Proposing(runner.step, proposer, states).step
    group = EvenSteps(InlineGroup(step, grammars))
    engine = Engine(scheduler, group, WallClock(), lookahead=lookahead)
    for request in asked:
        engine.add(request)
    answers = Answers(len(asked))
    task = asyncio.create_task(engine.run(answers))
    waiting = asyncio.create_task(answers.done.wait())
    await asyncio.wait((task, waiting), timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert answers.done.is_set() or task.exception()
    task.cancel()  # a step that was planned ahead may still run
    with suppress(asyncio.CancelledError):
        await task
    await engine.close()
    scheduler.check_integrity()
    return Said(answers.tokens, engine.work_counts(), scheduler.load().num_preempted)


def bound(id: int, grammar: str, rng: random.Random, **more: Any) -> Request:
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.5)),
        seed=rng.randrange(64),
        repetition_penalty=rng.choice((1.0, 1.2)),
        num_logprobs=rng.choice((-1, 0, 3)),
        stop_token_ids=(END,),
        masked_until_min=(END,),
        grammar=Grammar(text=grammar) if grammar else None,
        **{"max_tokens": 60, **more},
    )
    prompt = tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(3, 20)))
    return Request(id=f"r{id}", prompt=prompt, sampling=sampling, reply_to="f")


def requests(rng: random.Random, count: int) -> list[Request]:
    made: list[Request] = []
    for id in range(count):
        grammar = rng.choice(("", *SCHEMAS))
        request = bound(id, grammar, rng, min_tokens=rng.choice((0, 0, 9)), max_tokens=rng.randint(1, 70))
        if grammar and rng.random() < 0.3:
            thought = Grammar(text=grammar, think_begin=rng.choice((None, 7)), think_end=8)
            request = replace(request, sampling=replace(request.sampling, grammar=thought))
        made.append(request)
    return made


def loaded(folder: Path, family: str) -> CausalModel:
    make_served_as(folder, (FAMILIES | HYBRID)[family](random.Random(f"{family}0"), 0))
    return load_model(folder, "float32", CPU, options=LoadOptions(deterministic=family in FAMILIES))


def check(got: Said, plain: Said, family: str) -> None:
    if family in HYBRID:  # several tokens are taken in by other sums than one after the other
        agree(got.tokens, plain.tokens)
    else:
        assert got.tokens == plain.tokens


def tokens_of(answer: Said) -> dict[str, list[int]]:
    return {id: [token.token for token in tokens] for id, tokens in answer.tokens.items()}


KINDS = [
    "llama",
    "qwen3_next",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("deepseek_v3", "gemma2", "gpt_oss", "granite_hybrid", "llama4", "qwen3_moe")
    ),
]
"""A family for each kind of attention, state and layer. A grammar meets logits alone; draft tokens without one meet all
families."""


@pytest.mark.parametrize("family", KINDS)
async def test_no_draft_token_changes_a_token_under_a_grammar(family: str, tmp_path: Path) -> None:
    """In chunks, with preemptions, with lookahead and without, with the prefix cache and without."""
    model = loaded(tmp_path, family)
    rng, states = random.Random(family), num_states(model)
    num_right = num_preempted = 0
    asked = requests(rng, 6)
    few, many = 6 + 2 * states if states else 24, 400 + 6 * states
    plain = await said(model, asked, plain=True, lookahead=False, num_blocks=many)
    sources = ("none", "ngram", "adversary", *([] if states else ["draft:itself"]))
    for source in sources:
        got = await said(
            model,
            asked,
            drafter=Adversary(tokens_of(plain), rng) if source == "adversary" else None,
            draft=model if source == "draft:itself" else None,
            num_blocks=few if source == "none" else many,
            lookahead=rng.random() < 0.7,
            max_batch_tokens=rng.choice((9, 64)),
            prefix_cache=rng.random() < 0.7,
            speculate=source if source != "adversary" else "none",
            speculate_tokens=rng.choice((1, 3, 8)),
        )
        check(got, plain, family)
        num_right += got.work.accepted_tokens
        num_preempted += got.num_preempted
    assert num_right > 25
    assert num_preempted > 0


async def test_no_draft_token_of_a_head_changes_a_token_under_a_grammar(tmp_path: Path) -> None:
    """Samples that are put off, and runs that the grammar forces, leave it with states of the tokens that were sampled."""
    make_eagle(tmp_path / "head", make_target(tmp_path, vocab_size=VOCAB), draft_vocab=300)
    spec = read_eagle(tmp_path / "head", read_spec(tmp_path))
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(deterministic=True, taps=spec.taps))
    head = load_eagle(tmp_path / "head", model, CPU, block_size=4)
    asked = requests(random.Random(4), 4)
    plain = await said(model, asked, plain=True, lookahead=False)
    for keys in ({}, {"num_blocks": 28, "lookahead": False, "max_batch_tokens": 9}):
        layout = spec.layer.kv_layout(4, "float32")
        got = await said(model, asked, head=head, head_layout=layout, speculate="eagle:head", **keys)
        assert got.tokens == plain.tokens
        assert got.work.draft_tokens > got.work.accepted_tokens > 0


@pytest.mark.parametrize("family", ["llama", "granite_hybrid"])
async def test_forced_runs_take_far_fewer_steps_and_change_no_token(family: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, family)
    num_blocks = 400 + 4 * num_states(model)
    rng = random.Random(5)
    asked = [bound(id, SCHEMAS[0], rng, max_tokens=100) for id in range(4)]
    for count in (1, 4):
        # On a busy machine a mask may be late, and what was computed behind it is computed again.
        patient: dict[str, Any] = {"num_blocks": num_blocks, "grace_s": PATIENCE_S}
        plain = await said(model, asked[:count], plain=True, **patient)
        got = await said(model, asked[:count], **patient)
        check(got, plain, family)
        assert got.work.draft_tokens == got.work.accepted_tokens
        assert got.work.steps < 0.6 * plain.work.steps


async def test_a_sequence_that_came_from_elsewhere_within_a_run_goes_on_alike(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama")
    rng = random.Random(6)
    asked = [bound(id, SCHEMAS[id % 2], rng, max_tokens=100) for id in range(6)]
    want = tokens_of(await said(model, asked, plain=True))
    for count in (3, 11, 20):
        emitted = {id: tuple(tokens[:count]) for id, tokens in want.items()}
        moved = [request.retry(emitted[request.id]) for request in asked if len(want[request.id]) > count]
        got = await said(model, moved, speculate="ngram")
        assert tokens_of(got) == {each.id: want[each.id][count:] for each in moved}
        assert got.work.accepted_tokens > 0


async def test_a_run_is_drafted_as_far_as_the_output_has_room(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama")
    for max_tokens in range(1, 12):
        asked = [bound(0, SCHEMAS[0], random.Random(7), max_tokens=max_tokens)]
        got = await said(model, asked)
        assert got.tokens == (await said(model, asked, plain=True)).tokens
        assert len(got.tokens["r0"]) == max_tokens


def test_masks_behind_draft_tokens_are_those_of_a_sequence_that_has_sampled_them() -> None:
    rng = random.Random(8)
    for text in SCHEMAS:
        sampling = SamplingParams(grammar=Grammar(text=text), stop_token_ids=(END,), max_tokens=60)
        here = MATCHERS.start(NewSeq("here", (1,), 1, sampling), Grammar(text=text))
        for _ in range(12):
            there = MATCHERS.start(NewSeq("there", (1,), 1, sampling), Grammar(text=text))
            drafts = sampled_by(there, rng, 9)
            cut = rng.randrange(len(drafts))
            before = here.mask.bits.copy()
            masks = here.behind((*drafts[:cut], END, *drafts[cut:]))
            assert len(masks) >= cut
            there = MATCHERS.start(NewSeq("there", (1,), 1, sampling), Grammar(text=text))
            for token, mask in zip(drafts[:cut], masks, strict=False):
                there.advance((token,))
                assert np.array_equal(mask.bits, there.mask.bits)
                assert (mask.is_complete, mask.run) == (there.mask.is_complete, there.mask.run)
            assert np.array_equal(here.mask.bits, before)


def test_a_draft_token_that_the_grammar_forbids_has_no_mask_behind_it() -> None:
    sampling = SamplingParams(stop_token_ids=(END,))
    matching = MATCHERS.start(NewSeq("k", (1,), 1, sampling), Grammar(text=grammar_from("regex", "ab*")))
    allowed = [token for token in range(VOCAB) if int(matching.mask.bits[token // 32]) >> token % 32 & 1]
    assert matching.behind((max(set(range(VOCAB)) - set(allowed)), allowed[0])) == []
    assert len(matching.behind((allowed[0],))) == 1


def sampled_by(matching: Matching, rng: random.Random, most: int) -> list[TokenId]:
    """What a sample among all allowed tokens might give, up to the end."""
    out: list[TokenId] = []
    while len(out) < most and not matching.mask.is_complete:
        bits = np.unpackbits(matching.mask.bits.view(np.uint8), bitorder="little")
        out.append(rng.choice(np.flatnonzero(bits).tolist()))
        matching.advance(out[-1:])
    return out


class Hesitant(Matchers):
    """Matchers whose masks behind draft tokens are made when the gate opens, or soon."""

    def __init__(self, gate: Event) -> None:
        self._gate = gate

    def start(self, new: NewSeq, grammar: Grammar) -> Matching:
        return HesitantMatching(MATCHERS.start(new, grammar), self._gate)


class HesitantMatching:
    def __init__(self, matching: Matching, gate: Event) -> None:
        self._matching, self._gate = matching, gate

    @property
    def mask(self) -> Mask:
        return self._matching.mask

    def advance(self, tokens: SeqOf[TokenId]) -> None:
        self._matching.advance(tokens)

    def behind(self, drafts: SeqOf[TokenId]) -> list[Mask]:
        self._gate.wait(0.05)
        return self._matching.behind(drafts)


async def test_draft_tokens_whose_masks_are_late_are_not_verified_and_hold_no_sample_up(
    tmp_path: Path,
) -> None:
    model = loaded(tmp_path, "llama")
    asked = [bound(0, SCHEMAS[0], random.Random(9), max_tokens=100)]
    plain = await said(model, asked, plain=True)
    got = await said(model, asked, matchers=Hesitant(Event()))
    assert got.tokens == plain.tokens
    assert got.work.draft_tokens > got.work.accepted_tokens
