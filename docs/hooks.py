"""Pages of the site that are made from other files.

The reference, the configuration keys, the tables of models and of ONNX's test cases, the RFCs and the changelog.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import roles  # noqa: E402  it lies beside this file, which mkdocs loads by its path

PACKAGE = ROOT / "python" / "hidet_dist"
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the reference into the navigation."""
    assert config.nav is not None
    place = next(n for n, entry in enumerate(config.nav) if isinstance(entry, dict) and "Design" in entry)
    config.nav.insert(place, {"Reference": [f"reference/{name}.md" for name in reference()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {f"reference/{name}.md": text for name, text in reference().items()}
    pages["configuration.md"] = configuration()
    pages["models.md"] = models()
    pages["causal.md"] = causal_models()
    pages["onnx.md"] = onnx_cases()
    pages |= {f"rfcs/{path.name}": path.read_text(encoding="utf-8") for path in sorted((ROOT / "rfcs").glob("*.md"))}
    pages |= {page: (ROOT / name).read_text(encoding="utf-8") for page, name in FROM_ROOT.items()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that hold in the repository into links that hold in the site."""
    if page.file.src_uri in FROM_ROOT:
        markdown = re.sub(r"\[([^]]+)\]\((?!https?:|docs/)[^)]+\)", r"\1", markdown)  # files that are no pages
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../../rfcs/", "](../rfcs/").replace("](../docs/", "](../")


def reference() -> dict[str, str]:
    """The text of the reference's pages, by name: the documented calls, then a page for each package or module."""
    import hidet_dist

    pages = {"index": "# The calls\n\n" + "What `hidet_dist` has, and `hidet.distributed` once hidet is imported.\n"}
    pages["index"] += "".join(f"\n::: hidet_dist.{name}\n" for name in hidet_dist.__all__)
    for path in sorted(PACKAGE.iterdir()):
        if path.name.startswith("_") or not (path.suffix == ".py" or (path / "__init__.py").exists()):
            continue
        modules = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        pages[path.stem] = f"# {path.stem}\n" + "".join(map(_module, modules))
    return pages


def _module(path: Path) -> str:
    """The entry of a module. What a package only passes on stands where it is defined."""
    if path.stem == "__main__":
        return ""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    if path.stem == "__init__":
        return f"\n::: {name.removesuffix('.__init__')}\n    options: {{members: false}}\n"
    return f"\n::: {name}\n"


def models() -> str:
    """The page of the models that were compared: from the results of ``make models`` and of ``make models-hidet``."""
    outcomes = _results("models")
    rows = ["| model | | largest difference | operators | collectives on (2) | on (2, 2) |", "|" + " --- |" * 6]
    for name, own in outcomes.items():
        if own["verdict"] == "right":
            counts = [own["collectives"][mesh] for mesh in ("2", "2x2")]
            cells = ["right", f"{own['difference']:.1e}", own["operators"], *counts]
        else:
            cells = [f"{own['verdict']}: {own['reason']}", "", "", "", ""]
        rows.append("| " + " | ".join(map(str, (name, *cells))) + " |")
    right = sum(own["verdict"] == "right" for own in outcomes.values())
    return _MODELS.format(right=right, all=len(outcomes)) + "\n".join(rows) + "\n" + _tests_of_hidet()


def _tests_of_hidet() -> str:
    outcomes = _results("models-hidet")
    kinds = ("right", "refused", "wrong", "outside")
    rows = [f"| test | {' | '.join(kinds)} | why not all are right |", "|" + " --- |" * (len(kinds) + 2)]
    for name, own in outcomes.items():
        cells = (name, *(str(own[kind] or "") for kind in kinds), own["why"])
        rows.append("| " + " | ".join(map(_escaped, cells)) + " |")
    cases = {kind: sum(own[kind] for own in outcomes.values()) for kind in kinds}
    return _TESTS_OF_HIDET.format(tests=len(outcomes), **cases) + "\n".join(rows) + "\n"


def causal_models() -> str:
    """The page of the causal language models of transformers, from the results of ``make models-causal``."""
    whole = json.loads((ROOT / "benchmarks" / "results" / "models-causal.json").read_text(encoding="utf-8"))
    outcomes = whole["results"]
    header = ("type", "", "checked", "largest difference", "collectives: by hand", "here", "bytes: by hand", "here")
    rows = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for name, own in outcomes.items():
        off = "" if own["difference"] is None else f"{own['difference']:.1e}"
        verdict = own["verdict"] if own["verdict"] == "right" else f"{own['verdict']}: {own['reason']}"
        counts = (
            own["by_hand"],
            own["collectives"].get(_COMPARED),
            own["by_hand_bytes"],
            own["sent_bytes"].get(_COMPARED),
        )
        cells = (
            f"`{name}`",
            _escaped(verdict),
            _checked(own),
            off,
            *("" if count is None else f"{count:,}" for count in counts),
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    verdicts = [own["verdict"] for own in outcomes.values()]
    compared = [
        tuple((own[ours][_COMPARED], own[hand]) for ours, hand in _BESIDE)
        for own in outcomes.values()
        if own["by_hand"] is not None and own["collectives"].get(_COMPARED) is not None
    ]
    fewer = [[ours <= hand for ours, hand in pairs] for pairs in compared]
    return (
        _CAUSAL_MODELS.format(
            all=len(outcomes),
            left=f"; {left} others have not been run yet" if (left := whole["types"] - len(outcomes)) else "",
            by_hand=sum(own["by_hand"] is not None for own in outcomes.values()),
            compared=len(compared),
            fewer=sum(counts for counts, _ in fewer),
            smaller=sum(sizes for _, sizes in fewer),
            both=sum(map(all, fewer)),
            **{verdict: verdicts.count(verdict) for verdict in ("right", "refused", "wrong", "crash", "outside")},
        )
        + "\n".join(rows)
        + "\n"
    )


_COMPARED = "3"  # the mesh on which plans are compared with those by hand
_BESIDE = (("collectives", "by_hand"), ("sent_bytes", "by_hand_bytes"))


def _checked(own: dict[str, Any]) -> str:
    """The steps that a type's outcome is of."""
    meshes = [step.replace("x", " x ") for step in own["collectives"]]
    how = [] if own["kernels"] or not meshes else ["evaluated"]
    others = [name for step, name in _STEPS.items() if step in own["steps"]]
    return ", ".join([*(f"({mesh})" for mesh in meshes), *how, *others])


_STEPS = {"bfloat16": "bfloat16", "processes": "processes", "files": "files"}


def onnx_cases() -> str:
    """The page of the ONNX project's test cases, from the results of ``make onnx-cases``."""
    outcomes = _results("onnx-cases")
    rows = ["| operator | right | refused | why not all are right |", "|" + " --- |" * 4]
    for name, own in outcomes.items():
        cells = (name, str(own["right"] or ""), str(own["refused"] or ""), "; ".join(own["why"]))
        rows.append("| " + " | ".join(map(_escaped, cells)) + " |")
    counts = {kind: sum(own[kind] for own in outcomes.values()) for kind in ("right", "refused", "wrong")}
    return _ONNX_CASES.format(all=sum(counts.values()), **counts) + "\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    """Text as it is, where Markdown would read signs in it."""
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", text)


def _results(name: str) -> dict[str, Any]:
    """The results of a benchmark, by what was measured."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


_MODELS = """# Models that were compared with PyTorch

`make models` traces models of transformers, diffusers and torchvision with small random configurations, plans them on
two devices and on a mesh of 2 x 2 with too little memory for all weights on each device, runs all ranks in the
simulator, and then two processes from artifacts. A model is right when no output is further from PyTorch's than 1e-4 of
the output's largest value (or of 1), in float32. What is said to be from ONNX was exported by `torch.onnx.export` and
read by `from_onnx`. This is what it found: {right} of {all} are right.

"""

_CAUSAL_MODELS = """# Causal language models of transformers

`make models-causal` takes all types of `AutoModelForCausalLM`. Each gets a tiny configuration that rules make from its
class, with odd numbers of heads, experts, layers and tokens where the model allows it, and random weights. It is traced
in bfloat16 and in float32, planned on meshes of (2), (3) and (2, 2) with too little memory for all weights on each
device, and computed by all ranks in the simulator, then by two processes from artifacts.

Where the meshes are followed by "evaluated", no kernels were compiled: the programs of all ranks were computed by the
definitions of their operators. "bfloat16" says that the model was traced and planned in bfloat16, "processes" that two
processes computed it, and "files" that the weights of a folder that transformers saved were those that transformers
loads from it.

* **right**: no output is further from that of transformers than 1e-4 of the output's largest value (or of 1).
* **refused**: an error says what is not supported.
* **wrong**: the results are others. **crash**: an error that is no refusal, or too much time or memory.
* **outside**: transformers itself cannot make or call the model, or needs a package that is missing.

The last four columns are of three devices. They compare the plan with that of transformers by hand (`tp_plan`), where
there is one; some of these plans shard a part of the model alone. Bytes are those that a device sends in a call if
collectives go around a ring; what the logits take is among them. Plans here must save a quarter of the memory of the
weights. They are the fastest on the default machine, where the number of collectives of tiny tensors decides.

Of {all} types {right} are right, {refused} are refused, {wrong} are wrong, {crash} crash, and {outside} are
outside{left}. {by_hand} of them have a plan by hand. Of the {compared} that could be compared, {fewer} have no more
collectives here than that plan, {smaller} send no more bytes, and {both} neither.

"""

_ONNX_CASES = """# ONNX's test cases

The package `onnx` has test cases for all operators: a model, its inputs and its outputs. `make onnx-cases` reads each
model, in the nearest opset that `from_onnx` reads. It plans the model on two devices, by the search and by random
choices for every operator, and computes both ranks in the simulator. A case is right if all outputs are those of the
case. It is refused if `from_onnx` names what is not supported; inputs that must be known while a model is read, such as
the sizes of `Reshape`, are given as initializers. Of {all} cases {right} are right, {refused} are refused, and {wrong}
are wrong.

Where the standard's reference and ONNX Runtime differ, the reference is followed. `Resize` with `align_corners` and a
scale that gives a fractional size is such a case: the reference spaces the coordinates by the size before it is rounded
down, (size x scale) - 1, ONNX Runtime by the size after that. Of a pooling with `ceil_mode`, windows that begin in the
padding at the end are left out, as in the reference and in PyTorch; onnx's shape inference counts them.

"""

_TESTS_OF_HIDET = """
## hidet's own tests and examples

`make models-hidet` runs tests of operators, graphs, models and front ends of hidet 0.6.1 with `auto_parallel` in
hidet's place: what they compute is planned on two devices with too little memory for all weights on each, built, and
computed by two processes from artifacts. The tests compare with what they always compare with, and the results of
hidet's examples are compared with hidet's own. Models that would be downloaded have random weights. Of a test with many
cases a few are taken. A case is *outside* if it computes nothing, needs a GPU, a download or a package that is missing,
or if hidet alone fails as well. {tests} tests and examples were run: {right} cases are right, {refused} refused,
{wrong} wrong, and {outside} outside.

"""


def configuration() -> str:
    """The page of all keys of the two configurations: type, default and meaning, from the options."""
    from hidet_dist.config import OptimizationConfig, target_options
    from hidet_dist.options.planning import DistributedOptions

    parts = [_CONFIGURATION, "## distributed_config\n", *_keys(DistributedOptions)]
    parts += ["## optimization_config\n", *_keys(OptimizationConfig)]
    for target, options in target_options().items():
        parts += [
            _key(target, "*dict*", f"The options of the target `{target}`, which are below."),
            *_keys(options, f"{target}."),
        ]
    return roles.rewrite("\n".join(parts))


_CONFIGURATION = """# Configuration

`hidet.distributed.auto_parallel(graph, distributed_config, optimization_config, out_dir)` takes two dicts. This page
has all of their keys. An unknown key, or a value that does not fit, is refused before work starts. Specs may be given
as text, such as `"(S0, R)"`.
"""


def _keys(options: type, prefix: str = "") -> list[str]:
    """The entries of all options of a class; ``prefix`` is of their names."""
    from hidet_dist.options.option import REQUIRED, default_of, options_of

    entries = []
    for name, one in options_of(options).items():
        default = default_of(options, name)
        given = "required" if default is REQUIRED else f"`{default!r}` by default"
        entries.append(_key(prefix + name, f"*{one.kind}*; {given}.", one.help))
    return entries


def _key(name: str, kind: str, meaning: str) -> str:
    return "\n\n".join(filter(None, (f"### `{name}` {{ #{name} }}", kind, meaning))) + "\n"
