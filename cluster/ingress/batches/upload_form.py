"""Reads the form of an upload as it comes, and writes its file where it will stay: nothing waits in memory or elsewhere."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart.multipart import MultipartParser, parse_options_header

from core.errors import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 8
_MAX_HEADER_BYTES = 4096
"""The limit for the headers of one part."""
_MAX_VALUE_BYTES = 1024
"""The limit for what is no file."""
_MAX_NAME = 256


class UploadForm:
    """Blocks while it writes."""

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """`write` gets the file, piece by piece. Raises RequestError."""
        _, options = parse_options_header(content_type)
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        if not (boundary := options.get(b"boundary", b"")):
            raise _unreadable("its content-type names no boundary")
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except Exception as error:
            raise _unreadable(error) from None
        self._write = write
        self._num_parts = 0
        self._has_begun = self._is_over = False
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """The file's name; None where the form has no file so far."""

    def feed(self, piece: bytes) -> None:
        """Read a piece of the body. Raises RequestError."""
        if not self._has_begun:
            piece = piece.lstrip(
                b"\r\n"
            )  # the parser would take what follows them for a part of the first boundary
            self._has_begun = bool(piece)
        try:
            self._parser.write(piece)
        except (RequestError, OSError):
            raise
        except Exception as error:
            raise _unreadable(error) from None

    def end(self) -> None:
        """Raise RequestError where the form is not complete."""
        if not self._is_over:
            raise _unreadable("it ends before its last boundary")

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _unreadable(f"it has more than {_MAX_PARTS} parts")
        self._headers: dict[bytes, bytes] = {}
        self._num_header_bytes = 0
        self._name = self._value = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += self._counted(data, start, end)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data, start, end)

    def _counted(self, data: bytes, start: int, end: int) -> bytes:
        self._num_header_bytes += end - start
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise _unreadable(f"the headers of a part have more than {_MAX_HEADER_BYTES} bytes")
        return data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if b"name" not in options:
            raise _unreadable("a part has no name")
        self._field = options[b"name"].decode(errors="replace")
        self._is_file = b"filename" in options
        if self._is_file and (self._field != "file" or self.filename is not None):
            raise _unreadable("it has one file, whose name is 'file'")
        if self._is_file:
            self.filename = options[b"filename"].decode(errors="replace")[:_MAX_NAME] or "file"
        self._text = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._write(data[start:end])
            return
        if len(self._text) + end - start > _MAX_VALUE_BYTES:
            raise _unreadable(f"{self._field[:64]!r} has more than {_MAX_VALUE_BYTES} bytes")
        self._text += data[start:end]

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._field] = self._text.decode(errors="replace")

    def _on_end(self) -> None:
        self._is_over = True


def _unreadable(why: object) -> RequestError:
    return RequestError(f"the form cannot be read: {why}")
