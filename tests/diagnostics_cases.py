"""Problems shared by the tests of the diagnostics, and the Gram matrix behind these."""

import torch

from fcco.diagnostics import _FullData

DOUBLE = torch.float64


def gram(inner, number, parameters):
    """J J^T as the diagnostics compute it."""
    jacobian = _FullData("gram", inner, number, parameters).jacobian(torch.arange(number))
    return jacobian @ jacobian.T


class Curved:
    """g_i(w) = a_i.w - b_i + c_i |w|^2 / 2 with random coefficients, and a quadratic g_0."""

    def __init__(self, seed, number, dim, width=None):
        random = torch.Generator().manual_seed(seed)
        shape = (number,) if width is None else (number, width)
        self.slopes = torch.randn(*shape, dim, generator=random, dtype=DOUBLE)
        self.offsets = 0.5 * torch.randn(*shape, generator=random, dtype=DOUBLE)
        self.bends = torch.randn(*shape, generator=random, dtype=DOUBLE)
        self.center = torch.randn(dim, generator=random, dtype=DOUBLE)
        self.number = number
        self.w = (0.3 * torch.randn(dim, generator=random, dtype=DOUBLE)).requires_grad_()

    def at(self, w, index):
        bend = self.bends[index] * w.square().sum() / 2
        return self.slopes[index] @ w - self.offsets[index] + bend

    def inner(self, index):
        return self.at(self.w, index)

    def loss(self):
        return 0.1 * (self.w - self.center).square().sum() / 2

    def dense(self):
        """Values, stacked Jacobian and grad g_0 as arrays, from torch.func."""
        everything = torch.arange(self.number)
        w = self.w.detach()
        jacobian = torch.func.jacrev(lambda v: self.at(v, everything))(w)
        return self.at(w, everything).numpy(), jacobian.numpy(), (0.1 * (w - self.center)).numpy()


def group_losses(number=5):
    """S2 at its solution: L_i - s with L_i = |w - e_i|^2 / 2, and the loss s."""
    w = torch.full((number,), 1 / number, dtype=DOUBLE, requires_grad=True)
    s = torch.tensor(0.5 * (1 - 1 / number), dtype=DOUBLE, requires_grad=True)
    basis = torch.eye(number, dtype=DOUBLE)
    return w, s, lambda index: (w - basis[index]).square().sum(1) / 2 - s
