"""Ranks of one machine meet on the loopback address; tests/e2e/test_no_host_name.py runs them in namespaces."""

import os
import socket
from typing import Any

import pytest

from cloudai_mbridge.training.one_machine import meet_at_once, rendezvous
from cloudai_mbridge.training.process import loopback


@pytest.mark.parametrize(("address", "endpoint"), [("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0")])
def test_the_endpoint_is_the_address_with_a_free_port(address: str, endpoint: str) -> None:
    options = rendezvous(address)
    assert f"--rdzv-endpoint={endpoint}" in options
    assert f"--local-addr={address}" in options


def test_torchrun_does_not_wait_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    waits: list[float] = []
    monkeypatch.setattr(module, "_delay", waits.append)
    slow_name = module.get_method_name
    monkeypatch.setattr(module, "get_method_name", slow_name)
    meet_at_once(module)
    module._delay(seconds=(0, 0.3))
    module._delay(seconds=1)
    assert waits == [1]

    def record(find: Any) -> Any:
        return find()

    def join(find: Any) -> Any:
        return record(find)

    assert join(slow_name) == join(module.get_method_name) == "join"


def test_no_two_runs_have_one_id() -> None:
    assert rendezvous("::1") != rendezvous("::1")


def test_the_address_is_ipv6_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback.loopback_address() == "127.0.0.1"

    def no_ipv4(*args: Any) -> Any:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_ipv4)
    assert loopback.loopback_address() == "::1"


def test_an_interface_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    loopback.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    loopback.use_loopback()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
