"""Rules: the mathematics of a step as pure functions, which one run and a fleet both call.

A rule takes rows of the state and the values of a batch, returns new rows and has no side effects.
It uses names that NumPy and torch share, and is branch-free for tensors; NumPy paths may take
shortcuts. One run on the CPU calls it with NumPy views of its buffers (an operation on a short
vector costs a third of torch's there), one on a GPU with tensors, without device synchronisation,
a fleet under `torch.func.vmap` with whole tables and a mask.
"""
