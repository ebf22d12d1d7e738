"""Optimizers on flat shards, their plain serial twins, and the learning rate as a function of the step."""

from fourfold.training.optimizer.optimizer import Optimizer as Optimizer
from fourfold.training.optimizer.optimizer import Shard as Shard
from fourfold.training.optimizer.optimizer import build as build
from fourfold.training.optimizer.optimizer import build_plain as build_plain
from fourfold.training.optimizer.optimizer import group_of as group_of
from fourfold.training.optimizer.options import OptimizerError as OptimizerError
from fourfold.training.optimizer.options import OptimizerOptions as OptimizerOptions
from fourfold.training.optimizer.rate import learning_rate as learning_rate
