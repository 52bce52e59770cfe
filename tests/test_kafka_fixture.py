"""Where Kafka cannot start, its tests fail in CI and are skipped elsewhere, each with the reason and the mend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS_KAFKA = "def test_that_needs_kafka(kafka):\n    assert kafka\n"
REASON = "`java` is not on the PATH; install a Java runtime, version 17 or later"


def run_without_java(folder: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output of a pytest run on one test that asks for Kafka, on a PATH with nothing on it."""
    (folder / "test_inner.py").write_text(NEEDS_KAFKA)
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "KVTIDE_TEST_KAFKA", "PYTEST_ADDOPTS")}
    (folder / "bin").mkdir()
    kept |= {"PATH": str(folder / "bin"), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "pytest", "-p", "tests.kafka_fixtures", "-p", "no:cacheprovider", "-ra", "--rootdir", str(folder), "."]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_ci_fails_when_kafka_cannot_start(tmp_path: Path) -> None:
    code, out = run_without_java(tmp_path, CI="true")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert f"CI must run the Kafka tests, but: {REASON}" in out and "1 error" in out and "skipped" not in out


def test_elsewhere_it_is_skipped_and_says_why(tmp_path: Path) -> None:
    code, out = run_without_java(tmp_path)
    assert code == pytest.ExitCode.OK
    assert f"no Kafka here: {REASON}" in out and "1 skipped" in out


def test_a_given_broker_is_used_without_starting_one(tmp_path: Path) -> None:
    code, out = run_without_java(tmp_path, CI="true", KVTIDE_TEST_KAFKA="somewhere:9092")
    assert code == pytest.ExitCode.OK and "1 passed" in out
