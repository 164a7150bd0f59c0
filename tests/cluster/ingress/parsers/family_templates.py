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
    "gpt-oss": Family(_GPT_OSS, ("harmony", "harmony"), "<|call|>", _HARMONY_MARKS, one_call=True),
}
