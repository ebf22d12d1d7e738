"""The plan: four choices and the words that their rooms share."""

from fourfold.plan.events import Events as Events
from fourfold.plan.events import GradientReady as GradientReady
from fourfold.plan.plan import Placement as Placement
from fourfold.plan.plan import Plan as Plan
from fourfold.plan.plan import PlanError as PlanError
from fourfold.plan.plan import Wire as Wire
from fourfold.plan.protocols import Codec as Codec
from fourfold.plan.protocols import Rule as Rule
from fourfold.plan.technique import Technique as Technique
from fourfold.plan.technique import techniques as techniques
