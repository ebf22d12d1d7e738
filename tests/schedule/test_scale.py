"""What laying out, checking and simulating a schedule costs, in CPU seconds and memory of a process of its own."""

import json
import subprocess
import sys

import pytest

PLAN = """
import json, resource, sys
from time import process_time
from fourfold.schedule import Shape, bind, simulate, validate
from fourfold.schedule.orders.zb_1p import Options, order
from fourfold.schedule.work import F, I, W

workers, chunks, microbatches, repeats = map(int, sys.argv[1:])
shape = Shape(workers * chunks, microbatches, workers, chunks)
costs = {F: 1.0, I: 1.1, W: 0.9, "move": 0.1, "update": 0.5}
seconds = []
for _ in range(repeats):
    begin = process_time()
    program = validate(bind(order(shape, Options(microbatches, chunks)), workers), shape)
    timeline = simulate(program, lambda action: costs[action.kind])
    peaks = timeline.peaks(lambda buffer: 1)
    seconds.append(process_time() - begin)
print(json.dumps({
    "seconds": min(seconds),
    "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "kinds": sorted({action.kind for action in program.actions}),
    "actions": len(program.actions),
    "peaks": len(peaks),
    "makespan": timeline.makespan,
}))
"""
"""The planner's inner loop: generate, bind, validate, simulate, memory over time."""


def plan(workers, chunks, microbatches, repeats):
    command = [sys.executable, "-c", PLAN, *map(str, (workers, chunks, microbatches, repeats))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    stages = workers * chunks
    assert found["kinds"] == ["backward input", "backward weight", "forward", "move", "update"]
    assert found["actions"] == 3 * stages * microbatches + 2 * (stages - 1) * microbatches + stages
    assert found["peaks"] == workers and found["makespan"] > 3 * chunks * microbatches
    return found


def test_the_inner_loop_of_a_planner():
    assert plan(8, 2, 32, repeats=20)["seconds"] < 0.020


@pytest.mark.long
def test_many_devices_and_microbatches():
    found = plan(64, 4, 512, repeats=1)
    assert found["seconds"] < 10
    assert found["bytes"] < 2e9
