"""Names of models become folders, or one clear line."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from core.errors import ConfigError, RequestError
from models.families.table import read_spec
from models.files.hub import resolve
from models.text.tokenizer import load_tokenizer


def test_a_folder_is_itself_and_the_embedded_model_is_there(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert read_spec(resolve("embedded")).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./no", "~/no-such-folder", "nobody", "a/b/c"])
def test_what_is_neither_a_folder_nor_an_id(name: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        resolve(name)


def test_an_id_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot get the model 'nobody/nothing' from the hub") as caught:
        resolve("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_an_id_that_cannot_be_one() -> None:
    with pytest.raises(ConfigError, match="cannot get the model 'not an/id!'"):
        resolve("not an/id!")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    for path in resolve("embedded").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert caught.value.field == "messages"


def test_a_template_that_refuses_messages(tmp_path: Path) -> None:
    for path in resolve("embedded").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        load_tokenizer(tmp_path).render_chat([{"role": "user", "content": "hello"}])
