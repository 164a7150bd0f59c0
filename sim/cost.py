"""How long one engine step takes on a modelled device: a fixed part, and the larger of compute and memory time. Pure."""

from dataclasses import dataclass

from core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepCost:
    """A roofline: `duration_s` = overhead + max(tokens / compute rate, (weights + KV read) / bandwidth)."""

    overhead_s: float = 0.002
    tokens_per_s: float = 20_000.0
    """Prompt tokens per second when compute is the limit."""
    weights_read_s: float = 0.004
    """Time to read all weights once."""
    kv_token_read_s: float = 2e-8
    """Time to read one token's KV."""

    def duration_s(self, plan: StepPlan) -> float:
        context = sum(work.start + work.count for work in plan.work)
        compute_s = plan.num_tokens / self.tokens_per_s
        memory_s = self.weights_read_s + context * self.kv_token_read_s
        return self.overhead_s + max(compute_s, memory_s)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Time on a link: latency and bytes over bandwidth."""

    latency_s: float = 5e-6
    bytes_per_s: float = 50e9

    def duration_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s
