"""Nothing of a conversation is lost in a chat template: what one would leave out is moved, or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.requests.conversation import ChatMessage, MessageCall
from cluster.ingress.templates.message_shapes import condensed, shapes_of
from core.errors import RequestError
from tests.cluster.ingress.api.templated import (
    ASK,
    PARAMETERS,
    SYSTEM,
    TOOL,
    call,
    calling,
    chat_with,
    result,
)

LATER = {"role": "system", "content": "Mind the gap."}
ANSWER = {"role": "assistant", "content": "Blue."}
GO_ON = {"role": "user", "content": "And then?"}
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
IN_PLACE = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}CALLS{% endfor %}"
FIRST_ALONE = """{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}
{%- for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content or '' }}CALLS{% endfor %}"""
DEMANDS_FIRST = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content or '' }}CALLS
{%- endfor %}"""
NO_SYSTEM = (
    """{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content or '' }}CALLS{% endfor %}"""
)
ALTERNATES = """{% if messages[0].role == 'system' %}{% set told = messages[0].content + ' ' %}
{%- set messages = messages[1:] %}{% else %}{% set told = '' %}{% endif %}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{{- '[' + m.role + ']' + (told if loop.first else '') + m.content }}{% endfor %}"""
TEXT_OR_CALLS = """{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}CALLS{% else %}{{ m.content }}
{%- endif %}{% endfor %}"""
ONE_CALL = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}
{%- if loop.first %}<tool_call>{{ c.function | tojson }}</tool_call>{% endif %}{% endfor %}{% endfor %}"""
NO_LATE_RESULT = """{% for m in messages %}[{{ m.role }}]{% if m.role != 'tool' or messages[loop.index0 - 1].role != 'tool' %}
{{- m.content or '' }}CALLS{% endif %}{% endfor %}"""
NO_RESULTS = (
    """{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content or '' }}CALLS{% endfor %}"""
)


def rendered(template: str, folder: Path, *messages: dict[str, Any], **body: Any) -> str:
    return chat_with(TOOLS + template.replace("CALLS", CALLS), folder).prompt(*messages, **body)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (IN_PLACE, "[system]Be brief.[user]Which shade?[system]Mind the gap.[user]And then?"),
        (FIRST_ALONE, "[system]Be brief.\n\nMind the gap.[user]Which shade?[user]And then?"),
        (DEMANDS_FIRST, "[system]Be brief.\n\nMind the gap.[user]Which shade?[user]And then?"),
        (NO_SYSTEM, "[user]Be brief.\n\nMind the gap.\n\nWhich shade?[user]And then?"),
        (ALTERNATES, "[user]Be brief.\n\nMind the gap. Which shade?\n\nAnd then?"),
    ],
)
def test_a_system_message_behind_the_users_is_not_lost(template: str, prompt: str, tmp_path: Path) -> None:
    assert rendered(template, tmp_path, SYSTEM, ASK, LATER, GO_ON) == prompt


def test_a_system_message_behind_the_users_alone_comes_first(tmp_path: Path) -> None:
    assert rendered(DEMANDS_FIRST, tmp_path, ASK, LATER) == "[system]Mind the gap.[user]Which shade?"
    assert rendered(FIRST_ALONE, tmp_path, ASK, ANSWER, LATER, GO_ON).startswith("[system]Mind the gap.")


def test_two_system_messages_become_one_where_the_template_takes_one(tmp_path: Path) -> None:
    prompt = rendered(FIRST_ALONE, tmp_path, SYSTEM, {**LATER, "role": "developer"}, ASK)
    assert prompt == "[system]Be brief.\n\nMind the gap.[user]Which shade?"


def test_text_beside_calls_is_not_lost(tmp_path: Path) -> None:
    said = calling(call("call_a"), content="I look.")
    prompt = rendered(TEXT_OR_CALLS, tmp_path, ASK, said, result("call_a", "seen"), tools=[TOOL])
    assert "[assistant]I look.[assistant]<tool_call>" in prompt
    assert prompt.endswith("</tool_call>[tool]seen")


def test_reasoning_beside_text_and_calls_goes_with_the_calls(tmp_path: Path) -> None:
    shows = TEXT_OR_CALLS.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}({{ m.reasoning_content }})")
    said = {**calling(call("call_a"), content="I look."), "reasoning_content": "Hm."}
    prompt = rendered(shows, tmp_path, ASK, said, result("call_a", "seen"), tools=[TOOL])
    assert "[assistant]I look.[assistant](Hm.)<tool_call>" in prompt


def test_calls_beyond_the_first_are_not_lost_and_go_before_their_results(tmp_path: Path) -> None:
    said = calling(call("call_a", '{"n": 1}'), call("call_b", '{"n": 2}'))
    results = result("call_b", "second"), result("call_a", "first")
    prompt = rendered(ONE_CALL, tmp_path, ASK, said, *results, GO_ON, tools=[TOOL])
    places = [prompt.index(part) for part in ('{"n": 1}', "first", '{"n": 2}', "second", "And then?")]
    assert places == sorted(places)


def test_results_that_the_template_leaves_out_are_refused_by_their_place(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"messages\[2\]: .* would leave out a tool's result"):
        rendered(NO_RESULTS, tmp_path, ASK, calling(call("call_a")), result("call_a", "seen"), tools=[TOOL])


def test_what_a_template_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Roles must alternate\."):
        rendered(ALTERNATES, tmp_path, ANSWER, ASK)


def test_names_that_tell_messages_of_one_role_apart_are_not_lost(tmp_path: Path) -> None:
    ann, bob = ({"role": "user", "name": name, "content": f"I am {name}."} for name in ("Ann", "Bob"))
    prompt = rendered(IN_PLACE, tmp_path, ann, ANSWER, bob)
    assert prompt == "[user]Ann: I am Ann.[assistant]Blue.[user]Bob: I am Bob."
    assert rendered(IN_PLACE, tmp_path, ann, ANSWER, ASK).startswith("[user]I am Ann.")
    own = IN_PLACE.replace("{{ m.role }}", "{{ m.name or m.role }}")
    assert rendered(own, tmp_path / "own", ann, ANSWER, bob).startswith("[Ann]I am Ann.")


def test_a_result_has_its_tools_name_where_the_template_shows_it(tmp_path: Path) -> None:
    named = IN_PLACE.replace("{{ m.content or", "{{ m.name or '' }}:{{ m.content or")
    prompt = rendered(named, tmp_path, ASK, calling(call("call_a")), result("call_a", "seen"), tools=[TOOL])
    assert prompt.endswith("[tool]paint:seen")


@pytest.mark.parametrize(
    ("shows", "function"),
    [
        ("{{ '// ' + f.description }}", {"name": "paint", "parameters": PARAMETERS}),
        ("{{ '// ' + f.description }}{{ f.parameters.properties | length }}", {"name": "paint"}),
        ("{% for k, v in f.parameters.properties.items() %}{{ k }}{% endfor %}", {"name": "paint"}),
        ("{% for k in f.parameters.required %}{{ k }}{% endfor %}", {"name": "paint", "parameters": {}}),
        (
            "{% for k, v in f.parameters.properties.items() %}{{ k + v.description + v.type }}{% endfor %}",
            {"name": "paint", "parameters": {"type": "object", "properties": {"shade": {"enum": ["blue"]}}}},
        ),
    ],
)
def test_a_tool_without_optional_fields_is_rendered_where_a_template_joins_them(
    shows: str, function: dict[str, Any], tmp_path: Path
) -> None:
    template = "{% for t in tools or [] %}{% set f = t.function %}{{ f.name }}" + shows + "{% endfor %}"
    chat = chat_with(template + IN_PLACE.replace("CALLS", CALLS), tmp_path)
    assert "paint" in chat.prompt(ASK, tools=[{"type": "function", "function": function}])


def test_a_tool_is_rendered_as_it_came_where_the_template_takes_it(tmp_path: Path) -> None:
    bare = {"type": "function", "function": {"name": "paint"}}
    assert rendered(IN_PLACE, tmp_path, ASK, tools=[bare]).startswith(
        '{"type": "function", "function": {"name": "paint"}}[user]'
    )


@pytest.mark.parametrize("num_rounds", [1, 7, 12])
def test_a_long_loop_of_tools_is_refused_where_its_end_would_be_lost(num_rounds: int, tmp_path: Path) -> None:
    rounds = [
        message
        for number in range(num_rounds)
        for message in (calling(call(f"call_{number}"), content="I look."), result(f"call_{number}", "seen"))
    ]
    prompt = rendered(TEXT_OR_CALLS, tmp_path, ASK, *rounds, tools=[TOOL])
    assert prompt.count("[assistant]I look.[assistant]<tool_call>") == num_rounds
    at = len(rounds) + 1
    with pytest.raises(RequestError, match=rf"messages\[{at}\]: .* would leave out a tool's result"):
        rendered(NO_LATE_RESULT, tmp_path / "late", ASK, *rounds, result("call_x", "lost"), tools=[TOOL])


def test_rounds_of_a_loop_that_are_alike_are_tried_once() -> None:
    def shapes(num_rounds: int) -> Any:
        rounds = [
            part
            for number in range(num_rounds)
            for part in (
                ChatMessage(role="assistant", calls=(MessageCall(str(number), "paint", "{}"),)),
                ChatMessage(role="tool", call_id=str(number), content="seen"),
            )
        ]
        return condensed(
            shapes_of([ChatMessage(role="user", content="x"), *rounds, ChatMessage(role="user", content="y")])
        )

    assert shapes(20)[0] == shapes(8)[0]
    assert shapes(21)[0] == shapes(7)[0]
    few, places = shapes(20)
    assert len(few) == len(places) == 10
    assert (places[0], places[-1]) == (0, 41)


KIMI = """{{ tools | tojson }}{% for m in messages %}{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>
{{- c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- endif %}{% endfor %}"""


def test_ids_that_stand_for_names_have_the_name_and_the_calls_number(tmp_path: Path) -> None:
    chat = chat_with(KIMI, tmp_path)
    assert chat.formats == ("kimi_k2", "none")
    again = calling(call("call_a"))
    sent = calling(call("call_a"), call("call_b")), result("call_b", "two"), result("call_a", "one")
    prompt = chat.prompt(ASK, *sent, again, result("call_a", "three"), tools=[TOOL])
    begins = [part.partition("<|tool_call_argument")[0] for part in prompt.split("<|tool_call_begin|>")[1:]]
    assert begins == ["functions.paint:0", "functions.paint:1", "functions.paint:2"]
    results = [part.split()[0] for part in prompt.split("## Return of ")[1:]]
    assert results == ["functions.paint:1", "functions.paint:0", "functions.paint:2"]


@pytest.mark.parametrize(
    "thought",
    [{"reasoning_content": "Hm."}, {"reasoning_details": [{"text": "Hm."}]}, {"thinking_blocks": [{"thinking": "Hm."}]}],
)  # fmt: skip
def test_reasoning_stays_with_the_calls_in_each_form(thought: dict[str, Any], tmp_path: Path) -> None:
    said = calling(call("call_a"), content="I look.") | thought
    template = TEXT_OR_CALLS.replace("[{{ m.role }}]", "[{{ m.role }}]{{ m.reasoning_content or '' }}")
    prompt = rendered(template, tmp_path, ASK, said, result("call_a", "seen"))
    assert prompt.startswith("[user]Which shade?[assistant]I look.[assistant]Hm.<tool_call>")
