"""What the documents name exists: commands and options, scenarios, policies, links, files, modules, make targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from prefixwatch.loadgen.scenario.model import shipped_scenarios
from prefixwatch.router.policies import describe, make_policy
from prefixwatch.router.policies.spec import parse_spec, split
from prefixwatch.stack.drill.faults import FAULTS
from tests.stack.command_line import whole_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
    + list((ROOT / "docs").glob("*.md"))
    + list((ROOT / "runbooks").glob("*.md"))
)
ROOMS = (
    *("alerts", "benchmarks", "dashboards", "docs", "documents", "engines", "exporters", "kvcache", "loadgen"),
    *("router", "runbooks", "scripts", "simulator", "slo", "src", "stack", "tests"),
)
ONE_OF = re.compile(r"(\S+?)((?:\\?\|[a-z-]+)+)")
"""`check\\|build\\|grade`, as a table's cell writes alternatives."""

DOTTED = rf"(?:prefixwatch\.)?(?:{'|'.join(ROOMS)})(?:\.\w+)+(?<!\.yaml)"
EXTERNAL = ("pytest",)
USAGE_ERROR: Any = typer.BadParameter.__base__
"""What the command line's reader raises; typer has no public name for it."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_of(page: Path) -> Iterator[tuple[str, bool]]:
    """Each piece of code on a page, and whether it is a line to be typed as it stands: fenced and indented lines,
    continued ones joined, are; words in backticks within a sentence may leave arguments out."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from ((line, True) for line in block.splitlines())
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from ((line, True) for line in re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE))
    yield from ((" ".join(code.split()), False) for code in re.findall(r"`([^`]+)`", prose))


def commands_of(page: Path) -> Iterator[tuple[list[str], bool]]:
    """The arguments of each `prefixwatch …` on a page."""
    for code, whole in code_of(page):
        line = code.strip().removeprefix("- run: ")
        if not line.startswith("prefixwatch "):
            continue
        line = re.split(r"\s+(?:#|\|\||>|>>|\| )", line.replace("…", ""))[0]
        for each in alternatives(line):
            yield shlex.split(re.sub(r"\[[A-Z].*?\]", "", each))[1:], whole


def alternatives(line: str) -> list[str]:
    found = ONE_OF.search(line)
    if found is None:
        return [line]
    words = [found[1], *re.split(r"\\?\|", found[2])[1:]]
    return [one for word in words for one in alternatives(line[: found.start()] + word + line[found.end() :])]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Option and argument values of the command that these arguments call. Raises what the command line's reader
    raises for wrong ones."""
    command = whole_command()
    rest = list(arguments)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, arguments
        command = command.commands[rest.pop(0)]
    if not rest and hasattr(command, "commands"):
        return {}
    return dict(command.make_context("prefixwatch", rest).params)


@pages
def test_commands_on_a_page_are_ones_that_the_command_line_takes(page: Path) -> None:
    own = re.findall(r'prefixwatch\.policies"\]\n(\w+) =', page.read_text(encoding="utf-8"))  # a page's own plug-in
    policies = {policy["name"] for policy in describe()} | set(own)
    for arguments, whole in commands_of(page):
        try:
            given = parsed(arguments)
        except USAGE_ERROR as error:
            leaves_out = isinstance(error, typer.BadParameter) or "requires an argument" in str(error)
            if whole or not leaves_out:
                raise
            continue
        for spec in split(given.get("policy") or ""):
            assert parse_spec(spec).name in policies or spec.endswith(".yaml"), arguments
            if parse_spec(spec).name not in own:
                make_policy(spec)
        scenario = given.get("scenario")
        if scenario and scenario.islower() and not scenario.endswith(".yaml"):
            assert scenario in shipped_scenarios(), arguments


def examples_of_help(below: Any) -> Iterator[str]:
    for line in (below.help or "").splitlines():
        yield from re.findall(r"^Example: `(prefixwatch .*?)`", line.strip())
    for command in getattr(below, "commands", {}).values():
        yield from examples_of_help(command)


def test_examples_of_help_are_ones_that_the_command_line_takes() -> None:
    examples = list(examples_of_help(whole_command()))
    assert len(examples) > 20
    for example in examples:
        parsed(shlex.split(re.split(r" [>|] ", example)[0])[1:])


def test_the_command_lines_of_the_pages_are_found() -> None:
    """In fenced and indented blocks, continued lines, and a table's alternatives."""
    found = [" ".join(arguments) for page in PAGES for arguments, _ in commands_of(page)]
    assert "bench shared-prefix --search-rate --policy score" in found
    assert any(each.startswith("exporter --target engine-0=") and "--kv-events" in each for each in found)
    assert {"slo check", "slo build", "slo grade"} <= set(found)
    with pytest.raises(USAGE_ERROR, match="No such option"):
        parsed(["bench", "smoke", "--polcy", "score"])


@pages
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists() or list(file.parent.glob(file.name)), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}"


@pages
def test_files_and_make_targets_named_on_a_page_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for code, _ in code_of(page):
        for name in re.findall(rf"(?<![\w/.-])(?:{'|'.join(ROOMS)})/[\w./*-]*\w/?", code):
            assert list(ROOT.glob(name)), f"{page.name}: {name}"
        for name in re.findall(r"^make ([a-z-]+)", code.strip()):
            assert name in targets, f"{page.name}: make {name}"


@pages
def test_modules_that_a_page_runs_exist(page: Path) -> None:
    for code, _ in code_of(page):
        for name in re.findall(r"python -m ([\w.]+)", code):
            assert name in EXTERNAL or is_in_a_room(name), f"{page.name}: python -m {name}"


def test_modules_of_the_architecture_exist() -> None:
    """Read, not imported: some patch what they import."""
    names = [code for code, _ in code_of(ROOT / "docs/architecture.md") if re.fullmatch(DOTTED, code)]
    assert "stack.bench.bench" in names
    for name in names:
        assert is_in_a_room(name), name


def test_what_the_pages_count_in_words_is_as_many() -> None:
    said = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)
    dashboards = len(list((ROOT / "dashboards/json").glob("*.json")))
    systems = len(list((ROOT / "exporters/catalogue").glob("*.yaml")))
    assert (dashboards, systems, len(FAULTS.keys() - {"none"})) == (9, 24, 18)
    for phrase in ("nine Grafana dashboards", "entries for twenty-four", "makes eighteen faults"):
        assert phrase in said


def is_in_a_room(dotted: str) -> bool:
    """Whether it is a package, a module, or a name that a module defines."""
    path = ROOT.joinpath(*dotted.removeprefix("prefixwatch.").split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    defined = rf"^(?:class |def |async def )?{path.name}\b"
    return module.is_file() and re.search(defined, module.read_text(encoding="utf-8"), re.MULTILINE) is not None
