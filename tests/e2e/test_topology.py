"""`steptune doctor --topology`: the links between ranks of this machine."""

from steptune.tuner.emulation import HOSTS_VARIABLE


def test_links_are_measured_shown_and_kept(inside):
    """A second call checks what the first has recorded, in the same database."""
    out = inside("doctor", "--topology", "--device", "cpu").out
    assert "inside a host" in out
    assert "loopback" in out
    assert "order of ranks: 2 ranks on one host" in out
    found = inside("doctor", "--topology", "--device", "cpu", "--json").json
    assert found["order"]["level"] == "ok"
    assert found["topology"]["host_of_rank"] == [0, 0]
    assert {timing["num_ranks"] for timing in found["topology"]["inside"]["timings"]} == {2}


def test_emulated_hosts_have_a_network_between_them(inside, monkeypatch):
    monkeypatch.setenv(HOSTS_VARIABLE, "2")
    out = inside("doctor", "--topology", "--ranks", "4", "--device", "cpu", "--remeasure-links").out
    assert "between hosts" in out
    assert "emulated network" in out


def test_what_does_not_belong_together_is_refused(inside):
    assert "--topology cannot be combined with --network" in inside("doctor", "--topology", "--network", status=2).error
    assert "require --topology: add it" in inside("doctor", "--ranks", "2", status=2).error
