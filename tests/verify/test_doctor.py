import json

import pytest

from fourfold.hardware import Cluster
from fourfold.planner.here import cluster_file
from fourfold.verify import environment, link, peaks
from fourfold.verify.diagnosis import Diagnosis, Finding
from fourfold.verify.doctor import doctor

READING = link.LinkReading(latency=1e-4, bandwidth=2e9, seconds=1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(peaks, "GEMM", dict.fromkeys(peaks.GEMM, 128))
    monkeypatch.setattr(peaks, "SECONDS", 0.01)


def test_a_real_collective_between_two_processes():
    reading = link.measure()
    assert 1e-6 < reading.latency < 1.0 and 1e6 < reading.bandwidth < 1e12


def test_processes_that_do_not_answer_are_ended(monkeypatch):
    started = []
    real = link.subprocess.Popen
    monkeypatch.setattr(
        link.subprocess, "Popen", lambda *args, **keys: started.append(real(*args, **keys)) or started[-1]
    )
    with pytest.raises(link.LinkError, match=r"did not finish an all-reduce within 0\.01 s"):
        link.measure(timeout=0.01)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(link.sys, "executable", "/bin/false")
    with pytest.raises(link.LinkError, match="process 0 of 2 ended with 1"):
        link.measure()


def test_the_measured_machine_is_a_cluster_that_can_be_read_back():
    diagnosis = doctor(probe=lambda: READING)
    assert diagnosis.written == str(cluster_file())
    cluster = Cluster.parse(diagnosis.written)
    assert cluster.to_dict() == diagnosis.cluster == json.loads(cluster_file().read_text())
    assert cluster.is_cpu and cluster.world == environment.cores() and cluster.intra.each == 1e-4 / 2
    assert cluster.device.peak("fp32") > 1e8 and cluster.device.memory * cluster.world <= environment.memory()
    assert json.loads(json.dumps(diagnosis.to_dict()))["ok"] is diagnosis.ok
    seen = {finding.what for finding in diagnosis.findings}
    assert {"python", "packages", "processor", "two processes", "ports", "clock", "stale processes", "copy"} <= seen


def test_a_broken_link_is_wrong_and_writes_nothing():
    def probe():
        raise link.LinkError("nobody answered")

    diagnosis = doctor(probe=probe)
    assert not diagnosis.ok and not cluster_file().exists()
    assert "BAD  two processes" in diagnosis.text() and "nobody answered" in diagnosis.text()


def test_an_unwritable_cache_is_a_warning(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder is wanted")
    diagnosis = doctor(probe=lambda: READING)
    found = {finding.what: finding for finding in diagnosis.findings}
    assert found["cluster file"].level == "warning" and diagnosis.written == ""


def test_text_counts_and_puts_advice_below():
    findings = (Finding("ports", "good", "free"), Finding("load", "warning", "9.0", "wait"))
    assert Diagnosis(findings, {}).text() == (
        "ok   ports  free\nWARN load   9.0\n            -> wait\n\n0 wrong, 1 warnings, 1 good\n"
    )


def test_leftover_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    left = tmp_path / "fourfold-watch-1"
    left.write_bytes(b"x")
    found = {finding.what: finding for finding in environment.leftovers()}["stale files"]
    assert found.level == "warning" and str(left) in found.found and f"rm -r {left}" in found.advice
    with left.open("rb"):
        assert str(left) not in {f.what: f for f in environment.leftovers()}["stale files"].found
