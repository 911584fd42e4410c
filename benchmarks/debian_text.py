"""English text from Debian's documentation packages, as JSON lines for `prepare`:
python -m benchmarks.debian_text --output text.jsonl [PACKAGE...]

A package is a .deb file, or a name that `apt-get download` fetches. Taken are HTML, plain text, Perl documentation and
dictionaries; one document a page, each page once. Needs a Debian or a system derived from it.
"""

import argparse
import gzip
import html.parser
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "postgresql-doc-15",
    "python3.11-doc",
    "sqlite3-doc",
    "git-doc",
    "perl-doc",
    "libreoffice-help-en-us",
    "apache2-doc",
    "debian-policy",
    "debian-reference-en",
    "debian-handbook",
    "dict-gcide",
)
_HTML = (".html", ".htm", ".xhtml")
_TEXT = (*_HTML, ".txt", ".pod", ".dict")
_COMPRESSED = (".gz", ".dz")
# Pages in other languages, debian-handbook/xx-XX/page.html, and the sources of pages that are there as HTML.
_LEFT_OUT = re.compile(r"/(?!en-US/)[a-z]{2}-[A-Z]{2}/|/_sources/")
_SHORTEST = 300
"""Characters of a page that counts."""
_PIECE = 20_000
"""Characters at which a dictionary, one file, is cut into documents, at the next empty line."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES, metavar="PACKAGE", help="default: a choice of eleven")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    arguments = parser.parse_args(argv)
    seen: set[str] = set()
    with arguments.output.open("w", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        for package in arguments.packages:
            count = characters = 0
            for document in read_package(package, Path(folder)):
                if document in seen:
                    continue
                seen.add(document)
                file.write(json.dumps({"text": document}) + "\n")
                count, characters = count + 1, characters + len(document)
            print(f"{package}: {count:,} documents, {characters / 1e6:.1f}M characters", file=sys.stderr)


def read_package(package: str, folder: Path) -> Iterator[str]:
    """Documents of a package, in the order of their paths."""
    if not package.endswith(".deb"):
        before = set(folder.glob("*.deb"))
        subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True, stderr=subprocess.DEVNULL)
        (downloaded,) = set(folder.glob("*.deb")) - before
        package = str(downloaded)
    root = folder / Path(package).stem
    subprocess.run(["dpkg-deb", "-x", package, str(root)], check=True)
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield from documents(path)


def documents(path: Path) -> Iterator[str]:
    """The text of a file as documents; none where it is not text."""
    is_compressed = path.suffix in _COMPRESSED
    name = str(path.with_suffix("") if is_compressed else path).removesuffix(".en")
    is_twin = name.endswith(".txt") and Path(name).with_suffix(".html").exists()
    if is_twin or not name.endswith(_TEXT) or _LEFT_OUT.search(name):
        return
    content = gzip.decompress(path.read_bytes()) if is_compressed else path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if name.endswith(_HTML):
        page = _Page()
        page.feed(text)
        page.close()
        text = "".join(page.parts)
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n"))
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    yield from (piece for piece in _pieces(text) if len(piece) >= _SHORTEST)


def _pieces(text: str) -> Iterator[str]:
    while len(text) > 2 * _PIECE:
        cut = text.find("\n\n", _PIECE)
        if cut < 0:
            break
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    yield text


class _Page(html.parser.HTMLParser):
    """Collects what a reader sees of a page."""

    _HIDDEN = ("script", "style", "nav", "head", "footer")
    _BLOCKS = ("p", "div", "li", "br", "h1", "h2", "h3", "h4", "tr", "pre", "dt", "dd", "table")

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag, attrs):
        self._hidden += tag in self._HIDDEN
        if tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self._hidden -= tag in self._HIDDEN and self._hidden > 0
        if tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self._hidden:
            self.parts.append(data)


if __name__ == "__main__":
    main()
