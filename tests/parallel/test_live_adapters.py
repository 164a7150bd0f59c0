"""Adapters that come and go while a cluster serves: tokens are those of PEFT's model, on every instance, old and new."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.model_card import ModelCard, describe_adapter, read_model_card
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import InstanceParts, Role
from cluster.instance.real_parts import local_parts
from cluster.local import LocalCluster
from core.clock import WallClock
from core.config.adapter_config import HoldAdapters
from core.config.cluster_config import ClusterConfig
from core.errors import ConfigError, RequestError
from core.ports import LayerSink, WorkerGroup
from core.types import Request, SamplingParams, TokenOut
from kvtransfer.transport.loopback_transport import LoopbackFabric
from net.loopback_mail import LoopbackMail, LoopbackNetwork
from tests.models.continuation import continuation
from tests.parallel.test_served import settings
from tests.parallel.test_served_adapters import LENGTH, SAMPLING, Served, served
from tests.patience import until

pytestmark = pytest.mark.timeout(400)
LONG = replace(SAMPLING, max_tokens=60, min_tokens=60)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory.mktemp("live"), "llama")


class Watched:
    """A WorkerGroup that knows what it was last asked to hold, and may refuse."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group, self.refusal = group, ""
        self.asked = HoldAdapters((), (), 0)
        self.execute, self.on_ready, self.lost, self.give_up, self.close = (
            group.execute,
            group.on_ready,
            group.lost,
            group.give_up,
            group.close,
        )

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        self.asked = asked
        if self.refusal:
            return {place.key: self.refusal for place in asked.adapters}
        return await self._group.hold_adapters(asked)


class Live:
    """A cluster, and what a client does with it."""

    def __init__(self, model: Served, folder: Path, **keys: Any) -> None:
        self.model, self.folder = model, folder
        own = {"adapters.folders": [str(folder)], "adapters.slots": 2, "adapters.max_rank": 8}
        self.config: ClusterConfig = settings(
            model.folder / "base", **(own | {"engine.num_threads": 1} | keys)
        )
        self.card: ModelCard = read_model_card(self.config)
        self.network, self.fabric = LoopbackNetwork(), LoopbackFabric()
        self.groups: list[Watched] = []
        self.scheduler = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LocalCluster]:
        async with LocalCluster.assembled(self.config, self._join, self._parts) as self.cluster:
            yield self.cluster

    @asynccontextmanager
    async def another(self, role: Role) -> AsyncIterator[Instance]:
        """One more instance, as a replica that is started later."""
        mail = self._join(role)
        parts = self._parts(role, mail)
        instance = Instance(self.config, role, mail, WallClock(), self._resolve, parts)
        instance.run()
        try:
            yield instance
        finally:
            await instance.close()

    async def load(self, name: str, folder: Path, *, in_place: bool = False) -> None:
        found = describe_adapter(self.config, self.card, name, str(folder))
        await self.cluster.frontend.adapters.load(found.key, found.folder, in_place=in_place)

    async def unload(self, name: str) -> None:
        await self.cluster.frontend.adapters.unload(name)

    def request(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams = SAMPLING) -> Request:
        frontend = self.cluster.frontend
        key = frontend.adapters.served[name].key if name else ""
        return Request(
            id=frontend.new_request_id(),
            prompt=prompt,
            sampling=sampling,
            reply_to=frontend.address,
            adapter=key,
        )

    async def answer(self, request: Request) -> list[TokenOut]:
        return [token async for token in self.cluster.frontend.generate(request)]

    async def check(self, name: str, truth: str) -> list[TokenOut]:
        """Each prompt's tokens with the adapter `name` are those of PEFT's model `truth`. Returns the first's."""
        found = []
        for prompt in self.model.prompts:
            out = await self.answer(self.request(name, prompt))
            said = [token.token for token in out]
            assert said == continuation(self.model.truths[truth], prompt, said, LENGTH, barred=[1])
            found.append(out)
        return found[0]

    def held(self) -> list[set[str]]:
        """What each instance's ranks were last asked to hold."""
        return [{place.key for place in group.asked.adapters} for group in self.groups]

    def _join(self, name: str) -> LoopbackMail:
        mail = self.network.join(name)
        if name == "scheduler":
            self.scheduler = mail.address
        return mail

    async def _resolve(self) -> list[str]:
        return [self.scheduler]

    def _parts(self, role: Role, mail: Any) -> InstanceParts:
        parts = local_parts(self.config, self.model.folder / "base", role, mail, self.fabric)

        def make_group(sink: LayerSink | None) -> WorkerGroup:
            self.groups.append(Watched(parts.make_group(sink)))
            return self.groups[-1]

        return replace(parts, make_group=make_group)


