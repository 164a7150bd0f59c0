"""Requests that all come at once and have all the time."""

import random
from dataclasses import dataclass, field

from core.types import Slo
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, SimConfig
from sim.virtual_loop import run_virtual

NUM, SLOTS = 400, 256


@dataclass(frozen=True)
class LaunchedOrReplayed:
    """A device whose larger steps are launched by a slow and uneven host, and whose others are replayed. Two of the first steps
    wait for a compiler."""

    rng: random.Random = field(default_factory=lambda: random.Random(5))
    tokens: list[int] = field(default_factory=list[int])
    unread_decay: float = 0.0

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        pairs = 0.0 if num_tokens == num_seqs else num_pairs
        own_s = max(0.006, 0.003 + 24e-6 * num_tokens) + 44e-9 * context_tokens + 1.2e-9 * pairs
        if num_tokens <= 512 and pairs <= 1 << 15:
            own_s += 37e-9 * pairs
        else:
            own_s = max(own_s, 0.02 * self.rng.uniform(0.6, 1.8))
        self.tokens.append(num_tokens)
        return own_s + (1.5 if len(self.tokens) in (4, 7) else 0.0)


def test_slots_are_filled_whatever_an_instance_believes_of_its_steps() -> None:
    """Its step-time model puts the launches down to attention, and says that prompts gain nothing by longer steps."""
    rng, device = random.Random(0), LaunchedOrReplayed()

    def drawn(median: int, sigma: float, most: int) -> int:
        return min(most, 4 + int(median * rng.lognormvariate(0, sigma)))

    arrivals = [
        Arrival(
            0.0, tuple(rng.randrange(4, 30_000) for _ in range(drawn(90, 1.4, 1000))), drawn(140, 1.1, 600), i
        )
        for i in range(NUM)
    ]
    config = SimConfig(
        num_prefill=0,
        num_decode=0,
        num_both=1,
        num_blocks=28_000,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        step=device,
        slo=Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1),
        overrides={"engine.max_batch_tokens": 8192, "engine.max_num_seqs": SLOTS},
    )
    outcome = run_virtual(simulate(config, arrivals))
    assert [len(tokens) for tokens in outcome.tokens] == [each.max_tokens for each in arrivals]
    begun_at = sorted(outcome.first_token_at)
    assert begun_at[SLOTS - 1] < 5.7, "the slots are taken soon behind the slow steps"
