"""Records a command on a terminal, and draws the recording as a moving picture (SVG) for README.

    python docs/record_terminal.py record demo.cast COMMAND ARGUMENTS    # runs it on a terminal of 96 x 24
    python docs/record_terminal.py draw demo.cast docs/images/tune.svg   # needs the extra `docs`

The recording is an asciicast (version 2) of all that the command printed. In the picture pauses of more than a second
are shortened, time runs faster where half a minute would not do, which the picture says, and nothing else is changed.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import itertools
import json
import os
import pty
import struct
import termios
import time
from html import escape
from pathlib import Path
from typing import Any

COLUMNS, ROWS = 96, 24
LONGEST_PAUSE_S, LONGEST_S, LAST_S = 1.0, 30.0, 8.0
MOST_FRAMES = 90
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 14
COLOURS = {
    "default": "#d7dae0",
    "green": "#8fd18b",
    "red": "#f08a8a",
    "blue": "#7db4f5",
    "brown": "#e5c07b",  # as pyte names yellow
    "cyan": "#6fc7d1",
    "magenta": "#d59bea",
    "white": "#ffffff",
    "black": "#808893",
}


def record(cast: Path, command: list[str]) -> int:
    """Run a command on a terminal of its own; returns its exit status."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    decoder, began_s = codecs.getincrementaldecoder("utf-8")("replace"), time.monotonic()
    with cast.open("w", encoding="utf-8") as file:
        print(json.dumps({"version": 2, "width": COLUMNS, "height": ROWS, "title": " ".join(command)}), file=file)
        while True:
            try:
                content = os.read(terminal, 65536)
            except OSError:  # as Linux says that the other side is gone
                content = b""
            if not content:
                break
            text = decoder.decode(content)
            print(json.dumps([round(time.monotonic() - began_s, 3), "o", text]), file=file, flush=True)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def frames(cast: Path) -> list[tuple[float, list[Any]]]:
    """Screens, each with the seconds for which it stands."""
    import pyte

    header, *events = map(json.loads, cast.read_text(encoding="utf-8").splitlines())
    screen = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(screen)
    step = max(1, len(events) // MOST_FRAMES)
    found: list[tuple[float, list[Any]]] = []
    shown_s, last = 0.0, 0.0
    for number, (at_s, _, text) in enumerate(events):
        shown_s += min(at_s - last, LONGEST_PAUSE_S)
        last = at_s
        stream.feed(text)
        if number % step == 0 or number == len(events) - 1:
            found.append((shown_s, [dict(screen.buffer[row]) for row in range(screen.lines)]))
    starts = [at for at, _ in found]
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    return [(length, rows) for length, (_, rows) in zip([*lengths, LAST_S], found, strict=True)]


def draw(cast: Path, picture: Path) -> None:
    """Write the recording as an SVG that moves without scripts; whoever wants no motion sees its end."""
    command = json.loads(cast.read_text(encoding="utf-8").splitlines()[0])["title"]
    screens = [(length, text) for length, rows in frames(cast) if (text := drawn(rows))]
    faster = max(1.0, sum(length for length, _ in screens[:-1]) / LONGEST_S)
    screens = [(length / faster, text) for length, text in screens[:-1]] + screens[-1:]
    total_s = sum(length for length, _ in screens)
    ran = json.loads(cast.read_text(encoding="utf-8").splitlines()[-1])[0]
    pace = f"ran for {ran:.0f} s, shown in {total_s - LAST_S:.0f} s"
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, (ROWS + 1) * CELL_HEIGHT + 2 * MARGIN
    styles, groups, at_s = [], [], 0.0
    for number, (length, text) in enumerate(screens):
        begin, end = 100 * at_s / total_s, 100 * (at_s + length) / total_s
        at_s += length
        last = number == len(screens) - 1
        keys = f"0%{{opacity:0}}{begin:.3f}%{{opacity:1}}" + ("" if last else f"{end:.3f}%{{opacity:0}}")
        styles.append(f"@keyframes f{number}{{{keys}}}#f{number}{{animation-name:f{number}}}")
        groups.append(f'<g id="f{number}" class="{"frame last" if last else "frame"}">{text}</g>')
    picture.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="Recording of a terminal: {escape(command)}"><style>'
        f".frame{{opacity:0;animation:{total_s:.1f}s step-end infinite}}text{{font:14px ui-monospace,"
        "'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre;fill:#d7dae0}.bold{font-weight:700}"
        f"{''.join(styles)}@media (prefers-reduced-motion:reduce){{.frame{{animation:none}}.last{{opacity:1}}}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#14171c"/>'
        f'<text x="{MARGIN}" y="{MARGIN + 13}"><tspan fill="#8fd18b">$ </tspan>{escape(command)}</text>'
        f'<text x="{width - MARGIN:.0f}" y="{height - MARGIN:.0f}" text-anchor="end" fill-opacity="0.7">{pace}</text>'
        f"{''.join(groups)}</svg>\n",
        encoding="utf-8",
    )


def drawn(rows: list[Any]) -> str:
    """The lines of a screen, in runs of cells that look the same."""
    lines = []
    for number, row in enumerate(rows):
        runs: list[tuple[tuple[str, bool], str]] = []
        for column in range(max(row, default=-1) + 1):
            cell = row.get(column)
            look = ("default", False) if cell is None else (cell.fg, cell.bold)
            text = " " if cell is None else cell.data
            if runs and runs[-1][0] == look:
                runs[-1] = look, runs[-1][1] + text
            else:
                runs.append((look, text))
        spans = "".join(
            f'<tspan fill="{COLOURS.get(fg, COLOURS["default"])}" class="{"bold" if bold else "plain"}">'
            f"{escape(text)}</tspan>"
            for (fg, bold), text in runs
        )
        if "".join(text for _, text in runs).strip():
            lines.append(f'<text x="{MARGIN}" y="{MARGIN + 13 + (number + 1) * CELL_HEIGHT}">{spans}</text>')
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("cast", type=Path)
    recording.add_argument("command", nargs=argparse.REMAINDER)
    drawing = actions.add_parser("draw")
    drawing.add_argument("cast", type=Path)
    drawing.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "draw":
        draw(arguments.cast, arguments.picture)
    else:
        raise SystemExit(record(arguments.cast, arguments.command))


if __name__ == "__main__":
    main()
