"""Message-driven nodes: one instance at a time is serial; several are late by no more than stated; nothing is left."""

from math import sin, tanh
from random import Random

import pytest

from fourfold.schedule import Action, Buffer, ScheduleError, Threads, Virtual
from fourfold.schedule.action import UPDATE, WEIGHT
from fourfold.schedule.nodes import Nodes, Path, Visit, drive_nodes
from fourfold.schedule.work import B, F
from schedule.jitter import exponential

LEAF, CELL, JOIN, HEAD = range(4)
HOMES = (0, 1, 1, 2)
START, RATE = [0.9, 1.1, 0.7, 1.3], 0.1


def sequence(length: int) -> Path:
    """A recurrent net over `length` tokens: one cell, visited again and again."""
    visits = [Visit(LEAF)]
    state = 0
    for _ in range(1, length):
        visits += [Visit(LEAF), Visit(CELL, (state, len(visits)))]
        state = len(visits) - 1
    return [*visits, Visit(HEAD, (state,))]


def tree(draw: Random, depth: int) -> Path:
    """A binary tree of random shape."""
    visits: list[Visit] = []

    def grow(below: int) -> int:
        if not below or draw.random() < 0.3:
            visits.append(Visit(LEAF))
        else:
            children = grow(below - 1), grow(below - 1)
            visits.append(Visit(JOIN, children))
        return len(visits) - 1

    grow(depth)
    return [*visits, Visit(HEAD, (len(visits) - 1,))]


def epoch(seed: int, count: int = 12) -> list[Path]:
    draw = Random(seed)
    return [sequence(draw.randrange(1, 7)) if draw.random() < 0.5 else tree(draw, 3) for _ in range(count)]


def given(instance: int, visit: int) -> float:
    return 1.0 + sin(2.0 * instance + visit)


def target(instance: int) -> float:
    return sin(5.0 * instance)


class Values:
    """A node makes tanh(w x) of the sum x of what it takes; the head's loss is half the squared distance."""

    def __init__(self) -> None:
        self.held: dict[tuple[Buffer, int], float] = {
            (Buffer(WEIGHT, node), home): START[node] for node, home in enumerate(HOMES)
        }

    def perform(self, action: Action) -> None:
        read = [self.held[buffer, action.where] for buffer in action.reads]
        if action.source is not None:
            self.held[action.writes[0], action.worker] = read[0]
            del self.held[action.reads[0], action.source]
            return
        weight, rest = read[0], read[1:]
        instance = action.microbatches.start
        if action.kind == F:
            x = sum(rest) if rest else given(instance, action.writes[0].version)
            made = [x, tanh(weight * x)]
        elif action.kind == B:
            x = rest[0]
            out = tanh(weight * x)
            slope = (rest[1] if action.stage != HEAD else out - target(instance)) * (1 - out**2)
            made = [slope * x] + [slope * weight] * (len(action.writes) - 1)
        else:
            made = [weight - RATE * sum(rest)]
        for buffer in action.frees:
            del self.held[buffer, action.worker]
        self.held |= {(buffer, action.worker): value for buffer, value in zip(action.writes, made, strict=False)}

    @property
    def weights(self) -> list[float]:
        """Nothing else may be left."""
        assert {buffer.kind for buffer, _ in self.held} == {WEIGHT}
        return [value for (_, _), value in sorted(self.held.items())]


class Numbers(Virtual):
    def __init__(self, seed: int) -> None:
        super().__init__(3, exponential(seed, {F: 1.0, B: 2.0, "move": 0.5, UPDATE: 0.2}))
        self.values = Values()

    def next(self):
        completion = super().next()
        self.values.perform(completion.action)
        return completion


def serial(paths: list[Path], every: int = 1) -> list[float]:
    """Gradient descent, instance by instance."""
    weights, gradients = list(START), [0.0] * 4
    for instance, path in enumerate(paths):
        xs, outs = [], []
        for place, visit in enumerate(path):
            xs.append(sum(outs[giver] for giver in visit.takes) if visit.takes else given(instance, place))
            outs.append(tanh(weights[visit.node] * xs[-1]))
        slopes = [0.0] * (len(path) - 1) + [outs[-1] - target(instance)]
        for place in reversed(range(len(path))):
            node, slope = path[place].node, slopes[place] * (1 - outs[place] ** 2)
            gradients[node] += slope * xs[place]
            for giver in path[place].takes:
                slopes[giver] = slope * weights[node]
        if instance % every == every - 1 or instance == len(paths) - 1:
            weights = [weight - RATE * gradient for weight, gradient in zip(weights, gradients, strict=True)]
            gradients = [0.0] * 4
    return weights


