"""The OpenAI wire as a client reads it: server-sent events and error messages.

Lines end at newlines alone: a JSON string may hold other characters that `str.splitlines` would break it at."""

import json

DONE = b"[DONE]"


class SseReader:
    """Turns bytes into the payload of each complete `data:` line."""

    def __init__(self) -> None:
        self._rest = b""
        self._next_id = self.last_id = b""
        """The id of the event whose payload came last; empty where it has none."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads that `piece` completes, without surrounding blanks."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        payloads: list[bytes] = []
        for line in lines:
            if line.startswith(b"id:"):
                self._next_id = line[3:].strip()
            elif line.startswith(b"data:"):
                payloads.append(line[5:].strip())
                self.last_id = self._next_id
        return payloads


def error_message(body: bytes) -> str:
    """The message of an OpenAI-shaped error, or the beginning of whatever it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
