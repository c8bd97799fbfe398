"""The queue: who waits, who may have what, and which worker runs it.

`StudyQueue` is all of it. Its tables are in `service.models.queue`, leases in `service.fencing`.
"""

from service.queue.records import Claim, QueueEntry, Quotas, Slot, WorkerInfo, WorkerOffer
from service.queue.repository import StudyQueue

__all__ = ["Claim", "QueueEntry", "Quotas", "Slot", "StudyQueue", "WorkerInfo", "WorkerOffer"]
