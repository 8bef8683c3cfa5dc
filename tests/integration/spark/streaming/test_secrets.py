"""No text that users, operators or Spark receive contains a secret."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from nats_stream_source.connection.credentials import Credentials
from nats_stream_source.jetstream import connect
from tests.support.nats import buckets
from tests.support.nats.certificates import Authority
from tests.support.nats.jwt_operator import Operator
from tests.support.nats.topology import configured_server
from tests.support.program import ran

SECRET = "xyzzy-marker"
JOB = "tests.integration.spark.streaming.secrets_job"


async def make_bucket(url: str, content: str) -> None:
    async with connect(url, credentials_content=content) as jetstream:
        await jetstream.call("STREAM.CREATE.KV_fleet", buckets.bucket_config("fleet"))
        await jetstream.connection.request("$KV.fleet.a", b"1")


def test_secrets_are_nowhere_in_what_spark_shows(tmp_path: Path) -> None:
    """Neither where a query works nor where it fails: plan, progress, log, error, checkpoint."""
    operator = Operator()
    content = operator.credentials()
    foreign = Operator().credentials()
    unusable = content.replace("BEGIN USER NKEY SEED", "BEGIN SOMETHING")
    hidden = {"password": f"{SECRET}-1", "token": f"{SECRET}-2"}
    ways = [
        {"credentialsContent": content},
        {"credentialsContent": foreign},
        {"user": "me", "password": hidden["password"]},
        {"token": hidden["token"]},
        {"credentialsContent": unusable},
        {"credentialsContent": content, "token": hidden["token"]},
        {"token": hidden["token"], "tlsCaFile": Authority(tmp_path, "ca").path},
    ]
    with configured_server(operator.config()) as server:
        asyncio.run(make_bucket(server.url, content))
        job = ran(sys.executable, "-m", JOB, server.url, tmp_path, json.dumps(ways))
        shown = {"output": job.stdout + job.stderr}
    for path in [*tmp_path.glob("checkpoint*/**/*"), *tmp_path.glob("events/**/*")]:
        if path.is_file():
            shown[str(path)] = path.read_text(errors="replace")
    # It did happen: the errors were provoked, the options were shown, there are log and checkpoint.
    for said in (
        '"numInputRows": 1',
        "(option 'credentialsContent')",
        "'credentials_content' holds no nkey seed",
        "'credentials_content' and 'token' exclude each other",
        "refused the credentials: check 'user' and 'password'",
        "refused the credentials: check 'token'",
        "does not encrypt",
        "credentialsContent=*********(redacted)",
        "password=*********(redacted)",
        "token=*********(redacted)",
    ):
        assert said in shown["output"]
    assert len(shown) > 2
    secrets = [SECRET]
    for text in (content, foreign):
        made = Credentials.parse(text, "")
        secrets += [made.jwt[:60], made.jwt[-40:], made.seed[:30], made.seed[-20:]]
    found = {where: [one for one in secrets if one in text] for where, text in shown.items()}
    assert not any(found.values()), found
