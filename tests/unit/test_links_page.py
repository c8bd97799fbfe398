"""The links between ranks as a study's page shows them."""

import pytest
from builders import sample_environment, sample_link, sample_topology
from report_builders import STUDY_ID, make_study, stored

from steptune.dashboards.links import get_links_info, plot_links
from steptune.dashboards.site import STANDALONE
from steptune.dashboards.study_page import study_context
from steptune.dashboards.templating import render
from steptune.tuner.network.collective_costs import ring_ns
from steptune.tuner.network.link_fit import fit_link
from steptune.tuner.records import CollectiveTiming, Topology

ONE_HOST = sample_topology(host_of_rank=(0, 0), inside=sample_link(), between=None, whole=sample_link())


def page_of(topology: Topology | None) -> str:
    study = make_study(environment=sample_environment(num_ranks=4, topology=topology))
    context = study_context(stored(study, []), STUDY_ID, STANDALONE)
    return render("study.html", site=STANDALONE, **context)


class TestInfo:
    def test_each_link_is_a_row_and_each_message_a_point(self):
        info = get_links_info(sample_topology())
        assert [row.name for row in info.rows] == ["inside a host", "between hosts", "all ranks in one ring"]
        assert [row.bytes_per_s for row in info.rows] == [1.41421e11, 3.125e9, 3.125e9]
        assert len(info.points) == 3 * 9

    def test_what_was_measured_once_is_one_row(self):
        assert [row.name for row in get_links_info(ONE_HOST).rows] == ["inside a host"]

    def test_bus_bandwidth_is_that_of_all_who_share_the_link(self):
        """Two groups reduced 1 MiB over two ranks at the same time, in 29 us: 2 * 1 MiB * 2(2 - 1)/2 went out."""
        points = get_links_info(sample_topology()).points.set_index(["link", "collective", "message_bytes"])
        reduced = points.loc["between hosts", "all_reduce", 1 << 20]
        assert reduced["bus_bytes_per_s"] == pytest.approx(2 * (1 << 20) / 29e-6)
        assert points.loc["inside a host", "all_reduce", 1 << 20]["bus_bytes_per_s"] == pytest.approx((1 << 20) / 29e-6)

    def test_points_that_the_model_made_lie_on_the_fitted_line(self):
        link = sample_link(timings=())
        timings = [
            CollectiveTiming(
                collective=name, num_ranks=2, message_bytes=size, duration_ns=round(ring_ns(name, size, 2, link))
            )
            for name in ("all_reduce", "all_gather")
            for size in (1 << 12, 1 << 20, 1 << 26)
        ]
        fitted = fit_link(timings, kind="NV18")
        points = get_links_info(sample_topology(host_of_rank=(0, 0), inside=fitted, between=None, whole=fitted)).points
        assert list(points["fitted_bus_bytes_per_s"]) == pytest.approx(list(points["bus_bytes_per_s"]), rel=0.01)

    def test_ranks_dealt_out_in_turn_are_pointed_out(self):
        info = get_links_info(sample_topology(host_of_rank=(0, 1, 0, 1), backend="gloo"))
        assert "on hosts 0, 1, 0, 1: a ring in this order has up to 2 edges out of one host (1 is enough)" in info.order
        assert "2 times as many bytes" in info.order_effect
        assert get_links_info(sample_topology()).order == ""


def test_the_figure_has_points_and_a_line_for_each_link():
    figure = plot_links(get_links_info(sample_topology()))
    assert [(trace.name, trace.mode, len(trace.x)) for trace in figure.data] == [
        (name, mode, count)
        for link in ("inside a host", "between hosts", "all ranks in one ring")
        for name, mode, count in ((f"{link}, fitted", "lines", 3), (link, "markers", 9))
    ]


class TestPage:
    def test_shows_links_their_figure_and_all_messages(self):
        page = page_of(sample_topology())
        assert "Links between ranks" in page
        assert "141 GB/s" in page
        assert "3.12 GB/s" in page
        assert '"links"' in page
        assert "All 27 timed messages" in page

    def test_says_where_ranks_are_interleaved(self):
        assert "up to 2 edges out of one host" in page_of(sample_topology(host_of_rank=(0, 1, 0, 1)))
        assert "edges out of one host" not in page_of(sample_topology())

    def test_of_unknown_links_says_nothing(self):
        assert "ranks exchange" not in page_of(None)

    def test_of_described_links_has_no_figure(self):
        """A topology whose points were not kept."""
        described = sample_link(timings=())
        page = page_of(sample_topology(inside=described, between=None, whole=described))
        assert "Links between ranks" in page
        assert "that were timed" not in page
