"""Users who follow their studies over HTTP, each in a thread, whatever is restarted meanwhile; and what they missed."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence

import httpx

from steptune.service.client import Client
from steptune.service.client.errors import NotFoundError, ServiceError, ServiceUnreachableError

RETRY_S = 0.5
API = "/api/v1"


class StudyFollower(threading.Thread):
    """Follows one study to its end: until the service says that there is nothing more to come."""

    def __init__(self, url: str, token: str, study_id: str) -> None:
        super().__init__(daemon=True, name=f"follows {study_id}")
        self.study_id = study_id
        self.told: list[int] = []
        self.last = ("", "")
        """Kind of the newest event, and the state that it tells of."""
        self.has_ended = False
        self._url, self._token = url, token

    def run(self) -> None:
        while not self.has_ended:
            try:
                with Client(self._url, self._token, retries=1) as client:
                    for event in client.events(self.study_id, after=self.told[-1] if self.told else 0):
                        self.told.append(event.sequence)
                        self.last = event.kind, str(event.data.get("state", ""))
                    self.has_ended = True
            except NotFoundError:
                return
            except (ServiceUnreachableError, ServiceError):
                time.sleep(RETRY_S)


class UserFollower(threading.Thread):
    """Follows all that a user may see, as a browser does: by the number of the last event, from the first stream on."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(daemon=True, name="follows everything")
        self.told: list[int] = []
        self.first: int | None = None
        self.num_streams = 0
        self.leaves = threading.Event()
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}

    def run(self) -> None:
        last: int | None = None
        while not self.leaves.is_set():
            headers = self._headers | ({} if last is None else {"Last-Event-ID": str(last)})
            try:
                with httpx.stream("GET", f"{self._url}{API}/events", headers=headers, timeout=20) as answer:
                    answer.raise_for_status()
                    self.num_streams += 1
                    last = self._read(answer, last)
            except (httpx.HTTPError, OSError):
                self.leaves.wait(RETRY_S)

    def _read(self, answer: httpx.Response, last: int | None) -> int | None:
        """Reads a stream; what comes before its first event is the number after which it begins."""
        number = None
        try:
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: ") and number is not None:
                    self.told.append(number)
                    last = number
                elif not line and number is not None:
                    self.first = number if self.first is None else self.first
                    last = number
                if self.leaves.is_set():
                    break
        except httpx.HTTPError:
            pass
        return last


def missed(told: Sequence[int], there: Sequence[int]) -> Counter[str]:
    """How many events were not told, were told twice or in another order, or do not exist."""
    return +Counter(
        missed=len(set(there) - set(told)),
        twice=len(told) - len(set(told)),
        out_of_order=sum(b < a for a, b in itertools.pairwise(told)),
        unknown=len(set(told) - set(there)),
    )
