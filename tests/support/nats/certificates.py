"""Certificate authorities and certificates for tests, made with the package ``cryptography``."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
_OTHER_USES = (
    *("content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "encipher_only", "decipher_only"),
)
_SIGNS = x509.KeyUsage(
    digital_signature=True, key_cert_sign=True, crl_sign=True, **dict.fromkeys(_OTHER_USES, False)
)


@dataclass(frozen=True)
class Pair:
    """Paths of a PEM certificate and its private key."""

    cert: str
    key: str


class Authority:
    """A certificate authority whose files are in ``directory``."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = self._key.public_key()
        certificate = (
            _builder(name, name, public, days=30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_SIGNS, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path = str(directory / f"{name}.pem")
        Path(self.path).write_bytes(_pem(certificate))

    def issue(
        self,
        name: str,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        *,
        email: str | None = None,
        days: int = 30,
        passphrase: str | None = None,
    ) -> Pair:
        """A certificate for a server or a client; ``days`` below zero: expired so long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [_general(host) for host in hosts]
        if email is not None:
            names.append(x509.RFC822Name(email))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(name, self._name, key.public_key(), days=days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            protection = serialization.BestAvailableEncryption(passphrase.encode())
        pair = Pair(*(str(self._directory / f"{name}-{end}.pem") for end in ("cert", "key")))
        Path(pair.cert).write_bytes(_pem(certificate))
        Path(pair.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
            )
        )
        return pair


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePublicKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + min(0, days) * _DAY - _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
