"""Hundreds of JSON schemas, and forced calls of every format, over prefill and decode apart while decode instances are killed:
what ends keeps to its schema, and every call is read back."""

import asyncio
import json
import random
from collections import deque
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings

from cluster.ingress.bodies.structured import schema_grammar
from cluster.ingress.parsers.call_formats import CALL_FORMATS, markup_of
from cluster.ingress.parsers.call_grammars import CallableTool, call_grammar
from cluster.ingress.parsers.model_formats import ModelFormats, make_parser
from cluster.ingress.parsers.output_events import CallArguments, CallBegins, CallEnds, joined
from core.config.answer_formats import ToolFormat
from tests.chaos.world import Stream, World
from tests.engine.execution.sampling.test_grammar_masks import SCHEMAS, VOCAB, text
from tests.engine.execution.sampling.test_schema_keywords import TAKEN
from tests.models.served import make_served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.turns(6, number=4)]
NUM_DRAWN, NUM_KILLS, AT_ONCE, LENGTH = 300, 5, 16, 120
SHADES = {"shade": {"enum": ["light", "dark"]}}
TOOL = CallableTool(
    name="paint",
    schema={"type": "object", "properties": SHADES, "required": [*SHADES], "additionalProperties": False},
    strict=True,
)
FORMS: list[ToolFormat] = [*CALL_FORMATS, *CALL_FORMATS, *CALL_FORMATS]


def is_date(value: object) -> bool:
    """As RFC 3339 says it, whose years begin with 0. Python's begin with 1; both 0 and 2000 are leap years."""
    if isinstance(value, str):
        date.fromisoformat(value.replace("0000-", "2000-", 1) if value.startswith("0000-") else value)
    return True


FORMATS = jsonschema.FormatChecker()
FORMATS.checkers = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers | {"date": (is_date, ValueError)}


def drawn_schemas(count: int) -> list[dict[str, Any]]:
    """As many different ones, the same each time."""
    found: dict[str, dict[str, Any]] = {}

    @settings(max_examples=2 * count, phases=[Phase.generate], derandomize=True, database=None)
    @given(schema=SCHEMAS)
    def draw(schema: dict[str, Any]) -> None:
        found[json.dumps(schema)] = schema

    draw()
    return list(found.values())[-count:]  # the first are the simplest


class Clients:
    """Ask for an answer to each grammar, `AT_ONCE` of them at a time."""

    def __init__(self, world: World, grammars: Sequence[str]) -> None:
        self.world, self.grammars = world, grammars
        self.answers: dict[int, Stream] = {}

    @property
    def num_ended(self) -> int:
        return sum(answer.done.is_set() for answer in self.answers.values())

    @property
    def half_way(self) -> set[int]:
        return {n for n, answer in self.answers.items() if answer.tokens and not answer.done.is_set()}

    async def ask_all(self) -> None:
        todo = deque(range(len(self.grammars)))

        async def ask_some(frontend: str) -> None:
            while todo:
                self.answers[number] = answer = self.ask(number := todo.popleft(), frontend)
                await answer.done.wait()

        await asyncio.gather(*(ask_some(f"frontend{i % 2}") for i in range(AT_ONCE)))

    def ask(self, number: int, frontend: str) -> Stream:
        rng = random.Random(number)
        longest = 30 if number < len(self.grammars) - len(FORMS) else 12
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(6, longest)))
        grammar = self.grammars[number]
        return self.world.streams[self.world.generate(frontend, prompt, LENGTH, grammar=grammar, seed=number)]


async def kill_one_by_one(clients: Clients) -> set[int]:
    """The answers that were half-way at a kill, at the one that was killed or at the other."""
    world, half_way = clients.world, set[int]()
    for number in range(NUM_KILLS):
        victim = world.nodes[f"decode{number % 2}"]
        wanted = (number + 1) * len(clients.grammars) // (NUM_KILLS + 2)
        while clients.num_ended < wanted or await num_at(world, victim.address) < AT_ONCE // 4:
            await asyncio.sleep(0.005)
        half_way |= clients.half_way
        await world.kill(victim.name)
        await world.start(victim.name)
    return half_way


async def num_at(world: World, decode: str) -> int:
    routes = (await world.nodes["scheduler"].status())["routes"]
    return sum(route[2] == decode for route in routes)


def forced_call(tools: ToolFormat) -> str:
    """Return the grammar of one call of `TOOL`."""
    markup = markup_of(tools, [TOOL.name], {}, "")
    assert markup is not None
    return call_grammar(markup, [TOOL], must_call=True, one_call=True)


def called(tools: ToolFormat, written: str) -> Any:
    """Return the arguments of the only call that a model has written."""
    parser = make_parser(ModelFormats(tools, "none"), schemas={TOOL.name: TOOL.schema}, opened=False)
    begins, *arguments, ends = joined([*parser.push(written), *parser.finish()])
    assert isinstance(begins, CallBegins)
    assert begins.name == TOOL.name
    assert ends == CallEnds(0, is_whole=True)
    return json.loads("".join(part.text for part in arguments if isinstance(part, CallArguments)))


async def test_what_ends_keeps_to_its_schema_though_decode_instances_are_killed(tmp_path: Path) -> None:
    schemas = [*drawn_schemas(NUM_DRAWN), *TAKEN.values()]
    assert len(schemas) >= NUM_DRAWN
    model = tmp_path / "model"
    model.mkdir()
    make_served(model, "llama", 0)
    overrides = {"model.path": str(model), "engine.num_blocks": 1200, "engine.num_threads": 1}
    async with World(tmp_path / "world", overrides) as world:
        grammars = [*map(schema_grammar, schemas), *map(forced_call, FORMS)]
        clients = Clients(world, grammars)
        half_way, _ = await asyncio.gather(kill_one_by_one(clients), clients.ask_all())
        answers = [clients.answers[number] for number in range(len(grammars))]
        assert [answer.error for answer in answers] == [""] * len(answers)
        lost = {number for number, answer in enumerate(answers) if answer.lost}
        assert len(lost & half_way) >= NUM_KILLS, "else this says little"
        ended = [number for number, answer in enumerate(answers) if answer.finish == "stop"]
        assert len(ended) > 0.9 * len(answers), "else this says little"
        for number in ended:
            written, own = text(tuple(answers[number].tokens)), number - len(schemas)
            says = json.loads(written) if own < 0 else called(FORMS[own], written)
            schema = schemas[number] if own < 0 else TOOL.schema
            jsonschema.validate(says, schema, format_checker=FORMATS)
        whole = {FORMS[number - len(schemas)] for number in ended if number >= len(schemas)}
        assert len(whole) > 0.9 * len(CALL_FORMATS), "white space may fill the small model's context"
        for number in lost:
            again = clients.ask(number, "frontend0")
            await again.done.wait()
            assert (again.lost, again.tokens) == ([], answers[number].tokens), "what it says undisturbed"
        await world.settled()
