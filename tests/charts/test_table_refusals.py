"""Tables of models that the chart cannot place, each with the sentence that says why."""

from typing import Any

import pytest
from helm_python import HelmError

from tests.charts.rendering import Object, render
from tests.charts.test_many_models import PLAIN, SELDOM


def two(**changed: Any) -> Object:
    rows = {"a": {**SELDOM, **changed}, "b": SELDOM}
    return {"config": {"models": rows, "residency_groups": {"card": {"awake_models": 1}}}}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"config": PLAIN, "models": {"x": {}}}, "use one of both"),
        ({"models": {"x": {"config": PLAIN}}}, "use one of both"),
        ({"config": {**PLAIN, "model": {"path": "embedded"}}}, "leave it out"),
        ({"modelPods": {"code": {}}}, "describe them in prefill and decode"),
        ({"config": PLAIN, "modelPods": {"cod": {}}}, r"modelPods\.cod: there are pods of chat, code"),
        ({**two(), "modelPods": {"a": {}}}, "there are pods of card"),
        (
            {"config": {"models": {"a.b": "embedded", "a-b": "embedded"}}},
            "pods of a-b and of a.b would both be called a-b",
        ),
        (two(decode_instances=2), "decode_instances is not as in"),
        (two(decode={"tp": 2}), "make them equal"),
        (two(schedule={"residency": {"mode": "on_demand", "group": "other"}}), '"other" is not among'),
        ({"config": {**two()["config"], "serve": {"schedulers": 2}}}, "one for each model"),
        (
            {"config": {"models": {"a": {"path": "embedded", "engine": {"device": "cuda"}}}}},
            "a: engine.device",
        ),
        ({"config": {"models": {"a": {"path": "embedded", "engine": {"num_blocks": 64}}}}}, "shmSize"),
        ({"config": {**PLAIN, "serve": {"api_keys": ["hush"]}}}, "apiKeys.existingSecret"),
    ],
)
def test_what_a_table_cannot_have_is_refused(values: Object, why: str) -> None:
    with pytest.raises(HelmError, match=why):
        render(values)
