"""Captures a rank's steps where that can be done, and says why where it cannot."""

import logging
from collections.abc import Callable

from core.errors import ConfigError
from core.kv import num_blocks_for
from engine.execution.graphs.graph_capture import Capture
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.pools.kv_pool import DevicePool
from engine.execution.pools.resident_pool import ResidentPool
from models.causal_model import CausalModel
from models.model import Model

_log = logging.getLogger(__name__)


def make_graphs(
    model: CausalModel,
    pool: DevicePool,
    block_size: int,
    max_context_tokens: int,
    asked: GraphSizes,
    capture: Capture | None,
    *,
    agree: Callable[[bool], bool] = bool,
) -> tuple[StepGraphs | None, str]:
    """Capture what is `asked` for. Return the graphs, if any, and what is to be said of them.

    `capture` is None where nothing can be captured. `agree` is called by all ranks that meet in a step, with whether its own
    steps are captured, and returns whether all are: a step that is padded on one rank must be on the others. Raises ConfigError
    where named sizes cannot be captured, and CUDA's error when a capture fails; sizes that are not named are launched one kernel
    at a time then, so that the instance still serves."""
    if not asked.sizes:
        return None, ""
    if (why := why_no_graphs(model, capture)) or capture is None:
        if asked.are_named:
            raise ConfigError(f"engine.cuda_graphs names sizes, but {why}: leave it at auto")
        return None, _launched(why)
    assert isinstance(pool, ResidentPool), "on a GPU"
    most_blocks, graphs = num_blocks_for(max_context_tokens, block_size), None
    why = "capturing them has failed on another rank"
    try:
        marks = pool.layer_marks() if asked.hand_over else None
        graphs = StepGraphs(
            model,
            pool,
            block_size,
            most_blocks,
            asked.sizes,
            capture,
            max_seqs=asked.max_seqs,
            marks=marks,
        )
    except RuntimeError as error:
        if asked.are_named:
            raise
        why = f"capturing them has failed: {error}"
        _log.exception("steps cannot be captured")
    if not agree(graphs is not None):
        return None, _launched(why)
    return (
        graphs,
        f"steps of up to {max(asked.sizes)} tokens are captured, in {len(asked.sizes)} sizes",
    )


def why_no_graphs(model: CausalModel, capture: Capture | None) -> str:
    """Return a clause that says why steps cannot be captured; empty where they can."""
    if capture is None:
        return "CUDA graphs are captured on GPUs alone"
    if model.spec.recurrent is not None:
        return "recurrent layers cannot be captured"
    if any(model.spec.chunks):
        return "attention within chunks cuts sequences by their lengths, which a captured step does not know"
    if model.spec.mla is not None and model.spec.mla.index is not None:
        return "layers that choose tokens score as many as there are, which a captured step does not know"
    if model.spec.compressed is not None:
        return "layers with entries attend to as many as there are, which a captured step does not know"
    if isinstance(model, Model) and model.taps:
        return "an EAGLE-3 head reads states within the model, which a captured step does not give"
    if model.ops.fixed_step is None:
        return "only Triton's kernels can be captured (engine.kernels auto or triton)"
    return ""


def _launched(why: str) -> str:
    return f"steps are launched one kernel at a time: {why}"
