"""TLS: the context that the settings describe, and the errors of failed handshakes.

The server authenticates with a certificate that a trusted authority signed (an authority of the
system, or of ``tls_ca_file`` alone) and that contains the name or address by which the client
connects. If the server requests a client certificate, the client authenticates with
``tls_cert_file`` and ``tls_key_file``.
"""

from __future__ import annotations

import ssl

from nats_stream_source.connection.credentials import file_error, read_file
from nats_stream_source.errors import ConfigurationError, TlsError

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
