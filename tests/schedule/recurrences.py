"""A pipeline of scalars, run action by action, and the recurrences that asynchronous orders stand for.

Stage s maps a to tanh(w_s a); the loss of what the last stage makes is half the squared distance to a target. Weights
of stage s are w[s][0], w[s][1], ... by version.
"""

from collections.abc import Callable, Sequence
from math import sin, tanh

from fourfold.schedule import Action, Buffer, Program, Virtual
from fourfold.schedule.action import PREDICT, PREDICTED, UPDATE, WEIGHT
from fourfold.schedule.work import B, F

RATE, SMOOTH = 0.3, 0.7
"""Of the optimizer: w -= RATE v, v = SMOOTH v + (1 - SMOOTH) gradient, where momentum is on."""


def given(microbatch: int) -> float:
    return 1.0 + sin(3.0 * microbatch)


def target(microbatch: int) -> float:
    return 0.4 * sin(5.0 * microbatch + 1.0)


def start(stage: int) -> float:
    return 0.9 + 0.2 * stage


def gradient(forward: Sequence[float], backward: Sequence[float], microbatch: int) -> list[float]:
    """Of the loss by every stage's weight, if the passes take these weights."""
    inputs, value = [], given(microbatch)
    for weight in forward:
        inputs.append(value)
        value = tanh(weight * value)
    found, slope = [], value - target(microbatch)
    for stage in reversed(range(len(forward))):
        slope *= 1 - tanh(forward[stage] * inputs[stage]) ** 2
        found.append(slope * inputs[stage])
        slope *= backward[stage]
    return found[::-1]


class Scalars(Virtual):
    """Runs a program on numbers; a value lies on the worker that made it or to which it was moved.

    Attributes:
        values: what is there, by buffer and worker.
        first: the number in the whole run of the window's micro-batch 0.
        versions: how many weights each stage had at once, at most, between two actions.
        made, speeds: every weight of each stage, and the optimizer's velocity that came with it.
    """

    def __init__(
        self, program: Program, momentum: float = 0.0, cost: Callable[[Action], float] = lambda action: 1.0
    ) -> None:
        super().__init__(program.workers, cost)
        self.last, self.momentum, self.first = program.workers - 1, momentum, 0
        workers = range(program.workers)
        self.values = {(Buffer(WEIGHT, stage), stage): start(stage) for stage in workers}
        self.speeds = [[0.0] for _ in workers]
        self.versions, self.made = [1 for _ in workers], [[start(stage)] for stage in workers]

    def next(self):
        completion = super().next()
        self.perform(completion.action)
        return completion

    def perform(self, action: Action) -> None:
        read = [self.values[buffer, action.where] for buffer in action.reads]
        if action.source is not None:
            self.values[action.writes[0], action.worker] = read[0]
            del self.values[action.reads[0], action.source]
            return
        made = {F: self.forward, B: self.backward, UPDATE: self.update, PREDICT: self.predict}[action.kind](
            action, read
        )
        used = [buffer for buffer in action.reads if buffer.kind in ("activation", "activation-gradient")]
        for buffer in {*action.frees, *used}:
            del self.values[buffer, action.worker]
        self.values |= {(buffer, action.worker): value for buffer, value in zip(action.writes, made, strict=True)}
        alive = sum(buffer.kind == WEIGHT and worker == action.worker for buffer, worker in self.values)
        self.versions[action.worker] = max(self.versions[action.worker], alive)

    def forward(self, action: Action, read: list) -> list:
        weight, value = read[0], read[1] if action.stage else given(self.first + action.microbatches.start)
        out = tanh(weight * value)
        return [(value, out)] if action.stage == self.last else [(value, out), out]

    def backward(self, action: Action, read: list) -> list:
        weight, (value, out) = read[:2]
        slope = out - target(self.first + action.microbatches.start) if action.stage == self.last else read[2]
        slope *= 1 - out**2
        return [slope * value, slope * weight] if action.stage else [slope * value]

    def update(self, action: Action, read: list) -> list:
        weight, *gradients = read
        stage, mean = action.stage, sum(gradients) / len(gradients)
        self.speeds[stage].append(self.momentum * self.speeds[stage][-1] + (1 - self.momentum) * mean)
        self.made[stage].append(weight - RATE * self.speeds[stage][-1])
        return [self.made[stage][-1]]

    def predict(self, action: Action, read: list) -> list:
        distance = action.writes[0].version - action.reads[0].version
        assert distance > 0 and action.writes[0].kind in PREDICTED.values()
        return [read[0] - distance * RATE * self.speeds[action.stage][-1]]


History = list[list[float]]
"""weights[stage][version]."""
Reading = Callable[[History, History, int], tuple[list[float], list[float]]]
"""(weights, velocities, micro-batch) → every stage's weight in its forward and in its backward."""


def recurrence(stages: int, microbatches: int, updates: int, reading: Reading, momentum: float = 0.0) -> History:
    """Serially: each update takes the mean gradient of its micro-batches, each at the weights of `reading`."""
    weights: History = [[start(stage)] for stage in range(stages)]
    velocities: History = [[0.0] for _ in range(stages)]
    for update in range(updates):
        batch = range(update * microbatches, (update + 1) * microbatches)
        every = [gradient(*reading(weights, velocities, k), k) for k in batch]
        for stage in range(stages):
            mean = sum(one[stage] for one in every) / microbatches
            velocities[stage].append(momentum * velocities[stage][-1] + (1 - momentum) * mean)
            weights[stage].append(weights[stage][-1] - RATE * velocities[stage][-1])
    return weights
