"""Decode steps by captured launches, replayed by making the same launches again: with the host's lengths of the capture, over memory
that each step is filled into. Whatever a step took from anywhere else would be of another step."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.plan import KVPush, NewSeq, Sampled, SeqWork, StepPlan, StepResult
from core.prompt_images import PromptImage
from core.types import Request, SamplingParams
from engine.execution.graphs.graph_capture import Launch, again
from engine.execution.graphs.graph_sizes import auto_sizes
from engine.execution.graphs.step_graphs import StepGraphs
from kernels.ops import Ops
from kernels.triton.ops import invariant_ops_split_at, triton_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.lora.adapter import read_adapters
from models.lora.low_rank import AdapterWeights
from models.model import Model
from tests.engine.execution.batch.test_prompt_outputs import NUM_TOP, agree, answers, expected
from tests.engine.execution.pools.test_layer_marks import Endless
from tests.engine.execution.test_runner import Instance, Sink
from tests.engine.launching import Launching
from tests.kernels.triton.places import need_equal_places
from tests.kernels.triton.test_model import model_in
from tests.knowing import Knowing
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, make
from tests.models.peft_adapters import make_adapter

NUM_BLOCKS = 9
GREEDY = {"temperature": 0.0, "masked_until_min": (1,)}


def tiny(folder: Path, family: str, number: int = 1) -> tuple[object, Ops, Model]:
    config = FAMILIES[family](random.Random(family), number)
    config.tie_word_embeddings = False  # or a model may say its last token again, whatever it sees
    if "gemma4" not in family:  # whose layers share others' keys and values
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
    reference = make(folder, config, seed=0)
    ops = triton_ops(torch.device("cpu"))
    return reference, ops, model_in(folder, ops, torch.device("cpu"))


def requests_of(lengths: list[tuple[int, int]]) -> list[Request]:
    """(prompt, output) tokens of each."""
    rng = random.Random(7)
    return [
        Request(
            id=str(i),
            prompt=tuple(rng.randrange(2, VOCAB) for _ in range(prompt)),
            sampling=SamplingParams(max_tokens=output, min_tokens=output, **GREEDY),  # type: ignore[arg-type]
            reply_to="f",
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


@torch.inference_mode()
def of_transformers(reference: object, requests: list[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for request in requests:
        tokens = list(request.prompt)
        for _ in range(request.sampling.max_tokens):
            row = reference(torch.tensor([tokens])).logits[0, -1]  # type: ignore[operator]
            row[1] = -torch.inf
            tokens.append(int(row.argmax()))
        found[request.id] = tokens[len(request.prompt) :]
    return found


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_tokens_are_those_of_transformers_while_batches_and_tables_grow_and_shrink(
    family: str, tmp_path: Path
) -> None:
    """Blocks of 4: tables grow every fourth step. Batches go from 3 to 1, padded to 4 and 2."""
    reference, _, model = tiny(tmp_path, family)
    requests = requests_of([(5, 5), (9, 2), (2, 7)])
    want = of_transformers(reference, requests)
    instance = Instance(model, NUM_BLOCKS, simulated=True, sizes=(2, 4), max_batch_tokens=8)
    assert instance.run(requests) == want
    assert instance.num_replayed > 4
    assert instance.run(requests) == want  # from the prefix cache, over what others have left in the tables
    assert not instance.device.violations


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "gemma4_small"])
def test_prompts_are_replayed_whole_in_pieces_and_beside_sequences_that_decode(
    family: str, tmp_path: Path
) -> None:
    """The second prompt is cut, and its pieces are computed beside the first one's tokens."""
    reference, _, model = tiny(tmp_path, family)
    requests = requests_of([(5, 5), (17, 2), (2, 4)])
    want = of_transformers(reference, requests)
    instance = Instance(model, 20, simulated=True, sizes=(4, 8), max_batch_tokens=7)
    replayed: list[bool] = []
    step = instance.run_step

    def watched(plan: StepPlan) -> StepResult:
        replayed.append((result := step(plan)).replayed)
        return result

    instance.run_step = watched
    assert instance.run(requests) == want
    assert len(replayed) > 4
    assert all(replayed)
    assert instance.run(requests) == want  # from the prefix cache
    assert not instance.device.violations


