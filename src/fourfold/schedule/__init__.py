"""When every piece of work runs: an order yields actions, `bind` and `validate` make a program, `drive` runs it.

```python
program = validate(bind(order(Shape(stages=4, microbatches=8, workers=4), options), workers=4))
print(draw(simulate(program, cost)))
drive(program, Inline({"forward": forward, "backward": backward, "update": update}))
```

A new schedule is one file in `orders`: a frozen dataclass `Options` and a generator function `order`.
"""

from fourfold.schedule.action import ANY as ANY
from fourfold.schedule.action import Action as Action
from fourfold.schedule.action import Buffer as Buffer
from fourfold.schedule.action import ScheduleError as ScheduleError
from fourfold.schedule.bind import bind as bind
from fourfold.schedule.budget import Budget as Budget
from fourfold.schedule.draw import draw as draw
from fourfold.schedule.drive import drive as drive
from fourfold.schedule.inline import Inline as Inline
from fourfold.schedule.machine import Body as Body
from fourfold.schedule.machine import Completion as Completion
from fourfold.schedule.machine import Machine as Machine
from fourfold.schedule.nodes import Nodes as Nodes
from fourfold.schedule.nodes import Visit as Visit
from fourfold.schedule.nodes import drive_nodes as drive_nodes
from fourfold.schedule.order import Order as Order
from fourfold.schedule.order import Shape as Shape
from fourfold.schedule.program import Lane as Lane
from fourfold.schedule.program import Program as Program
from fourfold.schedule.ranks import Post as Post
from fourfold.schedule.ranks import Ranks as Ranks
from fourfold.schedule.ready import Mode as Mode
from fourfold.schedule.ready import drive_ready as drive_ready
from fourfold.schedule.simulate import simulate as simulate
from fourfold.schedule.template import Part as Part
from fourfold.schedule.template import Template as Template
from fourfold.schedule.threads import Threads as Threads
from fourfold.schedule.timeline import Timeline as Timeline
from fourfold.schedule.validate import validate as validate
from fourfold.schedule.virtual import Virtual as Virtual
from fourfold.schedule.window import Stream as Stream
from fourfold.schedule.window import Window as Window
