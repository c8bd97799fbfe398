"""The Python client of the service.

    from steptune.service.client import Client

    with Client("https://steptune.example", token="stp_…") as client:
        workload = client.upload("train.py", entry="train.py:MyWorkload")
        study = client.submit(workload_id=workload.workload_id, budget_s=600)
        client.wait(study.study_id)
        print(client.recommendation(study.study_id).gain)

`client.py` has the requests, `transport.py` their transport (retries, time limits, problems), `events.py` the stream
of events, `packing.py` the packing of a folder for upload. It loads neither torch nor the server.
"""

from typing import TYPE_CHECKING, Any

from steptune.service.client.client import Client
from steptune.service.client.errors import (
    AccessRefusedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    ServiceUnreachableError,
    TooManyRequestsError,
)
from steptune.tuner.errors import by_earlier_name

__all__ = [
    "AccessRefusedError",
    "Client",
    "ConflictError",
    "InvalidRequestError",
    "NotFoundError",
    "ServiceError",
    "ServiceUnreachableError",
    "TooManyRequestsError",
]

EARLIER_NAMES = {
    "AccessRefused": "AccessRefusedError",
    "Conflict": "ConflictError",
    "InvalidRequest": "InvalidRequestError",
    "NotFound": "NotFoundError",
    "ServiceUnreachable": "ServiceUnreachableError",
    "TooManyRequests": "TooManyRequestsError",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return by_earlier_name(name, globals(), EARLIER_NAMES)
