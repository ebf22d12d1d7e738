"""What a machine is: devices, links and memory tiers, as numbers. Bytes, seconds, FLOP/s; links per direction.

A cluster is written as words, as a mapping, or in a file that holds such a mapping:

    8x rtx4090
    4 nodes of 8x h100_sxm
    4 nodes of 8x h100_sxm over 4x port_200gb
    256 nodes of perlmutter

`over K x LINK` gives every node K ports of that kind; without it a node has the ports that its device is normally
sold with (one for each device, or one 100 Gb port for the whole node where the catalogue knows no better). A node
of a machine that the catalogue knows by name is whole: its devices are not counted again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

GIB = 1024**3
WORDS = re.compile(r"^(?:(\d+)\s+nodes?\s+of\s+)?(?:(\d+)\s*x\s+)?([\w-]+)(?:\s+over\s+(?:(\d+)\s*x\s+)?([\w-]+))?$")
MAY_BE_ZERO = ("reserved", "latency", "call", "each")
SYNTAX = "[N nodes of] [Mx] DEVICE [over [Kx] LINK], or [N nodes of] MACHINE"


class ClusterError(ValueError):
    """A machine that cannot be read: says what, where, what was expected, and the nearest name."""


@dataclasses.dataclass(frozen=True)
class Tier:
    """A place where bytes rest besides the device's own memory (host, NVMe).

    Attributes:
        bytes: size, for each device.
        bandwidth: bytes/s between device and tier, one direction.
    """

    name: str
    bytes: int
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection of a device, or a port of a node.

    Attributes:
        latency: seconds before the first byte arrives.
        bandwidth: bytes/s in one direction.
        shared_by: devices that must share one such connection (8 devices and 2 ports: 4).
        wires: equal parts of which each leads to another peer, where a node has no switch (4 devices, each with a third
            of its bandwidth towards each of the others: 3). 1: whoever it talks to, a device has it all.
        call: seconds that a collective costs whoever takes part: what starts it.
        each: seconds of the processor for every rank of the group in each round of a collective, where the processor
            sends and receives the messages (gloo); those of ranks that share a core add up.
    """

    name: str
    latency: float
    bandwidth: float
    shared_by: float = 1.0
    wires: int = 1
    call: float = 0.0
    each: float = 0.0

    def among(self, devices: int) -> float:
        """Bytes/s of a device, one direction, towards a group of so many that it belongs to."""
        return self.bandwidth / self.shared_by * min(self.wires, max(1, devices - 1)) / self.wires


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: a GPU, one die of a two-die card, or a CPU core.

    Attributes:
        memory: bytes.
        memory_bandwidth: bytes/s.
        flops: dense peak, FLOP/s by dtype ("fp32", "bf16", "fp64", "fp16"). Sparsity is never counted.
        link: the catalogue's name of its connection to the other devices of the node.
        port: the catalogue's name of the network port that comes with each device; None: one port for the node.
        efficiency: share of the peak that a large GEMM reaches.
        reserved: bytes that no tensor can have: driver context, library workspaces, communication buffers.
        recalled: names of the fields whose numbers nobody has checked against a source.
        source: where the numbers come from.
    """

    name: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    link: str
    port: str | None = None
    efficiency: float = 0.6
    reserved: int = 0
    recalled: tuple[str, ...] = ()
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for "fp32", "bf16" or "fp64"; what the device has no units for runs at its fp32 rate."""
        found = self.flops.get(dtype) or (self.flops.get("fp16") if dtype == "bf16" else None)
        if found is not None:
            return found
        return self.flops.get("fp32") or min(self.flops.values())


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. Ranks fill a node before the next one begins.

    Attributes:
        intra: what a device has towards the other devices of its node.
        inter: a network port of a node; `inter.shared_by` devices use one.
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ClusterError(f"hardware: {name} must be at least 1, found {getattr(self, name)}")

    @property
    def is_cpu(self) -> bool:
        """The devices are processor cores: kernels can be tried where the forecast is made."""
        return self.device.name.startswith("cpu")

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s, one direction, between a node and the network: all its ports together."""
        return self.inter.bandwidth * self.devices_per_node / self.inter.shared_by

    def to_dict(self) -> dict[str, Any]:
        """The plain mapping that `from_dict` reads back to an equal cluster."""
        plain = dataclasses.asdict(self)
        plain["device"]["flops"] = dict(self.device.flops)
        plain["device"]["recalled"] = list(self.device.recalled)
        plain["tiers"] = list(plain["tiers"])
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Cluster:
        """Read a full mapping.

        Raises:
            ClusterError: an unknown or missing key, or a value that is not a positive number.
        """
        fields = _checked("hardware", plain, cls)
        device = _checked("hardware.device", _mapping("hardware.device", fields["device"]), Device)
        device["flops"] = {
            str(dtype): _number(f"hardware.device.flops.{dtype}", value)
            for dtype, value in _mapping("hardware.device.flops", device["flops"]).items()
        }
        if not device["flops"]:
            raise ClusterError("hardware.device.flops: expected the peak of at least one dtype, such as fp32: 1e11")
        device["recalled"] = tuple(device.get("recalled", ()))
        links = {
            end: Link(**_checked(f"hardware.{end}", _mapping(f"hardware.{end}", fields[end]), Link))
            for end in ("intra", "inter")
        }
        tiers = tuple(Tier(**_checked("hardware.tiers", tier, Tier)) for tier in fields.get("tiers", ()))
        return cls(fields["nodes"], fields["devices_per_node"], Device(**device), **links, tiers=tiers)

    @classmethod
    def parse(cls, what: str | Mapping[str, Any]) -> Cluster:
        """A cluster from words (see the module), a mapping, or the path of a .json or .yaml file that holds one.

        Raises:
            ClusterError: with the syntax, the nearest name and the catalogue's names.
        """
        if isinstance(what, Mapping):
            return cls.from_dict(what)
        if what.endswith((".json", ".yaml", ".yml")):
            return cls.from_dict(_read(Path(what)))
        found = WORDS.match(what.strip())
        if not found:
            raise ClusterError(f"hardware: cannot read {what!r}; write it as {SYNTAX}, for example '8x rtx4090'")
        nodes, devices, name, ports, port = found.groups()
        if devices is None and port is None and (machine := _machine(name)):
            return dataclasses.replace(machine, nodes=int(nodes or 1))
        return _assemble(int(nodes or 1), int(devices or 1), name, int(ports or 1), port)


def _machine(name: str) -> Cluster | None:
    from fourfold.hardware import catalogue  # the catalogue is written in the types of this file

    return catalogue.MACHINES.get(name)


def _assemble(nodes: int, devices: int, name: str, ports: int, port: str | None) -> Cluster:
    from fourfold.hardware import catalogue  # the catalogue is written in the types of this file

    device = _entry("device", name, catalogue.DEVICES)
    if port is not None:
        inter = dataclasses.replace(_entry("link", port, catalogue.LINKS), shared_by=devices / ports)
    elif device.port is not None:
        inter = catalogue.LINKS[device.port]
    else:
        inter = dataclasses.replace(catalogue.LINKS["port_100gb"], shared_by=float(devices))
    return Cluster(nodes, devices, device, catalogue.LINKS[device.link], inter)


def _entry(kind: str, name: str, entries: Mapping[str, Any]) -> Any:
    if name in entries:
        return entries[name]
    near = get_close_matches(name, entries, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ClusterError(f"hardware: no {kind} is called {name!r}{hint}; the catalogue has: {', '.join(sorted(entries))}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"hardware: cannot read the file {str(path)!r}: {error}") from error
    try:
        if path.suffix == ".json":
            plain = json.loads(text)
        else:
            import yaml

            plain = yaml.safe_load(text)
    except ValueError as error:
        raise ClusterError(f"hardware: {str(path)!r} is not valid {path.suffix[1:]}: {error}") from error
    except Exception as error:  # yaml's errors do not derive from ValueError
        raise ClusterError(f"hardware: {str(path)!r} is not valid YAML: {error}") from error
    return _mapping(f"hardware file {str(path)!r}", plain)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ClusterError(f"{where}: expected a mapping, found {value!r}")
    return value


def _checked(where: str, plain: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The entries of `plain`, each known to `kind`, none missing, every number positive."""
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key in plain:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ClusterError(f"{where}.{key}: no such setting{hint}; expected one of {', '.join(known)}")
    for name, entry in known.items():
        if name not in plain:
            if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
                raise ClusterError(f"{where}.{name}: missing; expected {entry.type}")
        elif entry.type in ("int", "float"):
            _number(f"{where}.{name}", plain[name], whole=entry.type == "int", zero=name in MAY_BE_ZERO)
    return dict(plain)


def _number(where: str, value: Any, *, whole: bool = False, zero: bool = False) -> float:
    kinds = int if whole else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool) and (value > 0 or (zero and value == 0))
    if not good or value == float("inf"):
        raise ClusterError(f"{where}: expected a {'whole ' if whole else ''}number above zero, found {value!r}")
    return value
