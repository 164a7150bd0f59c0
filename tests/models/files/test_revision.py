"""Weights have a name: equal for a copy, different for weights that were trained further, in whatever they are stored."""

from pathlib import Path

import pytest

from models.files.revision import weights_revision


def checkpoint(folder: Path, name: str, middle: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "stored").write_bytes(bytes(1 << 18) + middle + bytes(1 << 18))
    (folder / name).symlink_to(folder / "stored")
    return folder


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.gguf"])
def test_other_weights_have_another_revision_and_a_copy_has_the_same(tmp_path: Path, name: str) -> None:
    old = checkpoint(tmp_path / "old", name, b"1234")
    copy = checkpoint(tmp_path / "copy", name, b"1234")
    trained = checkpoint(tmp_path / "trained", name, b"1235")
    assert weights_revision(old) == weights_revision(copy)
    assert weights_revision(old) != weights_revision(trained)
