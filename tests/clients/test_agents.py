"""Coding agents as they are installed, alone and through LiteLLM's proxy: each runs one of its tools, and a script plays the model."""

import asyncio
import shutil
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.clients.run_client import install_npm, install_python, said
from tests.clients.scripted_agent import SAID, SECRET, served_agent
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.template_fakes import last_rendered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
_PATIENCE_S = 120


def installed(package: str, program: str, folder: Path) -> Path:
    folder.mkdir()
    install_npm(package, folder)
    return folder / "node_modules" / ".bin" / program


async def asked(claude: Path, folder: Path, url: str) -> str:
    lines = await said(
        [str(claude), "-p", "What is the word?"],
        folder,
        without=("ANTHROPIC", "CLAUDE"),
        HOME=str(folder),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="k",
        ANTHROPIC_MODEL=NAME,
        ANTHROPIC_SMALL_FAST_MODEL=NAME,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    return "\n".join(lines)


@pytest.mark.turns(3, number=0)
async def test_codex_runs_a_command_though_it_sends_a_search_tool(tmp_path: Path) -> None:
    codex = installed("codex", "codex", tmp_path / "npm")
    (home := tmp_path / "home").mkdir()
    (work := tmp_path / "work").mkdir()
    (work / "note.txt").write_text(SECRET)
    async with served_agent("exec_command", {"cmd": "cat note.txt"}) as (api, url):
        (home / "config.toml").write_text(
            f'model = "{NAME}"\nmodel_provider = "baton"\n'
            f'[model_providers.baton]\nname = "Baton"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        )
        whole = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "The word?"]
        lines = await said([str(codex), *whole], work, without=("OPENAI", "CODEX"), CODEX_HOME=str(home))
    assert SAID in "\n".join(lines), lines
    assert "exec_command" in {tool["function"]["name"] for tool in last_rendered(api)["tools"]}


@pytest.mark.turns(3, number=1)
async def test_claude_code_reads_a_file(tmp_path: Path) -> None:
    claude = installed("claude-code", "claude", tmp_path / "npm")
    (tmp_path / "note.txt").write_text(SECRET)
    async with served_agent("Read", {"file_path": str(tmp_path / "note.txt")}) as (api, url):
        assert SAID in await asked(claude, tmp_path, url)
    assert "Read" in {tool["function"]["name"] for tool in last_rendered(api)["tools"]}


@pytest.mark.turns(3, number=2)
async def test_claude_code_reads_a_file_through_litellms_proxy(tmp_path: Path) -> None:
    """LiteLLM makes a chat of its messages, and asks for a reasoning effort."""
    claude = installed("claude-code", "claude", tmp_path / "npm")
    packages = tmp_path / "packages"
    install_python("litellm-proxy", packages)
    (tmp_path / "note.txt").write_text(SECRET)
    async with (
        served_agent("Read", {"file_path": str(tmp_path / "note.txt")}) as (api, url),
        proxy(packages, tmp_path, url) as proxy_url,
    ):
        assert SAID in await asked(claude, tmp_path, proxy_url)
    assert "Read" in {tool["function"]["name"] for tool in last_rendered(api)["tools"]}


@asynccontextmanager
async def proxy(packages: Path, folder: Path, url: str) -> AsyncGenerator[str]:
    """Run LiteLLM's proxy in front of a server, and yield its address."""
    (folder / "proxy.yaml").write_text(
        f"model_list:\n- model_name: {NAME}\n  litellm_params:\n    model: hosted_vllm/{NAME}\n"
        f"    api_base: {url}/v1\n    api_key: k\n"
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--config", "proxy.yaml", "--host", "127.0.0.1", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(packages / "bin" / "litellm"),
        *where,
        cwd=folder,
        env={"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await asyncio.wait_for(_alive(f"http://127.0.0.1:{port}", process), _PATIENCE_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _alive(url: str, process: "asyncio.subprocess.Process") -> None:
    async with httpx.AsyncClient() as http:
        while process.returncode is None:
            try:
                if (await http.get(f"{url}/health/liveliness")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.2)
    raise AssertionError(f"the proxy ended with {process.returncode}")
