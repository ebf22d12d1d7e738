"""The resolved config as text: every setting, defaults included, read back to an equal config."""

from __future__ import annotations

from fourfold.config.schema import Config
from fourfold.config.yaml_text import dump


def resolved(config: Config) -> str:
    """YAML text of the whole config; `load` of a file that holds it gives an equal config."""
    return dump(config.to_dict())
