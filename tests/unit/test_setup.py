"""Promises of the package about itself: cost of the import, public names, dependency ranges, commands, image."""

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import swarmllm
from swarmllm import __main__ as command
from swarmllm import api
from swarmllm.errors import ERRORS_BY_CODE, SwarmError

ROOT = Path(__file__).parents[2]

HEAVY = ("starlette", "torch", "transformers", "hivemind", "numpy", "pydantic", "huggingface_hub")
COMES_WITH_TORCH = ("triton",)
"""In its builds for CUDA, which alone have a use for it."""
IMPORTED_AS = {"PIL": "pillow", "pydantic_core": "pydantic"}
"""pydantic requires its core in one exact version."""
NEEDED_WITHOUT_IMPORT = {"numpy", "wsproto", "peft", "accelerate"}
"""By Tensor.numpy(); by uvicorn for WebSockets; by users who train, as README and the examples do."""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_swarmllm_imports_nothing_heavy() -> None:
    code = f"import sys, swarmllm.api, swarmllm.__main__; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_the_commands_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from swarmllm.__main__ import main; assert main(['--help']) == 0 == main(['--version']); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(set(swarmllm.__all__) - {"__version__"}))
def test_public_name_resolves_in_the_module_that_defines_it(name: str) -> None:
    value = getattr(swarmllm, name)
    assert value.__module__ == swarmllm._HOMES[name]
    assert name in dir(swarmllm)


