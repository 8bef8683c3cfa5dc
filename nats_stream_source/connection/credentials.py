"""Credentials files, nkey seeds, certificates and the errors of failed TLS handshakes.

A server with decentralised users sends a nonce in INFO. The client replies with the user's JWT,
which the operator's chain of keys signed, and with the nonce signed by the user's private nkey. The
key itself never leaves the client. A credentials file contains both, each between marker lines:

    -----BEGIN NATS USER JWT-----
    eyJ0eXAi…
    ------END NATS USER JWT------
    -----BEGIN USER NKEY SEED-----
    SUAM…
    ------END USER NKEY SEED------

nats-py's own parser of these files is not used: a file without the marker line keeps it in an
endless loop.

*TLS.* The server authenticates with a certificate that a trusted authority signed (an authority of
the system, or of ``tls_ca_file`` alone) and that contains the name or address by which the client
connects. If the server requests a client certificate, the client authenticates with
``tls_cert_file`` and ``tls_key_file``.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nats_stream_source.errors import ConfigurationError, TlsError

_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+([\w.=-]+)\s+-+END")
_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+(\w+)\s+-+END")
_BARE_SEED = re.compile(r"^\s*(SU[A-Z2-7]+)\s*$", re.MULTILINE)

# OpenSSL's X509_V_ERR_…, the values of SSLCertVerificationError.verify_code.
_NOT_YET_VALID, _EXPIRED, _WRONG_HOST, _WRONG_ADDRESS = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)

_CERT = ("tls_cert_file",)
_CERT_AND_KEY = ("tls_cert_file", "tls_key_file")
_ALERTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "CERTIFICATE_REQUIRED": (
        "it asks for a client's certificate; set 'tls_cert_file' and 'tls_key_file'",
        _CERT_AND_KEY,
    ),
    "UNKNOWN_CA": (
        "it does not trust the authority that signed the certificate in 'tls_cert_file'",
        _CERT,
    ),
    "CERTIFICATE_EXPIRED": ("the certificate in 'tls_cert_file' has expired", _CERT),
    "BAD_CERTIFICATE": (
        "it does not accept the certificate in 'tls_cert_file', or requires one",
        _CERT,
    ),
    "WRONG_VERSION_NUMBER": (
        "it does not start with the TLS handshake; leave 'tls_handshake_first' out, or name a port "
        "with TLS",
        ("tls_handshake_first",),
    ),
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's JWT and seed; neither is in the ``repr``."""

    jwt: str = field(repr=False)
    seed: str = field(repr=False)

    @classmethod
    def parse(cls, text: str, setting: str, path: str | None = None) -> Credentials:
        """From a credentials file; ``setting`` and ``path`` are for the ConfigurationError."""
        jwt, seed = _JWT.search(text), _SEED.search(text)
        missing = [name for name, match in (("user JWT", jwt), ("nkey seed", seed)) if not match]
        if jwt is None or seed is None:
            raise ConfigurationError(
                f"{_source(setting, path)} holds no {' and no '.join(missing)}; it must be a whole "
                f"credentials file as `nsc generate creds` writes it, with its BEGIN and END lines",
                settings=(setting,),
            )
        return cls(jwt[1], validate_seed(seed[1], setting, path))

    @property
    def expires(self) -> int | None:
        """Expiry of the JWT in seconds since 1970; None without expiry, or if it is unreadable."""
        try:
            body = self.jwt.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            return int(claims["exp"])
        except (IndexError, KeyError, TypeError, ValueError):
            return None


def validate_seed(seed: str, setting: str, path: str | None) -> str:
    """Return ``seed`` if it is a user's nkey seed; raise ConfigurationError otherwise."""
    import nkeys  # type: ignore[import-untyped]

    try:
        prefix, raw = nkeys.decode_seed(seed.encode())
        valid = prefix == nkeys.PREFIX_BYTE_USER and len(raw) == 32
    except (nkeys.NkeysError, binascii.Error, ValueError, IndexError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"{_source(setting, path)}: its seed is not a user's nkey seed (SU…)",
            settings=(setting,),
        )
    return seed


def parse_seed_file(text: str, setting: str, path: str) -> str:
    """The seed in a seed file, bare or between its marker lines; ConfigurationError without one."""
    match = _SEED.search(text) or _BARE_SEED.search(text)
    if match is None:
        raise ConfigurationError(
            f"{_source(setting, path)} holds no user's nkey seed (SU…)", settings=(setting,)
        )
    return validate_seed(match[1], setting, path)


