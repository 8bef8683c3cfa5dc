"""Decentralised users for tests: an operator, its accounts, users with credentials (JWT, nkeys)."""

from __future__ import annotations

import base64
import json
import os
import time
from typing import Any

import nkeys

_NO_LIMITS = {
    **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1),
    **dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1),
    "wildcards": True,
}

CREDENTIALS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

************************* IMPORTANT *************************
NKEY Seed printed below can be used to sign and prove identity.
NKEYs are sensitive and should be treated as secrets.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------

*************************************************************
"""
"""A credentials file as ``nsc generate creds`` writes it."""


class Nkey:
    """A key pair; ``kind`` is ``OPERATOR``, ``ACCOUNT`` or ``USER``."""

    def __init__(self, kind: str) -> None:
        prefix = getattr(nkeys, f"PREFIX_BYTE_{kind}")
        self.seed = nkeys.encode_seed(os.urandom(32), prefix).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self._pair.public_key.decode()

    def jwt(self, subject: Nkey, name: str, nats: dict[str, Any], **claims: Any) -> str:
        """A JWT about ``subject``, signed with this key."""
        body = {
            "jti": base64.b32encode(os.urandom(32)).decode().rstrip("="),
            "iat": int(time.time()),
            "iss": self.public,
            "sub": subject.public,
            "name": name,
            "nats": {"version": 2, **nats},
            **claims,
        }
        signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(body)}"
        return f"{signed}.{_encode(self._pair.sign(signed.encode()))}"


class Operator:
    """An operator with a system account and one account ``A`` with JetStream."""

    def __init__(self, **limits: Any) -> None:
        self._limits = {**_NO_LIMITS, **limits}
        self._operator, self._system, self._account = (
            Nkey(kind) for kind in ("OPERATOR", "ACCOUNT", "ACCOUNT")
        )

    def config(self) -> str:
        """The server's configuration, with the accounts preloaded into a memory resolver."""
        mine = self._operator
        preload = "\n".join(
            f"{account.public}: {mine.jwt(account, name, {'type': 'account', 'limits': limits})}"
            for account, name, limits in (
                (self._system, "SYS", {**_NO_LIMITS, "mem_storage": 0, "disk_storage": 0}),
                (self._account, "A", self._limits),
            )
        )
        return (
            f"operator: {mine.jwt(mine, 'O', {'type': 'operator'})}\n"
            f"resolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"
            f"system_account: {self._system.public}\n"
        )

    def credentials(self, *, lasts: float | None = None, **permissions: Any) -> str:
        """The text of a credentials file of a new user of the account.

        Args:
            lasts: seconds until the JWT expires; negative: it has.
            permissions: ``pub={"allow": [...]}`` and the like, of the user.
        """
        user = Nkey("USER")
        claims = {} if lasts is None else {"exp": int(time.time() + lasts)}
        rights = {"type": "user", "subs": -1, "data": -1, "payload": -1, **permissions}
        jwt = self._account.jwt(user, "spark", rights, **claims)
        return CREDENTIALS.format(jwt=jwt, seed=user.seed)


def _part(value: dict[str, Any]) -> str:
    return _encode(json.dumps(value).encode())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
