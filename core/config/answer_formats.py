"""The names of the formats in which models write tool calls and reasoning."""

from typing import Literal

ToolFormat = Literal[
    "none",
    "harmony",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "mistral",
    "gemma4",
    "cohere",
    "seed_oss",
    "minimax_m2",
    "hy_v3",
    "hy_v3_open",
    "hunyuan",
    "glm45",
    "qwen3_coder",
    "hermes",
    "apertus",
    "jamba",
    "phi4_mini_json",
    "granite",
    "nemotron",
    "internlm",
    "lfm2",
    "olmo3",
    "llama3_json",
    "pythonic",
]
ReasoningFormat = Literal[
    "none", "think", "mistral", "harmony", "seed_oss", "cohere", "hy_v3_open", "apertus", "gemma4"
]
