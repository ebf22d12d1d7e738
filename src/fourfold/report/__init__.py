"""What a run came to: one HTML page that needs nothing else, and a trace for Perfetto."""

from fourfold.report.page import Report as Report
from fourfold.report.page import amount as amount
from fourfold.report.page import off as off
from fourfold.report.page import write as write
from fourfold.report.recorded import ReportError as ReportError
