"""The queue: who waits, who may have what, and which worker runs it.

`StudyQueue` is all of it. Its tables are in `service.models.queue`, leases in `service.fencing`.
"""

from service.queue.opening import open_queue
from service.queue.records import Claim, QueueEntry, Quotas, WorkerInfo, WorkerOffer
from service.queue.repository import StudyQueue

__all__ = ["Claim", "QueueEntry", "Quotas", "StudyQueue", "WorkerInfo", "WorkerOffer", "open_queue"]
