"""Open a report in a real headless browser and check that it renders. Exit code 0 only if it does.

    python tests/browser/check_report.py [RUN_FOLDER] [--pictures FOLDER]

Without a run folder the report is of invented numbers. Needs Debian's chromium (or google-chrome) on the PATH.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from fourfold.report import write

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever the page asked for outside would be an error in the log
)
SECTIONS = ("loss", "time", "bytes", "memory", "forecast", "exactness", "sample", "machine", "journal", "config")
WIDTH, HEIGHT = 1100, 3000


def main() -> int:
    """Write, open, look; one line a finding."""
    arguments = argparse.ArgumentParser(description="Open a report in a headless browser and check that it renders.")
    arguments.add_argument("run", nargs="?", type=Path)
    arguments.add_argument("--pictures", type=Path, help="keep the pictures here")
    wanted = arguments.parse_args()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.stderr.write(f"no browser: install one of {', '.join(BROWSERS)}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run = wanted.run or invented(place / "a run")
        page = write(run).path.resolve().as_uri()
        wrong = check_dom(browser, page, place, run.resolve().name)
        pictures = wanted.pictures or place
        pictures.mkdir(parents=True, exist_ok=True)
        for scheme in ("light", "dark"):
            wrong += check_picture(browser, page, place, (pictures / f"report-{scheme}.png").resolve(), scheme)
    for line in wrong:
        sys.stderr.write(f"report: {line}\n")
    sys.stdout.write(f"report in {browser}: {'renders' if not wrong else f'{len(wrong)} faults'}\n")
    return 1 if wrong else 0


def invented(folder: Path) -> Path:
    """A run folder of invented numbers."""
    synthetic = runpy.run_path(str(Path(__file__).parents[1] / "report" / "synthetic.py"))
    return synthetic["write_run"](folder)


def browse(browser: str, page: str, place: Path, *flags: str) -> tuple[str, str]:
    """What the browser wrote to stdout and to its log, with a profile of its own."""
    with tempfile.TemporaryDirectory(dir=place) as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", *flags, page]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def check_dom(browser: str, page: str, place: Path, name: str) -> list[str]:
    """The page as the browser understood it, and what it complained of."""
    dom, log = browse(browser, page, place, "--dump-dom")
    wrong = [f"section {section!r} is missing" for section in SECTIONS if f'<section id="{section}">' not in dom]
    title = re.search(r"<title>(.*?)</title>", dom)
    if title is None or not title.group(1).startswith(name):
        wrong.append(f"the title is {title.group(1) if title else 'missing'}, expected it to begin with {name!r}")
    if dom.count("<script") or re.search(r"(?:src|href)=.?(?:https?:)?//", dom):
        wrong.append("the page holds a script or points outside")
    drawn = [path for path in re.findall(r'<path class="line[^>]* d="([^"]*)"', dom) if path.startswith("M")]
    if not drawn:
        wrong.append("no line is drawn in any chart")
    complaints = [line for line in log.splitlines() if ":CONSOLE" in line or "ERR_" in line]
    return wrong + [f"the console says: {line.strip()}" for line in complaints]


def check_picture(browser: str, page: str, place: Path, picture: Path, scheme: str) -> list[str]:
    """A screenshot: it exists, has the asked size, is not blank, and is as light or dark as the scheme."""
    flags = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    browse(browser, page, place, *flags, f"--screenshot={picture}", f"--window-size={WIDTH},{HEIGHT}")
    if not picture.is_file():
        return [f"{scheme}: the browser took no picture"]
    width, height, rows = pixels(picture.read_bytes())
    wrong = [f"{scheme}: the picture is {width} x {height}"] if (width, height) != (WIDTH, HEIGHT) else []
    brightness = sum(rows[0][:3]) / 3
    if (brightness > 128) != (scheme == "light"):
        wrong.append(f"{scheme}: the corner of the page has brightness {brightness:.0f} of 255")
    if len({bytes(row) for row in rows}) < height // 10:
        wrong.append(f"{scheme}: the picture is nearly empty")
    return wrong


def pixels(data: bytes) -> tuple[int, int, list[bytearray]]:
    """Width, height and rows of an 8-bit RGB or RGBA PNG (the standard library has no reader)."""
    position, packed, width, height, channels = 8, b"", 0, 0, 3
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, height, _, colour = struct.unpack(">IIBB", body[:10])
            channels = {2: 3, 6: 4}[colour]
        packed += body if kind == b"IDAT" else b""
        position += 12 + length
    raw, stride, rows = zlib.decompress(packed), width * channels, []
    above = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        above = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, channels)
        rows.append(above)
    return width, height, rows


def unfiltered(kind: int, row: bytearray, above: bytearray, channels: int) -> bytearray:
    """One row of a PNG, its filter undone (PNG specification, section 9)."""
    for at in range(len(row)):
        left = row[at - channels] if at >= channels else 0
        corner = above[at - channels] if at >= channels else 0
        up = above[at]
        if kind == 4:
            guess = left + up - corner
            nearest = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))
            row[at] = (row[at] + nearest[2]) & 255
        else:
            row[at] = (row[at] + (0, left, up, (left + up) // 2)[kind]) & 255
    return row


if __name__ == "__main__":
    raise SystemExit(main())
