"""Which running Ray must be joined at 127.0.0.1."""

import pytest
from ray._private import services

from cluster.deploy.ray_loopback import is_on_loopback


@pytest.mark.parametrize(
    ("address", "running", "wanted"),
    [
        ("127.0.0.1:6379", set[str](), True),
        ("localhost:6379", set[str](), True),
        ("127.0.0.1:6379", {"10.0.0.7:6379", "127.0.0.1:35767"}, False),
        ("127.0.0.1:35767", {"10.0.0.7:6379", "127.0.0.1:35767"}, True),
        ("10.0.0.7:6379", {"10.0.0.7:6379"}, False),
        ("10.0.0.7:6379", set[str](), False),
        ("auto", {"127.0.0.1:35767"}, True),
        ("auto", {"10.0.0.7:6379"}, False),
        ("auto", {"127.0.0.1:35767", "10.0.0.7:6379"}, False),
        ("auto", set[str](), False),
    ],
)
def test_a_ray_on_loopback_is_told_from_one_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, address: str, running: set[str], wanted: bool
) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset(running))
    assert is_on_loopback(address) is wanted
