"""A Kubernetes API server, as much of it as is asked of it: nodes, pods, KubeRay's objects with JSON patches, and events.

A patch is applied wholly or not at all; each makes a new resourceVersion. `before_patch` runs before the next one: somebody else
who is faster."""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.patience import PATIENCE_S

Object = dict[str, Any]


class FakeApi:
    def __init__(self) -> None:
        self.nodes: dict[str, Object] = {}
        self.pods: list[Object] = []
        self.objects: dict[tuple[str, str], Object] = {}
        """By plural and name."""
        self.events: list[Object] = []
        self.before_patch: list[Callable[[], None]] = []
        self.num_refused = 0
        self._version = 100

    def put(self, plural: str, made: Object) -> Object:
        made["metadata"]["resourceVersion"] = self._next()
        self.objects[plural, made["metadata"]["name"]] = made
        return made

    @contextmanager
    def serving(self) -> Iterator[str]:
        """On a thread of its own; yields the URL."""
        loop, ready, runner = asyncio.new_event_loop(), threading.Event(), web.AppRunner(self._app())
        ports: list[int] = []

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ports.append(runner.addresses[0][1])
            ready.set()

        def run() -> None:
            loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(PATIENCE_S)

    def _app(self) -> web.Application:
        app = web.Application()
        ray = "/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}"
        app.add_routes(
            [
                web.get("/api/v1/nodes/{name}", self._node),
                web.get("/api/v1/namespaces/{namespace}/pods", self._pods),
                web.post("/api/v1/namespaces/{namespace}/events", self._event),
                web.get(ray, self._read),
                web.patch(ray, self._patch),
            ]
        )
        return app

    async def _node(self, request: web.Request) -> web.Response:
        return _found(self.nodes.get(request.match_info["name"]))

    async def _pods(self, request: web.Request) -> web.Response:
        wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
        chosen = [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": chosen})

    async def _event(self, request: web.Request) -> web.Response:
        self.events.append(await request.json())
        return web.json_response(self.events[-1], status=201)

    async def _read(self, request: web.Request) -> web.Response:
        return _found(self.objects.get((request.match_info["plural"], request.match_info["name"])))

    async def _patch(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json-patch+json"
        if self.before_patch:
            self.before_patch.pop(0)()
        key = (request.match_info["plural"], request.match_info["name"])
        changed = copy.deepcopy(self.objects[key])
        for operation in await request.json():
            parent, last = _walk(changed, operation["path"])
            if operation["op"] == "test":
                if parent[last] != operation["value"]:
                    self.num_refused += 1
                    return web.json_response({"kind": "Status", "status": "Failure"}, status=422)
            else:
                assert operation["op"] == "add" or last in parent
                parent[last] = operation["value"]
        return web.json_response(self.put(key[0], changed))

    def _next(self) -> str:
        self._version += 1
        return str(self._version)


def _walk(node: Any, pointer: str) -> tuple[Any, Any]:
    *path, last = pointer.removeprefix("/").split("/")
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, int(last) if isinstance(node, list) else last


def _found(made: Object | None) -> web.Response:
    return web.json_response(made) if made else web.json_response({"kind": "Status"}, status=404)
