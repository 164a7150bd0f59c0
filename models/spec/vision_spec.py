"""What a model that reads images has beside its decoder."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """transformers computes it."""

    architecture: str
    """The whole model's."""
    token_id: int
    """The token of the vocabulary that stands for each row that the tower makes of an image."""
    num_patches: int
    """Rows that go through the tower for one image, at the most."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    prefixes: tuple[str, ...]
    """Beginnings of the names of its tensors."""
    num_deep: int = 0
    """Behind how many of the decoder's first layers more is added to an image's tokens, which the tower makes with its rows
    (DeepStack, arXiv:2406.04334)."""
    whole_rows: int = 0
    """How many neighbouring tokens of an image attend to each other in both directions, so that one step computes all of them;
    0: attention is causal within images, too."""