@pytest.mark.parametrize("module", [swarmllm, api], ids=lambda module: module.__name__)
def test_type_checkers_and_run_time_agree_on_the_public_names(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    branches = [branch for branch in tree.body if isinstance(branch, ast.If)]
    late, now = (
        {alias.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        for nodes in ([node for branch in branches for node in branch.body], tree.body)
    )
    assert late == module._HOMES
    own = {name for name, home in now.items() if str(home).startswith("swarmllm")}
    assert sorted(module.__all__) == sorted({*late, *own})


def test_names_for_guests_are_there_and_every_error_is_among_them() -> None:
    assert all(getattr(api, name) is not None for name in api.__all__)
    assert {error.__name__ for error in ERRORS_BY_CODE.values()} <= set(api.__all__) == set(dir(api))


def test_the_gateway_imports_only_what_guests_may(repo_root: Path) -> None:
    paths = (repo_root / "src/swarmllm/gateway").rglob("*.py")
    modules = {
        name for path in paths for name in re.findall(r"^ *(?:from|import) (swarmllm[\w.]*)", path.read_text(), re.M)
    }
    assert {name for name in modules if not name.startswith("swarmllm.gateway.")} == {"swarmllm.api"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AutoDistributedModl'"):
        _ = swarmllm.AutoDistributedModl


@pytest.mark.parametrize("name", sorted(command.COMMANDS))
def test_command_exists_and_is_in_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.find_spec(command.COMMANDS[name].module)
    assert spec is not None
    assert spec.origin is not None
    functions = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert "main" in {function.name for function in functions}
    assert command.main([]) == 0
    screen = capsys.readouterr().out
    assert f"\n  {name} " in screen
    assert command.COMMANDS[name].example.startswith(f"swarmllm {name}")
    assert all(len(line) <= 100 for line in screen.splitlines())


def test_command_passes_its_arguments_and_status_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def main(argv: list[str]) -> int:
            return len(argv)

    monkeypatch.setattr(command, "import_module", lambda name: Module if name == "swarmllm.commands.status" else None)
    assert command.main(["status", "--json", "-v", "x"]) == 3


def test_unknown_command_exits_2_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sevrer"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'sevrer'" in captured.err
    assert "server" in captured.err


# Dependencies


def setup_cfg(repo_root: Path) -> ConfigParser:
    setup = ConfigParser()
    setup.read(repo_root / "setup.cfg")
    return setup


def requirements(text: str) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def test_every_range_contains_its_pin(repo_root: Path) -> None:
    setup = setup_cfg(repo_root)
    pins = requirements((repo_root / "constraints.txt").read_text())
    ranges = requirements(setup["options"]["install_requires"])
    for extra in setup["options.extras_require"].values():
        ranges |= requirements(extra)
    for name, requirement in ranges.items():
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} does not allow {pin.version}"


def test_installed_versions_of_this_run_are_in_the_ranges(repo_root: Path) -> None:
    for requirement in requirements(setup_cfg(repo_root)["options"]["install_requires"]).values():
        version = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is installed"


def test_what_is_imported_is_required_and_the_other_way_round(repo_root: Path) -> None:
    required = requirements(setup_cfg(repo_root)["options"]["install_requires"])
    imported: dict[str, Path] = {}
    for path in (repo_root / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0]: path for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported[node.module.split(".")[0]] = path
    for other in {*sys.stdlib_module_names, "swarmllm", *COMES_WITH_TORCH} & imported.keys():
        del imported[other]
    imported = {IMPORTED_AS.get(name, name): path for name, path in imported.items()}
    for name, path in imported.items():
        assert canonicalize_name(name) in required, f"{path} imports {name}, which setup.cfg does not require"
    unused = required.keys() - {canonicalize_name(name) for name in imported} - NEEDED_WITHOUT_IMPORT
    assert not unused, f"nothing in src imports {unused}, which setup.cfg requires"


def test_lower_bounds_are_what_test_oldest_installs(repo_root: Path) -> None:
    done = subprocess.run([sys.executable, repo_root / ".ci/oldest.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    oldest = requirements(done.stdout)
    for name, requirement in requirements(setup_cfg(repo_root)["options"]["install_requires"]).items():
        (pin,) = oldest[name].specifier
        assert f">={pin.version}" in str(requirement.specifier)
        assert requirement.specifier.contains(pin.version)


def test_everything_in_src_is_packaged(repo_root: Path) -> None:
    package = repo_root / "src/swarmllm"
    patterns = setup_cfg(repo_root)["options.package_data"]["swarmllm"].split()
    made = {".pyc", ".c", ".h", ".so"}  # setup.py compiles the kernels into the wheel
    files = [path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix not in made]
    for path in files:
        if path.suffix == ".py":
            assert (package / path.parent / "__init__.py").exists(), f"{path} is in no package"
        else:
            assert any(path.match(pattern) for pattern in patterns), f"{path} would be missing from the wheel"
    assert all(any(path.match(pattern) for path in files) for pattern in patterns)


# Errors


def descendants(cls: type[SwarmError]) -> list[type[SwarmError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in descendants(child))]


def test_every_error_has_its_own_code() -> None:
    classes = descendants(SwarmError)
    assert len(classes) > 15
    assert all("code" in vars(cls) for cls in classes), "a class that inherits its code hides its parent on the wire"
    assert {cls.code: cls for cls in classes} == ERRORS_BY_CODE
    assert len(ERRORS_BY_CODE) == len(classes)


def test_the_tree_that_the_docstring_draws_is_the_real_one() -> None:
    drawing = import_module("swarmllm.errors").__doc__ or ""
    lines = [match for line in drawing.splitlines() if (match := re.match(r"^( {4,})([A-Z]\w+Error)\b(.*)", line))]
    drawn: dict[str, str | None] = {}
    ancestors: list[tuple[int, str]] = []
    for line in lines:
        indent, name, note = len(line[1]), line[2], line[3]
        ancestors = [(depth, ancestor) for depth, ancestor in ancestors if depth < indent]
        drawn[name] = ancestors[-1][1] if ancestors else None
        ancestors.append((indent, name))
        cls = getattr(import_module("swarmllm.errors"), name)
        assert bool(re.search(r"(?<!no )\bblame\b", note)) == cls.blames_peer, name
    real = {
        cls.__name__: cls.__bases__[0].__name__ if cls is not SwarmError else None for cls in descendants(SwarmError)
    }
    assert drawn == real


# Image


def test_the_image_copies_what_exists_and_runs_without_root(repo_root: Path) -> None:
    lines = (repo_root / "Dockerfile").read_text().splitlines()
    let_in = {line[1:] for line in (repo_root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in lines if line.startswith("COPY") and "--from" not in line for name in line.split()[1:-1]}
    assert copied == let_in
    assert all((repo_root / name).exists() for name in copied)
    user, entry = (
        lines.index("USER 1000:1000"),
        next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT")),
    )
    assert user < entry
    assert "VOLUME /cache" in lines


@pytest.mark.parametrize("code", [0, 3])
def test_what_make_waits_for_is_said(code: int) -> None:
    """And it ends as the command does, with nothing left that holds its output open."""
    done = subprocess.run(
        ["sh", ROOT / ".ci" / "talk.sh", "downloading things", "sh", "-c", f"echo done; exit {code}"],
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("downloading things\ndone\n", code)


def test_make_is_silent_for_no_step_of_the_set_up() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\n$(INSTALLED): ")[2].partition("\n\n")[0]
    steps = [
        line
        for line in recipe.replace("\\\n", "").splitlines()
        if "pip" in line or "$(HASHED)" in line or "$(PACKAGE)" in line
    ]
    assert len(steps) == 3
    assert all("$(TALK)" in step for step in steps)


def test_too_old_a_python_is_told_in_one_sentence(repo_root: Path) -> None:
    """By pip, too, which else fails on a dependency. `make` says the same."""
    old = "import sys; sys.version_info = (3, 10, 13); exec(compile(open('setup.py').read(), 'setup.py', 'exec'))"
    done = subprocess.run([sys.executable, "-c", old, "egg_info"], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.startswith("swarmllm needs Python 3.11 or newer, and this is 3.10")
    assert done.stderr.count("\n") == 1
    assert "swarmllm needs Python 3.11 or newer" in (repo_root / "Makefile").read_text()


def test_clean_removes_all_that_git_ignores(repo_root: Path, tmp_path: Path) -> None:
    """It removes the files that `make` and the tests have made; files of the checkout and results of trainings stay."""
    (tmp_path / "Makefile").write_text((repo_root / "Makefile").read_text())
    kept, made = [tmp_path / "src/swarmllm/kernels.c", tmp_path / "runs/pirate/adapter"], []
    for pattern in (repo_root / ".gitignore").read_text().splitlines():
        if pattern == "runs/":
            continue
        at_root = pattern.startswith((".", "/"))  # what tools make there; the rest may be anywhere
        name = pattern.strip("/").replace("*", "some")
        made.append(tmp_path / ("." if at_root else "src") / name / ("file" if pattern.endswith("/") else ""))
    for path in (*kept, *made):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    subprocess.run(["make", "-s", "clean"], cwd=tmp_path, check=True)
    assert all(path.exists() for path in kept)
    assert [path for path in made if path.exists()] == []
