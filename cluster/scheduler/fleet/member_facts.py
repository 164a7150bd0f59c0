"""What an instance has said of itself: when it registered, and in its last report."""

from typing import Final

from cluster.scheduler.fleet.link_model import Spot
from core.cost.steps import UNKNOWN_STEPS
from core.reports import LayerExperts, LoadReport, Register, TierCounts, WorkCounts

DEFAULT_STEP_S: Final = 0.02


class RegisteredFacts:
    """What an instance says once. It is copied from `info`: each decision reads it of many members, and an attribute of `self` is
    read quickest."""

    def __init__(self, info: Register) -> None:
        self.info = info
        self.address, self.sends = info.address, info.sends
        self.prefills, self.decodes = info.prefills, info.decodes
        self.answers = info.answers or info.decodes
        """It can be given requests of which nothing follows their prompt."""
        self.num_blocks, self.block_size = info.num_blocks, info.block_size
        self.all_blocks = info.num_blocks + info.overcommit_blocks
        """As many blocks as sequences may hold here together, with those that sit out (`core.pacing.overcommit`)."""
        self.state_blocks = info.state_blocks
        self.max_batch_tokens, self.max_num_seqs = info.max_batch_tokens, info.max_num_seqs
        self.kv_token_bytes, self.spot = info.kv_token_bytes, Spot(info)


class ReportedFacts(RegisteredFacts):
    """What an instance has said last."""

    def __init__(self, info: Register) -> None:
        super().__init__(info)
        self.num_running = 0
        self.num_waiting = 0
        self.defect = ""
        self.tiers = TierCounts()
        self.work = WorkCounts()
        self.experts: tuple[LayerExperts, ...] = ()
        self.measured_tokens_per_s = 0.0
        self.step_s = DEFAULT_STEP_S
        self.steps = UNKNOWN_STEPS
        self.num_decoding = 0
        self.context_tokens = 0
        self._used_blocks = self._pausable_blocks = 0
        self._waiting_tokens = 0
        self._late_tokens = 0
        self._waiting_by_priority: tuple[tuple[int, int], ...] = ()

    def _take_idle(self) -> None:
        """Note that nothing is left of the work in the last report."""
        self.num_running = self.num_waiting = self.num_decoding = self.context_tokens = 0
        self._waiting_tokens = self._late_tokens = 0
        self._waiting_by_priority = ()

    def _take(self, report: LoadReport) -> None:
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.defect = report.defect
        self.tiers, self.work = report.tiers, report.work
        self.experts = report.experts or self.experts
        self.measured_tokens_per_s = report.tokens_per_s
        self.step_s = report.step_s or self.step_s
        self.steps = report.steps
        self.num_decoding, self.context_tokens = report.num_decoding, report.context_tokens
        self._used_blocks = self.num_blocks - report.free_blocks
        self._pausable_blocks = report.pausable_blocks
        self._waiting_tokens = report.waiting_tokens
        self._late_tokens = report.late_tokens
        self._waiting_by_priority = report.waiting_by_priority
