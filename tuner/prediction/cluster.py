"""Cluster of a prediction: hosts with equal numbers of devices, and the two kinds of link."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from steptune.tuner.errors import ChoiceError
from steptune.tuner.network import collective_costs as costs
from steptune.tuner.network.collective_costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from steptune.tuner.prediction.corrections import correction
from steptune.tuner.records import Link


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cluster with one rank on each device, ranks numbered host by host.

    Attributes:
        inside: Link between the devices of a host; None with one device.
        between: Link of a host to the others, shared by its devices; None with one host.
    """

    num_hosts: int
    devices_per_host: int
    inside: Link | None = None
    between: Link | None = None

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise ChoiceError(
                f"a cluster must have at least one host and one device per host, got {self.num_hosts} (hosts) "
                f"and {self.devices_per_host} (devices per host)"
            )
        if self.devices_per_host > 1 and self.inside is None:
            raise ChoiceError(
                f"the bandwidth between the {self.devices_per_host} devices of a host is unknown, because the study "
                "has not measured it: give the bandwidth from one device to its neighbour, such as --inside 400GBps"
            )
        if self.num_hosts > 1 and self.between is None:
            raise ChoiceError(
                f"the bandwidth between {self.num_hosts} hosts is unknown: give the network bandwidth of one host, "
                "such as --network 25gbps"
            )

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.devices_per_host

    @functools.cached_property
    def host_of_rank(self) -> tuple[int, ...]:
        return tuple(rank // self.devices_per_host for rank in range(self.num_ranks))

    # --- over all ranks ---------------------------------------------------------------------------

    def all_reduce_ns(self, message_bytes: float) -> float:
        return self._ring_ns(ALL_REDUCE, message_bytes)

    def reduce_scatter_ns(self, message_bytes: float) -> float:
        return self._ring_ns(REDUCE_SCATTER, message_bytes)

    def all_gather_ns(self, message_bytes: float) -> float:
        return self._ring_ns(ALL_GATHER, message_bytes)

    def all_to_all_ns(self, message_bytes: float) -> float:
        modelled_ns = costs.flat_all_to_all_ns(message_bytes, self.host_of_rank, self.inside, self.between)
        return modelled_ns * self._correction(ALL_TO_ALL, message_bytes)

    def _ring_ns(self, collective: str, message_bytes: float) -> float:
        modelled_ns = costs.flat_ring_ns(collective, message_bytes, self.host_of_rank, self.inside, self.between)
        return modelled_ns * self._correction(collective, message_bytes)

    def _correction(self, collective: str, message_bytes: float) -> float:
        """Return the ratio of measured to modelled time of a ring over all ranks, from the link between hosts if there
        is one.
        """
        link = self.between if self.num_hosts > 1 else self.inside
        return 1.0 if link is None else correction(link, collective, message_bytes)

    # --- inside hosts, and between them -----------------------------------------------------------

    def scattered_inside_ns(self, message_bytes: float) -> float:
        """Return the time of a reduce-scatter inside every host."""
        return self._inside_ns(REDUCE_SCATTER, message_bytes)

    def gathered_inside_ns(self, message_bytes: float) -> float:
        return self._inside_ns(ALL_GATHER, message_bytes)

    def reduced_between_ns(self, message_bytes: float, sent_part: float = 1.0) -> float:
        """Return the time to all-reduce each device's part of a message between hosts, all parts at once.

        Args:
            sent_part: Share of the bytes that is sent: less than 1 with compression.
        """
        if self.num_hosts == 1:
            return 0.0
        assert self.between is not None
        part_bytes = sent_part * message_bytes / self.devices_per_host
        modelled_ns = costs.ring_ns(
            ALL_REDUCE, part_bytes, self.num_hosts, self.between, num_sharing=self.devices_per_host
        )
        return modelled_ns * correction(self.between, ALL_REDUCE, part_bytes)

    def _inside_ns(self, collective: str, message_bytes: float) -> float:
        if self.devices_per_host == 1:
            return 0.0
        assert self.inside is not None
        modelled_ns = costs.ring_ns(collective, message_bytes, self.devices_per_host, self.inside)
        return modelled_ns * correction(self.inside, collective, message_bytes)
