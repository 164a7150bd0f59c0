"""`baton serve` reads its options from one table: what is said explicitly wins, and the page is the table's."""

import inspect
import subprocess
import sys

import pytest

from baton.cli.main import MODULES
from baton.cli.serve_options import KEYS, overrides, signature
from baton.config_page import PAGE, page
from core.config.cluster_config import ClusterConfig, load
from core.config.config_words import keys_of
from core.errors import ConfigError

FILE = {"serve": {"port": 18765}, "prefill_instances": 2, "model": {"dtype": "float32"}}


def test_the_page_is_generated_from_the_configuration() -> None:
    assert page(PAGE.read_text()) == PAGE.read_text(), "run: make config-page"


def test_every_option_sets_a_key_that_there_is() -> None:
    known = dict(keys_of(ClusterConfig))
    assert [key for key in KEYS.values() if key not in known] == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (18765, 2, "float32")),
        ({"port": 8000}, (8000, 2, "float32")),
        ({"prefill": 1, "dtype": "auto"}, (18765, 1, "auto")),
    ],
)
def test_what_is_said_on_the_command_line_wins_whatever_the_default_is(
    given: dict[str, object], wanted: tuple[object, ...]
) -> None:
    everything = {name: given.get(name) for name in signature().parameters}
    config = load(FILE, {}, overrides(everything))
    assert (config.serve.port, config.prefill_instances, config.model.dtype) == wanted


def test_any_role_leaves_no_prefill_instance_unless_one_is_asked_for() -> None:
    assert load(FILE, {}, overrides({"any_role": True})).prefill_instances == 0
    with pytest.raises(ConfigError, match="any_role"):
        load(FILE, {}, overrides({"any_role": True, "prefill": 1}))


def test_options_that_are_not_given_say_nothing() -> None:
    silent = {name: one.default for name, one in signature().parameters.items()}
    assert overrides(silent) == {}
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in signature().parameters.values())


@pytest.mark.parametrize("command", sorted(MODULES))
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "from baton.cli.main import app\n"
        "try:\n"
        f"    app([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
