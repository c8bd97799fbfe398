"""Places are handed over in the order in which threads came."""

import threading

from marked import wait_until

from service.turns import Turns


def test_who_waited_longest_is_next() -> None:
    turns, came = Turns(1), []

    def come(number: int) -> None:
        with turns:
            came.append(number)

    threads = []
    with turns:
        for number in range(5):
            threads.append(threading.Thread(target=come, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(turns._waiting) == len(threads), "it waits", deadline_s=30)
        assert came == []
    for thread in threads:
        thread.join(30)
    assert came == [0, 1, 2, 3, 4]


def test_no_more_than_its_places_are_in_at_once() -> None:
    turns, inside, most, lock = Turns(3), 0, 0, threading.Lock()

    def come() -> None:
        nonlocal inside, most
        for _ in range(200):
            with turns:
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most <= 3
    assert turns._free == 3
