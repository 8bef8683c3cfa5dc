"""The options of the connection to the NATS servers, which both formats have.

Each row sets the field of ``ConnectionSettings`` that has its name in snake case. ``domain`` and
``apiPrefix`` together set the field ``api_prefix``.
"""

from __future__ import annotations

from dataclasses import fields

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import ConfigurationError, OptionError
from nats_stream_source.jetstream.subjects import api_prefix
from nats_stream_source.options import converters
from nats_stream_source.options.table import Option, Values, option_hints

_DEFAULTS = {field.name: field.default for field in fields(ConnectionSettings)}

CONNECTION: tuple[Option, ...] = (
    Option(
        "servers",
        converters.server_urls,
        "URLs of the NATS servers, such as `nats://host:4222`. Required. URLs with credentials are "
        "refused.",
        secret=True,
    ),
    Option("user", converters.name, "User name. Requires `password`."),
    Option("password", converters.password, "Password of `user`.", secret=True),
    Option("token", converters.name, "Authentication token.", secret=True),
    Option(
        "credentials",
        converters.path,
        "Credentials file (user JWT and nkey seed). The path must be readable on every machine.",
    ),
    Option(
        "credentialsContent",
        converters.credentials_content,
        "Content of a credentials file, instead of `credentials`. It must contain a word that "
        "Spark's redaction recognises, such as `secret`.",
        secret=True,
    ),
    Option(
        "nkeySeedFile",
        converters.path,
        "File with a user's nkey seed. The path must be readable on every machine.",
    ),
    Option(
        "tlsCaFile",
        converters.path,
        "PEM certificates of the authorities to trust. Default: those of the system.",
    ),
    Option("tlsCertFile", converters.path, "PEM certificate of the client. Requires `tlsKeyFile`."),
    Option(
        "tlsKeyFile",
        converters.path,
        "Private key of `tlsCertFile`. The key must not be encrypted.",
    ),
    Option(
        "tlsHandshakeFirst",
        converters.boolean,
        "Whether the client starts the TLS handshake before the server sends INFO. {default}. "
        "Set it for servers with `handshake_first`.",
        default=False,
    ),
    Option(
        "domain",
        converters.subject_token,
        "JetStream domain (ADR-19). One token; excludes `apiPrefix`.",
    ),
    Option(
        "apiPrefix",
        converters.subject,
        "Prefix of the JetStream API subjects (ADR-19). Default: `$JS.API`. Excludes `domain`.",
    ),
    Option(
        "inboxPrefix",
        converters.subject,
        "First tokens of the reply and deliver subjects, in ASCII. {default}.",
        default=_DEFAULTS["inbox_prefix"],
    ),
    Option(
        "consumerPrefix",
        converters.name,
        "First part of the names of consumers. {default}. One token.",
        default=_DEFAULTS["consumer_prefix"],
    ),
    Option(
        "connectTimeout",
        converters.seconds(0.05, 3600),
        "Maximum time to connect, and to retry while servers are not available. {default}; from "
        "0.05 to 3600.",
        default=_DEFAULTS["connect_timeout"],
    ),
    Option(
        "requestTimeout",
        converters.seconds(0.05, 3600),
        "Maximum time to wait for one response of a server. {default}; from 0.05 to 3600.",
        default=_DEFAULTS["request_timeout"],
    ),
    Option(
        "maxControlLine",
        converters.integer.named("number of bytes"),
        "Maximum length of a subject with its reply and sizes; longer ones are an error. "
        "{default}, as at the servers; change it with their `max_control_line`.",
        default=_DEFAULTS["max_control_line"],
    ),
)


def connection_settings(values: Values) -> ConnectionSettings:
    """The settings of the connection, from parsed values."""
    if not values["servers"]:
        raise OptionError("option 'servers' is missing: for example nats://127.0.0.1:4222")
    with option_hints(CONNECTION):
        try:
            prefix = api_prefix(values["apiPrefix"], values["domain"])
            settings = values.build(ConnectionSettings, api_prefix=prefix)
            settings.validate()
        except ConfigurationError as error:
            raise OptionError(str(error), settings=error.settings) from None
    return settings
