"""What type checkers make of user code (`typing_cases/`): right code is clean, and mistakes are found."""

import dataclasses
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

import logitless
from logitless.losses import (
    cross_entropy,
    distillation,
    dpo,
    dpo_types,
    grpo_types,
    kl_estimators,
    kto,
    reference_free,
    sampler_correction,
)
from logitless.losses.arguments import HEAD_OPTIONS, CallArguments
from logitless.losses.base import LinearLoss
from logitless.losses.inputs import CallInputs, HeadOptions
from logitless.losses.linear import REDUCTIONS
from tests.test_docs import FENCE, TEXTS

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "typing_cases"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Runs a type checker in a folder."""
    command = [sys.executable, "-m", *command]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def errors_of(folder: Path, *command: str) -> dict[str, set[int]]:
    """Lines with errors, by file, as a checker reports them in a folder with copies of the cases. `command`
    may name more files."""
    for case in CASES.glob("*.py"):
        shutil.copy(case, folder)
    done = run(folder, *command, "right.py", "wrong.py")
    actual: dict[str, set[int]] = {}
    for name, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -)?:? error", done.stdout):
        actual.setdefault(name, set()).add(int(line))
    assert done.returncode == 1 and actual, done.stdout + done.stderr
    return actual


def readme_in(folder: Path) -> str:
    """Name of a file with the README's blocks."""
    blocks = [block for _, block in FENCE.findall(TEXTS["README.md"])]
    assert len(blocks) > 2
    (folder / "readme.py").write_text("\n".join(blocks))
    return "readme.py"


def marked() -> set[int]:
    lines = (CASES / "wrong.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


# Parts of torch that tensors and modules do not need to be typed: without them mypy takes 5 s, else 16.
SKIPPED = (
    "_decomp _dynamo _export _functorch _guards _higher_order_ops _inductor _logging _prims _prims_common "
    "_refs _subclasses ao cuda distributions export func fx jit masked mps mtia nested onnx "
    "package profiler quantization signal sparse testing utils xpu"
).split()


needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy, of the dev extra, is not installed"
)


# What mypy's strict options ask for beyond its standard ones.
STRICT = (
    "disallow_untyped_defs disallow_incomplete_defs disallow_untyped_calls disallow_any_generics "
    "disallow_subclassing_any disallow_untyped_decorators warn_return_any warn_unused_ignores strict_equality"
).split()


@needs_mypy
def test_mypy(tmp_path):
    """The README's blocks as pasted too, by mypy's own standards: they annotate nothing, so not by its strict
    ones."""
    skipped = ",".join(f"torch.{name}.*" for name in SKIPPED)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\n"
        f"[mypy-{skipped},numpy.*,sympy.*,triton.*,transformers.*,trl.*]\nfollow_imports = skip\n"
        "[mypy-datasets.*]\nignore_missing_imports = True\n"
        "[mypy-readme]\n" + "\n".join(f"{name} = False" for name in STRICT)
    )
    assert errors_of(tmp_path, "mypy", readme_in(tmp_path)) == {"wrong.py": marked()}


PYRIGHT = next((name for name in ("pyright", "basedpyright") if importlib.util.find_spec(name)), None)


