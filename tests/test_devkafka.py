"""What starts the development broker says what is missing; filling its cache is safe for two processes at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ingest.errors import KvtideError
from kvtide import devkafka


def _maven(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A stand-in for Maven on the PATH; `$5` is the last argument, which names the output folder."""
    tool = folder / "bin" / "mvn"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("KVTIDE_CACHE", str(folder / "cache"))


def test_missing_java_and_maven_are_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path))
    with pytest.raises(KvtideError, match="`java` is not on the PATH; install a Java runtime"):
        devkafka.start_kafka()
    with pytest.raises(KvtideError, match="`mvn` is not on the PATH; install Maven.*KVTIDE_TEST_KAFKA"):
        devkafka.fetch_jars()


def test_a_failed_download_shows_mavens_last_lines_and_leaves_no_half_filled_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _maven(tmp_path, monkeypatch, "echo first; echo 'ERROR: no route to host'; exit 1")
    with pytest.raises(KvtideError, match=r"(?s)download of Kafka .* failed \(exit 1\).*no route to host"):
        devkafka.fetch_jars()
    assert list((tmp_path / "cache").iterdir()) == []


def test_several_processes_may_fill_the_cache_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _maven(
        tmp_path, monkeypatch, 'for last; do :; done; out="${last#-DoutputDirectory=}"; mkdir -p "$out"; sleep 0.2; touch "$out/kafka.jar"'
    )
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(devkafka.fetch_jars())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert [path.name for path in found[0].iterdir()] == ["kafka.jar"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found[0].name], "drafts are removed"


def test_docker_serves_where_java_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the command is checked, against a stand-in that records it: images cannot be pulled everywhere the tests run."""
    tool = tmp_path / "docker"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVTIDE_KAFKA_IMAGE", "here/kafka:1")
    monkeypatch.setattr(devkafka, "_wait_ready", lambda kafka, ready_s: kafka._process.wait())
    with devkafka.start_kafka() as kafka:
        port = kafka.bootstrap.rpartition(":")[2]
    ran, killed = (tmp_path / "calls").read_text().splitlines()
    assert ran.startswith("run --rm --name kvtide-kafka-") and ran.endswith(" here/kafka:1")
    assert f"-p 127.0.0.1:{port}:9092" in ran and f"KAFKA_ADVERTISED_LISTENERS=PLAINTEXT://127.0.0.1:{port}" in ran
    assert "KAFKA_AUTO_CREATE_TOPICS_ENABLE=false" in ran
    assert killed == f"kill {ran.split()[3]}"
