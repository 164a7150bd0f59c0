"""Calls of every format, as models write them, have the values that their schema says, and no character is lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ingress.parsers.argument_values import of_bare_text
from cluster.ingress.parsers.model_formats import ModelFormats, make_parser
from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    CallEnds,
    OutputEvent,
    Text,
    joined,
)
from tests.cluster.ingress.parsers.family_markup import MARKUPS, TAGS, Markup
from tests.cluster.ingress.parsers.test_parsers import MARKUP, split
from tests.cluster.ingress.parsers.written_calls import (
    BARE,
    CALL,
    NOT_QUITE_RIGHT,
    SCHEMAS,
    TIME,
    VALUES,
    WRITTEN,
)

FORMATS = pytest.mark.parametrize("name", MARKUPS)


def parse(markup: Markup, text: str, *, cut: bool = False) -> list[OutputEvent]:
    """Return the events, which no split of the text changes."""

    def run(pieces: list[str]) -> list[OutputEvent]:
        reasoning = "harmony" if markup.tools == "harmony" else "none"
        parser = make_parser(ModelFormats(markup.tools, reasoning), schemas=SCHEMAS, opened=False)
        events = [event for piece in pieces for event in parser.push(piece)]
        return joined([*events, *parser.finish(cut=cut)])

    whole = run([text])
    assert run(list(text)) == whole
    assert run(split(text, [7, 19, 40])) == whole
    return whole


def calls(events: list[OutputEvent]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    arguments = ""
    for event in events:
        match event:
            case CallBegins(_, name):
                found.append((name, None))
                arguments = ""
            case CallArguments(_, text):
                arguments += text
            case CallEnds(_, is_whole):
                found[-1] = (found[-1][0], json.loads(arguments) if is_whole else arguments)
            case _:
                pass
    return found


def text(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@FORMATS
@pytest.mark.parametrize("case", VALUES)
def test_a_value_is_what_its_schema_says(name: str, case: str) -> None:
    markup, values = MARKUPS[name], VALUES[case]
    events = parse(markup, markup.write(("f", values)))
    assert (calls(events), text(events)) == ([("f", values)], "")
    (found,) = [arguments for _, arguments in calls(events)]
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize("name", [*TAGS, "pythonic"])
@pytest.mark.parametrize("case", BARE)
def test_bare_text_is_read_by_its_schema(name: str, case: str) -> None:
    markup, (key, written, meant) = MARKUPS[name], BARE[case]
    line = f"{key}={written}"
    if name in TAGS:
        before, between, after = TAGS[MARKUPS[name].tools]
        line = f"{before}{key}{between}{written}{after}"
    assert calls(parse(markup, markup.write(("f", line)))) == [("f", {key: meant})]


SIGNED = ("deepseek_v32", "deepseek_v4")
PYTHON = ("pythonic", "lfm2", "olmo3")


@pytest.mark.parametrize("name", SIGNED)
def test_a_sign_says_what_the_schema_leaves_open(name: str) -> None:
    for value in ("5", 5, "null", None, "[1]", [1]):
        events = parse(MARKUPS[name], MARKUPS[name].write(("f", {"free": value, "either": "x"})))
        assert calls(events) == [("f", {"free": value, "either": "x"})]
    wrong = '<｜DSML｜parameter name="count" string="true">3</｜DSML｜parameter>\n'
    assert calls(parse(MARKUPS[name], MARKUPS[name].write(("f", wrong)))) == [("f", {"count": 3})]


JSON = [name for name, markup in MARKUPS.items() if markup.tools not in (*TAGS, *SIGNED, *PYTHON, "gemma4")]


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("case", WRITTEN)
def test_arguments_that_are_nearly_an_object(name: str, case: str) -> None:
    markup, (tool, written, meant) = MARKUPS[name], WRITTEN[case]
    events = parse(markup, markup.write((tool, written)))
    assert (calls(events), text(events)) == ([(tool, meant)], "")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("get_weather('Zürich', 2)", CALL[1]),
        ('get_weather("Zürich", days=2)', CALL[1]),
        ("get_weather({'city': 'Zürich', 'days': 2})", CALL[1]),
        ("get_weather(**{'city': 'Zürich', 'days': 2})", CALL[1]),
        ("get_weather(city='Zürich', days=2,)", CALL[1]),
        ("get_weather(\n    city = 'Zürich',\n    days = 2,\n)", CALL[1]),
        ("get_weather(city='a=b, (c', days=-1)", {"city": "a=b, (c", "days": -1}),
        ("get_weather(city='''one\n'two'\n''')", {"city": "one\n'two'\n"}),
        ('get_weather(city="one\ntwo")', {"city": "one\ntwo"}),
        ('get_weather(city="the "old" town")', {"city": 'the "old" town'}),
        ("get_weather(city='it\\'s')", {"city": "it's"}),
        ("get_weather(city='a' 'b')", {"city": "ab"}),
        ("visit(cities=('Oslo', \"Rome\"))", {"cities": ["Oslo", "Rome"]}),
        ("visit(['Oslo', 'Rome'])", {"cities": ["Oslo", "Rome"]}),
    ],
)
def test_calls_as_python_has_them(written: str, meant: Any) -> None:
    name = written.partition("(")[0]
    for around in (
        "[{}]",
        "[{}, get_time()]",
        "{}",
        "{}\n",
        "```python\n[{}]\n```",
        "<|python_start|>[{}]<|python_end|>",
    ):
        events = parse(MARKUPS["pythonic"], around.format(written))
        assert (calls(events)[0], text(events)) == ((name, meant), "")


@FORMATS
def test_text_stands_before_and_after_calls(name: str) -> None:
    markup = MARKUPS[name]
    if markup.one_call:
        said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + markup.write(CALL)
        assert calls(parse(markup, said)) == [CALL]
        assert text(parse(markup, said)) == "I look."
        return
    events = parse(markup, f"I look.\n\n{markup.write(CALL, TIME)}\n\nDone {{}} [x].")
    assert calls(events) == [CALL, TIME]
    assert text(events) == "I look.Done {} [x]."


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_calls_without_marks_stand_at_the_end_of_a_line(name: str) -> None:
    markup = MARKUPS[name]
    for behind in ("", "\n", " \n\nDone."):
        events = parse(markup, f"I look: {markup.write(CALL)}{behind}")
        assert (calls(events), text(events)) == ([CALL], "I look:" + behind.strip())
    written = f"Write {markup.write(CALL)} to call it, or `{markup.write(TIME)}`."
    assert parse(markup, written) == [Text(written)]


@FORMATS
def test_text_stands_between_calls(name: str) -> None:
    markup = MARKUPS[name]
    if not markup.one_call:
        events = parse(markup, f"{markup.write(CALL)}\nAnd now:\n{markup.write(TIME)}")
        assert (calls(events), text(events)) == ([CALL, TIME], "And now:")


@FORMATS
def test_the_model_may_leave_out_what_closes_a_call(name: str) -> None:
    markup = MARKUPS[name]
    whole = markup.write(("get_weather", {"city": "Zürich"}))
    for closing in ("\n</tool_call>", "</tool_call>", "</function>\n</tool_call>", "\n</function>\n</tool_call>",
                    "</parameter>\n</function>\n</tool_call>", "]", "<｜tool▁calls▁end｜>", "<|call|>",
                    "</seed:tool_call>", "<tool_call|>", "}<tool_call|>", "]<|tools_suffix|>", "\n</tool_calls:opensource>", "\n</｜DSML｜function_calls>", "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "\n</minimax:tool_call>", "</invoke>\n</minimax:tool_call>", "\n</tool_calls>",
                    "</tool_call>\n</tool_calls>", "\n```</tool_call></tool_calls>", "]</tool_calls>", "<|tool_calls_section_end|>",
                    "<|tool_call_end|><|tool_calls_section_end|>", "\n]<|END_ACTION|>", "]<|/tool_call|>", "]</TOOLCALL>",
                    "<|action_end|>", "]<|tool_call_end|>", "\n</function_calls>",
                    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"):  # fmt: skip
        if not whole.endswith(closing):
            continue
        events = parse(markup, whole.removesuffix(closing))
        assert (calls(events), text(events)) == ([("get_weather", {"city": "Zürich"})], ""), closing


@pytest.mark.parametrize("written", ['{"city": "Zürich"}', "{}", "{"])
def test_an_object_in_place_of_tags_is_there_once_though_nothing_closes_the_call(written: str) -> None:
    events = parse(MARKUPS["glm45"], f"<tool_call>get_weather{written}")
    assert calls(events) == [("get_weather", json.loads(written) if len(written) > 1 else {})]


@pytest.mark.parametrize(("name", "written"), NOT_QUITE_RIGHT)
def test_markup_that_is_not_quite_right(name: str, written: str) -> None:
    events = parse(MARKUPS[name], written)
    assert (calls(events), text(events)) == ([CALL], "")


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("hermes", '<tool_call>\n{"nam</tool_call>\n'),
        ("hermes", "<tool_call>\nget_time()\n</tool_call>\n"),
        ("hermes", '<tool_call>\n{"arguments": {"a": "b}}</tool_call>\n'),
        ("qwen3_coder", "<tool_call>\n<functio=x>\n</tool_call>\n"),
        ("llama3_json", '{"name": "get_tim\n'),
        ("pythonic", "[get_tim(]\n"),
        ("mistral", "[TOOL_CALLS]{]\n"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>get_time\n"),
    ],
)
def test_a_call_behind_a_broken_one_is_read_and_the_broken_one_is_text(name: str, broken: str) -> None:
    markup = MARKUPS[name]
    events = parse(markup, broken + markup.write(CALL))
    assert (calls(events), text(events).rstrip()) == ([CALL], broken.rstrip())


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": </tool_call>\n'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": "b}}</tool_call>\n'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": 1 2}}</tool_call>\n'),
        ("mistral v11", '[TOOL_CALLS]get_time[ARGS]{"a": : 1}'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"a": <｜tool▁call▁end｜>'),
        ("harmony", "<|channel|>commentary to=functions.get_time<|message|>{\"a\": : 1}<|end|><|start|>assistant"),
    ],
)  # fmt: skip
def test_a_call_that_breaks_off_is_not_whole_and_the_next_one_is(name: str, broken: str) -> None:
    markup = MARKUPS[name]
    events = parse(markup, broken + markup.write(CALL))
    (first, arguments), second = calls(events)
    assert (first, second) == ("get_time", CALL)
    assert isinstance(arguments, str)
    ends = [event for event in events if isinstance(event, CallEnds)]
    assert [end.is_whole for end in ends] == [False, True]


@FORMATS
def test_what_only_looks_like_a_call_is_shown_as_it_stands(name: str) -> None:
    markup = MARKUPS[name]
    for written in (
        'Write {"name": "x"} and [f, g](h) like `get_weather`.\nget_weather is a tool.\n{"a": [1, {"b": 2}]}',
        '{"name": "get_weather"} is how it begins, and\n"arguments" follow',
        '```json\n{"city": "Oslo"}\n```\nget_time() tells the time.',
        "1 < 2, <tool>, <tool_cal, [TOOL_CALL, <｜tool, <function, </parameter>",
    ):
        if name == "llama3_json" and written.startswith('{"name"'):
            continue  # a name alone is a call of a tool without parameters
        said = f"<|channel|>final<|message|>{written}" if name == "harmony" else written
        assert parse(markup, said) == [Text(written)]


@FORMATS
def test_a_tool_that_there_is_not_is_called_where_marks_say_so(name: str) -> None:
    markup = MARKUPS[name]
    written = markup.write(("get_money", {"a": "1"}))
    events = parse(markup, written)
    if markup.tools in ("llama3_json", *PYTHON):
        assert events == [Text(written)]
    else:
        assert [name for name, _ in calls(events)] == ["get_money"]


@FORMATS
def test_a_call_that_is_cut_is_not_whole_and_no_object(name: str) -> None:
    markup = MARKUPS[name]
    whole = markup.write(("get_weather", {"city": "Zürich am See", "days": 12}))
    for end in range(whole.index("get_weather") + len("get_weather"), whole.index("12") + 1):
        events = parse(markup, whole[:end], cut=True)
        for event in events:
            assert not isinstance(event, CallEnds) or not event.is_whole
        for _, arguments in calls(events):
            with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
                json.loads(arguments)


@FORMATS
def test_a_cut_string_is_there_as_far_as_it_came(name: str) -> None:
    markup = MARKUPS[name]
    whole = markup.write(("get_weather", {"city": "Zürich am See"}))
    ((_, arguments),) = calls(parse(markup, whole[: whole.index("am See")], cut=True)) or [("", "")]
    assert arguments.replace('":"', '": "') == '{"city": "Zürich' + ("" if name in PYTHON else " ")


@given(
    name=st.sampled_from(sorted(set(MARKUPS) - {*PYTHON, "harmony"})),
    before=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{`｜"), max_size=20),
    value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20),
)
def test_any_text_of_any_call_is_kept(name: str, before: str, value: str) -> None:
    if any(line.lstrip().startswith(tool) for tool in SCHEMAS for line in before.splitlines()):
        return
    markup = MARKUPS[name]
    events = parse(markup, before + "\n" + markup.write(("f", {"text": value})))
    assert calls(events) == [("f", {"text": value})]
    assert text(events) == before.rstrip()


def test_schemas_that_refer_to_themselves_and_numbers_without_end_are_read_at_once() -> None:
    loop: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    tool = {"properties": {"x": {"$ref": "#/$defs/a"}, "n": {"type": "integer"}}, "$defs": {"a": loop}}
    assert of_bare_text("5", tool["properties"]["x"], tool) == "5"
    for number in ("+1e999999999", "1e999999999", "1.e999999999", "9" * 5000):
        json.loads(of_bare_text(number, tool["properties"]["n"], tool), parse_int=str)


@given(
    name=st.sampled_from(sorted(set(MARKUPS) - {"harmony"})),
    pieces=st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=14),
)
def test_where_there_is_no_call_the_text_is_all_there(name: str, pieces: list[str]) -> None:
    written = "".join(pieces)
    events = parse(MARKUPS[name], written)
    if not calls(events):
        assert text(events) == written


@pytest.mark.parametrize("name", PYTHON)
def test_a_list_of_no_call_and_marks_around_none_are_text(name: str) -> None:
    markup = MARKUPS[name]
    for written in ("[]", "[ ]\nThe list is empty.", markup.wrap()):
        assert text(parse(markup, written)) == written
