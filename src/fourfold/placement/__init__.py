"""Placement: where every tensor lives. A plain model becomes a placed one."""

from fourfold.placement.layout import Layout as Layout
from fourfold.placement.piece import Piece as Piece
from fourfold.placement.placed import Placed as Placed
from fourfold.placement.placed import Shard as Shard
from fourfold.placement.placing import place as place
