"""A form is read alike however it is cut, and one that is none is refused."""

import pytest

from cluster.ingress.batches.upload_form import UploadForm
from core.errors import RequestError

KIND = "multipart/form-data; boundary=a"
PART = b'--a\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--a--\r\n'


def fields(kind: str, *pieces: bytes) -> dict[str, str]:
    form = UploadForm(kind, lambda _: None)
    for piece in pieces:
        form.feed(piece)
    form.end()
    return form.fields


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n\r\n"])
def test_a_form_is_read_alike_however_it_is_cut(before: bytes) -> None:
    body = before + PART
    for cut in range(len(body)):
        assert fields(KIND, body[:cut], body[cut:]) == {"purpose": "batch"}


@pytest.mark.parametrize("body", [b"\r\na--a--a", b"\r\n" + PART[2:], b"\n\n" + PART[1:]])
def test_what_follows_empty_lines_is_no_part_of_a_boundary(body: bytes) -> None:
    for cut in range(len(body)):
        with pytest.raises(RequestError, match="cannot be read"):
            fields(KIND, body[:cut], body[cut:])


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=", "", "text/plain"])
def test_a_form_without_a_boundary_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match="names no boundary"):
        fields(kind, b"--\r\n" + PART)
