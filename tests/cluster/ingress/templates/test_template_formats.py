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
        (template(GLM, THINK), ("none", "think")),
        (template(HUNYUAN), ("none", "none")),
        (template(SEED, SEED_THINK), ("none", "none")),
        (template(KIMI), ("none", "none")),
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
        (template(GLM), "writes calls in a format that Baton cannot read"),
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