CLUSTERS = [
    pytest.param({"decode_instances": 2}, id="prefill to decode"),
    pytest.param({"prefill_instances": 0, "decode_instances": 2, "any_role": True}, id="any role"),
]


@pytest.mark.parametrize("keys", CLUSTERS)
async def test_one_that_is_loaded_is_on_every_instance_and_leaves_all_of_them(
    keys: dict[str, Any], llama: Served
) -> None:
    live = Live(llama, llama.folder, **keys)
    async with live.running() as cluster:
        await live.check("", "")
        await live.load("mine", llama.folder / "small")
        assert list(cluster.frontend.adapters.served) == ["mine"]
        assert all(len(keys) == 1 for keys in live.held())
        await live.load("other", llama.folder / "large")
        for _ in range(2):  # again with prefixes cached
            await live.check("mine", "small")
            await live.check("other", "large")
            await live.check("", "")
        old = live.request("mine", llama.prompts[0])
        await live.unload("mine")
        assert list(cluster.frontend.adapters.served) == ["other"]
        with pytest.raises(RequestError, match="'mine' does not exist any more") as refused:
            await live.answer(old)
        assert refused.value.status == 404
        await live.load("third", llama.folder / "small")  # its slot is free
        await live.check("third", "small")
        await live.check("other", "large")
        for instance in cluster.instances:
            instance.check_integrity()


async def test_what_one_instance_refuses_is_nowhere_and_it_is_named(llama: Served) -> None:
    live = Live(llama, llama.folder)
    async with live.running() as cluster:
        await live.load("mine", llama.folder / "small")
        before = live.held()
        live.groups[1].refusal = "the disk is on fire"
        with pytest.raises(RequestError, match="the disk is on fire") as refused:
            await live.load("other", llama.folder / "large")
        assert cluster.instances[1].address in refused.value.message
        assert cluster.instances[0].address not in refused.value.message
        live.groups[1].refusal = ""
        assert list(cluster.frontend.adapters.served) == ["mine"]
        assert live.held()[0] == before[0]
        await live.load("other", llama.folder / "large")
        await live.check("other", "large")
        with pytest.raises(RequestError, match="all of its 2 slots are taken"):
            await live.load("third", llama.folder / "small")
        await live.check("mine", "small")


async def test_an_unload_waits_for_what_runs_and_new_requests_are_refused_meanwhile(llama: Served) -> None:
    live, prompt = Live(llama, llama.folder), llama.prompts[0]
    async with live.running() as cluster:
        await live.load("mine", llama.folder / "small")
        request, late = live.request("mine", prompt, LONG), live.request("mine", prompt)
        tokens = cluster.frontend.generate(request)
        said = [(await anext(tokens)).token]
        unloading = asyncio.create_task(live.unload("mine"))
        await until(lambda: not cluster.frontend.adapters.served)
        sibling = [token.token for token in await live.answer(late)]
        assert sibling == continuation(llama.truths["small"], prompt, sibling, LENGTH, barred=[1]), (
            "it was read before, and others still run with it"
        )
        assert not unloading.done()
        said += [token.token async for token in tokens]
        assert said == continuation(llama.truths["small"], prompt, said, 60, barred=[1])
        await unloading
        assert live.held() == [set(), set()]


async def test_other_files_of_a_name_share_nothing_with_those_before(llama: Served, tmp_path: Path) -> None:
    live, prompt = Live(llama, tmp_path), llama.prompts[0]
    shutil.copytree(llama.folder / "small", tmp_path / "mine")
    async with live.running() as cluster:
        await live.load("mine", tmp_path / "mine")
        await live.check("mine", "small")
        assert (await live.check("mine", "small"))[0].num_cached
        read_before, running = live.request("mine", prompt), live.request("mine", prompt, LONG)
        tokens = cluster.frontend.generate(running)
        said = [(await anext(tokens)).token]
        shutil.rmtree(tmp_path / "mine")
        shutil.copytree(llama.folder / "large", tmp_path / "mine")
        with pytest.raises(RequestError, match="already been loaded"):
            await live.load("mine", tmp_path / "mine")
        await live.load("mine", tmp_path / "mine", in_place=True)
        assert not (await live.answer(live.request("mine", prompt)))[0].num_cached
        await live.check("mine", "large")
        said += [token.token async for token in tokens]
        assert said == continuation(llama.truths["small"], prompt, said, 60, barred=[1]), (
            "what runs keeps its own"
        )
        await until(lambda: all(len(keys) == 1 for keys in live.held()))
        now = [token.token for token in await live.answer(read_before)]
        assert now == continuation(llama.truths["large"], prompt, now, LENGTH, barred=[1])


