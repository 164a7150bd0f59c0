"""Cut over real processes, a model says what transformers says: float32 logits to 1e-4, for every family and mesh."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.ranks.model_part import load_part
from engine.sizing.model_dims import dims_of, shards_of
from kernels.ops import AttentionMeta
from models.families.table import read_spec
from models.registry import LoadOptions
from parallel.balance import first_placement, place
from parallel.mesh import Mesh
from parallel.moves import Move, moved, next_moves
from parallel.plans import Dims, check
from tests.models.checkpoints import BLOCK, CPU, FAMILIES, SPARSE, VOCAB, make
from tests.parallel.families import awkward
from tests.parallel.world import World

MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(pp=2), Mesh(pp=3), Mesh(tp=2, pp=2)]
EXPERT_MESHES = [Mesh(ep=2), Mesh(ep=4), Mesh(tp=2, ep=2), Mesh(pp=2, ep=2)]
EXPERT_MESHES += [Mesh(dp=2), Mesh(dp=2, ep=2), Mesh(tp=2, dp=2), Mesh(pp=2, dp=2)]
LENGTHS = (19, 9)
Part = tuple[int, int, list[int]]
"""(sequence, first position, tokens)"""


def meta_of(parts: list[Part], device: torch.device = CPU) -> tuple[torch.Tensor, AttentionMeta]:
    """Positions, and where each sequence's KV lies: sequence s has every second block from s on."""
    if not parts:
        nothing = AttentionMeta.build((), (), (), np.empty(0, np.int64), device)
        return torch.empty(0, dtype=torch.int64, device=device), nothing
    spans = [np.arange(start, start + len(tokens)) for _, start, tokens in parts]
    tables = [np.arange(seq, 2 * -(-(start + len(t)) // BLOCK) + seq, 2) for seq, start, t in parts]
    slots = [table[span // BLOCK] * BLOCK + span % BLOCK for table, span in zip(tables, spans, strict=True)]
    counts = [len(tokens) for _, _, tokens in parts]
    contexts = [start + len(tokens) for _, start, tokens in parts]
    meta = AttentionMeta.build(counts, contexts, tables, np.concatenate(slots), device)
    return torch.from_numpy(np.concatenate(spans)).to(device), meta


@torch.inference_mode()
def part_logits(  # noqa: PLR0917 (ranks are given what they run by position)
    rank: int,
    store: Any,
    mesh: Mesh,
    folder: Path,
    steps: list[list[Part]],
    deterministic: bool = False,
    num_spare: int = 0,
    moving: Sequence[dict[int, tuple[Move, ...]]] = (),
    on_gpus: bool = False,
    fixed: bool = False,
) -> list[Any]:
    """The logits of each step; nothing but on the last stage. `moving`: the experts that move before each step. `on_gpus`: a GPU
    for each rank, with PyTorch's operations, whose products are float32 as the reference's are. `fixed`: by launches that can be
    captured."""
    device = torch.device("cuda", rank) if on_gpus else CPU
    if on_gpus:
        torch.cuda.set_device(device)
    part = load_part(
        folder,
        "float32",
        device,
        mesh,
        rank=rank,
        store=store,
        options=LoadOptions(kernels="torch", deterministic=deterministic),
        num_spare=num_spare,
    )
    spec = part.model.spec
    shard = shards_of(spec, mesh, spec.kv_layout(BLOCK, "float32"))[rank]
    shape = (64, shard.layout.num_planes, shard.num_heads, BLOCK, shard.layout.head_dim)
    kv = [torch.full(shape, torch.nan, device=device) for _ in range(shard.num_layers)]
    found: list[Any] = []
    pp = part.comms.pp
    for number, step in enumerate(steps):
        if moving:
            part.relocate(moving[number])
        step = own_parts(mesh, rank, step)
        positions, meta = meta_of(step, device)
        if pp.rank == 0:
            tokens = [token for _, _, tokens in step for token in tokens]
            x = torch.tensor(tokens, dtype=torch.int64, device=device)
        elif not step:
            x = torch.empty(0, part.model.spec.hidden_size, device=device)
        else:
            x = pp.recv((len(positions), part.model.spec.hidden_size), torch.float32, pp.rank - 1)
        forward = partial(part.model.forward, x, positions, kv, meta)
        x = part.fixed(forward) if fixed else forward()
        if pp.rank < pp.size - 1:
            if step:
                pp.send(x, pp.rank + 1)
        else:
            found.append(part.model.logits(x).cpu().numpy() if step else np.empty((0, VOCAB)))
    part.comms.close()
    return found


def own_parts(mesh: Mesh, rank: int, step: list[Part]) -> list[Part]:
    """Sequences are dealt out to the groups that serve sequences of their own. One may have none."""
    return [part for part in step if part[0] % mesh.dp == mesh.place(rank).dp]


def meshes_of(dims: Dims) -> list[Mesh]:
    """Return those whose stages can all begin with a layer that needs no earlier one."""
    meshes = MESHES + (EXPERT_MESHES if dims.num_experts else [])
    return [mesh for mesh in meshes if mesh.pp < len(dims.stage_edges)]


def reference_logits(folder: Path, family: str, *, alike: bool = False) -> tuple[list[list[Part]], list[Any]]:
    """Makes a checkpoint; three steps of two sequences, and what transformers says to them. `alike`: two steps, in which both have
    as many tokens."""
    rng = random.Random(family)
    reference = make(folder, awkward(family), seed=1)
    texts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in LENGTHS]
    steps: list[list[Part]] = [
        [(0, 0, texts[0][:7]), (1, 0, texts[1][:8])],
        [(1, 8, texts[1][8:]), (0, 7, texts[0][7:18])],
        [(0, 18, texts[0][18:])],
    ]
    if alike:
        steps = [[(0, 0, texts[0][:7]), (1, 0, texts[1][:7])], [(1, 7, texts[1][7:]), (0, 7, texts[0][7:9])]]
    want: list[Any] = []
    for step in steps:
        rows = [
            reference(torch.tensor([texts[seq]])).logits[0, start : start + len(t)] for seq, start, t in step
        ]
        want.append(torch.cat(rows).detach().numpy())
    return steps, want


@pytest.mark.turns(3)
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_transformers_on_every_mesh(
    family: str, third: int, tmp_path: Path, world: World
) -> None:
    steps, want = reference_logits(tmp_path, family)
    dims = dims_of(read_spec(tmp_path))
    for mesh in meshes_of(dims)[third::3]:
        check(dims, mesh, "test")
        compare(mesh, world.run(mesh.size, part_logits, mesh, tmp_path, steps), steps, want)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_over_nccl(family: str, tmp_path: Path, world: World) -> None:
    """As many meshes as there are GPUs for."""
    steps, want = reference_logits(tmp_path, family)
    dims = dims_of(read_spec(tmp_path))
    for mesh in meshes_of(dims):
        if mesh.size <= torch.cuda.device_count():
            work = (part_logits, mesh, tmp_path, steps, False, 0, (), True)
            compare(mesh, world.run(mesh.size, *work), steps, want)


def compare(mesh: Mesh, answers: list[list[Any]], steps: list[list[Part]], want: list[Any]) -> None:
    for rank, found in enumerate(answers):
        assert bool(found) == (mesh.place(rank).pp == mesh.pp - 1)
        for ours, theirs, step in zip(found, want, steps, strict=bool(found)):
            ends = np.cumsum([len(tokens) for _, _, tokens in step])
            rows = dict(zip((seq for seq, _, _ in step), np.split(theirs, ends[:-1]), strict=True))
            own = [rows[seq] for seq, _, _ in own_parts(mesh, rank, step)]
            theirs = np.concatenate(own) if own else theirs[:0]
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-5, err_msg=f"{mesh} rank {rank}")


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", sorted(SPARSE))
def test_experts_may_move_between_steps(family: str, tmp_path: Path, world: World) -> None:
    """With copies of some, other placements in each layer, and weights that come from rank to rank: before the second step one
    expert for each rank, so that layers are on their way between two placements, before the third all others."""
    rng = random.Random(family)
    steps, want = reference_logits(tmp_path, family)
    dims = dims_of(read_spec(tmp_path))
    for mesh, num_spare in ((Mesh(ep=2), 2), (Mesh(ep=4), 4), (Mesh(tp=2, ep=2), 0), (Mesh(pp=2, dp=2), 4)):
        check(dims, mesh, "test", num_spare)
        ranks = mesh.num_expert_ranks
        first = first_placement(dims.num_experts, ranks, num_spare)
        moving: list[dict[int, tuple[Move, ...]]] = [{}, {}, {}]
        for layer in range(dims.num_layers):
            target = place([rng.random() for _ in range(dims.num_experts)], ranks, num_spare)
            moving[1][layer] = next_moves(first, target, ranks, 1)
            between = moved(first, moving[1][layer])
            moving[2][layer] = next_moves(between, target, ranks, len(first))
            assert moved(between, moving[2][layer]) == target
        found = world.run(mesh.size, part_logits, mesh, tmp_path, steps, False, num_spare, moving)
        compare(mesh, found, steps, want)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(tp=2), Mesh(ep=2), Mesh(ep=4), Mesh(tp=2, ep=2), Mesh(dp=2), Mesh(dp=2, ep=2), Mesh(tp=2, dp=2)],
    ids=str,
)
def test_launches_that_depend_on_no_choice_of_experts_say_the_same_bits(
    mesh: Mesh, tmp_path: Path, world: World
) -> None:
    steps, want = reference_logits(tmp_path, "qwen3_moe", alike=mesh.dp > 1)
    given = (part_logits, mesh, tmp_path, steps, True)
    launched = world.run(mesh.size, *given)
    fixed = world.run(mesh.size, *given, 0, (), False, True)
    compare(mesh, fixed, steps, want)
    for ours, theirs in zip(launched, fixed, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_such_launches_find_experts_where_they_are_when_they_have_moved(tmp_path: Path, world: World) -> None:
    """With copies of some."""
    steps, want = reference_logits(tmp_path, "qwen3_moe")
    mesh, dims = Mesh(ep=2), dims_of(read_spec(tmp_path))
    first = first_placement(dims.num_experts, 2, 2)
    target = place([3, 1, 2, 5, *range(dims.num_experts - 4)], 2, 2)
    moves = dict.fromkeys(range(dims.num_layers), next_moves(first, target, 2, len(first)))
    given = (part_logits, mesh, tmp_path, steps, False, 2, [{}, moves, {}])
    compare(mesh, world.run(mesh.size, *given, False, True), steps, want)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(tp=3), Mesh(tp=4), Mesh(tp=2, ep=2), Mesh(pp=2, ep=2), Mesh(dp=2), Mesh(tp=2, dp=2)],
    ids=str,
)
def test_deterministic_ranks_say_the_same_bits_however_prompts_are_chunked(
    mesh: Mesh, tmp_path: Path, world: World
) -> None:
    rng = random.Random(1)
    config = FAMILIES["qwen3_moe"](rng, 0)
    config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers = 12, 12, 2
    config.hidden_size = 96
    make(tmp_path, config, seed=1)
    texts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in LENGTHS]
    together: list[list[Part]] = [[(0, 0, texts[0]), (1, 0, texts[1])]]
    apart: list[list[Part]] = [
        [(1, 0, texts[1][:5])],
        [(1, 5, texts[1][5:8]), (0, 0, texts[0][:2])],
        [(0, 2, texts[0][2:])],
        [(1, 8, texts[1][8:])],
    ]
    answers = world.run(mesh.size, part_logits, mesh, tmp_path, together, True)
    others = world.run(mesh.size, part_logits, mesh, tmp_path, apart, True)
    for rank, (whole, parts) in enumerate(zip(answers, others, strict=True)):
        if whole:
            want, found = in_order(mesh, rank, together, whole), in_order(mesh, rank, apart, parts)
            assert want.keys() == found.keys()
            assert all(np.array_equal(found[seq], rows) for seq, rows in want.items())


def in_order(mesh: Mesh, rank: int, steps: list[list[Part]], found: list[Any]) -> dict[int, Any]:
    """By sequence, its rows from the first position to the last."""
    rows: dict[int, list[Any]] = {}
    for step, logits in zip(steps, found, strict=True):
        own = own_parts(mesh, rank, step)
        pieces = np.split(logits, np.cumsum([len(tokens) for _, _, tokens in own])[:-1]) if own else []
        for (seq, _, _), piece in zip(own, pieces, strict=True):
            rows.setdefault(seq, []).append(piece)
    return {seq: np.concatenate(pieces) for seq, pieces in rows.items()}
