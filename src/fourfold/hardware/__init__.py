"""Machines as numbers: devices, links, memory tiers, and closed forms of what a collective takes."""

from fourfold.hardware.cluster import Cluster as Cluster
from fourfold.hardware.cluster import ClusterError as ClusterError
from fourfold.hardware.cluster import Device as Device
from fourfold.hardware.cluster import Link as Link
from fourfold.hardware.cluster import Tier as Tier
