"""`baton models`: the state of a cluster's model, and its sleep, from any of its ingresses."""

from typing import Annotated, Any, Literal

import httpx
import typer

from core.errors import ConfigError

_LONGEST_S = 3600.0


def models(
    action: Annotated[
        Literal["state", "sleep", "wake"], typer.Argument(help="state, sleep or wake.")
    ] = "state",
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: weights stay in host memory. 2: they are on disk only.")
    ] = 1,
    pause: Annotated[
        bool, typer.Option("--pause", help="Sequences that run stop now, and go on after waking.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for which others are finished.")] = 60.0,
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="An ingress; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="One with the scope operator, and metrics for state.")
    ] = "",
) -> None:
    """Show whether the model serves or sleeps, have it sleep, or wake it. Returns when it is so."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=_LONGEST_S) as http:
            if action == "sleep":
                mode = "keep" if pause else "wait"
                _asked(http.post("/sleep", params={"level": level, "mode": mode, "timeout": timeout}))
            elif action == "wake":
                _asked(http.post("/wake_up"))
            for line in state(_asked(http.get("/cluster"))):
                typer.echo(line)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"no ingress answers at {base}: {error}") from None


def state(status: dict[str, Any]) -> list[str]:
    """Return lines that say of each instance whether it serves."""
    lines = [f"{status['model']}: {status['num_queued']} requests wait"]
    for one in status["instances"]:
        lines += [f"  {one['address']} {'is leaving' if one['leaving'] else 'serves'}"]
    for one in status["sleepers"]:
        wakes = f"wakes up in about {one['wake_s']:.2g} s"
        lines += [f"  {one['address']} is {one['state']}, level {one['level']}, {wakes}"]
    return lines


def _asked(answer: httpx.Response) -> dict[str, Any]:
    """Return an answer's JSON. Raises ConfigError with the server's words where it refuses."""
    if answer.is_success:
        return answer.json()
    try:
        why = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        why = f"status {answer.status_code}"
    raise ConfigError(f"{answer.request.url.path}: {why}")
