"""The public face: names, docstrings, what an import costs; and the inner order: floors, homes of heavy packages."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import shardstore

PUBLIC = [
    "DamagedStoreError",
    "Dataset",
    "ImageError",
    "NoStoreError",
    "OptionError",
    "Problem",
    "ReadOptions",
    "ShardDataset",
    "ShardstoreError",
    "SourceError",
    "StackError",
    "change_workers",
    "convert",
    "export",
    "open",
    "validate",
]

# A room (a folder, or a module beside them) imports from lower floors, or sideways inside itself.
FLOORS = {
    "errors": 0,
    "order": 1,
    "pool": 1,
    "pictures": 1,
    "options": 2,
    "transforms": 2,
    "store": 3,
    "formats": 4,
    "sources": 5,
    "loading": 5,
    "converting": 6,
    "exporting": 6,
    "checking": 7,
    "__init__": 8,
    "cli": 9,
}
CLI_MAY_IMPORT_FROM = ("errors", "pictures.opening", "converting.options", "checking.validation")
HOMES = {
    "h5py": ("formats",),
    "zarr": ("formats",),
    "PIL": ("pictures",),
    "simplejpeg": ("pictures.images",),
    "torch": ("transforms", "loading"),
    "numcodecs": ("store.codecs",),
    "google_crc32c": ("store.files",),
    "click": ("cli",),
    "rich": ("cli",),
}


@functools.cache
def modules() -> dict[str, str]:
    """The source text of every module of the package, as installed, by its dotted name."""
    texts = {}
    for package in ("shardstore", "shardstore.cli"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        for location in spec.submodule_search_locations:
            for file in sorted(Path(location).rglob("*.py")):
                name = ".".join((package, *file.relative_to(location).with_suffix("").parts))
                texts[name] = file.read_text(encoding="utf-8")
    return texts


def imports(text: str, inside: bool = True) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import statement, also ``inside`` functions; name is None for ``import module``."""
    tree = ast.parse(text)
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield from ((node.module or "", alias.name) for alias in node.names)


def room(module: str) -> str:
    """The key of FLOORS for a dotted module name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floor(name: str) -> int:
    """Where a room is; -1 for one without a floor, of which another test complains."""
    return FLOORS.get(name, -1)


def target_module(module: str, name: str | None, known: Iterable[str]) -> str:
    """The module that an import reaches: ``from shardstore import options`` is ``shardstore.options``."""
    return f"{module}.{name}" if name and f"{module}.{name}" in known else module


def floor_breaches(texts: dict[str, str]) -> list[str]:
    packages = {name.removesuffix(".__init__") for name in texts}
    found = []
    for module, text in texts.items():
        here = room(module)
        for imported, name in imports(text):
            if imported.split(".")[0] != "shardstore":
                continue
            there = room(target_module(imported, name, packages))
            if here != there and floor(there) >= floor(here):
                found.append(f"{module} (floor {floor(here)}) imports {there} (floor {floor(there)})")
            allowed = there == "cli" or imported.removeprefix("shardstore.") in CLI_MAY_IMPORT_FROM
            if here == "cli" and not allowed and name not in (None, *PUBLIC):
                found.append(f"{module} imports {imported}.{name}, which is not public")
    return found


def home_breaches(texts: dict[str, str]) -> list[str]:
    return [
        f"{module} imports {package}, at home in {HOMES[package]}"
        for module, text in texts.items()
        for package in {imported.split(".")[0] for imported, _ in imports(text)}
        if package in HOMES and not is_within(module, HOMES[package])
    ]


def is_within(module: str, homes: Iterable[str]) -> bool:
    """Whether a module is one of these, or in a folder of them."""
    return any(f"{module}.".startswith(f"shardstore.{home}.") for home in homes)


def circle(texts: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle as they load; empty where none do."""
    known = {name.removesuffix(".__init__") for name in texts}
    graph = {
        module.removesuffix(".__init__"): {
            target_module(imported, name, known) for imported, name in imports(text, False)
        }
        for module, text in texts.items()
        if module != "shardstore.__init__"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


# -- names ------------------------------------------------------------------------------------------------------------


def test_all_is_sorted_and_exactly_the_public_names() -> None:
    assert shardstore.__all__ == PUBLIC == sorted(PUBLIC)


def test_dir_shows_the_public_names_and_no_others() -> None:
    assert dir(shardstore) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(shardstore, name)
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc
    assert len(doc.strip()) > 20
    # What a dataclass writes when there is no docstring is its signature.
    assert not doc.startswith(f"{name}(")


def test_every_public_method_has_a_docstring() -> None:
    missing, seen = [], 0
    for name in PUBLIC:
        value = getattr(shardstore, name)
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_") and (callable(member) or isinstance(member, property)):
                seen += 1
                missing += [] if member.__doc__ else [f"{name}.{attribute}"]
    assert missing == []
    assert seen >= 10


def test_a_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from shardstore import *", namespace)
    assert sorted(namespace.keys() - {"__builtins__"}) == PUBLIC


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'shuffle'"):
        _ = shardstore.shuffle


def test_errors_form_the_documented_tree() -> None:
    assert issubclass(shardstore.OptionError, ValueError)
    assert issubclass(shardstore.NoStoreError, FileNotFoundError)
    assert issubclass(shardstore.StackError, RuntimeError)
    assert issubclass(shardstore.ImageError, shardstore.SourceError)
    errors = [getattr(shardstore, name) for name in PUBLIC if name.endswith("Error")]
    assert len(errors) == 7
    assert all(issubclass(error, shardstore.ShardstoreError) for error in errors)


# -- what an import costs ---------------------------------------------------------------------------------------------


def imported_packages(code: str) -> set[str]:
    """Top packages that a fresh interpreter loads for ``code``."""
    lines = run_python("-X", "importtime", "-c", code).stderr.splitlines()
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines if line.startswith("import time:")}


