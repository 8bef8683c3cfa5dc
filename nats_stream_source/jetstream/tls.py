"""TLS: the context that the options ask for, and what its failures mean to the user.

Who is who: the server proves itself by a certificate that a trusted authority has signed (those of
the system, or of ``tlsCaFile`` alone) and that has the name or address that the client knows it by.
Where the server asks for it, the client does the same with ``tlsCertFile`` and ``tlsKeyFile``.
"""

from __future__ import annotations

import ssl

from nats_stream_source.errors import ConfigurationError, TlsError
from nats_stream_source.jetstream.credentials import read_text, unreadable

# OpenSSL's X509_V_ERR_…, as SSLCertVerificationError.verify_code has them.
_NOT_YET_VALID, _EXPIRED, _WRONG_HOST, _WRONG_ADDRESS = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)

_ALERTS = {
    "CERTIFICATE_REQUIRED": "it asks for a client's certificate: set the options 'tlsCertFile' and "
    "'tlsKeyFile'",
    "UNKNOWN_CA": "it does not trust who has signed the certificate in 'tlsCertFile'",
    "CERTIFICATE_EXPIRED": "the certificate in 'tlsCertFile' has expired",
    "BAD_CERTIFICATE": "it does not accept the certificate in 'tlsCertFile', or asks for one",
    "WRONG_VERSION_NUMBER": "it does not begin with the TLS handshake: leave the option "
    "'tlsHandshakeFirst' out, or name a port that speaks TLS",
}


def make_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """A client's context that trusts ``ca`` (None: the system's authorities).

    Args:
        ca, cert, key: paths of PEM files; ``cert`` and ``key`` prove the client, or are None.

    Raises:
        ConfigurationError: a file cannot be read, or is not what it should be.
    """
    context = ssl.create_default_context()
    if ca is not None:
        text = read_text(ca, "tlsCaFile")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(cadata=text)
        except (ssl.SSLError, ValueError):
            raise ConfigurationError(f"option 'tlsCaFile': {ca} holds no PEM certificate") from None
    load_identity(context, cert, key)
    return context


def load_identity(context: ssl.SSLContext, cert: str | None, key: str | None) -> None:
    """Let ``context`` prove itself with ``cert`` and ``key`` as they are now; see above."""
    if cert is None or key is None:
        return
    for path, option in ((cert, "tlsCertFile"), (key, "tlsKeyFile")):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise unreadable(path, option, error) from None

    def no_password() -> str:
        # Without a function OpenSSL asks on the terminal, and a job would wait there for ever.
        raise ConfigurationError(
            f"option 'tlsKeyFile': {key} is encrypted; give a key without a passphrase"
        )

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"options 'tlsCertFile' and 'tlsKeyFile': {cert} and {key} are not a PEM certificate "
            f"and its private key ({error.reason or 'unreadable'})"
        ) from None


def explain(error: BaseException, places: str) -> TlsError | None:
    """What a failed handshake means, with the option to change; None if it is another failure."""
    if isinstance(error.__cause__, ssl.SSLError):
        error = error.__cause__  # aiohttp wraps it
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"{places} was not trusted: {_distrust(error)}")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        for alert, meaning in _ALERTS.items():
            if alert in reason:
                return TlsError(f"{places} refused the TLS handshake: {meaning}")
        return TlsError(f"the TLS handshake with {places} failed: {reason}")
    return None


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "its certificate has expired (or this machine's clock is wrong)"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet (or this machine's clock is wrong)"
    if error.verify_code in (_WRONG_HOST, _WRONG_ADDRESS):
        return (
            f"its certificate is for another host ({error.verify_message}): name it in the option "
            f"'servers' as its certificate does"
        )
    if error.verify_code in _UNKNOWN_ISSUER:
        return (
            f"its certificate is signed by an unknown authority ({error.verify_message}): name "
            f"that authority's certificate in the option 'tlsCaFile'"
        )
    return error.verify_message
