"""Launch scripts: their syntax, and what they say when they are called wrongly."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent / "launch").iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_syntax(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_without_arguments_it_says_how_to_call_it(script, tmp_path):
    result = subprocess.run(["bash", script], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []
