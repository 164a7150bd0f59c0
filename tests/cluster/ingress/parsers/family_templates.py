"""The parts of families' chat templates that render tools and calls, abridged from what their checkpoints carry."""

from dataclasses import dataclass

CHATML_END = "<|im_end|>\n"
_CHATML = """{%- if tools %}<|im_start|>system
You may call functions: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content if message.content else '' }}{%- for tool_call in message.tool_calls or [] %}
{%- set tool_call = tool_call.function %}CALL{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_QWEN = """
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>"""
_QWEN_CODER = """
<tool_call>
<function={{ tool_call.name }}>
{% for key, value in tool_call.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""
_GLM = """
<tool_call>{{ tool_call.name }}
{% for key, value in tool_call.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>"""
_SEED = """
<seed:tool_call>
<function={{ tool_call.name }}>
{% for key, value in tool_call.arguments.items() %}<parameter={{ key }}>
{{- value if value is string else value | string }}</parameter>
{% endfor %}</function>
</seed:tool_call>"""
_KIMI = """<|tool_call_begin|>{{ 'functions.' + tool_call.name + ':' + loop.index0 | string }}
{{- '<|tool_call_argument_begin|>' }}{{ tool_call.arguments | tojson }}<|tool_call_end|>"""
_MINIMAX = """
{{- '<invoke name="' + tool_call.name + '">\n' }}{% for key, value in tool_call.arguments.items() %}
{{- '<parameter name="' + key + '">' }}{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
"""
_HY = """<tool_call>{{ tool_call.name }}<tool_sep>
{% for key, value in tool_call.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
"""
_COHERE = """{{- '\n    ' }}{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}
{{- ',' if not loop.last else '\n]' }}"""
_INTERNLM = """
<|action_start|><|plugin|>
{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|action_end|>"""
_DSML = """
{{- '<｜DSML｜invoke name="' + tool_call.name + '">\n' }}{% for key, value in tool_call.arguments.items() %}
{{- '<｜DSML｜parameter name="' + key + '" string="' + (value is string) | string | lower + '">' }}
{{- value if value is string else value | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
"""
_APERTUS = """{{- '{"' + tool_call.name + '": ' }}{{ tool_call.arguments | tojson }}{{ '}' }}{{ ', ' if not loop.last }}"""
_GEMMA = """{{- '<|tool_call>call:' + tool_call.name + '{' }}{% for key, value in tool_call.arguments.items() %}
{{- key + ':' }}{{ '<|"|>' + value + '<|"|>' if value is string else value | tojson }}{{ ',' if not loop.last }}
{%- endfor %}{{ '}<tool_call|>' }}"""
_LFM = """{{ tool_call.name }}({% for key, value in tool_call.arguments.items() %}
{{- key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}"""
_LLAMA = """{%- if tools %}Respond with {"name": function name, "parameters": dictionary of argument name and its value}.
{{ tools | tojson }}{% endif %}{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
_MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}{{- '[TOOL_CALLS][' }}{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if tool_call.id | length != 9 %}{{- raise_exception('Tool call IDs should have length 9!') }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']</s>' }}{%- endif %}{%- endfor %}
{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
{%- else %}{{- '[TOOL_RESULTS]' + message.tool_call_id + message.content + '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""
_DEEPSEEK = """{%- if tools %}{{ tools | tojson }}{% endif %}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}
{{- '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']
+ '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- elif message['role'] == 'assistant' %}
{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- if message['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + THINK }}{%- endif %}"""
_GPT_OSS = """{%- if tools %}# Tools
{{ tools | tojson }}{% endif %}{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
{%- if message.tool_calls %}{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}
{{- tool_call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    formats: tuple[str, str]
    end: str
    """What ends an assistant's turn."""
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Tokens beyond the vocabulary that published tokenizers do not call special."""
    opened: bool = False
    one_call: bool = False
    """Its template renders one call alone."""


def _listed(begin: str, call: str, end: str) -> str:
    """A template with marks around all calls of a turn."""
    before, _, behind = _CHATML.partition("{%- for tool_call")
    behind = behind.replace(
        "{%- endfor %}<|im_end|>",
        f"{{%- endfor %}}{{%- if message.tool_calls %}}{{{{- '{end}' }}}}{{%- endif %}}<|im_end|>",
        1,
    )
    whole = (
        f"{before}{{%- if message.tool_calls %}}{{{{- '{begin}' }}}}{{%- endif %}}{{%- for tool_call{behind}"
    )
    return whole.replace("CALL", call)


_ARGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
FAMILIES = {
    "qwen2.5": Family(_CHATML.replace("CALL", _QWEN), ("hermes", "none"), CHATML_END, added=_TOOL_CALL),
    "qwen3-coder": Family(
        _CHATML.replace("CALL", _QWEN_CODER), ("qwen3_coder", "none"), CHATML_END, added=_TOOL_CALL
    ),
    "llama 3.1": Family(_LLAMA, ("llama3_json", "none"), "<|eot_id|>", one_call=True),
    "mistral": Family(_MISTRAL, ("mistral", "none"), "</s>", ("[TOOL_CALLS]",)),
    "deepseek-v3": Family(
        _DEEPSEEK.replace("THINK", "''"),
        ("deepseek_v3", "think"),
        _DEEPSEEK_END,
        (_DEEPSEEK_END,),
        (*_DEEPSEEK_MARKS, "<think>", "</think>"),
    ),
    "deepseek-r1": Family(
        _DEEPSEEK.replace("THINK", "'<think>\\n'"),
        ("deepseek_v3", "think"),
        _DEEPSEEK_END,
        (_DEEPSEEK_END,),
        (*_DEEPSEEK_MARKS, "<think>", "</think>"),
        opened=True,
    ),
    "glm-4.5": Family(
        _CHATML.replace("CALL", _GLM), ("glm45", "none"), CHATML_END, added=(*_TOOL_CALL, *_ARGS)
    ),
    "seed-oss": Family(
        _CHATML.replace("CALL", _SEED),
        ("seed_oss", "none"),
        CHATML_END,
        special=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "kimi-k2": Family(
        _listed("<|tool_calls_section_begin|>", _KIMI, "<|tool_calls_section_end|>"),
        ("kimi_k2", "none"),
        CHATML_END,
        special=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "minimax-m2": Family(
        _listed("\\n<minimax:tool_call>\\n", _MINIMAX, "\\n</minimax:tool_call>"),
        ("minimax_m2", "none"),
        CHATML_END,
        added=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "hunyuan 3": Family(
        _listed("<tool_calls>\\n", _HY, "\\n</tool_calls>"),
        ("hy_v3", "none"),
        CHATML_END,
        special=("<tool_calls>", "</tool_calls>", "<tool_sep>", *_TOOL_CALL, *_ARGS),
    ),
    "command": Family(
        _listed("<|START_ACTION|>[", _COHERE, "<|END_ACTION|>"),
        ("cohere", "none"),
        CHATML_END,
        special=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "gemma 4": Family(
        _CHATML.replace("CALL", _GEMMA),
        ("gemma4", "none"),
        CHATML_END,
        special=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "internlm": Family(
        _CHATML.replace("CALL", _INTERNLM),
        ("internlm", "none"),
        CHATML_END,
        special=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "deepseek-v3.2": Family(
        _listed("<｜DSML｜function_calls>\\n", _DSML, "\\n</｜DSML｜function_calls>"),
        ("deepseek_v32", "none"),
        CHATML_END,
        special=("｜DSML｜",),
    ),
    "apertus": Family(
        _listed("<|tools_prefix|>[", _APERTUS, "]<|tools_suffix|>"),
        ("apertus", "none"),
        CHATML_END,
        special=("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "lfm2": Family(
        _listed("<|tool_call_start|>[", _LFM, "]<|tool_call_end|>"),
        ("lfm2", "none"),
        CHATML_END,
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "gpt-oss": Family(_GPT_OSS, ("harmony", "harmony"), "<|call|>", _HARMONY_MARKS, one_call=True),
}
