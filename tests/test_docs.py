"""Every block of README.md and docs/ that a reader could run is run, and what it shows is what comes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists()]
# A misspelt language would be a block that no one runs.
LANGUAGES = {"python", "console", "bash", "text", "json", "toml"}
INSTALLS = re.compile(r"\b(pip|venv)\b")
SCRIPT = re.compile(r"# (\w+\.py)\n")  # the first line of a python block that is a file, for a console block to run


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line on which the text begins, from 1."""

    language: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2], page[: found.start(2)].count("\n") + 1)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output shown below it."""
    assert text.startswith("$ "), "a console block begins with a command"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        while command.endswith("\\"):
            more, _, shown = shown.partition("\n")
            command = f"{command}\n{more}"
        yield command, shown


def normal(output: str) -> str:
    """An output without what no two runs share: seconds, images per second, and spaces at the ends of lines."""
    output = re.sub(r"\b\d+\.\d+ s\b", "N s", output)
    output = re.sub(r"\b[\d,]+ images/s", "N images/s", output)
    return re.sub(r" +$", "", output, flags=re.MULTILINE).strip()


def run_console(block: Block, place: str) -> None:
    """Run a console block in the working directory."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command, shown in commands(block.text):
        if INSTALLS.search(command):
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert normal(done.stdout) == normal(shown) or not shown.strip(), f"{place}: {command}"
        # A command that finds problems may be shown, with what it says.
        assert done.returncode in ((0, 1) if shown.strip() else (0,)), f"{place}: {command}\n{done.stdout}"


def run_page(page: str, name: str) -> int:
    """Run all blocks of a page in the working directory; how many there were."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count, waiting = 0, set[str]()
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{name}:{block.line}: a block of language {block.language!r}"
        if block.language == "python" and (script := SCRIPT.match(block.text)):
            Path(script[1]).write_text(block.text, encoding="utf-8")
            waiting.add(script[1])
        elif block.language == "python":
            # Empty lines before it, so that a traceback shows the page's own line numbers.
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), namespace)
        elif block.language == "console":
            run_console(block, f"{name}:{block.line}")
            waiting -= {word for command, _ in commands(block.text) for word in command.split()}
        count += block.language in ("python", "console")
    assert not waiting, f"{name}: no console block runs {', '.join(sorted(waiting))}"
    return count


@pytest.fixture
def scratch(tmp_path: Path, images_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ``imgs/``."""
    shutil.copytree(images_dir, tmp_path / "imgs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_the_blocks_of_a_page_run(scratch: Path, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert run_page(text, str(page)) == len(re.findall(r"^ *```(?:python|console)\b", text, re.MULTILINE))


def test_the_readme_has_blocks_of_both_kinds() -> None:
    found = list(blocks((ROOT / "README.md").read_text(encoding="utf-8")))
    for language in ("python", "console"):
        assert [block for block in found if block.language == language]
    console = [block.text for block in found if block.language == "console"]
    assert any(shown.strip() for text in console for _, shown in commands(text))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_check_itself_runs_and_compares(scratch: Path) -> None:
    page = (
        "```console\n$ mkdir new && \\\n  cd new && echo 3.1 s, 1,200 images/s   \n7.25 s, 3 images/s\n"
        "$ pip install nonsense && exit 9\n$ echo shown; exit 1\nshown\n```\n```python\nx = 1\n```\n```text\n???\n```\n"
        "```python\nassert x == 1\nopen('made', 'w').close()\n```\n"
    )
    assert run_page(page, "page") == 3
    assert (scratch / "made").exists()
    assert (scratch / "new").is_dir()


def test_a_block_that_is_a_script_is_run_by_a_console_block(scratch: Path) -> None:
    page = "```python\n# late.py\nprint(7)\n```\n```console\n$ python late.py\n7\n```\n"
    assert run_page(page, "page") == 2


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo 24 images\n25 images\n```\n",
        "```console\n$ echo one; echo two\none\n```\n",
        "```console\n$ true\nsomething\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo shown; exit 2\nshown\n```\n",
        "```console\nno command\n```\n",
        "```python\nassert 1 == 2\n```\n",
        "```pyton\nx = 1\n```\n",
        "```python\n# never.py\nassert 1 == 1\n```\n",
        "```python\n# wrong.py\nassert 1 == 2\n```\n```console\n$ python wrong.py\n```\n",
        "```console\n$ shardstore convert imgs/ out\nout holds 23 images in 3 classes\n```\n",
    ],
)
def test_the_check_itself_finds_what_is_wrong(scratch: Path, page: str) -> None:
    with pytest.raises(AssertionError):
        run_page(page, "page")


def test_an_error_in_a_block_shows_the_line_of_the_page(scratch: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("# Title\n\n```python\nx = 0\n1 / x\n```\n", "page")
    assert caught.traceback[-1].lineno + 1 == 5
