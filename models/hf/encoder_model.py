"""An encoder's layers, computed by transformers: the texts of a step in one row, each of which attends to itself alone.

transformers' modules ask for attention through an interface, where this one is registered; positions tell texts apart. As it is
loaded a model is compared with what transformers computes text by text. One whose attention is built in (MPNet, DeBERTa) computes
texts one after the other."""

import contextvars
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MODEL_MAPPING, AttentionInterface, AutoConfig, AutoModel

from core.errors import UnsupportedModel
from kernels.ops import Ops
from models.hf.encoder_spec import first_position
from models.hf.linear import pack_products
from models.spec.model_spec import ModelSpec

_NAME: Final = "baton_texts"
_CHECKED: Final = (5, 3)
"""Lengths of the texts in the comparison; the first grows beyond the widest window."""
_LONGEST_CHECKED: Final = 300
_STARTS: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("starts")
"""First rows of a step's texts, and the end of the last."""


class EncoderModel:
    """All of an encoder, on one rank."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tolerance: float,
        on_read: Callable[[], None],
    ) -> None:
        """`tolerance`: how far hidden states may be off transformers' own, as a share of their length. `on_read` is called when
        weights are there.

        Raises UnsupportedModel."""
        self.spec = spec
        self._base, self._packs = _load(folder, spec, dtype, device)
        self.bytes_read = sum(tensor.nbytes for tensor in self._base.state_dict().values())
        on_read()
        self._first = first_position(self._base.config)
        self._tells_pairs = "token_type_ids" in signature(self._base.forward).parameters
        texts = [_random_text(length, spec, self._base.config, device) for length in _CHECKED]
        try:
            with _own_attention(self._base, packs=self._packs):
                wanted = [self._alone(text) for text in texts]
            pack_products(self._base, ops, dtype)
            self._compare(texts, wanted, tolerance)
        except (AttributeError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise _refused(
                spec, f"transformers' code for it does not run over packed texts: {error}"
            ) from error

    def encode(self, texts: Sequence[Tensor], seconds: Sequence[int] = ()) -> list[Tensor]:
        """Token ids (T,) of each text -> its hidden states (T, hidden_size). `seconds`: where a second text begins in each; 0 or
        none: nowhere."""
        kinds = _kinds(texts, seconds) if self._tells_pairs and any(seconds) else None
        if not self._packs:
            told = [None] * len(texts) if kinds is None else kinds
            return [self._alone(*text) for text in zip(texts, told, strict=True)]
        lengths = [len(text) for text in texts]
        places = torch.cat([torch.arange(self._first, self._first + length) for length in lengths])
        token = _STARTS.set(_starts(lengths))
        try:
            packed = torch.cat([*texts])
            told = {} if kinds is None else {"token_type_ids": torch.cat(kinds)[None]}
            out = self._base(input_ids=packed[None], position_ids=places[None].to(packed.device), **told)
        finally:
            _STARTS.reset(token)
        return list(out.last_hidden_state[0].split(lengths))

    def _alone(self, text: Tensor, kinds: Tensor | None = None) -> Tensor:
        told = {} if kinds is None else {"token_type_ids": kinds[None]}
        return self._base(input_ids=text[None], **told).last_hidden_state[0]

    def _compare(self, texts: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
        for ours, theirs in zip(self.encode(texts), wanted, strict=True):
            off = float((ours - theirs).float().norm() / theirs.float().norm().clamp_min(1e-9))
            if not off <= tolerance:
                raise _refused(
                    self.spec,
                    f"with texts in one row its hidden states are {off:.0%} off what transformers computes of each alone",
                )


def _load(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[Any, bool]:
    """Return transformers' model, and whether its attention can be asked for. Raises UnsupportedModel."""
    AttentionInterface.register(_NAME, _attend)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind: Any = MODEL_MAPPING[type(config)]
    packs = bool(kind._supports_attention_backend)
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_NAME if packs else "eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"transformers cannot load {folder}: {error}") from None
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise UnsupportedModel(f"the checkpoint in {folder} lacks {', '.join(missing[:3])}")
    if hasattr(model, "pooler"):
        model.pooler = None  # what follows the hidden states is models/pooling/readout.py's
    return model.to(device).eval(), packs


@contextmanager
def _own_attention(model: Any, *, packs: bool) -> Generator[None]:
    if packs:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if packs:
            model.set_attn_implementation(_NAME)


def _random_text(length: int, spec: ModelSpec, config: Any, device: torch.device) -> Tensor:
    """Return token ids (length,) without padding tokens, which transformers would not count."""
    window = getattr(config, "sliding_window", None) or 0
    longest = min(spec.max_context_tokens, _LONGEST_CHECKED)
    length = min(longest, length + (2 * window if length == _CHECKED[0] else 0))
    rng = torch.Generator().manual_seed(length)
    text = torch.randint(spec.vocab_size, (length,), generator=rng)
    text[text == config.pad_token_id] = (config.pad_token_id + 1) % spec.vocab_size
    return text.to(device)


def _kinds(texts: Sequence[Tensor], seconds: Sequence[int]) -> list[Tensor]:
    """Return (T,) int64 of each text: 1 from where its second begins."""
    return [
        (torch.arange(len(text), device=text.device) >= (at or len(text))).long()
        for text, at in zip(texts, seconds, strict=True)
    ]


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return tuple(starts)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query (1, H, T, D), key and value (1, Hkv, T, D) -> (1, T, H, D)."""
    del dropout
    if attention_mask is not None or getattr(module, "is_causal", False):
        raise UnsupportedModel("an encoder's layer attends by a mask of its own, or to former tokens alone")
    if others.get("softcap") or others.get("s_aux") is not None or others.get("position_bias") is not None:
        raise UnsupportedModel("an encoder's layer adds to its attention's scores")
    out = torch.empty_like(query)
    for start, stop in pairwise(_STARTS.get()):
        rows = slice(start, stop)
        out[:, :, rows] = F.scaled_dot_product_attention(
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            attn_mask=_window(stop - start, sliding_window, query.device),
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return out.transpose(1, 2), None


def _window(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool: who is less than `sliding_window` away; None where everybody is."""
    if not sliding_window or length <= sliding_window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < sliding_window


def _refused(spec: ModelSpec, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"architecture {spec.architecture!r} is not supported: {why}")
