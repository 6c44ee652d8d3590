"""The operators of the losses: each is one file with its launcher and its PyTorch twin, its Triton kernels in
`*_triton.py`. The fused layers, in `logitless.layers`, share `launch` and `operands`. Internal: the engine
and `parallel` call them, users do not. Importing them loads no Triton."""