def test_draft_tokens_are_verified_by_replays(tmp_path: Path) -> None:
    reference, _, model = tiny(tmp_path, "llama")
    requests = requests_of([(5, 9), (9, 7)])
    want = of_transformers(reference, requests)
    knowing = Knowing({request.prompt: want[request.id] for request in requests})
    instance = Instance(model, 20, simulated=True, sizes=(4, 16), max_batch_tokens=16, drafter=knowing)
    plans: list[StepPlan] = []
    instance.on_step = plans.append
    assert instance.run(requests) == want
    assert any(item.drafts for plan in plans for item in plan.work)
    assert instance.num_replayed == len(plans)
    assert instance.scheduler.load().draft_tokens[1] > 0
    assert not instance.device.violations


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
async def test_replays_take_tokens_that_the_host_does_not_know_yet(family: str, tmp_path: Path) -> None:
    reference, _, model = tiny(tmp_path, family)
    requests = requests_of([(5, 6), (9, 4), (2, 7)])
    instance = Launching(model, 20, sizes=(2, 4), max_batch_tokens=8)
    said = await instance.run(requests)
    want = of_transformers(reference, requests)
    assert {key: [token.token for token in tokens] for key, tokens in said.items()} == want
    assert instance.watched is not None
    assert instance.watched.num_replayed > 4
    assert instance.watched.num_overlapped > 4


@pytest.mark.parametrize(("sizes", "num_steps"), [((2,), 7), ((8,), 2)], ids=["by tokens", "at once"])
def test_a_prompt_that_is_computed_by_captured_steps_is_scored(
    sizes: tuple[int, ...], num_steps: int, tmp_path: Path
) -> None:
    reference, _, model = tiny(tmp_path, "llama")
    (request,) = requests_of([(6, 2)])
    request = replace(request, sampling=replace(request.sampling, num_prompt_logprobs=NUM_TOP))
    most = 1 if sizes == (2,) else 8
    instance = Instance(model, NUM_BLOCKS, simulated=True, sizes=sizes, max_batch_tokens=most)
    first, _ = answers(instance, [request])
    assert instance.num_replayed == num_steps
    agree(first.prompt_scores, expected(reference, request.prompt), request.prompt)  # type: ignore[arg-type]


def test_steps_with_an_adapter_are_launched_and_those_without_are_replayed(tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random("llama"), 1)
    config.num_hidden_layers = 2
    reference = make(tmp_path, config, seed=0)
    truth, ops = make_adapter(tmp_path / "one", reference, 0), triton_ops(CPU)
    (adapter,) = read_adapters({"one": str(tmp_path / "one")}, read_spec(tmp_path))
    beside = AdapterWeights([adapter], whole)
    model = Model(read_spec(tmp_path), ops, Checkpoint(tmp_path, torch.float32, CPU, adapters=beside), CPU)
    first, second = requests_of([(5, 4), (9, 9)])
    adapted = replace(first, adapter=adapter.key)
    instance = Instance(model, NUM_BLOCKS, simulated=True, sizes=(2,), max_batch_tokens=16)
    want = of_transformers(truth, [adapted]) | of_transformers(reference, [second])
    assert instance.run([adapted, second]) == want
    assert 0 < instance.num_replayed < 6
    assert not instance.device.violations


def test_replays_have_the_positions_behind_images(tmp_path: Path) -> None:
    _, _, model = tiny(tmp_path, "qwen2")
    first, second = requests_of([(14, 7), (5, 7)])
    image = PromptImage(b"a", ((3, 8),), columns=4)

    def said(image: PromptImage, sizes: tuple[int, ...] = (2,)) -> dict[str, list[int]]:
        instance = Instance(model, 30, simulated=True, sizes=sizes, max_batch_tokens=16)
        out = instance.run([replace(first, images=(image,)), second])
        assert (instance.num_replayed > 5) == bool(sizes)
        return out

    assert said(image) == said(image, ()) != said(replace(image, columns=0))


