"""How the models of each family write a call with given arguments, and the same with what models get wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.ingress.parsers.model_formats import ToolFormat

V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class Markup:
    """`{name}` and `{arguments}` stand for a call's."""

    tools: ToolFormat
    call: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    one_call: bool = False
    """A turn has one call, and text comes before it."""

    def write(self, *calls: tuple[str, Any]) -> str:
        return self.wrap(*(self.one(name, arguments) for name, arguments in calls))

    def wrap(self, *calls: str) -> str:
        return self.opening + self.between.join(calls) + self.closing

    def one(self, name: str, arguments: Any) -> str:
        """Return a call. `arguments`: an object, or text as the model writes it."""
        text = arguments if isinstance(arguments, str) else self.arguments(arguments)
        return self.call.replace("{name}", name).replace("{arguments}", text)

    def arguments(self, values: Mapping[str, Any]) -> str:
        match self.tools:
            case "qwen3_coder":
                return "".join(
                    f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in values.items()
                )
            case "pythonic":
                return ", ".join(f"{key}={value!r}" for key, value in values.items())
            case _:
                return json.dumps(values, ensure_ascii=False)


def _bare(value: Any) -> str:
    """As the model's template has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


MARKUPS: Mapping[str, Markup] = {
    "hermes": Markup(
        "hermes", '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', between="\n"
    ),
    "qwen3_coder": Markup(
        "qwen3_coder", "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", between="\n"
    ),
    "llama3_json": Markup("llama3_json", '{"name": "{name}", "parameters": {arguments}}', between="; "),
    "pythonic": Markup("pythonic", "{name}({arguments})", "[", ", ", "]"),
    "mistral": Markup("mistral", '{"name": "{name}", "arguments": {arguments}}', "[TOOL_CALLS][", ", ", "]"),
    "mistral v11": Markup("mistral", "[TOOL_CALLS]{name}[ARGS]{arguments}"),
    "deepseek_v3": Markup(
        "deepseek_v3",
        V3.format("{name}", "{arguments}"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Markup(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "harmony": Markup(
        "harmony",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        between="<|start|>assistant",
        one_call=True,
    ),
}
