"""What the documents name exists: linked files and headings, settings, configurations, modules."""

import re
from pathlib import Path

import pytest

from orthros_jax.config_reader import setting_types

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SETTINGS = setting_types()
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
OPTION = re.compile(r"--(?!section\.key\b)([a-z]+\.[a-z_0-9]+)")
SETTING = re.compile(rf"`((?:{'|'.join(sorted(SECTIONS))})\.(?!py\b|jsonl\b|safetensors\b)[a-z_0-9]+)\b")
CONFIG = re.compile(r"\bconfigs/[a-z_0-9]+\.yaml")
SOURCE = re.compile(r"\b(?:orthros_jax|pallas_kernels|tests|benchmarks)/[a-z_0-9/]+\.py")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems(text: str, page: Path) -> list[str]:
    """What `text`, which stands in `page`, names and nothing answers to."""
    missing = []
    for target in (markdown or html for markdown, html in LINK.findall(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    missing += [name for name in OPTION.findall(text) + SETTING.findall(text) if name not in SETTINGS]
    return missing + [name for name in CONFIG.findall(text) + SOURCE.findall(text) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_everything_that_a_page_names_exists(page):
    assert problems(page.read_text(encoding="utf-8"), page) == []


def test_configurations_name_files_that_exist():
    for path in (ROOT / "configs").glob("*.yaml"):
        named = re.findall(r"\b[a-z_0-9]+\.yaml", path.read_text(encoding="utf-8"))
        assert [name for name in named if not (path.parent / name).exists()] == [], path.name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](architecture.md) [b](#imports) ![c](two_streams.svg) [d](https://example.com/x)", []),
        ("[a](nowhere.md)", ["nowhere.md"]),
        ("[a](training.md#no-such-heading)", ["training.md#no-such-heading"]),
        ('<img src="docs/two_streams.svg">', ["docs/two_streams.svg"]),
        ("train.py --model.windows 3 --run_dir x", ["model.windows"]),
        ("`mesh.pipeline` and `model.window`", ["mesh.pipeline"]),
        ("configs/orthros_13b.yaml", ["configs/orthros_13b.yaml"]),
        ("`orthros_jax/model/nothing.py`", ["orthros_jax/model/nothing.py"]),
    ],
)
def test_the_check_finds_what_is_missing(text, expected):
    assert problems(text, ROOT / "docs" / "architecture.md") == expected