def nonce_signer(seed: Callable[[], str]) -> Callable[[str], bytes]:
    """A function that signs a nonce with the seed that ``seed()`` returns at that time."""

    def sign(nonce: str) -> bytes:
        import nkeys

        return base64.b64encode(nkeys.from_seed(bytearray(seed().encode())).sign(nonce.encode()))

    return sign


def read_file(path: str, setting: str) -> str:
    """The text of a setting's file; the ConfigurationError never contains it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise file_error(path, setting, error) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"could not read '{setting}': {path} is not a text file", settings=(setting,)
        ) from None


def file_error(path: str, setting: str, error: OSError) -> ConfigurationError:
    """The error for a file that cannot be read; each process reads the files of its own machine."""
    reason = error.strerror or type(error).__name__
    return ConfigurationError(
        f"could not read '{setting}': {path} cannot be read ({reason}); the file must be at the "
        f"same path on every machine that connects, and readable by the process",
        settings=(setting,),
    )


def _source(setting: str, path: str | None) -> str:
    return f"the value of '{setting}'" if path is None else f"invalid file of '{setting}': {path}"


def make_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """A client's context that trusts ``ca``, or the system's authorities if it is None.

    Args:
        ca, cert, key: paths of PEM files; ``cert`` and ``key`` authenticate the client, or are
            None.

    Raises:
        ConfigurationError: a file cannot be read, or its content is invalid.
    """
    context = ssl.create_default_context()
    if ca is not None:
        text = read_file(ca, "tls_ca_file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(cadata=text)
        except (ssl.SSLError, ValueError):
            raise ConfigurationError(
                f"could not load 'tls_ca_file': {ca} holds no PEM certificate",
                settings=("tls_ca_file",),
            ) from None
    load_client_certificate(context, cert, key)
    return context


def load_client_certificate(context: ssl.SSLContext, cert: str | None, key: str | None) -> None:
    """Load the present content of ``cert`` and ``key``; arguments as for :func:`make_context`."""
    if cert is None or key is None:
        return
    for path, setting in ((cert, "tls_cert_file"), (key, "tls_key_file")):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise file_error(path, setting, error) from None

    def no_password() -> str:
        # Without a callback OpenSSL prompts on the terminal, where a job would wait for ever.
        raise ConfigurationError(
            f"could not load 'tls_key_file': {key} is encrypted; use a key without a passphrase",
            settings=("tls_key_file",),
        )

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"could not load 'tls_cert_file' and 'tls_key_file': {cert} and {key} are not a PEM "
            f"certificate and its private key ({error.reason or 'unreadable'})",
            settings=_CERT_AND_KEY,
        ) from None


def handshake_error(error: BaseException, server_list: str) -> TlsError | None:
    """The named error for a failed TLS handshake; None for any other failure."""
    if isinstance(error.__cause__, ssl.SSLError):
        error = error.__cause__  # aiohttp wraps it
    if isinstance(error, ssl.SSLCertVerificationError):
        reason, settings = _verification_failure(error)
        return TlsError(f"{server_list} was not trusted: {reason}", settings=settings)
    if isinstance(error, ssl.SSLError):
        description = error.reason or str(error)
        for alert, (reason, settings) in _ALERTS.items():
            if alert in description:
                return TlsError(
                    f"{server_list} refused the TLS handshake: {reason}", settings=settings
                )
        return TlsError(f"the TLS handshake with {server_list} failed: {description}")
    return None


def _verification_failure(error: ssl.SSLCertVerificationError) -> tuple[str, tuple[str, ...]]:
    """The reason, and the settings that can change it."""
    if error.verify_code == _EXPIRED:
        return "its certificate has expired (or this machine's clock is wrong)", ()
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet (or this machine's clock is wrong)", ()
    if error.verify_code in (_WRONG_HOST, _WRONG_ADDRESS):
        return (
            f"its certificate is for another host ({error.verify_message}); use the host name of "
            f"the certificate in 'servers'",
            ("servers",),
        )
    if error.verify_code in _UNKNOWN_ISSUER:
        return (
            f"its certificate is signed by an unknown authority ({error.verify_message}); name "
            f"that authority's certificate in 'tls_ca_file'",
            ("tls_ca_file",),
        )
    return error.verify_message, ()
