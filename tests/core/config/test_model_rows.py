"""The table of models: each row is the configuration of one model, and what cannot be one model's is refused by name."""

import pickle
from typing import Any

import pytest

from core.config.cluster_config import ClusterConfig, load, overlay
from core.config.residency_groups import models_of
from core.errors import ConfigError

PATHS = {"small": "embedded", "big": {"path": "org/big", "aliases": ["gpt-4o"]}}


def table(rows: dict[str, Any], **others: Any) -> ClusterConfig:
    return load({"models": rows, **others}, {})


def test_a_row_stands_in_place_of_what_is_said_for_all() -> None:
    config = table(
        {
            "small": "embedded",
            "big": {
                "path": "org/big",
                "aliases": ["gpt-4o"],
                "model": {"dtype": "float16"},
                "engine": {"block_size": 8},
                "decode": {"tp": 2},
                "decode_instances": 3,
                "slo_classes": {"chat": {"ttft_s": 3.0}},
            },
        },
        model={"dtype": "bfloat16", "max_context_tokens": 64},
        engine={"block_size": 32, "max_num_seqs": 7},
        serve={"port": 1234},
    )
    small, big = pickle.loads(pickle.dumps(config)).rows  # noqa: S301 (its own)
    assert (small.model.name, small.model.path, small.model.aliases) == ("small", "embedded", ())
    assert (big.model.name, big.model.path, big.model.aliases) == ("big", "org/big", ("gpt-4o",))
    assert (small.model.dtype, big.model.dtype) == ("bfloat16", "float16")
    assert [row.model.max_context_tokens for row in (small, big)] == [64, 64]
    assert [(row.engine.block_size, row.engine.max_num_seqs) for row in (small, big)] == [(32, 7), (8, 7)]
    assert [(row.decode.tp, row.decode_instances) for row in (small, big)] == [(1, 1), (2, 3)]
    assert [row.slo_classes["chat"].ttft_s for row in (small, big)] == [1.0, 3.0]
    assert set(small.slo_classes) == set(big.slo_classes)
    assert {row.serve.port for row in (small, big)} == {1234}
    assert not small.models


def test_one_model_is_a_table_of_one_row() -> None:
    config = load({"model": {"path": "embedded"}}, {})
    assert config.rows == (config,)


def test_options_name_models_by_their_paths() -> None:
    assert load({}, {}, {"models": ["a=embedded", "b=org/b"]}) == table(
        {"a": "embedded", "b": {"path": "org/b"}}
    )
    assert load({}, {"BATON_MODELS__A__PATH": "embedded"}).rows[0].model.name == "a"


@pytest.mark.parametrize(
    ("shared", "row", "steps"),
    [
        ({}, {"device": "cuda"}, (8192, 512)),
        ({"device": "cuda"}, {}, (8192, 512)),
        ({"device": "cuda"}, {"device": "cpu"}, (512, 64)),
        ({"max_batch_tokens": 100}, {"device": "cuda"}, (100, 512)),
        ({"device": "cuda", "max_num_seqs": 3}, {"device": "cpu", "max_batch_tokens": 9}, (9, 3)),
    ],
)
def test_a_device_sizes_the_steps_of_its_own_row(
    shared: dict[str, Any], row: dict[str, Any], steps: tuple[int, int]
) -> None:
    (engine,) = (one.engine for one in table({"a": {"path": "x", "engine": row}}, engine=shared).rows)
    assert (engine.max_batch_tokens, engine.max_num_seqs) == steps


def test_schedulers_record_into_files_of_their_own() -> None:
    rows = table(
        {"org/a": "x", "b": {"path": "y", "schedule": {"record_path": "/tmp/b"}}},
        schedule={"record_path": "/tmp/all"},
    )
    assert [row.schedule.record_path for row in rows.rows] == ["/tmp/all.org-a", "/tmp/b"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"models": {"a": {}}}, "models.a.path is missing"),
        ({"models": {"a": {"path": "x", "serve": {"port": 1}}}}, "models.a.serve: serve is for all models together"),
        ({"models": {"a": {"path": "x", "tenants": {}}}}, "models.a.tenants: tenants is for all models together"),
        ({"models": {"a": {"path": "x", "engine": {"blocksize": 1}}}}, "models.a.engine.blocksize"),
        ({"models": {"a": {"path": "x", "engine": {"block_size": 0}}}}, "models.a.engine.block_size"),
        ({"models": {"a": {"path": "x", "residency": "on_demand"}}}, "no configuration key models.a.residency"),
        ({"models": {"a": {"path": "x", "engine": {"disk_cache_bytes": 1}}}}, "models.a: engine.disk_cache_bytes"),
        ({"models": {"a": {"path": "x", "model": {"name": "b"}}}}, "models.a.model.name"),
        ({"models": {"a": {"path": "x", "slo_classes": {"mine": {}}}}}, "'mine' is not among slo_classes"),
        ({"models": {"a": "x"}, "model": {"path": "y"}}, "model.path is of one model"),
        ({"models": {"a": {"path": "x", "aliases": ["b"]}, "b": "y"}}, "two models called 'b'"),
        ({"models": {"a": {"path": "x", "model": {"adapters": {"b": "z"}}}, "b": "y"}}, "two models called 'b'"),
        ({"models": {"a/b": "x", "a:b": "y"}}, "become 'a-b'"),
        ({"models": {"a b": "x"}}, "models.a b"),
        ({"models": ["a"]}, "'a' is no NAME=PATH"),
        ({"models": ["a=x", "a=y"]}, "two models are called 'a'"),
        ({"models": PATHS, "tenants": {"t": {"keys": ["k"], "models": ["tiny"]}}}, "tenants.t.models: 'tiny'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(content: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(content, {})


def test_a_live_change_may_name_the_models_of_the_table_alone() -> None:
    config = table(PATHS)
    changed = overlay(config, {"tenants": {"t": {"keys": ["k"], "models": ["small"]}}})
    assert changed.tenants["t"].models == ("small",)
    with pytest.raises(ConfigError, match="'gpt-4o' is not among models"):
        overlay(config, {"tenants": {"t": {"keys": ["k"], "models": ["gpt-4o"]}}})


SHARING = {
    "models": {"a": "embedded", "b": "embedded"},
    "residency_groups": {"card": {"awake_models": 1}},
    "schedule": {"residency": {"mode": "on_demand", "group": "card"}},
}


def test_models_may_share_memory_in_groups() -> None:
    config = load(SHARING, {})
    assert models_of(config, "card") == ("a", "b")
    assert config.rows[0].schedule.residency.group == "card"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"residency_groups": {"card": {"awake_models": 2}}}, "none would ever make way"),
        ({"residency_groups": {}}, "'card' is not among residency_groups"),
        ({"schedule": {"residency": {"group": "card"}}}, "needs the mode on_demand"),
        ({"scaling": {"enabled": True}}, "scaling.enabled must be false"),
        ({"serve": {"schedulers": 2}}, "needs one scheduler for each model"),
        ({"models": {}}, "give models a row for each"),
    ],
)
def test_a_group_that_cannot_work_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(SHARING | change, {})
