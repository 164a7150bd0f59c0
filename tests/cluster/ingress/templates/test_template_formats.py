"""A model's markup is that of the parser which reads what its chat template renders."""

from pathlib import Path

import pytest

from core.errors import RequestError
from tests.cluster.ingress.api.templated import ASK, TOOL, chat_with, tokenizer_with
from tests.cluster.ingress.api.templated import Chat as TemplatedChat

HEAD = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
TURNS = """{% for m in messages %}[{{ m.role }}]
{% if m.role == 'assistant' %}THOUGHT{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}
{% else %}{{ m.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}"""
HERMES = """<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>"""
GLM = """<tool_call>{{ f.name }}
{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>"""
HUNYUAN = """<tool_calls><tool_call>{{ f.name }}
```json
{{ f.arguments | tojson }}
```</tool_call></tool_calls>"""
SEED = """<seed:tool_call><function={{ f.name }}>{% for k, v in f.arguments.items() %}
<parameter={{ k }}>{{ v }}</parameter>{% endfor %}
</function></seed:tool_call>"""
KIMI = """<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ f.name }}:0<|tool_call_argument_begin|>
{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"""
GLM_5 = GLM.replace("\n", "")
HUNYUAN_3 = f"<tool_calls>\n{GLM.replace('}}', '}}<tool_sep>', 1)}\n</tool_calls>"
MINIMAX = """
<minimax:tool_call>
<invoke name="{{ f.name }}">
{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>
{% endfor %}</invoke>
</minimax:tool_call>"""
COHERE = """<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
]<|END_ACTION|>"""
LISTED = """{}[{{{{ f | tojson }}}}]{}"""
GEMMA = """<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments.items() %}{{ k }}:
{{- '<|"|>' + v + '<|"|>' if v is string else v }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"""
INTERNLM = """<|action_start|><|plugin|>
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|action_end|>"""
CODER = """<tool_call>
<function={{ f.name }}>
{% for k, v in f.arguments.items() %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>
</tool_call>"""
LLAMA = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
PYTHONIC = "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}, {% endfor %})]"
MISTRAL = "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
COHERE_THINK = THINK.replace("</think>", "<|END_THINKING|>").replace("<think>", "<|START_THINKING|>")
GEMMA_THINK = (
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
)
SEED_THINK = "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}"


def template(call: str, thought: str = "", head: str = HEAD) -> str:
    return head + TURNS.replace("CALL", call).replace("THOUGHT", thought)


@pytest.mark.parametrize(
    ("source", "formats"),
    [
        (template(HERMES), ("hermes", "none")),
        (template(HERMES, THINK), ("hermes", "think")),
        (template(CODER, THINK.replace("reasoning_content", "reasoning")), ("qwen3_coder", "think")),
        (template(LLAMA), ("llama3_json", "none")),
        (template(LLAMA, head=HEAD + "Write [func_name1(x=1)]."), ("pythonic", "none")),
        (template(PYTHONIC), ("pythonic", "none")),
        (template(MISTRAL), ("mistral", "none")),
        (template(GLM, THINK), ("glm45", "think")),
        (template(GLM_5, THINK), ("glm45", "think")),
        (template(HUNYUAN), ("hunyuan", "none")),
        (template(HUNYUAN_3, THINK), ("hy_v3", "think")),
        (template(SEED, SEED_THINK), ("seed_oss", "seed_oss")),
        (template(MINIMAX, THINK), ("minimax_m2", "think")),
        (template(KIMI), ("kimi_k2", "none")),
        (template(COHERE, COHERE_THINK), ("cohere", "cohere")),
        (template(LISTED.format("<tool_calls>", "</tool_calls>")), ("jamba", "none")),
        (template(LISTED.format("<|tool_call|>", "<|/tool_call|>")), ("phi4_mini_json", "none")),
        (template(LISTED.format("<|tool_call|>", "")), ("granite", "none")),
        (template(LISTED.format("<TOOLCALL>", "</TOOLCALL>"), THINK), ("nemotron", "think")),
        (template(INTERNLM), ("internlm", "none")),
        (template(GEMMA, GEMMA_THINK), ("gemma4", "gemma4")),
        (
            template(MINIMAX.replace("minimax:", "").replace("tool_call>", "｜DSML｜tool_calls>")),
            ("none", "none"),
        ),
        (template(f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>"), ("lfm2", "none")),
        (template(f"<function_calls>{PYTHONIC[1:-1]}</function_calls>"), ("olmo3", "none")),
        (template(f"<odd>{GLM[11:-12]}</odd>"), ("none", "none")),
        (template("<tool_call>{{ f | tojson }}") + "{# <function= #}", ("hermes", "none")),
        (template(HERMES, head="{# tools <tool_call> #}"), ("none", "none")),
        ("{{ messages[0].content }} tools <tool_call>", ("none", "none")),
        (template(HERMES) + "{# content.split('</think>') #}", ("hermes", "think")),
        (template(HERMES) + "{# </think> [THINK] #}", ("hermes", "none")),
        (
            template(HERMES).replace("[assistant]\n{% endif", "[assistant]<think>\n{% endif"),
            ("hermes", "think"),
        ),
    ],
)
def test_a_format_is_found_where_its_parser_reads_what_is_rendered(
    source: str, formats: tuple[str, str], tmp_path: Path
) -> None:
    assert chat_with(source, tmp_path).formats == formats


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (template(f"<odd>{GLM[11:-12]}</odd>"), "writes calls in a format that Baton cannot read"),
        (template(HERMES, head=""), "shows the model no tools"),
        (template(""), "leaves calls out of a conversation"),
    ],
)
def test_a_refusal_of_tools_says_what_the_template_lacks(source: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"{problem}.*--tool-call-parser"):
        chat_with(source, tmp_path).prompt(ASK, tools=[TOOL])


def test_the_configurations_word_stands_above_the_templates(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(template(GLM, THINK), tmp_path)
    chat = TemplatedChat(tokenizer, tool_call_parser="hermes", reasoning_parser="none")
    assert chat.formats == ("hermes", "none")
    assert "paint" in chat.prompt(ASK, tools=[TOOL])
