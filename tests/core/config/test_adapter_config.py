"""Adapters are named on the command line, in a file or in the environment, and a name that cannot be one is refused."""

import pytest

from core.config.adapter_config import adapter_key, adapter_name
from core.config.cluster_config import load
from core.errors import ConfigError

WANTED = {"sql": "/adapters/sql", "team/poet": "/poet=1"}


def test_texts_and_mappings_mean_the_same() -> None:
    texts = [f"{name}={path}" for name, path in WANTED.items()]
    for config in (
        load({"model": {"adapters": WANTED}}, {}),
        load(None, {}, {"model.adapters": texts}),
        load(None, {"BATON_MODEL__ADAPTERS": '{"sql": "/adapters/sql", "team/poet": "/poet=1"}'}),
        load(None, {"BATON_MODEL__ADAPTERS": '["sql=/adapters/sql", "team/poet=/poet=1"]'}),
    ):
        assert config.model.adapters == WANTED
    assert load(None, {"BATON_MODEL__ADAPTERS": "sql=/adapters/sql"}).model.adapters == {
        "sql": "/adapters/sql"
    }
    assert load(None, {}).model.adapters == {}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["/adapters/sql"], "'/adapters/sql' is no NAME=PATH"),
        (["sql=/a", "sql=/b"], "two adapters are called 'sql'"),
        ({"two words": "/a"}, "'two words' is no name for an adapter"),
        ({"a\nb": "/a"}, "is no name for an adapter"),
        ({"a@b": "/a"}, "'a@b' is no name for an adapter"),
        (["=/a"], "'' is no name for an adapter"),
        (7, "model.adapters"),
    ],
)
def test_what_cannot_be_one_is_refused(given: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(None, {}, {"model.adapters": given})


def test_a_request_names_an_adapter_and_its_revision() -> None:
    assert adapter_name(adapter_key("team/poet:2", "12ab")) == "team/poet:2"
    assert adapter_name("") == ""


def test_folders_are_whole_paths_and_slots_are_none_without_them() -> None:
    assert load(None, {}).adapters.num_slots == 0
    assert load({"adapters": {"folders": ["/adapters"], "slots": 3}}, {}).adapters.num_slots == 3
    with pytest.raises(ConfigError, match=r"adapters\.folders has 'adapters': give whole paths"):
        load({"adapters": {"folders": ["adapters"]}}, {})
    with pytest.raises(ConfigError, match=r"adapters\.list_file has 'loaded\.json': give whole paths"):
        load({"adapters": {"folders": ["/adapters"], "list_file": "loaded.json"}}, {})
    with pytest.raises(ConfigError, match=r"copy it into the store .* name that in serve\.store"):
        load({"adapters": {"folders": ["/adapters"], "list_file": "/adapters/loaded.json"}}, {})
    with pytest.raises(ConfigError, match=r"say in adapters\.folders where they lie"):
        load({"adapters": {"list_file": "/adapters/loaded.json"}}, {})
