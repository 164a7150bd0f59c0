"""Every path of a configuration is looked at before anything starts."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from cluster.deploy.config_paths import check_paths
from cluster.deploy.deployment_phases import is_refused
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError
from tests.authority import Authority
from tests.deploy.test_process_logs import restored
from tests.ports import free_port

__all__ = ["restored"]
pytestmark = pytest.mark.usefixtures("restored")
NOWHERE = "/nowhere/at/all"
BY_CARD = {"model.path", "model.adapters"}
"""What `read_model_card` reads."""


def of(key: str, path: str, folder: Path) -> dict[str, Any]:
    """Return settings in which `key` is `path` and all else is as it should be."""
    good, keys = folder / "good", folder / "keys"
    good.write_text("{}")
    keys.write_text("sk-1\n")
    cert, secret, ca = Authority(folder, "ours").member("one")
    settings: dict[str, Any] = {}
    if key.startswith("serve.tls"):
        settings |= {"serve.tls_cert": cert, "serve.tls_key": secret, "serve.tls_client_ca": ca}
    if key.startswith("security.tls"):
        settings |= {"security.tls": "files", "security.tls_cert": cert}
        settings |= {"security.tls_key": secret, "security.tls_ca": ca}
    if key == "engine.disk_cache_path":
        settings["engine.disk_cache_bytes"] = 1 << 30
    if key == "tenants.acme.keys_file":
        return {"tenants": {"acme": {"keys_file": path}}}
    value: Any = (
        f"draft:{path}" if key == "engine.speculate" else [path] if key == "adapters.folders" else path
    )
    return settings | {key: value}


def config(key: str, path: str, folder: Path) -> ClusterConfig:
    return load({}, {}, of(key, path, folder))


KEYS = [
    "engine.disk_cache_path",
    "engine.profile",
    "engine.speculate",
    "security.tls_cert",
    "security.tls_key",
    "security.tls_ca",
    "schedule.record_path",
    "serve.api_keys_file",
    "serve.batch_dir",
    "serve.live_file",
    "serve.store_file",
    "serve.tls_cert",
    "serve.tls_key",
    "serve.tls_client_ca",
    "serve.usage_dir",
    "adapters.folders",
    "tenants.acme.keys_file",
]


def test_no_path_is_forgotten() -> None:
    """A new key that looks like one belongs here, and into `check_paths`."""
    known = json.loads((Path(__file__).parents[1] / "core" / "config" / "config_keys.json").read_text())
    looks = re.compile(r"(path|file|dir|folder|folders|cert|key|ca|profile|adapters|speculate)$")
    # An earlier release's list of adapters may be missing: then it has none.
    others = {"cluster_key", "transfer.checksum", "serve.batch_dir_bytes", "adapters.list_file"}
    found = {key for key in known if looks.search(key)} - BY_CARD - others
    assert found == {key for key in KEYS if not key.startswith("tenants.")}


@pytest.mark.parametrize("key", KEYS)
def test_what_is_not_there_is_said_with_its_key(key: str, tmp_path: Path) -> None:
    written = ("serve.batch_dir", "serve.usage_dir", "engine.disk_cache_path")
    path = f"/dev/null{NOWHERE}" if key in written else NOWHERE
    with pytest.raises(ConfigError) as refused:
        check_paths(config(key, path, tmp_path))
    assert str(refused.value).startswith(key)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    ("key", "content", "said"),
    [
        ("serve.api_keys_file", "# nothing", "holds no key"),
        ("serve.api_keys_file", "one two three", "printable ASCII"),
        ("tenants.acme.keys_file", "k operator", "no scope of such a key"),
        ("serve.live_file", "tenants: [", "is not YAML"),
        ("serve.live_file", "tenants: {acme: {keys_file: /nowhere}}", "/nowhere"),
        ("serve.tls_cert", "no certificate", "serve.tls_cert"),
        ("security.tls_ca", "no certificate", "security.tls_cert, tls_key, tls_ca"),
        ("engine.profile", "no profile", "is no profile"),
        ("engine.disk_cache_path", "", "cannot be written"),
        ("serve.batch_dir", "", "cannot be written"),
        ("adapters.folders", "", "cannot be read"),
        ("serve.store_file", "mysql://host/x", "no URL that begins with sqlite://// or postgresql://"),
        ("serve.store_file", "sqlite:////dev/null/store.db", "serve.store: /dev/null cannot be written"),
    ],
)
def test_what_is_there_but_not_what_it_should_be_is_said(
    key: str, content: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        check_paths(config(key, str(file), tmp_path))


def test_what_is_right_passes_and_leaves_nothing(tmp_path: Path) -> None:
    batches = tmp_path / "new" / "batches"
    cert, secret, ca = Authority(tmp_path, "ours").member("one")
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    settings = {
        "serve.batch_dir": str(batches),
        "serve.api_keys_file": str(keys),
        "serve.tls_cert": cert,
        "serve.tls_key": secret,
        "serve.tls_client_ca": ca,
        "security.tls": "files",
        "security.tls_cert": cert,
        "security.tls_key": secret,
        "security.tls_ca": ca,
        "schedule.record_path": str(tmp_path / "record"),
        "engine.speculate": "draft:embedded-draft",
    }
    check_paths(load({}, {}, settings))
    assert list(batches.iterdir()) == []
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    "key", ["serve.api_keys_file", "serve.tls_cert", "serve.batch_dir", "security.tls_ca"]
)
def test_serve_says_so_before_it_starts_anything(
    key: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[..., Any]] = []
    for name in ("cluster.local.serve_local", "cluster.deploy.launch.serve_cluster"):
        monkeypatch.setattr(name, started.append)
    path = f"/dev/null{NOWHERE}"
    settings = of(key, path, tmp_path) | {"serve.port": free_port()}
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    begun = time.monotonic()
    error = CliRunner().invoke(app, ["serve", *(["--local"] if local else []), *options]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(key)
    assert not started
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_transport_for_gpus_is_refused_where_auto_comes_to_cpus(transport: str) -> None:
    options = ["--set", f"transfer.transport={transport}", "--set", f"serve.port={free_port()}"]
    error = CliRunner().invoke(app, ["serve", *options]).exception
    assert isinstance(error, ConfigError)
    assert "engine.device auto comes to CPUs here" in str(error)
    assert transport in str(error)


def test_a_refusal_of_a_replica_is_told_from_what_another_try_may_mend() -> None:
    """Serve would try a refused configuration again for a minute and more."""
    retrying = "A replica failed to start with exception. Retrying 19 more time(s). Error:\n%s"
    assert is_refused(["", retrying % "core.errors.ConfigError: serve.tls_cert: no such file"])
    assert is_refused([retrying % "core.errors.UnsupportedModel: no such layer"])
    assert not is_refused([retrying % "RuntimeError: the node was too slow", ""])


async def test_so_it_is_in_one_process() -> None:
    with pytest.raises(ConfigError, match="engine.device auto comes to CPUs here"):
        async with LocalCluster.running(load({}, {}, {"transfer.transport": "nccl"})):
            pass
