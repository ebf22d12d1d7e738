"""Forecast a plan, search plans, explain the choice: before a single device is touched."""

from fourfold.planner.answer import plan as plan
from fourfold.planner.explain import Outlook as Outlook
from fourfold.planner.forecast import Forecast as Forecast
from fourfold.planner.forecast import ForecastError as ForecastError
from fourfold.planner.forecast import RefusedError as RefusedError
from fourfold.planner.forecast import forecast as forecast
from fourfold.planner.here import here as here
from fourfold.planner.here import loaded as loaded
from fourfold.planner.measure import Peak as Peak
from fourfold.planner.measure import measured_peak as measured_peak
from fourfold.planner.search import search as search
from fourfold.planner.search import silent as silent
from fourfold.planner.subject import Subject as Subject
from fourfold.planner.trace import TraceError as TraceError
from fourfold.planner.trace import UnrunnableError as UnrunnableError
from fourfold.planner.traces import Traces as Traces