async def test_an_instance_that_starts_later_answers_for_what_was_loaded_before(llama: Served) -> None:
    live = Live(llama, llama.folder, prefill_instances=0)
    async with live.running() as cluster:
        await live.load("mine", llama.folder / "small")
        await live.load("other", llama.folder / "large")
        async with live.another("decode"):
            async with asyncio.timeout(60):
                while len((await cluster.frontend.status()).instances) < 2:
                    await asyncio.sleep(0.002)
            assert len(live.held()[1]) == 2, "requests come when it has them"
            await cluster.instances[0].close()
            await live.check("mine", "small")
            await live.check("other", "large")
            await live.unload("mine")
            assert len(live.held()[1]) == 1


def test_what_lies_elsewhere_is_refused_whatever_links_say(llama: Served, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    live = Live(llama, inside)
    shutil.copytree(llama.folder / "small", inside / "good")
    (inside / "link").symlink_to(llama.folder / "small")
    shutil.copytree(llama.folder / "small", inside / "linked-file")
    (inside / "linked-file" / "adapter_model.safetensors").unlink()
    (inside / "linked-file" / "adapter_model.safetensors").symlink_to(
        llama.folder / "small" / "adapter_model.safetensors"
    )
    (inside / "moved").symlink_to(inside / "good")
    outside = [
        llama.folder / "small",
        inside / "link",
        inside / "linked-file",
        inside / ".." / "x",
        Path("/nowhere"),
        Path("good"),
    ]
    for path in outside:
        with pytest.raises(ConfigError, match=r"is not in one of adapters\.folders"):
            describe_adapter(live.config, live.card, "mine", str(path))
    with pytest.raises(ConfigError, match="there is no folder"):
        describe_adapter(live.config, live.card, "mine", str(inside / "nothing"))
    keys = {
        describe_adapter(live.config, live.card, "mine", str(inside / name)).key for name in ("good", "moved")
    }
    assert len(keys) == 1


def test_names_and_ranks_that_cannot_be(llama: Served) -> None:
    live = Live(llama, llama.folder, **{"adapters.max_rank": 4})
    for name, said in (("base", "the model's own name"), ("a b", "is no name for an adapter")):
        with pytest.raises(ConfigError, match=said):
            describe_adapter(live.config, live.card, name, str(llama.folder / "small"))
    with pytest.raises(ConfigError, match="rank of 8, and adapters.max_rank is 4"):
        describe_adapter(live.config, live.card, "mine", str(llama.folder / "large"))
    fixed = llama.config()
    with pytest.raises(ConfigError, match=r"adapters\.folders names no folder"):
        describe_adapter(fixed, read_model_card(fixed), "mine", str(llama.folder / "small"))


MESHES = [
    pytest.param({"prefill.tp": 2, "decode.pp": 2}, id="tp2 to pp2"),
    pytest.param({"prefill.pp": 2, "decode.tp": 2}, id="pp2 to tp2"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("keys", MESHES)
async def test_the_same_on_meshes(keys: dict[str, Any], llama: Served, tmp_path: Path) -> None:
    live = Live(llama, tmp_path, **keys)
    for name in ("small", "large"):
        shutil.copytree(llama.folder / name, tmp_path / name)
    async with live.running() as cluster:
        await live.load("mine", tmp_path / "small")
        await live.check("mine", "small")
        found = describe_adapter(live.config, live.card, "other", str(tmp_path / "large"))
        shutil.rmtree(tmp_path / "large")
        with pytest.raises(RequestError, match=r"rank \d of 2 .*there is no folder"):
            await cluster.frontend.adapters.load(found.key, found.folder, in_place=False)
        await live.unload("mine")
        shutil.copytree(llama.folder / "large", tmp_path / "large")
        await live.load("mine", tmp_path / "large")
        await live.check("mine", "large")
        await live.check("", "")
