"""What must start fast, or in many processes, imports only what it uses.

Each process of a cluster pays for its own imports, and all of them start side by side."""

import subprocess
import sys

import pytest

_MODELS = ("torch", "transformers")
_API = ("cluster.ingress.http_app", "httpx", "prometheus_client", "PIL")
_TOKENIZERS = ("tokenizers", "llguidance", "jinja2")
_ENGINE = ("engine.loop", "kernels.ops", "kvtransfer.pusher")
_CERTIFICATES = "cryptography"
"""Only connections between hosts have any."""
_TOOLS = ("matplotlib", "openai", "pandas", "scipy", "sympy", "torch._dynamo", "torch._inductor", "triton")
"""What nobody needs who serves a model in eager mode on a processor."""


@pytest.mark.parametrize(
    ("process", "module", "others"),
    [
        ("the command line", "baton.cli.serve", (*_MODELS, *_API, *_TOKENIZERS, *_ENGINE, "numpy", "ray")),
        (
            "whoever deploys",
            "cluster.deploy.launch",
            (*_MODELS, *_API, *_TOKENIZERS, *_ENGINE, *_TOOLS),
        ),
        ("Serve's builder", "cluster.deploy.serve_app", (*_MODELS, *_API, *_TOKENIZERS, *_ENGINE, *_TOOLS)),
        (
            "a scheduler",
            "cluster.deploy.scheduler_deployment",
            (*_MODELS, *_API, *_TOKENIZERS, *_ENGINE, *_TOOLS, _CERTIFICATES),
        ),
        ("an ingress", "cluster.deploy.ingress_process", (*_MODELS, *_ENGINE, *_TOOLS)),
        ("an instance", "cluster.deploy.pool_instance", ("transformers", *_API, *_TOOLS, _CERTIFICATES)),
    ],
)
def test_a_process_imports_nothing_that_it_does_not_use(
    process: str, module: str, others: tuple[str, ...]
) -> None:
    assert imported(module, others) == "[]", f"{process} imports what it does not use"


def imported(module: str, names: tuple[str, ...]) -> str:
    """Return those of `names` that an interpreter has imported after `module`."""
    program = f"import sys, {module}; print([name for name in {names} if name in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
