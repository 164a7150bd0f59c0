"""The forward pass of every supported family: a pre-norm decoder over packed tokens and a paged KV cache.

Everything that differs between families is data in ModelSpec. Nothing here knows ranks, requests or phases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, Ops
from models.rope import inverse_frequencies
from models.spec import ModelSpec
from models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_attention_norm: Tensor | None
    post_mlp_norm: Tensor | None


class Model:
    def __init__(self, spec: ModelSpec, ops: Ops, checkpoint: Checkpoint, device: torch.device) -> None:
        self.spec, self._ops = spec, ops
        self._embedding = checkpoint.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        self._layers = [_read_layer(spec, checkpoint, f"model.layers.{i}.") for i in range(spec.num_layers)]
        self._norm = _norm(spec, checkpoint, "model.norm.weight", spec.hidden_size)
        if spec.tied:
            checkpoint.ignore("lm_head.weight")
            self._head = self._embedding
        else:
            self._head = checkpoint.take("lm_head.weight", (spec.vocab_size, spec.hidden_size))
        frequencies, self._rope_factor = inverse_frequencies(
            spec.rope, spec.head_dim, spec.max_context_tokens
        )
        self._frequencies = frequencies.to(device)
        self._activation = ops.silu_mul if spec.activation == "silu" else ops.gelu_tanh_mul

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Sequence[Tensor],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """(T,), (T,) -> hidden (T, hidden_size) before the head. Writes the tokens' K and V into `kv`.

        `on_layer(l)` is called as soon as layer l's K and V are all in `kv`."""
        spec = self.spec
        x = torch.nn.functional.embedding(tokens, self._embedding)
        if spec.embedding_scale != 1.0:
            x = x * torch.tensor(spec.embedding_scale, dtype=x.dtype)
        cos, sin = self._rotation(positions, x.dtype)
        for index, layer in enumerate(self._layers):
            x = self._attend(x, layer, index, kv[index], meta, cos, sin, on_layer)
            x = self._mlp(x, layer)
        return self._ops.rms_norm(x, self._norm, spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, hidden_size) -> (N, vocab_size) float32."""
        logits = self._ops.linear(hidden, self._head, None).float()
        cap = self.spec.logit_soft_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self._rope_factor).to(dtype), (angles.sin() * self._rope_factor).to(dtype)

    def _attend(
        self,
        x: Tensor,
        layer: Layer,
        index: int,
        kv_layer: Tensor,
        meta: AttentionMeta,
        cos: Tensor,
        sin: Tensor,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        spec, ops = self.spec, self._ops
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, spec.norm_eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * kv_heads, spec.head_dim)
        if layer.q_norm is None or layer.k_norm is None:
            rotated = ops.rope(qkv[:, : heads + kv_heads], cos, sin)
            q, k = rotated[:, :heads], rotated[:, heads:]
        else:
            q = ops.rope(ops.rms_norm(qkv[:, :heads], layer.q_norm, spec.norm_eps), cos, sin)
            k = ops.rope(
                ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, spec.norm_eps), cos, sin
            )
        ops.write_kv(k, qkv[:, heads + kv_heads :], kv_layer, meta)
        if on_layer is not None:
            on_layer(index)
        window = spec.windows[index]
        attended = ops.paged_attention(
            q, kv_layer, meta, spec.attention_scale, window, spec.attention_soft_cap
        )
        out = ops.linear(attended.reshape(-1, heads * spec.head_dim), layer.out, layer.out_bias)
        if layer.post_attention_norm is not None:
            out = ops.rms_norm(out, layer.post_attention_norm, spec.norm_eps)
        return x + out

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        spec, ops = self.spec, self._ops
        gate_up = ops.linear(
            ops.rms_norm(x, layer.mlp_norm, spec.norm_eps), layer.gate_up, layer.gate_up_bias
        )
        out = ops.linear(self._activation(gate_up), layer.down, layer.down_bias)
        if layer.post_mlp_norm is not None:
            out = ops.rms_norm(out, layer.post_mlp_norm, spec.norm_eps)
        return x + out


def _norm(spec: ModelSpec, checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    weight = checkpoint.take(name, (size,), torch.float32)
    return weight + 1.0 if spec.unit_offset_norm else weight


def _read_layer(spec: ModelSpec, checkpoint: Checkpoint, prefix: str) -> Layer:
    hidden, middle = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def fused(parts: Sequence[tuple[str, int]], bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat(
            [checkpoint.take(f"{prefix}{name}.weight", (size, hidden)) for name, size in parts]
        )
        if not bias:
            return weight, None
        return weight, torch.cat([checkpoint.take(f"{prefix}{name}.bias", (size,)) for name, size in parts])

    def single(name: str, inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = checkpoint.take(f"{prefix}{name}.weight", (hidden, inputs))
        return weight, checkpoint.take(f"{prefix}{name}.bias", (hidden,)) if bias else None

    def norm(name: str, size: int = hidden, wanted: bool = True) -> Tensor | None:
        return _norm(spec, checkpoint, f"{prefix}{name}.weight", size) if wanted else None

    qkv, qkv_bias = fused(
        [("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)],
        spec.qkv_bias,
    )
    out, out_bias = single("self_attn.o_proj", q_size, spec.out_bias)
    gate_up, gate_up_bias = fused([("mlp.gate_proj", middle), ("mlp.up_proj", middle)], spec.mlp_bias)
    down, down_bias = single("mlp.down_proj", middle, spec.mlp_bias)
    attention_norm = norm("input_layernorm")
    mlp_norm = norm("pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm")
    assert attention_norm is not None
    assert mlp_norm is not None
    return Layer(
        qkv, qkv_bias, out, out_bias, gate_up, gate_up_bias, down, down_bias, attention_norm, mlp_norm,
        q_norm=norm("self_attn.q_norm", spec.head_dim, spec.qk_norm),
        k_norm=norm("self_attn.k_norm", spec.head_dim, spec.qk_norm),
        post_attention_norm=norm("post_attention_layernorm", wanted=spec.post_norms),
        post_mlp_norm=norm("post_feedforward_layernorm", wanted=spec.post_norms),
    )  # fmt: skip
