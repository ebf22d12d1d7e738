"""The one record of time, bytes and memory, shared by forecast and measurement."""

from fourfold.ledger.ledger import Difference as Difference
from fourfold.ledger.ledger import Flow as Flow
from fourfold.ledger.ledger import Ledger as Ledger
from fourfold.ledger.ledger import Span as Span
from fourfold.ledger.ledger import Traffic as Traffic