@pytest.mark.skipif(
    PYRIGHT is None, reason="neither pyright nor basedpyright is installed; both are optional"
)
def test_pyright(tmp_path):
    options = f'{{"typeCheckingMode": "strict", "extraPaths": ["{ROOT}"]}}'
    (tmp_path / "pyrightconfig.json").write_text(options)
    command = [PYRIGHT, f"--pythonpath={sys.executable}"]
    assert errors_of(tmp_path, *command) == {"wrong.py": marked()}
    options = options.replace("strict", "standard")  # the README annotates nothing
    (tmp_path / "pyrightconfig.json").write_text(options)
    done = run(tmp_path, *command, readme_in(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


LOSSES = [
    kind
    for name in logitless.losses.__all__
    if isinstance(kind := getattr(logitless, name), type)
    and issubclass(kind, LinearLoss)
    and kind not in (logitless.TokenLoss, logitless.LogitsLoss)
]


def keys(kind: type) -> set[str]:
    """Of a TypedDict."""
    return {*kind.__required_keys__, *kind.__optional_keys__}


def typed_keywords(call) -> set[str]:
    """Names of the keywords that a checker allows: of the signature, and of its `Unpack[TypedDict]`."""
    names = set()
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.add(parameter.name)
        elif parameter.kind is parameter.VAR_KEYWORD and get_args(parameter.annotation):
            names |= keys(get_args(parameter.annotation)[0])
    return names


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_checkers_and_calls_know_the_same_keywords(loss):
    assert typed_keywords(loss.__call__) == set(loss.keywords)


def test_keywords_of_every_loss_are_declared_alike():
    """In the signature of the base class, the dict for type checkers, and the record of a call."""
    parameters = inspect.signature(LinearLoss.__call__).parameters.values()
    signature = {x.name: (x.annotation, x.default) for x in parameters if x.kind is x.KEYWORD_ONLY}
    types = inspect.get_annotations(CallInputs)
    assert {name: annotation for name, (annotation, _) in signature.items()} == types
    record = {field.name: (field.type, field.default) for field in dataclasses.fields(CallArguments)}
    assert {name: record[name] for name in types} == signature


@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_logprobs", "linear_topk"])
def test_checkers_know_options_of_functions(function):
    options = keys(HeadOptions)
    assert options <= set(cross_entropy.OPTIONS) & {*HEAD_OPTIONS, "cp_group"}
    assert options <= typed_keywords(getattr(logitless, function))


def choices(loss: type, field: str) -> set[str]:
    """Texts that a field may have, for a checker."""

    def texts(kind) -> set[str]:
        if get_origin(kind) is Literal:
            return {x for x in get_args(kind) if isinstance(x, str)}
        return set().union(*map(texts, get_args(kind)))

    return texts(inspect.get_annotations(loss)[field])


DISPATCHED = {
    "loss_type of DPO": (dpo.DPOLoss, "loss_type", dpo_types.DPO_TYPES),
    "f_divergence_type": (dpo.DPOLoss, "f_divergence_type", dpo_types.DIVERGENCES),
    "loss_type of KTO": (kto.KTOLoss, "loss_type", kto.KTO_MARGINS),
    "loss_type of CPO": (reference_free.CPOLoss, "loss_type", reference_free.CPO_LOSSES),
    "loss_type of GRPO": (logitless.GRPOLoss, "loss_type", grpo_types.TYPES),
    "importance_sampling_level": (logitless.GRPOLoss, "importance_sampling_level", grpo_types.LEVELS),
    "trust_region": (logitless.GRPOLoss, "trust_region", filter(None, grpo_types.TRUST_REGIONS)),
    "loss_agg_mode": (logitless.GRPOLoss, "loss_agg_mode", grpo_types.AGG_MODES),
    "kl_estimator": (logitless.GRPOLoss, "kl_estimator", kl_estimators.NAMES),
    "level": (logitless.SamplerCorrection, "level", sampler_correction.LEVELS),
    "action": (logitless.SamplerCorrection, "action", sampler_correction.ACTIONS),
    "measure": (logitless.SamplerCorrection, "measure", sampler_correction.MEASURES),
    "divergence": (distillation.DistillationLoss, "divergence", distillation.NAMES),
    "topk_mode": (distillation.DistillationLoss, "topk_mode", distillation.TOPK_MODES),
    "support": (distillation.DistillationLoss, "support", distillation.SUPPORTS),
    "reduction": (LinearLoss, "reduction", REDUCTIONS),
}


@pytest.mark.parametrize("case", DISPATCHED)
def test_checkers_know_what_is_dispatched(case):
    loss, field, names = DISPATCHED[case]
    assert choices(loss, field) == set(names)
