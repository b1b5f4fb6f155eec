"""The code matches ARCHITECTURE and the guides."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"triptych": ROOT / "src" / "triptych", "services": ROOT / "services"}
GUIDES = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "CHANGELOG.md"]


@pytest.mark.slow
def test_dependencies_point_down_only() -> None:
    command = Path(sys.executable).with_name("lint-imports")  # a process: in this one it would disable all loggers
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", ["machine", "policy"])
def test_every_policy_and_machine_has_its_own_tests(package: str) -> None:
    root, tests = SOURCES["triptych"] / package, ROOT / "tests" / "unit" / package
    sources = root.rglob("[a-z]*.py")
    modules = {
        path.relative_to(root) for path in sources if not path.stem.endswith(("_events", "_effects"))
    }  # data types only
    tested = {path.relative_to(tests).with_name(path.name.removeprefix("test_")) for path in tests.rglob("test_*.py")}
    assert modules <= tested, f"without tests: {sorted(map(str, modules - tested))}"


def test_unit_tests_mirror_the_tree() -> None:
    strays = []
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        folder = path.parent.relative_to(ROOT / "tests" / "unit")
        base = ROOT / folder if folder.parts[:1] in (("services",), ("deploy",)) else SOURCES["triptych"] / folder
        if not base.is_dir():
            strays.append(str(path.relative_to(ROOT)))
    assert not strays, f"tests of packages that are not there: {strays}"


def test_every_service_has_the_same_files() -> None:
    common = {"__init__.py", "__main__.py", "app.py", "service.py", "settings.py", "README.md"}
    edges = {"gateway": {"routes.py"}, "encoder": set[str]()}
    assert (SOURCES["triptych"] / "rpc" / "encoder.py").is_file(), (
        "text instances that transfer serve the encoder's calls too"
    )
    for folder in sorted(path for path in SOURCES["services"].iterdir() if (path / "__main__.py").exists()):
        missing = (common | edges.get(folder.name, {"servicer.py"})) - {path.name for path in folder.iterdir()}
        assert not missing, f"services/{folder.name} lacks {sorted(missing)}"


def test_commands_in_the_guides_exist_in_the_makefile() -> None:
    makefile = ROOT / "Makefile"
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile.read_text(), re.MULTILINE)) if makefile.exists() else set()
    for guide in GUIDES:
        named = set(re.findall(r"(?:^\s*|`)make ([a-z][\w-]*)", guide.read_text(), re.MULTILINE))
        assert named <= targets, f"{guide.name} names make targets that are not there: {sorted(named - targets)}"


def test_links_in_the_guides_exist() -> None:
    for guide in GUIDES:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", guide.read_text()):
            if "://" not in link and not link.startswith("mailto:"):
                assert (guide.parent / link).exists(), f"{guide.name} links to {link}, which is not there"


def test_links_to_headings_exist() -> None:
    for guide in (*GUIDES, *ROOT.glob("docs/adr/*.md"), *ROOT.glob("services/*/README.md")):
        for link, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", guide.read_text()):
            target = guide.parent / link if link else guide
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{guide.name} links to #{anchor}, which is not in {target.name}"


def test_decision_records_are_numbered_without_an_unnamed_gap_and_listed() -> None:
    records = sorted(path for path in ROOT.glob("docs/adr/*.md") if path.name != "README.md")
    page = (ROOT / "docs/adr/README.md").read_text()
    unused = [
        int(number)
        for number in re.findall(r"\d+", re.findall(r"^Numbers not in use: ([^.]+)\.", page, re.MULTILINE)[0])
    ]
    numbers = sorted([*unused, *(int(path.name[:4]) for path in records)])
    assert numbers == list(range(1, len(numbers) + 1))
    listed = re.findall(r"^\| \[(\d+)\]\(([^)]+)\)", page, re.MULTILINE)
    assert listed == [(str(int(path.name[:4])), path.name) for path in records]
    for path in records:
        assert path.read_text().startswith(f"# {int(path.name[:4])}. "), path.name
    documents = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md"))
    links = [
        link for document in documents for link in re.findall(r"\[ADR (\d+)\]\([^)]*?(\d{4})-", document.read_text())
    ]
    assert links
    assert [(said, file) for said, file in links if int(said) != int(file)] == []


@cache
def defined(file: str) -> set[str]:
    """Names of a file's functions and classes, methods included."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def test_every_file_and_name_that_architecture_points_to_exists() -> None:
    pointers = re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(pointers) > 30
    for path, name in pointers:
        file = path if path.startswith("services/") else f"src/triptych/{path}"
        assert (ROOT / file).is_file(), f"ARCHITECTURE.md names {file}, which is not there"
        if name:
            assert name in defined(file), f"ARCHITECTURE.md names {name} in {file}, which is not there"


def test_every_test_in_the_table_of_failures_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "failures.md").read_text())
    assert len(named) > 40
    for file, name in named:
        assert (ROOT / file).is_file(), f"failures.md names {file}, which is not there"
        assert name in defined(file), f"failures.md names {name} in {file}, which is not there"


UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def test_no_code_unpickles() -> None:
    for root in SOURCES.values():
        for path in root.rglob("*.py"):
            text = path.read_text()
            if not any(word in text for word in (*UNPICKLES, "torch.load")):
                continue  # parsing all files takes a second
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Import(names):
                        modules = {alias.name.split(".")[0] for alias in names}
                    case ast.ImportFrom(module=str(module)):
                        modules = {module.split(".")[0]}
                    case ast.Attribute(value=ast.Name("torch"), attr="load"):
                        modules = {"torch.load"}
                    case _:
                        continue
                bad = modules & (UNPICKLES | {"torch.load"})
                assert not bad, f"{path.relative_to(ROOT)} uses {sorted(bad)}: nothing that came over a wire may run"
