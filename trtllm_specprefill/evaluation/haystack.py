"""Long prose to hide facts in: The Debian Administrator's Handbook, from its Debian package.

Fetched once with apt's own download (which verifies its signature) and unpacked beside the
weights; no root is needed and nothing is installed. Licence: GPL-2+ or CC-BY-SA 3.0.
"""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from trtllm_specprefill.fetch import FetchFailed, Progress, build_once, cache_folder
from trtllm_specprefill.prompt import read_text

PACKAGE = "debian-handbook"
LANGUAGE = "en-US"
_TEXT = "prose.txt"


def haystack(document: Path | None = None, progress: Progress = lambda _: None) -> str:
    """Prose of the handbook, or of a UTF-8 text file when `document` is given.

    Paragraphs, one a line, each followed by an empty line. Raises `FetchFailed` where there is
    no apt and no copy yet, `InputError` for a document that is not UTF-8 text.
    """
    if document is not None:
        return read_text("document", document)
    target = cache_folder() / "documents" / f"{PACKAGE}-{LANGUAGE}"
    folder = build_once(target, lambda work: _fetch(work, progress), progress)
    return (folder / _TEXT).read_text("utf-8")


def _fetch(work: Path, progress: Progress) -> Path:
    progress(f"fetching {PACKAGE} (35 MB) from Debian")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchFailed(
                f"{PACKAGE} is a Debian package and {tool} is not here; give a text file instead"
            )
    _run("apt-get", "download", PACKAGE, folder=work)
    (package,) = work.glob("*.deb")
    _run("dpkg-deb", "-x", package.name, "unpacked", folder=work)
    pages = work / "unpacked" / "usr/share/doc" / PACKAGE / "html" / LANGUAGE
    paragraphs = [p for page in sorted(pages.glob("*.html")) for p in _paragraphs(page)]
    made = work / "made"
    made.mkdir()
    (made / _TEXT).write_text("\n\n".join(paragraphs) + "\n", "utf-8")
    return made


def _run(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise FetchFailed(
            f"{' '.join(command)}: {' '.join(last) or f'exit code {done.returncode}'}"
            " (does `apt-get update` help?)"
        )


class _Paragraphs(HTMLParser):
    """Text of the paragraphs that are whole sentences; code and navigation left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open = 0
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin to listen at a paragraph."""
        is_paragraph = tag == "p" or (tag == "div" and ("class", "para") in attrs)
        if self._open and tag == "div":
            self._open += 1
        elif is_paragraph and not self._open:
            self._open, self._text = 1, []

    def handle_endtag(self, tag: str) -> None:
        """Take the paragraph in."""
        if self._open and tag in ("p", "div"):
            self._open -= 1
            if not self._open:
                line = " ".join("".join(self._text).split())
                if len(line) > 80 and line[-1] in ".!?":
                    self.found.append(line)

    def handle_data(self, data: str) -> None:
        """Collect text while inside one."""
        if self._open:
            self._text.append(data)


def _paragraphs(page: Path) -> list[str]:
    parser = _Paragraphs()
    parser.feed(page.read_text("utf-8"))
    return parser.found
