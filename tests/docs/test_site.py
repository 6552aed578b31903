"""The documentation as a site: that it builds without a warning, and that no package and no key is missing from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import griffe
import pytest

import hidet_dist
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError

ROOT = Path(__file__).parents[2]
PACKAGE = Path(hidet_dist.__file__).parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as ``make docs`` builds it, where there is no network."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_page_is_made_and_needs_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "configuration.html", "contributing.html"} <= {page.name for page in pages}
    for page in pages:
        fetched = re.findall(
            r'<(?:script|img)[^>]+src="(?!data:)([^"]+)"|<link[^>]+stylesheet[^>]+href="([^"]+)"', text_of(page)
        )
        assert not [source for pair in fetched for source in pair if source.startswith(("http", "//"))], page


@pytest.mark.slow
def test_every_public_call_has_its_reference(site):
    text = text_of(site / "reference" / "index.html")
    assert all(f">{name}<" in text or f".{name}" in text for name in hidet_dist.__all__)


@pytest.mark.parametrize("config", [DistributedConfig, OptimizationConfig])
@pytest.mark.slow
def test_every_key_that_a_configuration_takes_is_on_its_page(site, config):
    with pytest.raises(ConfigError, match="the keys are") as refused:
        config.parse({"nonsense": 1})
    keys = str(refused.value).partition("the keys are ")[2].rstrip(".").split(", ")
    assert len(keys) > 2
    text = text_of(site / "configuration.html")
    assert [key for key in keys if f'id="{key}"' not in text] == []


def test_the_types_of_attributes_are_types():
    """A description that stands where the numpy style has the type would be shown as one."""
    extensions = griffe.load_extensions(str(ROOT / "docs" / "roles.py"))
    classes = []
    for name in ("api.AutoParallelResult", "runtime.profile.Profile", "rules.rule.Rule"):
        module, _, cls = name.rpartition(".")
        file = PACKAGE / f"{module.replace('.', '/')}.py"
        text = text_of(file)
        classes.append(griffe.visit(f"hidet_dist.{module}", filepath=file, code=text)[cls])
        extensions.call("on_object", obj=classes[-1], loader=griffe.GriffeLoader())  # as behind a whole package
    attributes = {
        f"{cls.path}.{attribute.name}": str(attribute.annotation)
        for cls in classes
        for section in cls.docstring.parse("numpy")
        if section.kind is griffe.DocstringSectionKind.attributes
        for attribute in section.value
    }
    assert len(attributes) > 10
    assert {name: kind for name, kind in attributes.items() if " " in kind.replace(", ", ",").replace(" | ", "|")} == {}


def test_the_layout_page_has_every_package_once():
    page = text_of(ROOT / "docs" / "design" / "layout.md")
    listed = Counter(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    there = {
        path.stem
        for path in PACKAGE.iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert set(listed) == there
    assert set(listed.values()) == {1}
    for path in (PACKAGE / "search").glob("*/__init__.py"):
        assert page.count(f"| `search/{path.parent.name}` |") == 1


def test_links_of_pages_in_the_repository_lead_to_files():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "rfcs").glob("*.md")]
    generated = {
        ROOT / "docs" / name for name in ("configuration.md", "contributing.md", "models.md", "causal.md", "onnx.md")
    }
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+\.(?:md|py))[^)]*\)", text_of(page)):
            path = (page.parent / target).resolve()
            if not (target.startswith("http") or path.exists() or path in generated or "/reference/" in f"/{target}"):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_paths_that_pages_name_exist():
    """Files and folders of the repository, as pages write them: relative to the root or to the Python package."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "rfcs").glob("*.md")]
    missing = []
    for page in pages:
        if page.name == "CHANGELOG.md":  # it names what was
            continue
        for name in re.findall(r"`([\w./]+/[\w./*]*)`", text_of(page)):
            roots = (ROOT, PACKAGE, ROOT / "hidet_dist", ROOT / "hidet_dist" / "include")
            if name.startswith("/"):  # of an address
                continue
            if not any(list(root.glob(name.rstrip("/"))) for root in roots) and not _is_made(name):
                missing.append(f"{page.name}: {name}")
    assert missing == []


def _is_made(name: str) -> bool:
    """Whether a path is one that commands make, in a checkout or in an artifact folder."""
    return name.startswith(("build/", "out/", "stage0/", ".gpu", ".venv", "torch/", "multiple/"))
