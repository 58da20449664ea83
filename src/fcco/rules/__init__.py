"""Rules: the mathematics of a step as pure functions, which one run and a fleet both call.

A rule takes rows of the state and the values of a batch, and returns new rows: no module, no write,
no branch on data. It uses names that NumPy and torch share. One run on the CPU calls it with NumPy
views of its buffers (an operation on a short vector costs a third of torch's there), one on a GPU
with tensors, for which nobody waits, a fleet under `torch.func.vmap` with whole tables and a mask.
"""
