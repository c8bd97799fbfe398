"""A study on a terminal: live progress, Ctrl-C, and the answer."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import httpx
from command import PATIENT, TUNED

DEADLINE_S = 600
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on a terminal of 80 columns."""

    def __init__(self, steptune, *arguments):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
        environment = {**steptune.environment(), "TERM": "xterm-256color"}
        del environment["COLUMNS"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steptune", *arguments],
            cwd=steptune.folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._seen = b""

    def read_until(self, text=None):
        """Reads until a text has appeared, or to the end; what was shown, without escapes."""
        deadline = time.monotonic() + DEADLINE_S
        while text is None or text.encode() not in ESCAPE.sub(b"", self._seen):
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not appear:\n{self._seen.decode(errors='replace')}"
            try:
                chunk = os.read(self._master, 1 << 16)
            except OSError:  # the other end is closed
                chunk = b""
            if not chunk:
                assert text is None, f"{text!r} did not appear:\n{self._seen.decode(errors='replace')}"
                break
            self._seen += chunk
        return ESCAPE.sub(b"", self._seen).decode().replace("\r", "")

    def press_ctrl_c(self):
        os.write(self._master, b"\x03")

    def status(self):
        return self.process.wait(timeout=DEADLINE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


TUNE = ("tune", TUNED, "--budget", "150s", "--only", "data_loading,optimizer_implementation", *PATIENT)


def test_ctrl_c_keeps_what_was_measured_and_reports_the_best(steptune, inside):
    """The live line shows time left, trials and the best before that; `resume` goes on afterwards."""
    with Terminal(steptune, *TUNE) as terminal:
        live = terminal.read_until("· best ")
        for part in ("of 2 min 30 s left", "trials done", "now baseline"):
            assert part in live
        terminal.press_ctrl_c()
        end = terminal.read_until().removeprefix(live)
        assert terminal.status() == 0
    study = inside("list", "--json").json[0]["study"]
    assert study["state"] == "interrupted"
    assert "today's settings" in " ".join(end.lower().split())
    assert f"steptune resume {study['study_id']}" in " ".join(end.split())
    assert (steptune.folder / "steptune-results" / study["study_id"] / "report.html").exists()
    listed = inside("list").out
    assert "interrupted" in listed
    with Terminal(steptune, "resume", study["study_id"]) as terminal:
        terminal.read_until("inspecting the machine")
        terminal.press_ctrl_c()
        end = " ".join(terminal.read_until().split())
        assert terminal.status() == 130
    assert f"print the earlier one with `steptune show {study['study_id']}`" in end


def test_ctrl_c_before_anything_was_measured_says_how_to_go_on(steptune, inside):
    with Terminal(steptune, *TUNE) as terminal:
        terminal.read_until("inspecting the machine")
        terminal.press_ctrl_c()
        end = terminal.read_until()
        assert terminal.status() == 130
    study = inside("list", "--json").json[0]["study"]["study_id"]
    assert "Traceback" not in end
    assert f"steptune resume {study}" in " ".join(end.split())
    assert "interrupted" in inside("list").out


def test_serve_shows_a_login_code_on_a_terminal_that_works_once(steptune):
    with Terminal(steptune, "serve", "--port", "0", "--no-worker") as terminal:
        shown = terminal.read_until("within 10 minutes")
        url = re.search(r"pages for browsers at (http://\S+?)/?\s", shown)[1]
        code = re.search(r"with the code ((?:[0-9a-z]{4}-){2}[0-9a-z]{4})", " ".join(shown.split()))[1]
        statuses = [httpx.post(f"{url}/login", data={"token": code}).status_code for _ in range(2)]
        terminal.press_ctrl_c()
        rest = terminal.read_until().removeprefix(shown)
    assert statuses == [303, 401]
    assert code not in rest, "requests are logged without it"
