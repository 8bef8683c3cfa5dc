"""``docker/`` as far as it can be checked without an engine, and its server for real."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nats_stream_source.embedded import NatsServer, server_binary
from nats_stream_source.wire.framing import scanner
from tests.integration.cli.command import COMMAND
from tests.support.delta import rows
from tests.support.event_loop import run
from tests.support.nats.buckets import connected, flushed
from tests.support.nats.topology import with_user
from tests.support.paths import ROOT
from tests.support.program import ran

DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(config=DOCKER / "nats.conf") as running:
        yield running


@pytest.mark.parametrize("name", SERVICES)
def test_volumes_dependencies_and_files_of_image_exist(name: str) -> None:
    service = SERVICES[name]
    for volume in service.get("volumes", []):
        source, target = volume.split(":")[:2]
        assert target.startswith("/")
        assert (DOCKER / source).is_file() if source[0] == "." else source in COMPOSE["volumes"]
    for needed, how in service.get("depends_on", {}).items():
        assert how["condition"] in ("service_healthy", "service_completed_successfully")
        assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[needed]
    if (build := service.get("build")) is None:
        return
    context = (DOCKER / build["context"]).resolve()
    text = (context / build["dockerfile"]).read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert {build["target"], *re.findall(r"COPY --from=(\S+)", text)} <= set(stages)
    copied = [shlex.split(line)[:-1] for line in re.findall(r"^COPY (?!--from=)(.*)$", text, re.M)]
    assert copied
    assert all((context / path).exists() for paths in copied for path in paths)


@pytest.mark.parametrize("name", ["bucket", "writer"])
def test_command_exists_in_image_and_gets_its_variables(name: str) -> None:
    service = SERVICES[name]
    program, script, *_ = service["command"]
    assert program == "python"
    assert "COPY docker docker\n" in (DOCKER / "Dockerfile").read_text()
    code = (ROOT / script).read_text()
    assert all(f'"{variable}"' in code for variable in service["environment"])
    required = {part.split('"')[1] for part in code.split("os.environ[")[1:]}
    assert required <= service["environment"].keys()


def test_installation_without_compiled_modules_is_refused(tmp_path: Path) -> None:
    """`docker/verify_installation.py` ends the build of an image."""
    pure = tmp_path / "nats_stream_source"
    shutil.copytree(ROOT / "nats_stream_source", pure, ignore=shutil.ignore_patterns("*.so"))
    for path, status in (
        (str(ROOT), 0 if "compiled" in scanner.available() else 1),
        (str(tmp_path), 1),
    ):
        variables = {"PYTHONPATH": path, "NATS_STREAM_SOURCE_SCANNER": ""}
        program = DOCKER / "verify_installation.py"
        ran(sys.executable, program, cwd=tmp_path, status=status, **variables)


def test_server_command(tmp_path: Path) -> None:
    """The flags are nats-server's, and its configuration is mounted where it is looked for."""
    command = SERVICES["nats"]["command"]
    config = command[command.index("--config") + 1]
    mounts = dict(
        reversed(volume.split(":")[:2]) for volume in SERVICES["nats"]["volumes"] if ":" in volume
    )
    assert mounts[config] == "./nats.conf"
    assert mounts[command[command.index("--store_dir") + 1]] == "nats"
    real = [str(DOCKER / "nats.conf") if part == config else part for part in command]
    ran(server_binary(), *real, "-t", cwd=tmp_path)


def test_writer_reads_and_writes(server: NatsServer) -> None:
    async def put_and_get() -> bytes | None:
        async with connected(with_user(server.url, "writer"), allow_reconnect=False) as client:
            bucket = await client.jetstream().create_key_value(bucket="scratch")
            await bucket.put("key", b"value")
            return (await bucket.get("key")).value

    assert run(put_and_get()) == b"value"


@pytest.mark.parametrize(
    ("subject", "allowed"),
    [
        ("$JS.API.STREAM.INFO.KV_fleet", True),
        ("$JS.API.STREAM.MSG.GET.KV_fleet", True),
        ("$JS.API.DIRECT.GET.KV_fleet", True),
        ("$JS.API.CONSUMER.CREATE.KV_fleet.spark-1", True),
        ("$JS.API.CONSUMER.CREATE.KV_fleet.spark-1.$KV.fleet.>", True),
        ("$JS.API.CONSUMER.DELETE.KV_fleet.spark-1", True),
        ("$JS.FC.KV_fleet.spark-1.1", True),
        ("$KV.fleet.key", False),
        ("$JS.API.STREAM.INFO.KV_other", False),
        ("$JS.API.STREAM.PURGE.KV_fleet", False),
        ("$JS.API.STREAM.DELETE.KV_fleet", False),
    ],
)
def test_follower_permissions(subject: str, allowed: bool, server: NatsServer) -> None:
    async def refusals() -> list[str]:
        refused: list[str] = []

        async def remember(error: Exception) -> None:
            refused.append(str(error).lower())

        follower = with_user(server.url, "follower")
        async with connected(follower, error_cb=remember, allow_reconnect=False) as client:
            await client.publish(subject, b"")
            await flushed(client)
        return refused

    found = run(refusals())
    assert len(found) == (not allowed)
    assert all("permissions violation for publish" in error for error in found)


def test_services_work_together(server: NatsServer, tmp_path: Path) -> None:
    """The commands of compose.yaml, one after the other, as processes of this machine."""
    for name in ("bucket", "writer"):
        words = (sys.executable, *SERVICES[name]["command"][1:])
        done = ran(*words, ROWS="2000", NATS_URL=with_user(server.url, "writer"))
    assert done.stdout.splitlines()[-1].split()[0].isdecimal()
    words = (*COMMAND, *SERVICES["follower"]["command"], "--once")
    table = tmp_path / "fleet"
    variables = {**SERVICES["follower"]["environment"], "NATS_URL": server.url}
    given = [table if word == "/lake/fleet" else word for word in words]
    following = ran(*given, **variables)
    keys = len(rows(table))
    assert following.stderr == ""
    assert f" rows read, up to date, {keys:,} keys" in following.stdout
