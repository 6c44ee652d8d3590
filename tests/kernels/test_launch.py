"""`cached_launch` launches the kernel that Triton compiled for operands of the same kind, and no other."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.knobs import HookChain  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from logitless.kernels import launch  # noqa: E402
from logitless.kernels.head import scale_triton  # noqa: E402
from logitless.kernels.launch import OF_CHUNKS, BoundLaunch, CachedLaunch  # noqa: E402
from tests.kernels.offline import INTERPRETED, jitted, kernel_modules  # noqa: E402
from tests.support import DEVICE  # noqa: E402

MEMORY = torch.zeros(64)
WIDE = torch.zeros(4, 16)
OPERANDS = (MEMORY, 24, 1.5, None)
CONSTANTS = {"BLOCK": 64, "FLAG": True, "num_warps": 4}


class Kernel:
    """In the place of Triton's: compiles anew whenever it is launched."""

    def __init__(self):
        self.fn, self.compiled, self.launched = Kernel, 0, []
        names = {"x": False, "n": False, "factor": False, "y": False, "BLOCK": True, "FLAG": True}
        plain = {"do_not_specialize": False, "do_not_specialize_on_alignment": False}
        self.params = [SimpleNamespace(name=name, is_constexpr=it, **plain) for name, it in names.items()]

    def __getitem__(self, grid):
        def compile_and_launch(*operands, **constants):
            self.compiled += 1
            self.launched.append((self.compiled, grid))
            return Compiled(self.compiled, self.launched)

        return compile_and_launch


