"""The wire: the only room that communicates. Mesh, axes, collectives, their bytes, and who is missing."""

from fourfold.wire import formulas as formulas
from fourfold.wire import threads as threads
from fourfold.wire.axis import Axis as Axis
from fourfold.wire.dry import Dry as Dry
from fourfold.wire.dry import dry_mesh as dry_mesh
from fourfold.wire.errors import Mismatch as Mismatch
from fourfold.wire.errors import RankFailed as RankFailed
from fourfold.wire.errors import Stalled as Stalled
from fourfold.wire.errors import UsageError as UsageError
from fourfold.wire.errors import WireError as WireError
from fourfold.wire.link import Message as Message
from fourfold.wire.links import Links as Links
from fourfold.wire.mesh import Mesh as Mesh
from fourfold.wire.work import Work as Work
from fourfold.wire.world import World as World
from fourfold.wire.world import join as join
