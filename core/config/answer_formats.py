"""The names of the formats in which models write tool calls and reasoning."""

from typing import Literal

ToolFormat = Literal[
    "none",
    "harmony",
    "deepseek_v3",
    "kimi_k2",
    "mistral",
    "cohere",
    "seed_oss",
    "minimax_m2",
    "hy_v3",
    "hunyuan",
    "glm45",
    "qwen3_coder",
    "hermes",
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
ReasoningFormat = Literal["none", "think", "mistral", "harmony", "seed_oss", "cohere"]
