"""Images in the bodies of all routes: what becomes of them, and what is refused before anything is generated."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import anthropic
import httpx2
import numpy as np
import pytest
from PIL import Image

from cluster.ingress.images.image_intake import ImageIntake
from core.config.image_config import ImageConfig
from core.errors import RequestError
from core.prompt_images import PromptImage
from models.vision.image_reader import ImageLayout, open_image
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import CHATS, SETTINGS, Api
from tests.models.seeing_checkpoints import data_url, encoded, make_image, said, shown

PLACEHOLDER = 1
LIMITS = ImageConfig(max_per_request=2, max_bytes=4096, max_pixels=10_000)
SMALL, OTHER = make_image(1, 20, 16), make_image(2, 20, 16)


class Reader:
    """An image of width w is w / 10 tokens in each of two rows, each of which another token ends."""

    token_id = placeholder_id = PLACEHOLDER

    def in_text(self, text: str) -> str:
        return text

    def layout(self, image: Image.Image) -> ImageLayout:
        return ImageLayout([*[PLACEHOLDER] * (image.width // 10), 2] * 2, columns=0)


class SeeingTokenizer(ByteTokenizer):
    def render_chat(self, messages: Sequence[Any], *others: Any, **more: Any) -> str:
        return super().render_chat(
            [{**message, "content": _flat(message["content"])} for message in messages], *others, **more
        )


def _flat(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(part["text"] if part["type"] == "text" else chr(PLACEHOLDER) for part in content)


def seeing(limits: ImageConfig = LIMITS, **settings: Any) -> Api:
    intake = ImageIntake(Reader(), limits)  # type: ignore[arg-type]
    return Api(FakeGenerator("ok"), replace(SETTINGS, images=intake, **settings), tokenizer=SeeingTokenizer())


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": content, **more}], "max_tokens": 2}


BODY = b"user: a" + bytes([1, 1, 2, 1, 1, 2]) + b"b\nassistant: "
SEEN = (PromptImage(encoded(SMALL), ((7, 2), (10, 2))),)


async def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    api = seeing()
    answer = await api.openai.chat.completions.create(**asked([said("a"), shown(SMALL), said("b")]))
    (request,) = api.generator.requests
    assert bytes(request.prompt) == BODY
    assert request.images == SEEN
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(BODY)


@pytest.mark.parametrize(("detail", "sides"), [("low", (512, 256)), ("high", (640, 320)), (None, (640, 320))])
async def test_a_large_image_is_shrunk_where_low_detail_will_do(detail: Any, sides: tuple[int, int]) -> None:
    api = seeing(ImageConfig(max_bytes=1 << 20))
    url = data_url(encoded(make_image(1, 640, 320)))
    shown: Any = {"url": url} | ({"detail": detail} if detail else {})
    await api.openai.chat.completions.create(**asked([{"type": "image_url", "image_url": shown}]))
    part: Any = {"type": "input_image", "image_url": url, "detail": detail or "auto"}
    await api.openai.responses.create(
        model=NAME, input=[{"role": "user", "content": [part]}], max_output_tokens=2
    )
    for request in api.generator.requests:
        (own,) = request.images
        assert Image.open(BytesIO(own.data)).size == sides
        assert own.num_rows == 2 * (sides[0] // 10)


async def test_two_turns_have_their_images_in_order() -> None:
    api = seeing()
    messages = [
        {"role": "user", "content": [shown(SMALL)]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [said("y"), shown(OTHER)]},
    ]
    assert (await api.post(CHATS, {"model": NAME, "messages": messages})).status_code == 200
    (request,) = api.generator.requests
    assert [one.data for one in request.images] == [encoded(SMALL), encoded(OTHER)]
    for one in request.images:
        for start, count in one.spans:
            assert request.prompt[start : start + count] == (PLACEHOLDER,) * count
    assert sum(one.num_rows for one in request.images) == request.prompt.count(PLACEHOLDER)


async def test_responses_and_messages_are_the_same_request() -> None:
    api = seeing()
    url = data_url(encoded(SMALL))
    parts: Any = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "b"},
    ]
    await api.openai.responses.create(model=NAME, input=[{"role": "user", "content": parts}])
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app), base_url="http://api")
    client = anthropic.AsyncAnthropic(base_url="http://api", api_key="k", http_client=http, max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks: Any = [
        {"type": "text", "text": "a"},
        {"type": "image", "source": source},
        {"type": "text", "text": "b"},
    ]
    messages: Any = [{"role": "user", "content": blocks}]
    answer = await client.messages.create(model=NAME, max_tokens=2, messages=messages)
    assert answer.usage.input_tokens == len(BODY)
    assert [(bytes(one.prompt), one.images) for one in api.generator.requests] == [(BODY, SEEN)] * 2
    counted = await client.messages.count_tokens(model=NAME, messages=messages)
    assert counted.input_tokens == len(BODY)


class CallingTokenizer(SeeingTokenizer):
    def render_chat(self, messages: Sequence[Any], *others: Any, **more: Any) -> str:
        said = [{**m, "content": str(m["tool_calls"])} if "tool_calls" in m else m for m in messages]
        return super().render_chat(said, *others, **more)


RESULTS = b"\ntool: seen\ntool: \nuser: " + bytes([1, 1, 2, 1, 1, 2])


async def test_the_images_of_tools_results_are_shown_behind_them() -> None:
    intake = ImageIntake(Reader(), LIMITS)  # type: ignore[arg-type]
    settings = replace(SETTINGS, images=intake, max_context_tokens=500)
    api = Api(FakeGenerator("ok"), settings, tokenizer=CallingTokenizer())
    url = data_url(encoded(SMALL))
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in "xy"]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": [
                {"type": "image", "source": source}, {"type": "text", "text": "seen"}]},
            {"type": "tool_result", "tool_use_id": "y", "content": ""},
            {"type": "text", "text": "b"},
        ]},
    ]  # fmt: skip
    answer = await api.post("/v1/messages", {"model": NAME, "max_tokens": 2, "messages": messages})
    assert answer.status_code == 200, answer.text
    call: Any = {"type": "function_call", "name": "f", "arguments": "{}"}
    items: Any = [
        {"role": "user", "content": "a"},
        *({**call, "call_id": i} for i in "xy"),
        {"type": "function_call_output", "call_id": "x", "output": [
            {"type": "input_image", "image_url": url}, {"type": "input_text", "text": "seen"}]},
        {"type": "function_call_output", "call_id": "y", "output": ""},
    ]  # fmt: skip
    await api.openai.responses.create(model=NAME, input=items, max_output_tokens=2)
    first, second = (bytes(request.prompt) for request in api.generator.requests)
    assert first.endswith(RESULTS + b"b\nassistant: ")
    assert second.endswith(RESULTS + b"\nassistant: ")
    assert [len(request.images) for request in api.generator.requests] == [1, 1]


async def test_a_stored_response_goes_on_with_its_image() -> None:
    api = seeing()
    part: Any = {"type": "input_image", "image_url": data_url(encoded(SMALL))}
    first = await api.openai.responses.create(model=NAME, input=[{"role": "user", "content": [part]}])
    await api.openai.responses.create(model=NAME, input="more", previous_response_id=first.id)
    assert [len(one.images) for one in api.generator.requests] == [1, 1]


async def test_tokenize_counts_them() -> None:
    body = {"messages": [{"role": "user", "content": [said("a"), shown(SMALL), said("b")]}]}
    answer = (await seeing().post("/tokenize", body)).json()
    assert bytes(answer["tokens"]) == BODY


async def test_every_choice_has_the_images() -> None:
    api = seeing()
    await api.openai.chat.completions.create(**asked([said("a"), shown(SMALL), said("b")]), n=2)
    assert [one.images for one in api.generator.requests] == [SEEN, SEEN]


async def test_images_count_for_the_context() -> None:
    answer = await seeing(max_context_tokens=len(BODY)).post(
        CHATS, asked([said("a"), shown(SMALL), said("b")])
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def bomb() -> bytes:
    """A PNG file of some bytes that says that it has 2,500,000,000 pixels."""
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", len(head))
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + struct.pack(">I", 0)
        + b"IDAT"
        + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def several(kind: str, first: Image.Image, then: Image.Image) -> bytes:
    out = BytesIO()
    first.save(out, kind, save_all=True, append_images=[then])
    return out.getvalue()


def url(of: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": of}}


def whole(data: bytes) -> dict[str, Any]:
    return url(data_url(data))


PNG = encoded(SMALL)
NOISE = Image.effect_noise((60, 60), 90)
REFUSED = [
    ([url("https://example.org/a.png")], "send the image itself"),
    ([url("http://169.254.169.254/latest/meta-data")], "send the image itself"),
    ([url("file:///etc/passwd")], "send the image itself"),
    ([url("data:image/png,abc")], "must be data:image/"),
    ([url("data:image/png;base64")], "must be data:image/"),
    ([url("data:image/png;base64,a?b=")], "no valid base64"),
    ([url("data:image/png;base64,abc")], "no valid base64"),
    ([url("data:image/png;base64,")], "no PNG, JPEG, WEBP or GIF"),
    ([whole(b"hello, this is a text")], "no PNG, JPEG, WEBP or GIF"),
    ([whole(encoded(SMALL, "BMP"))], "no PNG, JPEG, WEBP or GIF"),
    ([whole(PNG[: len(PNG) // 2])], "damaged"),
    ([whole(bomb())], "more than 10000 pixels"),
    ([whole(encoded(make_image(1, 200, 60)))], "200 x 60 pixels, more than 10000"),
    ([whole(encoded(NOISE.convert("RGB")))], "bytes, more than this server's limit of 4096"),
    ([whole(encoded(make_image(1, 99, 3)))], "more than 32 times"),
    ([shown(SMALL)] * 3, "limit of 2"),
    ([shown(SMALL), said(f"say {chr(PLACEHOLDER)}")], "placeholders"),
    ([{"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "huge"}}], "detail must be"),
    ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "video_url"),
]


@pytest.mark.parametrize("kind", ["MPO", "GIF", "PNG", "WEBP"])
async def test_of_several_images_in_one_file_the_first_is_seen(kind: str) -> None:
    """Phones put several JPEGs into one file (MPO): the photo, and a map of its brightness."""
    wide, narrow = make_image(1, 40, 16), make_image(2, 20, 16)
    data = several(kind, wide, wide.rotate(180) if kind == "WEBP" else narrow.resize((40, 16)))
    answer = await seeing().post(CHATS, asked([whole(data)]))
    assert answer.status_code == 200, answer.text
    seen, alone = open_image(data), open_image(encoded(wide, "JPEG" if kind == "MPO" else kind))
    assert seen.size == (40, 16)
    assert np.array_equal(np.asarray(seen), np.asarray(alone)) or kind != "PNG"
    difference = np.abs(np.asarray(seen, int) - np.asarray(wide.convert("RGB"), int)).mean()
    other = np.abs(np.asarray(seen, int) - np.asarray(narrow.resize((40, 16)).convert("RGB"), int)).mean()
    assert difference < other / 2


async def test_a_phones_photo_is_turned_upright() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    out = BytesIO()
    make_image(1, 40, 16).save(out, "MPO", save_all=True, append_images=[OTHER], exif=turned)
    assert open_image(out.getvalue()).size == (16, 40)


@pytest.mark.parametrize(("content", "says"), REFUSED)
async def test_what_cannot_be_read_is_refused_by_name(content: Any, says: str) -> None:
    api = seeing()
    answer = await api.post(CHATS, asked(content))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages"), error
    assert says in error["message"]
    assert len(error["message"]) < 400
    assert not api.generator.requests


async def test_a_refusal_says_where_the_image_stands() -> None:
    answer = await seeing().post(CHATS, asked([said("a"), url("http://x")]))
    assert answer.json()["error"]["message"].startswith("messages[0].content[1].image_url.url: ")


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
async def test_only_users_show_images(role: str) -> None:
    answer = await seeing().post(CHATS, asked([shown(SMALL)], role=role))
    assert answer.status_code == 400
    assert "only a user's message has images" in answer.json()["error"]["message"]


async def test_prompts_with_images_are_not_cut() -> None:
    answer = await seeing().post(CHATS, {**asked([shown(SMALL)]), "truncate_prompt_tokens": 9})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_limit_of_none_refuses_the_first() -> None:
    answer = await seeing(ImageConfig(max_per_request=0)).post(CHATS, asked([shown(SMALL)]))
    assert "limit of 0" in answer.json()["error"]["message"]


class TextTokenizer(ByteTokenizer):
    def render_chat(self, messages: Sequence[Any], *others: Any, **more: Any) -> str:
        if not all(isinstance(message["content"], str) for message in messages):
            raise RequestError("the chat template refuses these messages", field="messages")
        return super().render_chat(messages, *others, **more)


async def test_a_model_of_texts_refuses_images_by_its_name() -> None:
    api = Api(FakeGenerator(), tokenizer=TextTokenizer())
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    image = {"type": "image", "source": source}
    for path, body in (
        (CHATS, asked([shown(SMALL)])),
        ("/v1/messages", asked([image])),
        ("/v1/messages/count_tokens", {"model": NAME, "messages": asked([image])["messages"]}),
        ("/tokenize", {"messages": asked([shown(SMALL)])["messages"]}),
    ):
        answer = await api.post(path, body)
        assert answer.status_code == 400, path
        assert "'fake' reads no images" in answer.json()["error"]["message"]
    part = {"type": "input_image", "image_url": data_url(PNG)}
    answer = await api.post("/v1/responses", {"model": NAME, "input": [{"role": "user", "content": [part]}]})
    assert "'fake' reads no images" in answer.json()["error"]["message"]
    assert not api.generator.requests


async def test_text_in_parts_stays_text_where_a_template_takes_texts() -> None:
    api = seeing()
    await api.post(CHATS, asked([said("a"), said("b")]))
    assert bytes(api.generator.requests[0].prompt) == b"user: ab\nassistant: "


async def test_a_template_that_takes_parts_alone_gets_parts() -> None:
    class PartsAlone(SeeingTokenizer):
        def render_chat(self, messages: Sequence[Any], *others: Any, **more: Any) -> str:
            kept = [m if isinstance(m["content"], list) else {**m, "content": ""} for m in messages]
            return super().render_chat(kept, *others, **more)

    intake = ImageIntake(Reader(), LIMITS)  # type: ignore[arg-type]
    api = Api(FakeGenerator("ok"), replace(SETTINGS, images=intake), tokenizer=PartsAlone())
    await api.post(CHATS, asked("text"))
    assert bytes(api.generator.requests[0].prompt) == b"user: text\nassistant: "
