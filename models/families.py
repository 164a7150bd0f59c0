"""From each family's config.json to a ModelSpec. What a family may ask for and Baton cannot do is refused here, by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import UnsupportedModel
from models.spec import Activation, ModelSpec, read_json, rope_spec

Config = Mapping[str, Any]
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Gemma2ForCausalLM": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
"""What a family means where its config.json is silent, and where silence is not the same as null."""
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_spec(folder: Path) -> ModelSpec:
    """The model in `folder`, without touching its weights. Raises ConfigError and UnsupportedModel."""
    config = read_json(folder / "config.json")
    names = config.get("architectures") or ["(none)"]
    family = _FAMILIES.get(names[0])
    if family is None:
        raise UnsupportedModel(
            f"architecture {names[0]!r} is not supported; Baton serves {', '.join(_FAMILIES)}"
        )
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise UnsupportedModel(
            f"quantization_config ({method}) is not supported: use a float32 or bfloat16 checkpoint"
        )
    try:
        spec = family({**_DEFAULTS[names[0]], **config})
        _check(spec)
        return _with_generation_config(spec, config, folder)
    except KeyError as error:
        raise UnsupportedModel(f"config.json of {names[0]} lacks {error}") from None
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"config.json or generation_config.json in {folder} holds a value of the wrong kind: {error}"
        ) from None


def _check(spec: ModelSpec) -> None:
    """What no weight's shape would show."""
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {spec.num_heads} is no multiple of num_key_value_heads {spec.num_kv_heads}"
        )
    if spec.head_dim % 2:
        raise UnsupportedModel(f"head_dim {spec.head_dim} is odd: rotary embeddings need pairs")
    if len(spec.windows) != spec.num_layers:
        raise UnsupportedModel(
            f"layer_types has {len(spec.windows)} entries for {spec.num_layers} num_hidden_layers"
        )


def _llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(
        _common(config), qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


def _mistral(config: Config) -> ModelSpec:
    return replace(_common(config), windows=_windows(config, lambda _: bool(config.get("sliding_window"))))


def _qwen2(config: Config) -> ModelSpec:
    return replace(_common(config), qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(_common(config), qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_qwen_windows(config))


def _gemma2(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported")
    bias = bool(config.get("attention_bias", False))
    return replace(
        _common(config, activation_key="hidden_activation"),
        qkv_bias=bias,
        out_bias=bias,
        windows=_windows(config, lambda layer: layer % 2 == 0),
        post_norms=True,
        unit_offset_norm=True,
        embedding_scale=float(_count(config, "hidden_size")) ** 0.5,
        query_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
    )


_FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
}


def _common(config: Config, activation_key: str = "hidden_act") -> ModelSpec:
    num_heads = _count(config, "num_attention_heads")
    num_layers = _count(config, "num_hidden_layers")
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=_count(config, "vocab_size"),
        hidden_size=_count(config, "hidden_size"),
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads
        if config.get("num_key_value_heads") is None
        else _count(config, "num_key_value_heads"),
        head_dim=_count(config, "hidden_size") // num_heads
        if config.get("head_dim") is None
        else _count(config, "head_dim"),
        norm_eps=float(config["rms_norm_eps"]),
        max_context_tokens=_count(config, "max_position_embeddings"),
        rope=rope_spec(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        activation=_activation(config.get(activation_key, "silu")),
        windows=(0,) * num_layers,
    )


def _count(config: Config, key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key} is {value!r} in config.json; it must be a positive whole number")
    return value


def _activation(name: str) -> Activation:
    if name == "silu":
        return "silu"
    if name == "gelu_pytorch_tanh":
        return "gelu_tanh"
    raise UnsupportedModel(f"activation {name!r} is not supported (silu and gelu_pytorch_tanh are)")


def _windows(config: Config, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Layer by layer, from `layer_types` where the config has them."""
    num_layers, window = _count(config, "num_hidden_layers"), int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types")
    if kinds and (unknown := set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(
            f"layer type {sorted(unknown)[0]!r} is not supported (full_attention and sliding_attention are)"
        )
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return tuple(window if slides(layer) else 0 for layer in range(num_layers))


def _qwen_windows(config: Config) -> tuple[int, ...]:
    if not config.get("use_sliding_window", False):
        return (0,) * _count(config, "num_hidden_layers")
    return _windows(config, lambda layer: layer >= int(config["max_window_layers"]))


def _with_generation_config(spec: ModelSpec, config: Config, folder: Path) -> ModelSpec:
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    sampling = {key: float(generation[key]) for key in _SAMPLING_KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return replace(spec, eos_token_ids=ids, default_sampling=sampling)
