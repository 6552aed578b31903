"""CUDA kernels run on the CPU, thread by thread, where there is no GPU: their numbers are checked, not their speed.

:mod:`translate` turns the CUDA C++ that hidet generates into C++ for the host: launches, shared memory, and each
instruction of its inline PTX. ``emulated.hpp`` is what that is compiled with: a block's threads are fibers, that take
turns at barriers and where a warp acts as one (``mma``, ``ldmatrix``, ``shfl``). ``nvcc.py`` takes nvcc's place in a
build, so that whole artifacts are made of emulated kernels, which the stand-ins for the driver and NCCL run.

It is stricter than a GPU where a GPU may do as it likes: shared memory holds NaN before it is written, a ``cp.async``
may come as late as it is waited for, or at once (``EMULATED_COPIES=eager``), warps run in either order
(``EMULATED_WARPS=reverse``). Misaligned accesses, warps that diverge in an instruction that they must reach together,
barriers that are never passed, shared memory beyond its end and false assumptions end the process with a message; so do
races in shared memory, of plain accesses and of ``cp.async`` (``races.cpp``). Accesses to global memory beyond a tensor
are found by :func:`emulated.run`, which gives each of a kernel's tensors pages of its own.
"""
