"""YAML as its version 1.2 reads it (core schema): `1e-4` is a number, `no` is text, a key is written once.

PyYAML follows version 1.1, where `1e-4` is text and `no` is false. Its scanner and composer are used as they are;
plain scalars are resolved here by the tables of YAML 1.2.2, section 10.3.2, and values are built here from the composed
nodes, so that no tag can construct anything but null, booleans, numbers, text, lists and mappings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from fourfold.config.document import Document
from fourfold.config.problem import ConfigError, Path, Problem

LARGEST = 20_000
"""Values that a file may expand to: aliases of aliases grow exponentially."""
DEEPEST = 50
"""Levels of nesting."""
MANY = f"holds more than {LARGEST} values; a config is smaller: is this the right file?"
DEEP = f"nested too deep; at most {DEEPEST} levels are read"
TAG = "tag:yaml.org,2002:"

_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Bound(yaml.MarkedYAMLError):
    """The text holds more than a config can."""


class Loader(yaml.SafeLoader):
    """PyYAML's scanner, parser and composer with the plain scalars of YAML 1.2; stops at too many or too deep nodes."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, stream: str) -> None:
        """Read text."""
        super().__init__(stream)
        self.nodes = 0
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """One node and what it holds, while both stay within bounds."""
        self.nodes += 1
        self.depth += 1
        if self.nodes > LARGEST or self.depth > DEEPEST:
            raise _Bound(None, None, MANY if self.nodes > LARGEST else DEEP, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back: text that would resolve to something else is quoted; lists stay on one line."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out, also one that occurs twice."""
        return True


for _kind, _pattern, _first in _CORE:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(TAG + _kind, re.compile(rf"^(?:{_pattern})\Z"), _first)
Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence(TAG + "seq", data, flow_style=True))


def dump(settings: dict[str, Any]) -> str:
    """YAML text that `parse` reads back to equal settings."""
    return yaml.dump(settings, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)


def parse(text: str, path: str) -> Document:
    """Read YAML text.

    Raises:
        ConfigError: the text is not YAML, not a mapping, nested too deep, or its aliases expand to too much.
    """
    try:
        node = _compose(text)
    except _Bound as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError([Problem(f"{path}:{line}", "", str(error.problem))]) from None
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(error, text, path)]) from None
    document = Document()
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            [Problem(_place(path, node), "", "expected lines of `key: value`, found none; see examples/")]
        )
    document.settings = _Builder(document, path).mapping(node, ())
    return document


def table(text: str) -> dict[str, Any]:
    """One mapping in braces, as a line of a file would hold it: {tensor: {algorithm: 4d, y: 2}}.

    Raises:
        ValueError: it is none, or a key in it has no value (as where the blank after a colon is missing).
    """
    document = Document()
    try:
        node = _compose(text)
        if not isinstance(node, yaml.MappingNode) or _lacks_values(node):
            raise ValueError("expected a mapping whose keys have values")
        settings = _Builder(document, "").mapping(node, ())
    except (yaml.YAMLError, ConfigError) as error:
        raise ValueError(str(error)) from None
    if document.problems:
        raise ValueError(document.problems[0].text)
    return settings


def _lacks_values(node: yaml.Node) -> bool:
    if isinstance(node, yaml.MappingNode):
        return any(_lacks_values(value) for _, value in node.value)
    if isinstance(node, yaml.SequenceNode):
        return any(map(_lacks_values, node.value))
    return isinstance(node, yaml.ScalarNode) and node.style is None and not node.value


def scalar(text: str) -> Any:
    """The value of one plain scalar, as a file would hold it: 1e-4, true, null; anything else is text."""
    for name, pattern, _ in _CORE:
        if re.fullmatch(pattern, text):
            return _VALUES[name](text)
    return text


def _compose(text: str) -> yaml.Node | None:
    loader = Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


class _Builder:
    """Plain values from composed nodes, with the line of each key and everything that is refused on the way."""

    def __init__(self, document: Document, path: str) -> None:
        self.document = document
        self.path = path
        self.built = 0

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, path, "a key is a word; quote it if it holds [ ] { } or ,")
                continue
            key = key_node.value
            line = key_node.start_mark.line + 1
            if key in result:
                first = self.document.lines[(*path, key)]
                self._refuse(key_node, (*path, key), f"written twice, first on line {first}; remove one of the two")
                continue
            self.document.lines[(*path, key)] = line
            result[key] = self._value(value_node, (*path, key))
        return result

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self.built += 1
        if self.built > LARGEST:
            self._stop(node, path, f"its aliases expand to more than {LARGEST} values; use fewer of them")
        if len(path) > DEEPEST:
            self._stop(node, path[:3], f"an alias holds itself; {DEEP}")
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self._item(item, (*path, str(index))) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self.document.lines[path] = node.start_mark.line + 1
        return self._value(node, path)

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        build = _VALUES.get(node.tag.removeprefix(TAG))
        if build is None or not isinstance(node, yaml.ScalarNode):
            tag = node.tag.replace(TAG, "!!")
            self._refuse(node, path, f"the tag {tag} is not read; write the plain value")
            return None
        try:
            return build(node.value)
        except (ValueError, OverflowError):
            self._refuse(
                node, path, f"expected {node.tag.replace(TAG, '!!')}, found {node.value[:40]!r}; write a number"
            )
            return None

    def _refuse(self, node: yaml.Node, path: Path, text: str) -> None:
        self.document.problems.append(Problem(_place(self.path, node), ".".join(path), text))

    def _stop(self, node: yaml.Node, path: Path, text: str) -> None:
        raise ConfigError([*self.document.problems, Problem(_place(self.path, node), ".".join(path), text)])


def _integer(text: str) -> int:
    return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)


def _float(text: str) -> float:
    return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))


_VALUES = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": _float,
    "str": str,
}


def _place(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _syntax(error: yaml.YAMLError, text: str, path: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        reason = getattr(error, "reason", None) or str(error).splitlines()[0]
        return Problem(path, "", f"is not YAML: {reason}; remove the odd characters, or save it as plain UTF-8")
    lines = text.split("\n")
    line = lines[mark.line] if mark.line < len(lines) else ""
    remedy = "check indentation, colons, quotes and brackets here and just above"
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in str(error):
        remedy = "indent by spaces, not by tabs"
    words = " ".join(part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    return Problem(f"{path}:{mark.line + 1}", "", f"is not YAML: {words}; {remedy}")
