"""The only loop: it issues what is ready and takes completions, and never waits for one action in particular."""

from __future__ import annotations

from fourfold.schedule.machine import Machine
from fourfold.schedule.program import Program
from fourfold.schedule.timeline import Timeline


def drive(program: Program, machine: Machine) -> Timeline:
    """Run the share of a program that the machine owns.

    Each lane runs its actions in list order; data edges decide when. The same loop simulates and executes.

    Raises:
        ScheduleError: nothing runs and nothing is ready (a program that `validate` has passed cannot do that).
    """
    actions, lane, after = program.actions, program.lane, program.after
    needs, ready, size = program.part(machine.owns)
    starts: list[float | None] = [None] * len(actions)
    ends: list[float | None] = [None] * len(actions)
    running: dict[int, int] = {}
    left = size
    while left:
        for number in ready:
            running[id(actions[number])] = number
            machine.issue(actions[number], lane[number])
        if not running:
            done = [number for number, end in enumerate(ends) if end is not None]
            raise program.stuck(done, machine.owns)
        action, start, end = machine.next()
        number = running.pop(id(action))
        starts[number], ends[number] = start, end
        left -= 1
        ready = []
        for follower in after[number]:
            needs[follower] -= 1
            if not needs[follower] and (
                actions[follower].worker in machine.owns or actions[follower].source in machine.owns
            ):
                ready.append(follower)
    return Timeline(program, starts, ends)
