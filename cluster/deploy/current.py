"""The ASGI application of this ingress replica.

Ray Serve pickles the ingress class by value but imports this module by name, so what the replica's constructor puts here is
what the builder below hands to Serve."""

from typing import Any

app: Any = None


def current_app() -> Any:
    return app
