"""Record docs/session.svg, the picture in README.md: `make picture`.

This script copies the contract of `sessions/quickstart` to a temporary folder, runs COMMANDS there in a
pseudo-terminal, and draws what it shows at the end. Nothing in the picture is written by hand.
tests/docs/test_picture.py checks that it is up to date.
"""

from __future__ import annotations

import fcntl
import hashlib
import html
import io
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from kvedit import __version__

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "sessions" / "quickstart" / "contract.md"
PICTURE = ROOT / "docs" / "session.svg"
COLUMNS = 100
CHARACTER_WIDTH = 12.2
"""Width of a character in rich's SVG."""
COMMANDS = (
    "kvedit load contract.md --force",
    "kvedit delete --lines 11-16",
    'kvedit ask "When must fees be paid?" --budget 5% --max-new-tokens 48',
    "kvedit status",
)
_ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen:
    """The contents of a terminal: lines of styled characters. Supports the escape codes that rich writes."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.style = ""

    def feed(self, data: str) -> None:
        """Process output. A character is stored with the style in front of it."""
        position = 0
        while position < len(data):
            escape = _ESCAPE.match(data, position)
            if escape:
                self._control(escape[1], escape[2])
            else:
                self._put(data[position])
            position = escape.end() if escape else position + 1

    def text(self) -> str:
        """Return the lines, with the escape codes of their styles."""
        lines = ["".join(line).rstrip() for line in self.lines]
        return "\n".join(lines).rstrip("\n") + "\n"

    def _control(self, arguments: str, code: str) -> None:
        if code == "m":
            self.style = "" if arguments in ("", "0") else f"\x1b[{arguments}m"
        elif code == "A":
            self.row = max(0, self.row - int(arguments or 1))
        elif code == "K":
            self.lines[self.row] = []

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
            return
        if character == "\n" or self.column == COLUMNS:
            self.row += 1
            self.column = 0
            if self.row == len(self.lines):
                self.lines.append([])
            if character == "\n":
                return
        line = self.lines[self.row]
        line += [" "] * (self.column + 1 - len(line))
        line[self.column] = f"{self.style}{character}\x1b[0m" if self.style else character
        self.column += 1


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(record()), encoding="utf-8")


def record() -> list[tuple[str, str]]:
    """Run COMMANDS. Return each one with what the terminal shows for it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(DOCUMENT, folder)
        return [(command, _run(command, folder)) for command in COMMANDS]


def draw(shown: list[tuple[str, str]]) -> str:
    """Return the SVG, which ends with a comment that identifies its inputs."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for number, (command, output) in enumerate(shown):
        console.print(Text(("\n" if number else "") + "$ ", style="bold green") + Text(command, style="bold"))
        console.print(Text.from_ansi(output.rstrip("\n")))
    svg = console.export_svg(title="kvedit", theme=MONOKAI, unique_id="kvedit")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # do not load fonts from the network
    return f"{svg.rstrip()}\n<!-- {inputs()} -->\n"


def inputs() -> str:
    """Return kvedit's version and a checksum of the document and the commands."""
    content = DOCUMENT.read_bytes() + "\n".join(COMMANDS).encode()
    return f"kvedit {__version__}, inputs {hashlib.sha256(content).hexdigest()[:16]}"


def lines(svg: str) -> list[str]:
    """Return the lines of text in a picture."""
    rows: dict[float, str] = {}
    for x, y, text in re.findall(
        r'<text class="kvedit-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', svg
    ):
        column = round(float(x) / CHARACTER_WIDTH)
        rows[float(y)] = rows.get(float(y), "").ljust(column) + html.unescape(text).replace("\xa0", " ")
    return [line.rstrip() for _, line in sorted(rows.items())]


def _run(command: str, folder: str) -> str:
    words = [sys.executable, "-m", "kvedit", *shlex.split(command)[1:]]
    changed = {"TERM": "xterm-256color", "KVEDIT_HOME": folder, "PYTHONPATH": str(ROOT)}
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | changed
    screen, (ours, theirs) = Screen(), pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    ) as process:
        os.close(theirs)
        data = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    screen.feed(data.decode("utf-8"))
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{screen.text()}")
    return screen.text()


def _read(terminal: int) -> bytes:
    """Read available output; return nothing once the process has closed its end."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


if __name__ == "__main__":
    main()
