"""The sections `prefill` and `decode` of the configuration: the ranks of each instance of a pool, and its share of a card."""

from pydantic import Field

from core.config.config_section import Section
from core.errors import ConfigError

_ROUNDING = 1e-9


class ParallelConfig(Section):
    """The ranks of each instance of a pool: tp x pp x dp x ep processes. The two pools choose theirs apart from each other."""

    tp: int = Field(default=1, ge=1, le=1024)
    """Tensor parallel: ranks among which matrices and attention heads are cut."""
    pp: int = Field(default=1, ge=1, le=1024)
    """Pipeline parallel: stages of layers."""
    dp: int = Field(default=1, ge=1, le=1024)
    """Data-parallel attention: groups of ranks that serve sequences of their own; experts are spread over dp x ep ranks."""
    ep: int = Field(default=1, ge=1, le=1024)
    """Expert parallel: ranks with the same attention, among which (and dp) a mixture's experts are spread."""
    ep_redundant_experts: int = Field(default=0, ge=0)
    """Slots of each layer for copies of experts that are chosen often, over all ranks that share its experts."""
    ep_balance_interval_s: float = Field(default=0.0, ge=0)
    """How often experts move to where their loads of late are even, between two steps; 0: never."""
    ep_move_bytes: int = Field(default=4 << 20, ge=1)
    """Bytes of experts' weights that a rank gets from others, and sends to them, before one step; one expert at least."""
    hosts: int = Field(default=1, ge=1, le=1024)
    """Over how many hosts at most an instance's ranks may be, where fewer have no room; those of one `tp` group stay together."""

    gpu_share: float = Field(default=1.0, gt=0, le=1)
    """Share of one GPU that an instance has, of its memory above all; below 1 the card is for a prefill and a decode instance
    together, in processes of their own."""
    sm_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the processors of a shared card that an instance uses at the most, bounded by CUDA MPS; 0: as `gpu_share`, 1: all
    of them, and MPS is not needed."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.ep

    @property
    def shares_card(self) -> bool:
        return self.gpu_share < 1

    @property
    def most_sms(self) -> float:
        """The share of a card's processors that an instance may use."""
        return self.sm_share or self.gpu_share


def check_shares(prefill: ParallelConfig, decode: ParallelConfig) -> None:
    """Raise ConfigError where the two cannot have a card together."""
    for role, pool in (("prefill", prefill), ("decode", decode)):
        if pool.shares_card and pool.num_ranks > 1:
            raise ConfigError(
                f"{role}.gpu_share is {pool.gpu_share:g}, and an instance has {pool.num_ranks} ranks: only instances of one rank "
                "share a card"
            )
        if pool.sm_share and not pool.shares_card:
            raise ConfigError(
                f"{role}.sm_share bounds an instance on a shared card: set {role}.gpu_share below 1, too"
            )
    both = prefill.gpu_share + decode.gpu_share
    if (prefill.shares_card or decode.shares_card) and both > 1 + _ROUNDING:
        raise ConfigError(
            f"prefill.gpu_share {prefill.gpu_share:g} and decode.gpu_share {decode.gpu_share:g} are {both:g} of a card, which an "
            "instance of each is on: together they may be 1"
        )
