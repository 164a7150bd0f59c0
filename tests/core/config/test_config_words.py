"""A configuration that cannot be is refused in words that say what to write instead."""

from collections.abc import Iterator

import pytest
import yaml

from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"engine": {"blocksize": 1}},
            "there is no configuration key engine.blocksize; did you mean engine.block_size?",
        ),
        (
            {"engine": {"num_seqs": 1}},
            "there is no configuration key engine.num_seqs; did you mean engine.max_num_seqs?",
        ),
        ({"block_size": 1}, "there is no configuration key block_size; did you mean engine.block_size?"),
        ({"prefil": {"tp": 1}}, "there is no configuration key prefil; did you mean prefill?"),
        ({"zzz": 1}, "there is no configuration key zzz"),
        (
            {"engine": {"block_size": 0}},
            "engine.block_size must be a whole number of at least 1 and at most 256, not 0",
        ),
        (
            {"engine": {"block_size": "many"}},
            "engine.block_size must be a whole number of at least 1 and at most 256, not 'many'",
        ),
        (
            {"serve": {"port": 70000}},
            "serve.port must be a whole number of at least 0 and at most 65535, not 70000",
        ),
        (
            {"scaling": {"target": 1.5}},
            "scaling.target must be a number of more than 0 and at most 1, not 1.5",
        ),
        ({"engine": {"lookahead": "perhaps"}}, "engine.lookahead must be true or false, not 'perhaps'"),
        (
            {"engine": {"cuda_graphs": "some"}},
            "engine.cuda_graphs must be one of auto and none or a list of whole numbers, not 'some'",
        ),
        ({"engine": 5}, "engine must be keys and their values, not 5"),
        ({"model": {"path": 5}}, "model.path must be a text, not 5"),
    ],
)
def test_what_is_wrong_is_said_in_one_plain_sentence(content: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(content, {})
    assert str(refused.value) == said


def test_choices_are_named() -> None:
    with pytest.raises(ConfigError) as refused:
        load({"transfer": {"transport": "pigeon"}}, {})
    assert str(refused.value).startswith("transfer.transport must be one of auto, shm, tcp,")
    assert str(refused.value).endswith("not 'pigeon'")


@pytest.mark.parametrize(
    ("transport", "more", "word"),
    [
        (
            "nccl",
            {"engine.device": "cpu"},
            "transport nccl moves GPU memory; CPUs hand KV over in host memory",
        ),
        ("cuda_ipc", {"engine.device": "cpu"}, "CPUs hand KV over in host memory"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_before_anything_starts(
    transport: str, more: dict[str, object], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        load({}, {}, {"transfer.transport": transport, **more})


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        load({"serve": {"api_keys": {"hush": 1}}}, {})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "content", [{"slo_classes": {"chat": {"ttft_s": "soon"}}}, {"tenants": {"acme": {"weigth": 2}}}]
)
def test_mistakes_below_names_of_the_users_own_are_said_with_their_place(content: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(content, {})
    assert next(iter(content)) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_caches_below_several_ranks_leave_device_transports_possible(transport: str) -> None:
    given = {"transfer.transport": transport, "decode.tp": 2, "engine.host_cache_bytes": 1 << 20}
    assert load({}, {}, given).transfer.transport == transport


def test_no_word_of_a_configuration_is_another_value_in_yaml() -> None:
    found = list(words(ClusterConfig.model_json_schema()))
    assert "auto" in found
    for word in found:
        assert yaml.safe_load(f"key: {word}") in ({"key": word}, {"key": False}), "YAML 1.1 reads no as false"
    assert [word for word in found if yaml.safe_load(str(word)) is False] == ["off", False], (
        "and both are taken"
    )


@pytest.mark.parametrize("written", ["off", "'off'", "false"])
def test_tls_is_switched_off_by_the_word_as_yaml_reads_it(written: str) -> None:
    assert load(yaml.safe_load(f"security: {{tls: {written}}}"), {}).security.tls == "off"


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
def test_keys_that_have_moved_are_refused_with_their_new_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no configuration key transfer.{name}; did you mean security.{name}"
    ):
        load({}, {}, {f"transfer.{name}": "/x"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls": "files", "tls_cert": "/x", "tls_ca": "/y"}, "tls_key is empty"),
        ({"tls_cert": "/x"}, "set security.tls to files"),
        ({"tls": "off", "strict": True}, "security.strict .* set security.tls to auto or files"),
        ({"tls": "on"}, "security.tls must be one of auto, files and off, not 'on'"),
    ],
)
def test_keys_of_encryption_that_do_not_go_together_are_refused(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load({"security": settings}, {})


def words(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from words(part)
    if isinstance(schema, dict):
        for key, part in schema.items():
            yield from part if key == "enum" else [part] if key == "const" else words(part)
