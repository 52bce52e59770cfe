"""A real Apache Kafka for development and tests: one broker in KRaft mode, from jars that Maven fetches once into a cache.

Where Java or Maven is absent and Docker is there, the same version runs from its image instead (`KVTIDE_KAFKA_IMAGE` names another).

`python -m kvtide.devkafka` starts one in the foreground and prints its address.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ingest.errors import KvtideError
from ingest.kafka import check

VERSION = "4.1.0"
_POM = """<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>kvtide</groupId><artifactId>devkafka</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""
_JVM = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
_CLUSTER_ID = "a3Z0aWRlLWRldi1rYWZrYQ"
_PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
message.max.bytes=8388608
num.network.threads=2
num.io.threads=2
log.cleaner.dedupe.buffer.size=4194304
"""


@dataclass
class DevKafka:
    """A running broker; a context manager that stops it and removes its data."""

    bootstrap: str
    _process: subprocess.Popen[bytes]
    _folder: Path
    _kill: tuple[str, ...] = ()  # what ends a broker that killing `_process` does not end
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self._folder / "kafka.log"

    def stop(self) -> None:
        """Kill the broker and remove its folder; its data is disposable."""
        if self._kill:
            subprocess.run(self._kill, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> DevKafka:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_kafka(*, version: str = VERSION, ready_s: float = 60.0) -> DevKafka:
    """Start one broker on free local ports with its data in a temporary folder; about 3 s once the jars are cached.

    Raises `KvtideError` when neither Java with Maven nor Docker is there, the download fails, or the broker is not ready in `ready_s`.
    """
    kafka = _start_container(version) if _only_docker(version) else _start_jars(version)
    try:
        _wait_ready(kafka, ready_s)
    except BaseException:
        kafka.stop()
        raise
    return kafka


def _only_docker(version: str) -> bool:
    has_jars = (_cache() / f"kafka-{version}").is_dir() or shutil.which("mvn") is not None
    return not (shutil.which("java") and has_jars) and shutil.which("docker") is not None


def _start_container(version: str) -> DevKafka:
    """The broker in a container; its first start pulls the image."""
    folder = Path(tempfile.mkdtemp(prefix="kvtide-kafka-"))
    (port,), name = _free_ports(1), f"kvtide-kafka-{os.getpid()}-{folder.name[-8:]}"
    image = os.environ.get("KVTIDE_KAFKA_IMAGE") or f"apache/kafka:{version}"
    lines = _PROPERTIES.format(broker=9092, controller=9093, folder="/tmp/kafka").splitlines()
    given = dict(line.split("=", 1) for line in lines)
    given["listeners"] = "PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093"
    given["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{port}"
    settings = [part for key, value in given.items() for part in ("-e", f"KAFKA_{key.upper().replace('.', '_')}={value}")]
    command = ["docker", "run", "--rm", "--name", name, "-p", f"127.0.0.1:{port}:9092", *settings, image]
    with (folder / "kafka.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return DevKafka(f"127.0.0.1:{port}", process, folder, ("docker", "kill", name))


def _start_jars(version: str) -> DevKafka:
    java = _needed("java", "install a Java runtime, version 17 or later (Debian: apt install openjdk-17-jre-headless), or Docker")
    jars = fetch_jars(version)
    folder = Path(tempfile.mkdtemp(prefix="kvtide-kafka-"))
    try:
        broker, controller = _free_ports(2)
        properties = folder / "server.properties"
        properties.write_text(_PROPERTIES.format(broker=broker, controller=controller, folder=folder))
        command = [java, *_JVM, "-cp", f"{jars}/*"]
        _run([*command, "kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(properties)], "Kafka's storage format")
        with (folder / "kafka.log").open("wb") as log:
            process = subprocess.Popen([*command, "kafka.Kafka", str(properties)], stdout=log, stderr=log, start_new_session=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return DevKafka(f"127.0.0.1:{broker}", process, folder)


def _cache() -> Path:
    return Path(os.environ.get("KVTIDE_CACHE") or Path.home() / ".cache" / "kvtide")


def fetch_jars(version: str = VERSION) -> Path:
    """Folder with Kafka's jars, filled by Maven on first use; safe when several processes fill it at once."""
    root = _cache()
    target = root / f"kafka-{version}"
    if target.is_dir():
        return target
    mvn = _needed("mvn", "install Maven (Debian: apt install maven), or point KVTIDE_TEST_KAFKA at a running broker")
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"kafka-{version}.", dir=root))
    try:
        (draft / "pom.xml").write_text(_POM.format(version=version))
        copy = [mvn, "-q", "-B", "-f", str(draft / "pom.xml"), "dependency:copy-dependencies", f"-DoutputDirectory={draft / 'jars'}"]
        _run(copy, f"Maven's download of Kafka {version}")
        try:
            (draft / "jars").rename(target)  # atomic: whoever comes second finds a full folder and drops its own
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _needed(program: str, mend: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise KvtideError(f"`{program}` is not on the PATH; {mend}")
    return found


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = "\n  ".join(line for line in done.stdout.splitlines()[-8:] if line.strip())
        raise KvtideError(f"{what} failed (exit {done.returncode}); mend what its last lines name and try again:\n  {last}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait_ready(kafka: DevKafka, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while True:
        try:
            _connect(kafka.bootstrap)
            check(kafka.bootstrap, timeout_s=2.0)
            return
        except (OSError, KvtideError) as error:
            if kafka._process.poll() is not None or time.monotonic() > deadline:
                last = "\n  ".join(kafka.log.read_text(errors="replace").splitlines()[-8:])
                raise KvtideError(f"Kafka was not ready ({error}); its last lines:\n  {last}") from error
            time.sleep(0.1)


def _connect(bootstrap: str) -> None:
    host, port = bootstrap.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=1.0).close()


def main() -> None:
    """Start a broker, print its address on stdout and stop it on Ctrl-C or SIGTERM."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        with start_kafka() as kafka:
            print(kafka.bootstrap, flush=True)
            print(f"Kafka {VERSION} runs; use it with KVTIDE_KAFKA={kafka.bootstrap}, stop it with Ctrl-C", file=sys.stderr)
            kafka._process.wait()
    except KeyboardInterrupt:
        pass
    except KvtideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
