"""Kernels built by the host compiler and run one thread block at a time: no GPU is needed.

The text is the one that a GPU gets, inline PTX included. It is compiled twice: with the address
and undefined-behaviour sanitizers, and with a watch on shared memory that finds races.

kernels.py      the call table: a line per kernel and parameters
products.py     cases of D = alpha * (op(A) op(B) + P) + beta * C; elementwise.py: of the others
operands.py     matrices with canaries, unaligned, padded, or 2^31 elements apart
program.py      what runs them; compiler.py: the host compiler and its cache
translate.py    inline PTX to calls; numbers the barriers, waits and commits

cuda_on_cpu.h   what a kernel sees instead of a GPU
block.cpp       threads and barriers; memory.cpp: shared memory and asynchronous copies
races.cpp       who touched which byte; launches.cpp: input and output
tensor_cores.cpp    what the lanes of a warp multiply together

A new kernel takes a line of ``TABLE`` in kernels.py. If it uses an instruction of PTX, or a CUDA
function, that no kernel used before, the compiler says so: add a function to cuda_on_cpu.h, named
as the instruction with ``_`` for ``.``, its operands in their order.
"""
