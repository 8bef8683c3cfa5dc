"""A real single-node Kafka broker, and the jars of Spark's own Kafka source.

pyspark's ivy downloads all jars from Maven Central into Spark's ivy cache (for a mirror, the
environment variable ``IVY_SETTINGS`` is the path of an ivy settings file). The broker runs in KRaft
mode, broker and controller in one process, on two free ports of the loopback interface, with its
own directory, and stops at the end of its ``with`` block. Its settings are Kafka's defaults, except
that settings that require three nodes are set to one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from nats_stream_source.embedded import free_port

KAFKA_VERSION = "3.9.2"  # what Spark 4.2.0 is built with

_SOURCE_JARS = (  # of `format("kafka")`, in addition to Spark's
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", pyspark.__version__),
    # Not on Maven Central in Spark's own version; it is for Kerberos and has not changed.
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", KAFKA_VERSION),
    ("org.apache.commons", "commons-pool2", "2.13.1"),
)
_BROKER_JARS = (("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),)

_DEADLINE = 60.0  # seconds for the broker to start and to stop

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={directory}/logs
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
auto.create.topics.enable=false
"""


class KafkaUnavailableError(RuntimeError):
    """The jars could not be downloaded, or the broker did not start."""


def broker_jars() -> list[Path]:
    """The broker and its dependencies."""
    return _resolve(_BROKER_JARS, "master,runtime")


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin/java")) if home else "java"


def _resolve(coordinates: tuple[tuple[str, str, str], ...], scope: str) -> list[Path]:
    """The files of jars, downloaded on first use; KafkaUnavailableError without Maven Central."""
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    wanted = "".join(
        f'<dependency org="{group}" name="{name}" rev="{version}" conf="default->{scope}"/>'
        for group, name, version in coordinates
    )
    with tempfile.TemporaryDirectory(prefix="ivy-") as directory:
        module, listed = Path(directory, "ivy.xml"), Path(directory, "classpath")
        module.write_text(
            '<ivy-module version="2.0"><info organisation="bench" module="kafka"/>'
            f'<configurations><conf name="default"/></configurations>'
            f"<dependencies>{wanted}</dependencies></ivy-module>"
        )
        command = [_java(), "-jar", str(ivy), "-warn", "-ivy", str(module), "-confs", "default"]
        command += ["-cache", str(Path.home() / ".ivy2.5.2/cache"), "-cachepath", str(listed)]
        if settings := os.environ.get("IVY_SETTINGS"):
            command += ["-settings", settings]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not listed.exists():
            raise KafkaUnavailableError(
                "could not download Kafka's jars from Maven Central: connect this machine to it, "
                "or set IVY_SETTINGS to an ivy settings file\n"
                + (done.stdout + done.stderr)[-2000:]
            )
        return [Path(one) for one in listed.read_text().strip().split(os.pathsep)]


@dataclass(frozen=True, slots=True)
class KafkaBroker:
    """A running broker: ``servers`` for ``kafka.bootstrap.servers``, and its process."""

    servers: str
    pid: int


@contextmanager
def kafka_broker() -> Iterator[KafkaBroker]:
    """One broker process with a directory of its own; both end with the block."""
    port, controller = free_port(), free_port()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kafka-"))
        properties, log = Path(directory, "server.properties"), Path(directory, "broker.log")
        properties.write_text(
            _PROPERTIES.format(port=port, controller=controller, directory=directory)
        )
        classpath = os.pathsep.join(map(str, broker_jars()))
        java = [_java(), "-Xmx1g", "-XX:+UseG1GC", "-cp", classpath]
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        storage = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)]
        done = subprocess.run([*java, *storage], capture_output=True, text=True, check=False)
        if done.returncode:
            raise KafkaUnavailableError(
                f"Kafka's storage was not formatted:\n{done.stderr[-2000:]}"
            )
        output = stack.enter_context(log.open("wb"))
        command = [*java, "kafka.Kafka", str(properties)]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        stack.callback(_stop, process)
        deadline = time.monotonic() + _DEADLINE
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")
                raise KafkaUnavailableError(f"the Kafka broker did not start:\n{said[-2000:]}")
            time.sleep(0.05)
        yield KafkaBroker(f"127.0.0.1:{port}", process.pid)


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_kafka(stack: ExitStack) -> tuple[list[Path], KafkaBroker | None]:
    """The jars of the source, and a broker until ``stack`` ends; neither without Maven Central."""
    try:
        return _resolve(_SOURCE_JARS, "master"), stack.enter_context(kafka_broker())
    except KafkaUnavailableError as error:
        print(f"without Kafka: {error}")
        return [], None


def create_topic(spark: SparkSession, broker: KafkaBroker, name: str, partitions: int) -> None:
    """Create a topic, with the Kafka client of a session of :func:`start_kafka`."""
    java = spark._jvm
    assert java is not None
    properties = java.java.util.Properties()
    properties.put("bootstrap.servers", broker.servers)
    admin = java.org.apache.kafka.clients.admin.Admin.create(properties)
    try:
        topics = java.java.util.Collections.singleton(
            java.org.apache.kafka.clients.admin.NewTopic(name, partitions, 1)
        )
        admin.createTopics(topics).all().get()
    finally:
        admin.close()


def steady_producer(broker: KafkaBroker, topic: str, rate: int, count: int) -> list[str]:
    """The command of a process that sends ``count`` records, ``rate`` a second; needs a JDK.

    The value of a record is the time of its send in ns, 8 bytes.
    """
    classpath = os.pathsep.join(str(jar) for jar in broker_jars())
    program = Path(__file__).with_name("SteadyProducer.java")
    return [_java(), "-cp", classpath, str(program), broker.servers, topic, str(rate), str(count)]
