"""What is counted is what crosses: the benchmark of the same name, on fewer bytes, held to its 1 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "socket_bytes.py"


def unshare_works() -> bool:
    attempts = [["unshare", "-n", "true"], ["unshare", "-Urn", "true"]]
    return sys.platform == "linux" and any(subprocess.run(one, capture_output=True).returncode == 0 for one in attempts)


def test_socket_counters_and_the_ledger_agree_within_one_per_cent() -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--megabytes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode == 2:
        assert "no network namespace can be made here" in done.stderr
        assert not unshare_works(), "refused, though a namespace can be made"
        return
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(done.stdout)
    assert {row["ranks"] for row in rows} == {2, 3, 4}
    assert {row["op"].partition(",")[0] for row in rows} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "send",
    }
    assert [row for row in rows if abs(row["ratio"] - 1) > 0.01] == []
