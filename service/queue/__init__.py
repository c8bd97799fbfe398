"""The queue of studies: waiting studies, the devices that their users may have, and the worker that runs each study.

`StudyQueue` is its interface. Its tables are in `steptune.service.models.queue`, leases in `steptune.service.fencing`.
"""

from steptune.service.queue.opening import open_queue
from steptune.service.queue.records import Claim, QueueEntry, Quotas, WorkerInfo, WorkerOffer
from steptune.service.queue.repository import StudyQueue

__all__ = ["Claim", "QueueEntry", "Quotas", "StudyQueue", "WorkerInfo", "WorkerOffer", "open_queue"]
