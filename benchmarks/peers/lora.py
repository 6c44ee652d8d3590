"""LoRA layers of others, which a PEFT model gets in place of PEFT's."""

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

from torch import nn

from benchmarks.harness.registry import Peers, package_version

PEERS = Peers()


@PEERS.add("axolotl", package="axolotl", needs_cuda=True)
def load_axolotl() -> Callable[[nn.Module], None]:
    with _without_its_dependencies():
        kernels = importlib.import_module("axolotl.monkeypatch.lora_kernels")
    keys = ("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel")
    config = kernels.DictDefault(dict.fromkeys(keys, True))

    def apply(model: nn.Module) -> None:
        cls = _own_attention_class(model)
        names = {"get_attention_cls_from_config": lambda config: cls, "exec": _exec_with_source}
        # A global `exec` hides the built-in one.
        with mock.patch.multiple(kernels, create=True, **names):
            kernels.patch_self_attn_lora(config)
        kernels.apply_lora_kernel_patches(model, config)

    return apply


@contextmanager
def _without_its_dependencies() -> Iterator[None]:
    """Context in which axolotl's LoRA kernels can be imported without the packages that they do not call.

    `axolotl.utils.callbacks` imports wandb, evaluate and all schemas, although one function of a module in it
    is needed. Of bitsandbytes, names alone are needed where no weight is in 4 bits.
    """
    utils = importlib.import_module("axolotl.utils")
    callbacks = ModuleType("axolotl.utils.callbacks")
    callbacks.__path__ = [f"{path}/callbacks" for path in utils.__path__]
    stand_ins = {callbacks.__name__: callbacks}
    if package_version("bitsandbytes") is None:
        library = mock.MagicMock()
        stand_ins |= {"bitsandbytes": library, "bitsandbytes.functional": library.functional}
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _own_attention_class(model: nn.Module) -> type:
    """Give the model's attention layers a class of their own, as axolotl changes the class, and return it."""
    layers = [module for module in model.modules() if hasattr(module, "q_proj")]
    cls = type(layers[0])
    own = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    for layer in layers:
        layer.__class__ = own
    return own


def _exec_with_source(source: str, namespace: dict) -> None:
    """Run a rewritten forward pass so that `fuse_layers` can read it, and fuse the rotation in it."""
    filename = f"<axolotl {hash(source)}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    exec(compile(source, filename, "exec"), namespace)