class Compiled:
    """In the place of Triton's CompiledKernel; notes its number with every launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, number, launched):
        self.number, self.launched = number, launched

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *operands):
        assert (stream, function, packed) == (100 + torch.cuda.current_device(), "function", "metadata")
        assert metadata is enter is leave is None
        self.launched.append((self.number, (x, y, z), *operands))

    def __getitem__(self, grid):
        return lambda *operands: self.launched.append((self.number, grid, *operands, "with hooks"))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    active = SimpleNamespace(get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return Kernel()


def test_a_second_launch_takes_what_the_first_compiled(kernel):
    cached_launch, others = CachedLaunch(kernel), (torch.ones(32), 40, -2.0, None)
    cached_launch[(3,)](*OPERANDS, **CONSTANTS)
    cached_launch[(5, 2)](*others, **CONSTANTS)
    assert kernel.launched[0] == (1, (3,))
    number, grid, *operands = kernel.launched[1]
    assert (number, grid, kernel.compiled) == (1, (5, 2, 1), 1)
    assert operands[0] is others[0] and operands[1:] == [*others[1:], 64, True]


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_bound_launch_looks_up_what_was_compiled(kernel, monkeypatch, compiled_before):
    cached_launch, others = CachedLaunch(kernel), (torch.ones(32), 40, -2.0, None)
    if compiled_before:
        cached_launch[(3,)](*OPERANDS, **CONSTANTS)
    bound = BoundLaunch(cached_launch, **CONSTANTS)
    bound.look_up(*OPERANDS)
    if not compiled_before:
        bound((3,), *OPERANDS)
    monkeypatch.setattr(CachedLaunch, "key", lambda *_: pytest.fail("it looked up again"))
    bound((7,), *others)
    number, grid, *operands = kernel.launched[1]
    assert (number, grid, operands) == (1, (7, 1, 1), [*others, 64, True]) and kernel.compiled == 1


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("kind", ["added", "set", "none"])
def test_a_profiler_is_told(kernel, monkeypatch, hook, kind):
    hooks = {"added": HookChain(), "set": lambda metadata: None, "none": None}
    hooks["added"].add(hooks["set"])
    monkeypatch.setattr(launch.knobs.runtime, hook, hooks[kind])
    cached_launch = CachedLaunch(kernel)
    for _ in range(2):
        cached_launch[(3,)](*OPERANDS, **CONSTANTS)
    told = ["with hooks"] if kind != "none" else []
    assert kernel.launched[1][1:] == ((3, 1, 1), *OPERANDS, 64, True, *told)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((MEMORY[1:], *OPERANDS[1:]), id="not aligned"),
        pytest.param((MEMORY.half(), *OPERANDS[1:]), id="another dtype"),
        pytest.param((None, *OPERANDS[1:]), id="no tensor"),
        pytest.param((MEMORY, 1, *OPERANDS[2:]), id="1"),
        pytest.param((MEMORY, 32, *OPERANDS[2:]), id="a multiple of 16"),
        pytest.param((MEMORY, 2**31 + 8, *OPERANDS[2:]), id="64 bits"),
        pytest.param((MEMORY, 2**31, *OPERANDS[2:]), id="64 bits, a multiple of 16"),
        pytest.param((MEMORY, -(2**31) - 8, *OPERANDS[2:]), id="-64 bits"),
        pytest.param((*OPERANDS[:2], 2, None), id="an integer"),
        pytest.param((*OPERANDS[:2], True, None), id="a bool"),
        pytest.param((TensorDescriptor(WIDE, [4, 16], [16, 1], [4, 16]), *OPERANDS[1:]), id="a descriptor"),
    ],
)
def test_operands_of_another_kind(kernel, others):
    cached_launch = CachedLaunch(kernel)
    for operands in (OPERANDS, others, OPERANDS, others):
        cached_launch[(1,)](*operands, **CONSTANTS)
    assert kernel.compiled == 2 and [number for number, *_ in kernel.launched] == [1, 2, 1, 2]


def test_integers_of_64_bits_tiles_constants_and_devices(kernel, monkeypatch):
    cached_launch = CachedLaunch(kernel)

    def launched(x=MEMORY, n: int = 24, **changed) -> int:
        """The number of the compiled kernel that a launch takes."""
        cached_launch[(1,)](x, n, *OPERANDS[2:], **CONSTANTS | changed)
        return kernel.launched[-1][0]

    assert [launched(n=2**31 + rest) for rest in (8, 0, 24, 16)] == [1, 2, 1, 2]
    tiles = ((WIDE, [4, 16]), (WIDE, [2, 16]), (WIDE.bfloat16(), [4, 16]), (WIDE[:2], [4, 16]))
    described = [TensorDescriptor(x, list(x.shape), list(x.stride()), tile) for x, tile in tiles]
    assert [launched(x) for x in described] == [3, 4, 5, 3]
    changes = ({}, {"BLOCK": 32}, {"FLAG": False}, {"num_warps": 8}, {})
    assert [launched(**changed) for changed in changes] == [6, 7, 8, 9, 6]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert launched() == 10


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name, module", kernel_modules().items())
def test_what_changes_from_chunk_to_chunk_compiles_nothing(name, module):
    sizes, vectors = OF_CHUNKS.values()
    assert {"C", "partial_stride"} <= {*sizes} and {"targets_ptr", "logps_ptr", "soft_ptr"} <= {*vectors}
    for param in jitted(getattr(module, name)).params:
        assert param.do_not_specialize or param.name not in sizes, param.name
        assert param.do_not_specialize_on_alignment or param.name not in vectors, param.name


def test_a_constant_among_the_operands(kernel):
    with pytest.raises(TypeError, match="expected 4 operands, got 5; pass constants by name"):
        CachedLaunch(kernel)[(1,)](*OPERANDS, 64, FLAG=True)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_on_a_gpu():
    """Alignments and sizes in turns, for each of which Triton compiles a kernel of its own."""
    assert isinstance(scale_triton.scale_kernel, CachedLaunch)
    memory = torch.randn(1 << 16, device=DEVICE)
    for _ in range(2):
        for start, columns in ((0, 1024), (1, 1024), (0, 1), (0, 48), (3, 5)):
            x = memory[start:][: 8 * columns].view(8, columns)
            factor, out = torch.randn(8, device=DEVICE), torch.empty(8, columns, device=DEVICE)
            scale_triton.scale_all([(x, out)], [factor], [None])
            assert torch.equal(out, x * factor[:, None]), (start, columns)
