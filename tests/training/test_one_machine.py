"""Ranks of one machine meet on the loopback address; tests/e2e/test_no_host_name.py runs them in namespaces."""

import os
import socket
from typing import Any

import pytest

from cloudai_mbridge.training.one_machine import rendezvous
from cloudai_mbridge.training.process import loopback


@pytest.mark.parametrize(("address", "endpoint"), [("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0")])
def test_the_endpoint_is_the_address_with_a_free_port(address: str, endpoint: str) -> None:
    options = rendezvous(address)
    assert f"--rdzv-endpoint={endpoint}" in options
    assert f"--local-addr={address}" in options


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
