"""The names of nats-py that the connection uses, and packages that are not installed."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport, WebSocketTransport

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.errors import ConfigurationError
from tests.integration.jetstream.connection.authentication import MARKS, let_in

pytestmark = MARKS


def test_private_names_of_nats_py_exist() -> None:
    assert list(inspect.signature(Client._process_info).parameters) == [
        "self",
        "info",
        "initial_connection",
    ]
    assert list(inspect.signature(Client._process_connect_init).parameters) == ["self"]
    reconnect = inspect.getsource(Client._attempt_reconnect)
    assert "await self._process_connect_init()" in reconnect
    assert list(inspect.signature(Client._attempt_reconnect).parameters) == ["self"]
    for beginning in (Client.force_reconnect, Client._process_op_err):
        assert "create_task(self._attempt_reconnect())" in inspect.getsource(beginning)
    assert Client()._server_pool == []
    assert Client()._max_payload == Client().max_payload
    tls = inspect.getsource(TcpTransport.connect_tls)
    assert "self._io_reader, self._io_writer = reader, writer" in tls
    assert list(inspect.signature(Client._select_next_server).parameters) == ["self"]
    assert "await self._select_next_server()" in reconnect
    assert list(inspect.signature(Client._connect_to_server).parameters) == ["self", "s"]
    select = inspect.getsource(Client._select_next_server)
    assert "await self._connect_to_server(s)" in select
    connect = inspect.getsource(TcpTransport.connect)
    assert "self._bare_io_reader = self._io_reader = r" in connect
    assert "self._bare_io_writer = self._io_writer = w" in connect
    assert Client()._host_is_ip("::1")
    websocket = inspect.getsource(WebSocketTransport)
    assert "self._ws = await self._client.ws_connect(" in websocket
    assert {"discovered", "last_attempt", "reconnects", "tls_name"} <= {
        field.name for field in fields(Srv)
    }
    connect = inspect.getsource(Client._process_connect_init)
    greeting = connect.index("await self._process_info(srv_info, initial_connection=True)")
    assert greeting < connect.index('"tls_required" in self._server_info')
    assert greeting < connect.index("self._connect_command()")
    # The JWT and the signature are asked for anew at each connect.
    command = inspect.getsource(Client._connect_command)
    assert "self._signature_cb(" in command
    assert "self._user_jwt_cb()" in command


async def test_websocket_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"aiohttp.*nats-stream-source\[websocket\]"):
        await let_in(ConnectionSettings(servers=("ws://127.0.0.1:1",)))
