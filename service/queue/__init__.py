"""The queue: which studies wait, which devices their users may have, and which worker runs each.

`StudyQueue` is its interface. Its tables are in `steptune.service.models.queue`, leases in `steptune.service.fencing`.
"""

from steptune.service.queue.opening import open_queue
from steptune.service.queue.records import Claim, QueueEntry, Quotas, WorkerInfo, WorkerOffer
from steptune.service.queue.repository import StudyQueue

__all__ = ["Claim", "QueueEntry", "Quotas", "StudyQueue", "WorkerInfo", "WorkerOffer", "open_queue"]
