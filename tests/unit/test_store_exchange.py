"""Messages of hosts to each other through the store of torchrun's rendezvous."""

from datetime import timedelta

from torch.distributed import TCPStore

from steptune.tuner.trials.launch import Launch
from steptune.tuner.trials.store_exchange import publish, published, withdraw


def test_what_all_hosts_have_is_read_by_nobody_else() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    launch = Launch(
        rank=0, local_rank=0, ranks_per_host=1, host=0, num_hosts=2, address="127.0.0.1", port=store.port, attempt="a/0"
    )
    publish(launch, "a word")
    assert published(launch) == "a word"
    withdraw(launch)
    assert not store.check(["steptune/a/0"])