class Steps:
    """A rank told of steps by hand: sequences of growing lengths in blocks of their own."""

    def __init__(self, model: Model, kv_dtype: str, sizes: tuple[int, ...]) -> None:
        model.expert_load.zero_()
        self.instance = Instance(model, 60, simulated=True, kv_dtype=kv_dtype, sizes=sizes)
        self._lens: dict[str, int] = {}
        self._number = 0

    def prompts(self, lens: dict[str, int]) -> list[Sampled]:
        sampling = SamplingParams(temperature=0.8, seed=5, num_logprobs=4, max_tokens=40)
        new = [NewSeq(key, tuple(range(2, 2 + count)), count, sampling) for key, count in lens.items()]
        self._lens |= lens
        return self._step(tuple(new), [self.work(key, 0, count) for key, count in lens.items()])

    def decode(self, keys: str, silent: str = "", push: str = "") -> list[Sampled]:
        work: list[SeqWork] = []
        for key in keys:
            work.append(self.work(key, self._lens[key], 1, key not in silent, key in push))
            self._lens[key] += 1
        return self._step((), work)

    def work(self, key: str, start: int, count: int, samples: bool = True, push: bool = False) -> SeqWork:
        first = 10 * "abcdef".index(key)
        blocks = tuple(range(first + 9, first + 9 - -(-(start + count) // 4), -1))
        return SeqWork(
            key=key,
            start=start,
            count=count,
            block_ids=blocks,
            samples=samples,
            push=KVPush("g", start, count) if push else None,
        )

    def _step(self, new: tuple[NewSeq, ...], work: list[SeqWork]) -> list[Sampled]:
        self._number += 1
        return list(
            self.instance.step(
                StepPlan(step=self._number, new=new, copies=(), work=tuple(work), drop=())
            ).sampled
        )


WITH_PROMPTS, DECODE_ALONE = ((2, 4, 24), 9), ((2, 4), 6)
"""Sizes, and how many of a day's steps are replayed."""


def a_day(steps: Steps) -> list[Sampled]:
    """Full batches, padded ones, ones larger than any captured, a prompt between, one that samples nothing."""
    sampled = steps.prompts({"a": 5, "b": 13, "c": 1, "d": 3})
    for keys in ("abcd", "abc", "a", "dcba"):
        sampled += steps.decode(keys)
    sampled += steps.prompts({"e": 7})
    sampled += steps.decode("abcde")
    return sampled + steps.decode("eb", silent="e") + steps.decode("ba")


@pytest.mark.parametrize(
    ("family", "kv_dtype", "sizes", "num_replayed"),
    [("qwen3", "int8", *DECODE_ALONE), ("qwen3_moe", "float32", *WITH_PROMPTS)],
    ids=["decode", "prompts"],
)
def test_what_is_said_of_tokens_and_experts_is_what_eager_steps_say(
    family: str, kv_dtype: str, sizes: tuple[int, ...], num_replayed: int, tmp_path: Path
) -> None:
    _, _, model = tiny(tmp_path, family)
    stored = "" if kv_dtype == "float32" else kv_dtype
    eager = Steps(model, stored, ())
    want, counts = a_day(eager), model.expert_load.clone()
    replayed = Steps(model, stored, sizes)
    model.expert_load.zero_()  # what capturing has counted was nobody's
    got = a_day(replayed)
    assert (eager.instance.num_replayed, replayed.instance.num_replayed) == (0, num_replayed)
    assert [(one.key, one.token) for one in got] == [(one.key, one.token) for one in want]
    for one, other in zip(got, want, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert torch.equal(model.expert_load, counts)


@pytest.mark.parametrize(
    ("family", "sizes", "num_replayed"),
    [("gpt_oss", *WITH_PROMPTS), ("deepseek_v3", *DECODE_ALONE)],
    ids=["prompts", "decode"],
)
def test_replays_have_the_bits_of_launched_steps_where_batches_change_none(
    family: str, sizes: tuple[int, ...], num_replayed: int, tmp_path: Path
) -> None:
    """Splits of 16 tokens, so that contexts have several."""
    tiny(tmp_path, family)
    model = model_in(tmp_path, invariant_ops_split_at(CPU, 16), CPU)
    eager, replayed = Steps(model, "", ()), Steps(model, "", sizes)
    want, got = a_day(eager), a_day(replayed)
    assert (eager.instance.num_replayed, replayed.instance.num_replayed) == (0, num_replayed)
    if sizes == WITH_PROMPTS[0]:
        assert [one.token for one in got] == [one.token for one in want]
        need_equal_places()  # rows of prompts stand elsewhere in their tiles
    assert got == want  # log-probabilities, too, bit for bit
    want += eager.prompts({"f": 35})
    got += replayed.prompts({"f": 35})
    assert eager.decode("fc") + eager.decode("f") == replayed.decode("fc") + replayed.decode("f")


def test_a_replay_tells_what_says_of_each_layer_that_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device never says that all is over, so the marks do."""
    _, _, model = tiny(tmp_path, "llama")
    sink = Sink()
    steps = Steps(model, "", (2, 4))
    instance = steps.instance = Instance(model, 60, sink=sink, simulated=True, sizes=(2, 4))
    monkeypatch.setattr(instance.device.compute, "record", Endless)
    monkeypatch.setattr(instance.pool, "finish", lambda: None)  # it would wait for that
    steps.prompts({"a": 3})
    for _ in range(2):
        steps.decode("a", push="a")
    assert instance.num_replayed == 3
    assert sink.heard == [2, "layer 0", "layer 1", 3, "layer 0", "layer 1"]
    assert [event is not None and event.query() for event in sink.events] == [True] * 4
    monkeypatch.setattr(model, "forward", lambda *_: torch.zeros(2, model.spec.hidden_size))
    steps.decode("a", push="a")
    assert [event is not None and event.query() for event in sink.events[4:]] == [False] * 2


@pytest.mark.parametrize(("deterministic", "num_captures"), [(False, 3), (True, 2)])
def test_sizes_are_captured_twice_only_where_tiles_have_two_heights(
    deterministic: bool, num_captures: int, tmp_path: Path
) -> None:
    tiny(tmp_path, "qwen3")
    ops = invariant_ops_split_at(CPU, 16) if deterministic else triton_ops(CPU)
    model, captured = model_in(tmp_path, ops, CPU), list[Launch]()

    def capture(launch: Launch) -> Launch:
        captured.append(launch)
        return again(launch)

    pool = Steps(model, "", ()).instance.pool
    StepGraphs(model, pool, 4, 8, (2, 4), capture, max_seqs=4)  # type: ignore[arg-type]
    assert len(captured) == num_captures


def test_groups_of_ranks_pad_a_step_alike_or_launch_it(tmp_path: Path) -> None:
    _, _, model = tiny(tmp_path, "qwen3_moe")
    steps = Steps(model, "", ())
    graphs = StepGraphs(model, steps.instance.pool, 4, 8, (2, 4), again, max_seqs=4)  # type: ignore[arg-type]
    decoding = [steps.work(key, 3, 1) for key in "abcde"]
    prompt, pushed = steps.work("d", 0, 2), steps.work("d", 3, 1, push=True)
    assert [graphs.padded((), decoding[:num]) for num in range(6)] == [0, 2, 2, 4, 4, 0]
    assert graphs.padded(decoding[:1], decoding[1:4], ()) == 4
    assert graphs.padded(decoding[:1], [prompt]) == 2
    assert graphs.padded(decoding[:3], [prompt, *decoding[:2]]) == 4
    assert graphs.padded(decoding[:1], [steps.work("d", 0, 5)]) == 0, "more tokens than were captured"
    assert graphs.padded(decoding[:1], [replace(prompt, both_ways=((0, 2),))]) == 0
    assert graphs.padded(decoding[:1], [replace(prompt, start=1 << 16)]) == 2, "whatever it sees"
    assert graphs.padded(decoding[:1], [replace(prompt, start=1 << 20)]) == 4, "by tall tiles"
    assert graphs.padded(decoding[:1], [replace(prompt, start=1 << 20, drafts=(5,))]) == 2, (
        "a draft token is no prompt"
    )
    assert graphs.padded(decoding[:1], [replace(decoding[1], start=1 << 20)]) == 2
    assert graphs.padded(decoding[:1], [pushed]) == 2, "layers are waited for"
    assert graphs.padded(decoding[:1], [replace(decoding[1], adapter="a@1")]) == 0


def test_a_group_without_work_replays_padding_alone(tmp_path: Path) -> None:
    """It writes no KV but that of the block that is nobody's, samples nothing, and chooses no experts."""
    _, _, model = tiny(tmp_path, "qwen3_moe")
    steps = Steps(model, "", (2, 4))
    steps.prompts({"a": 3})
    pool = [layer[:-1].clone() for layer in layers(steps)]
    model.expert_load.zero_()
    other = tuple(steps.work(key, 3, 1) for key in "abc")
    result = steps.instance.step(StepPlan(step=9, new=(), copies=(), work=(), drop=(), groups=((), other)))
    assert result.replayed
    assert result.sampled == ()
    assert all(
        torch.equal(now[:-1].view(torch.int32), then.view(torch.int32))
        for now, then in zip(layers(steps), pool, strict=True)
    )
    assert not model.expert_load.any()


def layers(steps: Steps) -> list[torch.Tensor]:
    return [layer for layer in steps.instance.pool.layers if isinstance(layer, torch.Tensor)]


def test_sizes_are_few_and_pad_little() -> None:
    assert auto_sizes(1) == (1,)
    assert auto_sizes(20) == (1, 2, 4, 8, 16, 20)
    for largest in (64, 256, 1000, 2048):
        sizes = auto_sizes(largest)
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        assert len(sizes) < 60
        for batch in range(9, largest + 1):
            size = next(size for size in sizes if size >= batch)
            assert size - batch < max(8 if size <= 64 else 16, size // 8)
