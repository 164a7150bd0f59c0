"""What is no Ray is told of at once, in a sentence."""

import socket
from contextlib import closing

import pytest

from cluster.deploy.ray_address import check_ray_address
from core.errors import ConfigError


@pytest.mark.parametrize("address", ["nope", "nope:", "nope:http", ":6379", "ray://nope", "host:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        check_ray_address(address)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_where_nothing_listens_no_ray_runs(scheme: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"{scheme}127.0.0.1:{listener.getsockname()[1]}"
        check_ray_address(address)
    with pytest.raises(ConfigError, match="no Ray answers there"):
        check_ray_address(address)
