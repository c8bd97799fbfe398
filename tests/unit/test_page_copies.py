"""One rendered copy of a page for all its readers: filled in for each, new with each version, within its memory."""

from __future__ import annotations

import gzip
import threading

import pytest

from steptune.service.page_copies import Copy, Fragment, PageCopies, opening

TEXT = f"<p>before</p>{opening('reader')}<p>between é</p>{opening('last_event')}<p>after</p>" + "x" * 5000


class TestCopy:
    @pytest.mark.parametrize("reader", ["", "ada", '<a href="/login">Zoë</a>'])
    def test_it_is_one_gzip_stream_of_the_filled_page(self, reader: str) -> None:
        fillings = {"reader": reader, "last_event": "17"}
        wanted = f"<p>before</p>{reader}<p>between é</p>17<p>after</p>{'x' * 5000}".encode()
        copy = Copy.of(TEXT)
        assert copy.plain(fillings) == wanted
        packed = copy.packed(fillings)
        assert gzip.decompress(packed) == wanted
        assert len(packed) < len(wanted) / 10

    def test_its_tag_follows_what_is_filled_in_and_nothing_else(self) -> None:
        copy, same, other = Copy.of(TEXT), Copy.of(TEXT), Copy.of(f"{TEXT}y")
        ada = {"reader": "ada", "last_event": "1", "unused": "3"}
        assert copy.tag(ada) == same.tag({**ada, "unused": "4"})
        assert len({one.tag(f) for one in (copy, other) for f in (ada, {**ada, "reader": "eve"})}) == 4

    def test_nothing_that_a_user_writes_is_an_opening(self) -> None:
        assert len(Copy.of("\x02reader\x03 \x02:reader\x03 {reader}").pieces) == 1

    def test_a_fragment_stands_in_it_as_it_is_and_is_compressed_once(self) -> None:
        fragment = Fragment.of("<h2>é</h2>" * 100)
        copy = Copy.of(f"<p>{opening('reader')}</p>{fragment.__html__()}<p>after</p>", [fragment])
        wanted = ("<p>ada</p>" + "<h2>é</h2>" * 100 + "<p>after</p>").encode()
        assert copy.plain({"reader": "ada"}) == wanted
        assert gzip.decompress(copy.packed({"reader": "ada"})) == wanted
        assert any(piece.packed is fragment.packed for piece in copy.pieces)

    def test_another_fragment_is_another_page(self) -> None:
        tags = {Copy.of(str(one.__html__()), [one]).tag({}) for one in map(Fragment.of, ("a", "b", "a"))}
        assert len(tags) == 2


class Rendered:
    """Counts how often a page is rendered."""

    def __init__(self, text: str = "page") -> None:
        self.text = text
        self.count = 0

    def __call__(self) -> Copy:
        self.count += 1
        return Copy.of(f"{self.text} {self.count}")


class TestPageCopies:
    def test_a_version_is_rendered_once_and_another_again(self) -> None:
        copies, make = PageCopies(), Rendered()
        assert copies.get("study", 1, make) is copies.get("study", 1, make)
        assert copies.get("study", 2, make).plain({}) == b"page 2"
        assert copies.get("other", 2, make).plain({}) == b"page 3"

    def test_many_readers_at_once_get_the_same_rendering(self) -> None:
        copies, began, go = PageCopies(), threading.Barrier(9), threading.Event()
        make = Rendered()

        def slowly() -> Copy:
            go.wait(60)
            return make()

        def read() -> None:
            began.wait(60)
            found.append(copies.get("study", 1, slowly))

        found: list[Copy] = []
        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        began.wait(60)
        go.set()
        for thread in threads:
            thread.join(60)
        assert make.count == 1
        assert len(found) == 8
        assert len({id(copy) for copy in found}) == 1

    def test_what_was_read_longest_ago_makes_room(self) -> None:
        make = Rendered("x" * 1000)
        size = Copy.of(make.text + " 1").size_bytes
        copies = PageCopies(max_bytes=2 * size + 10)
        for key in ("a", "b", "a", "c"):
            copies.get(key, 1, make)
        assert make.count == 3
        copies.get("a", 1, make)
        assert make.count == 3
        copies.get("b", 1, make)
        assert make.count == 4

    def test_one_that_is_too_large_is_not_kept(self) -> None:
        copies, make = PageCopies(max_bytes=10), Rendered("x" * 1000)
        copies.get("a", 1, make)
        copies.get("a", 1, make)
        assert make.count == 2

    def test_a_page_that_fails_leaves_no_copy(self) -> None:
        copies, make = PageCopies(), Rendered()

        def fail() -> str:
            raise ValueError("no page")

        with pytest.raises(ValueError, match="no page"):
            copies.get("a", 1, fail)
        assert copies.get("a", 1, make).plain({}) == b"page 1"
