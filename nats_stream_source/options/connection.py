"""The options that say how to reach the servers, the same for every format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nats_stream_source.errors import ConfigurationError, OptionError
from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.jetstream.subjects import api_prefix
from nats_stream_source.options import kinds
from nats_stream_source.options.table import Option

CONNECTION: tuple[Option, ...] = (
    Option(
        "servers", "list of URLs", kinds.servers, None, "where the NATS servers are; required", True
    ),
    Option("user", "text", kinds.text, None, "user name"),
    Option("password", "text", kinds.text, None, "password of `user`", secret=True),
    Option("token", "text", kinds.text, None, "authentication token", secret=True),
    Option("credentials", "path", kinds.text, None, "credentials file (user JWT and nkey seed)"),
    Option(
        "credentialsContent",
        "credentials file's text",
        kinds.credentials,
        None,
        "the text of a credentials file, where none can be put on every machine",
        secret=True,
    ),
    Option("nkeySeedFile", "path", kinds.text, None, "file with a user's nkey seed"),
    Option(
        "tlsCaFile", "path", kinds.text, None, "PEM certificates to trust, instead of the system's"
    ),
    Option("tlsCertFile", "path", kinds.text, None, "PEM certificate that proves the client"),
    Option("tlsKeyFile", "path", kinds.text, None, "private key of `tlsCertFile`, not encrypted"),
    Option(
        "tlsHandshakeFirst",
        "boolean",
        kinds.boolean,
        False,
        "begin with the TLS handshake; for servers that are set so",
    ),
    Option("domain", "token", kinds.token, None, "JetStream domain to read from (ADR-19)"),
    Option("apiPrefix", "subject", kinds.subject, None, "prefix of the JetStream API (ADR-19)"),
    Option("inboxPrefix", "subject", kinds.subject, "_INBOX", "first tokens of reply subjects"),
    Option("consumerPrefix", "token", kinds.token, "spark", "first part of the consumers' names"),
    Option("connectTimeout", "number of seconds", kinds.seconds, 10.0, "limit for connecting"),
    Option(
        "requestTimeout",
        "number of seconds",
        kinds.seconds,
        5.0,
        "limit for one answer of a server",
    ),
)


def connection_settings(values: Mapping[str, Any]) -> ConnectionSettings:
    """The connection's part of parsed values; OptionError when it contradicts itself."""
    if not values["servers"]:
        raise OptionError("option 'servers' is missing: for example nats://127.0.0.1:4222")
    if values["domain"] and values["apiPrefix"]:
        raise OptionError("options 'domain' and 'apiPrefix' exclude each other")
    settings = ConnectionSettings(
        servers=values["servers"],
        user=values["user"],
        password=values["password"],
        token=values["token"],
        api_prefix=api_prefix(values["apiPrefix"], values["domain"]),
        inbox_prefix=values["inboxPrefix"],
        consumer_prefix=values["consumerPrefix"],
        connect_timeout=values["connectTimeout"],
        request_timeout=values["requestTimeout"],
        credentials=values["credentials"],
        credentials_content=values["credentialsContent"],
        nkey_seed_file=values["nkeySeedFile"],
        tls_ca_file=values["tlsCaFile"],
        tls_cert_file=values["tlsCertFile"],
        tls_key_file=values["tlsKeyFile"],
        tls_handshake_first=values["tlsHandshakeFirst"],
    )
    try:
        settings.check()
    except OptionError:
        raise
    except ConfigurationError as error:
        raise OptionError(str(error)) from None
    return settings
