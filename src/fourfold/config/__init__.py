"""One tree of settings: a file and overrides merge into one validated, frozen `Config`."""

from fourfold.config.load import Check as Check
from fourfold.config.load import Loaded as Loaded
from fourfold.config.load import load as load
from fourfold.config.problem import ConfigError as ConfigError
from fourfold.config.problem import Origins as Origins
from fourfold.config.problem import Problem as Problem
from fourfold.config.schema import Config as Config
from fourfold.config.write import resolved as resolved