def test_importing_the_package_loads_no_heavy_package() -> None:
    loaded = imported_packages("import shardstore")
    assert "shardstore" in loaded
    assert loaded & {"torch", "h5py", "zarr", "PIL", "simplejpeg", "numcodecs", "numpy", "click", "rich"} == set()


def test_the_check_of_loaded_packages_sees_what_use_loads() -> None:
    assert {"torch", "numpy"} <= imported_packages("import shardstore; shardstore.ShardDataset")


def test_converting_to_npy_loads_neither_torch_nor_the_other_containers(tmp_path: Path, images_dir: Path) -> None:
    code = f"import shardstore; shardstore.convert({str(images_dir)!r}, {str(tmp_path / 'out')!r}, workers=1)"
    loaded = imported_packages(code)
    assert "PIL" in loaded
    assert loaded & {"torch", "h5py", "zarr"} == set()


# -- floors and homes -------------------------------------------------------------------------------------------------


def test_every_module_has_a_floor() -> None:
    assert {room(module) for module in modules()} == set(FLOORS)


def test_imports_go_down_or_sideways() -> None:
    assert floor_breaches(modules()) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("shardstore.store.files", "from shardstore.formats.npy import scan"),
        ("shardstore.store.files", "import shardstore.formats.npy"),
        ("shardstore.store.chunks", "from shardstore import formats, write"),
        ("shardstore.pictures.images", "def f():\n    from shardstore.store.schema import parts\n"),
        ("shardstore.sources.folder", "from shardstore.converting.plan import Plan"),
        ("shardstore.formats.npy", "from shardstore.sources.strings import Strings"),
        ("shardstore.exporting", "from shardstore.checking.validation import validate"),
        ("shardstore.converting.conversion", "import shardstore"),
        ("shardstore.loading.loader", "from shardstore.cli.main import main"),
        ("shardstore.cli.info", "from shardstore.formats.npy import scan"),
        ("shardstore.cli.info", "from shardstore import chunks"),
    ],
)
def test_a_breach_of_the_floors_is_found(module: str, text: str) -> None:
    texts = modules()
    assert module in texts
    assert floor_breaches({**texts, module: text}) != []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(modules()) == []


def test_a_circle_within_a_room_is_found() -> None:
    texts = modules()
    files = texts["shardstore.store.files"]
    assert circle({**texts, "shardstore.store.files": f"{files}\nfrom shardstore.store import index\n"}) != []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("shardstore.formats.zarr", "from shardstore.formats import Extents"),
        ("shardstore.sources.folder", "from shardstore.sources.strings import Strings"),
        ("shardstore.cli.info", "from shardstore import Dataset"),
        (
            "shardstore.cli.info",
            "from shardstore.converting.options import ConvertOptions\nimport shardstore\nimport json",
        ),
    ],
)
def test_what_is_allowed_is_not_called_a_breach(module: str, text: str) -> None:
    assert floor_breaches({**modules(), module: text}) == []


def test_heavy_packages_have_one_home() -> None:
    texts = modules()
    assert home_breaches(texts) == []
    used = {imported.split(".")[0] for text in texts.values() for imported, _ in imports(text)}
    assert set(HOMES) <= used


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("shardstore.store.chunks", "import h5py"),
        ("shardstore.loading.dataset", "from PIL import Image"),
        ("shardstore.loading.samples", "import simplejpeg"),
        ("shardstore.store.index", "def f():\n    import zarr.storage\n"),
        ("shardstore.converting.write", "import torch.utils.data"),
        ("shardstore.converting.conversion", "import rich.progress"),
    ],
)
def test_a_heavy_package_away_from_home_is_found(module: str, text: str) -> None:
    assert home_breaches({**modules(), module: text}) != []
