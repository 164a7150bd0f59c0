import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from baton.own_tree import PACKAGES, check_own_tree
from core.config.cluster_config import ClusterConfig, load
from core.config.device_steps import GPU_BATCH_TOKENS, GPU_NUM_SEQS
from core.errors import ConfigError

KEYS = Path(__file__).parent / "config_keys.json"


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        found += keys(kind, f"{prefix}{name}.") if nested else [prefix + name]
    return found


def test_a_new_key_is_a_reviewed_change() -> None:
    assert keys(ClusterConfig) == json.loads(KEYS.read_text())


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    assert [key for key in keys(ClusterConfig) if f"`{key}`" not in text] == []


def test_file_then_environment_then_options() -> None:
    content = {"engine": {"block_size": 4, "num_blocks": 10}, "decode_instances": 3}
    config = load(content, {"BATON_ENGINE__BLOCK_SIZE": "8", "BATON_API_KEY": "x"}, {"engine.num_blocks": 12})
    assert (config.engine.block_size, config.engine.num_blocks, config.decode_instances) == (8, 12, 3)


def test_keys_that_need_each_other_are_refused_apart() -> None:
    for content, named in (
        ({"transfer": {"kv_replicas": 1}}, "host_cache_bytes"),
        ({"any_role": True, "prefill_instances": 2}, "set prefill_instances to 0"),
        ({"engine": {"disk_cache_bytes": 1 << 20}}, "disk_cache_path"),
        ({"serve": {"batch_dir": "batches"}}, "whole path"),
        ({"engine": {"host_cache_bytes": 1 << 20, "prefix_cache": False}}, "prefix_cache"),
    ):
        with pytest.raises(ConfigError, match=named):
            load(content, {})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"engine": {"blocksize": 1}}, "engine.blocksize"),
        ({"engine": {"block_size": 0}}, "engine.block_size"),
        ({"serve": {"port": "many"}}, "serve.port"),
        ({"transfer": {"transport": "pigeon"}}, "transfer.transport"),
    ],
)
def test_mistakes_are_named_in_one_line(content: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(content, {})
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_secrets_do_not_show() -> None:
    config = load({"cluster_key": "hush", "serve": {"api_keys": ["psst"]}}, {})
    assert "hush" not in repr(config)
    assert "psst" not in repr(config)


def test_our_packages_are_our_own() -> None:
    check_own_tree()
    root = Path(__file__).parents[3]
    assert sorted(PACKAGES) == sorted(
        p.parent.name for p in root.glob("*/__init__.py") if p.parent.name not in ("tests", "benchmarks")
    )


def test_steps_of_a_gpu_are_large_unless_they_are_set() -> None:
    def sizes(**engine: object) -> tuple[int, int]:
        config = load({"engine": engine}, {}, {}).engine
        return config.max_batch_tokens, config.max_num_seqs

    assert sizes() == sizes(device="cpu") == (512, 64)
    assert sizes(device="cuda") == (GPU_BATCH_TOKENS, GPU_NUM_SEQS)
    assert sizes(device="cuda", max_num_seqs=8) == (GPU_BATCH_TOKENS, 8)
    assert load(None, {}, {"engine.device": "cuda"}).engine.max_num_seqs == GPU_NUM_SEQS
