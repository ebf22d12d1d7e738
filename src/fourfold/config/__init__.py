"""One tree of settings: a file and overrides merge into one validated, frozen `Config`."""

from fourfold.config.schema import Config as Config