def close(found: list[float], want: list[float]) -> bool:
    return all(abs(one - other) <= 1e-12 for one, other in zip(found, want, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_one_at_a_time_is_serial(seed):
    paths, machine = epoch(seed), Numbers(seed)
    nodes = Nodes(HOMES, paths, active=1)
    drive_nodes(nodes, machine)
    assert close(machine.values.weights, serial(paths))
    assert nodes.staleness == [0] * 4 and nodes.most == 1


@pytest.mark.parametrize("seed", range(5))
def test_all_at_once_is_the_whole_batch(seed):
    """No update before the last gradient: what is in flight sees one weight, whatever comes when."""
    paths, machine = epoch(seed), Numbers(seed)
    nodes = Nodes(HOMES, paths, active=len(paths), frequency=len(paths))
    drive_nodes(nodes, machine)
    assert close(machine.values.weights, serial(paths, every=len(paths)))
    assert nodes.most == len(paths)


@pytest.mark.parametrize("frequency", [1, 2, 5])
@pytest.mark.parametrize("active", [1, 2, 4, 8])
def test_several_in_flight(active, frequency):
    for seed in range(10):
        paths, machine = epoch(seed, 20), Numbers(seed)
        nodes = Nodes(HOMES, paths, active, frequency)
        ran = drive_nodes(nodes, machine)
        assert len(machine.values.weights) == 4, "caches are empty after the epoch"
        assert nodes.flying == 0 and nodes.most == active
        assert max(nodes.staleness) <= (2 * (active - 1) + frequency - 1) // frequency
        passes = [
            (action.kind, action.stage, action.microbatches.start) for action, _, _ in ran if action.kind in (F, B)
        ]
        visits = sorted((kind, one.node, k) for k, path in enumerate(paths) for one in path for kind in (F, B))
        assert sorted(passes) == visits
        for node in range(4):
            visitors = sum(any(one.node == node for one in path) for path in paths)
            assert nodes.versions[node] == -(-visitors // frequency)


def test_several_in_flight_are_late_and_faster():
    paths = epoch(1, 40)
    ends, stale = {}, {}
    for active in (1, 4):
        machine = Numbers(1)
        nodes = Nodes(HOMES, paths, active)
        drive_nodes(nodes, machine)
        ends[active], stale[active] = machine.now, max(nodes.staleness)
    assert stale[1] == 0 < stale[4]
    assert ends[4] < ends[1]


def test_instances_overtake_one_another():
    paths = [sequence(6), sequence(1)]
    nodes = Nodes(HOMES, paths, active=2)
    ran = [action.microbatches.start for action, _, _ in drive_nodes(nodes, Numbers(0)) if action.kind == B]
    assert ran.index(1) < ran.index(0)


def test_threads_run_them_too():
    paths, values = epoch(3), Values()
    with Threads(3, dict.fromkeys((F, B, UPDATE, "move"), values.perform)) as machine:
        drive_nodes(Nodes(HOMES, paths, active=1), machine)
    assert close(values.weights, serial(paths))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ([Visit(LEAF), Visit(HEAD)], "visit 0: expected a later one that takes its value, found none"),
        (
            [Visit(LEAF), Visit(CELL, (0,)), Visit(HEAD, (0, 1))],
            "visit 2 takes from visit 0: expected an earlier one that",
        ),
        ([Visit(CELL, (1,)), Visit(HEAD, (0,))], "visit 0 takes from visit 1: expected an earlier one"),
        ([Visit(9)], "visit 0: expected a node from 0 to 3, found 9"),
    ],
    ids=["lost", "taken twice", "not made yet", "nowhere"],
)
def test_bad_paths_are_refused(path, says):
    with pytest.raises(ScheduleError, match=says):
        Nodes(HOMES, [path], active=1)


def test_bad_limits_are_refused():
    with pytest.raises(ScheduleError, match="expected active of at least 1, found 0"):
        Nodes(HOMES, [], active=0)
    with pytest.raises(ScheduleError, match="expected frequency of at least 1, found 0"):
        Nodes(HOMES, [], active=1, frequency=0)
