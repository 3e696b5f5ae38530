"""The certified inverse of a symmetric matrix that comes as such: sums, kernels and covariances of the user's own.

    A = (c S + alpha I)^-1                    without weights
    A = (c S + alpha W^-1)^-1                 with weights w >= 0 of the rows of S; rows of weight 0 are left out of A

Always float64: where only S is known there is nothing exact to refine against. The second form is what a weighted dual
or kernel fit needs; it is computed as w^1/2 (c w^1/2 S w^1/2 + alpha I)^-1 w^1/2 but has a derivative at w = 0 (see
`_half`). The derivatives are made of A itself, so any order works.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.centring import EPS
from intention.solve.factor import by_gain, inverse_of_lower
from intention.solve.ladder import PINV, PRIMAL, Report, pack, screen, unpack, warn_inaccurate
from intention.solve.operator import Operator, Saved, flat

# A lower bound of the condition beyond which alpha = 0 may mean "singular": the spectrum is looked at.
DOUBTFUL = 1e10
# A negative eigenvalue beyond this share of the largest is no rounding.
INDEFINITE = 1e-8


def inverse(
    matrix: Tensor,
    alpha: Tensor,
    gain: Tensor | None = None,
    weight: Tensor | None = None,
    quiet: bool = False,
    rounding: float = EPS,
) -> tuple[Tensor, Tensor, Report]:
    """(A, log det, report) of S (..., n, n), alpha and gain (...), weight (..., n); leading dimensions broadcast.

    The determinant is that of c W^1/2 S W^1/2 + alpha I. Where that is singular: A of the pseudo-inverse and the
    determinant on its range. `quiet`: the caller reads the report and has something better at hand. `rounding`: that of
    the entries of S, where it was not made in float64.
    """
    if not torch.float64 == matrix.dtype:
        raise TypeError(f"matrix must be float64, got {matrix.dtype}")
    shapes = {"matrix": matrix.shape[:-2], "alpha": alpha.shape}
    shapes |= {} if gain is None else {"gain": gain.shape}
    shapes |= {} if weight is None else {"weight": weight.shape[:-1]}
    lead, n = checks.leading(**shapes), matrix.shape[-1]
    if n == 0 or 0 in lead:
        zero = alpha.expand(lead) * 0
        return matrix.expand(*lead, n, n) * 1.0, zero, Report(zero, zero + 1, zero)
    tensors = flat(matrix, lead, n, n), flat(weight, lead, n), flat(alpha, lead), flat(gain, lead)
    out, logdet, packed = INVERSE(*tensors, quiet, rounding)
    return out.reshape(*lead, n, n), logdet.reshape(lead), unpack(packed.reshape(*lead, 3))


def inverse_batch(
    matrix: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, quiet: bool, rounding: float, _: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """(A, log det, packed report) of a flat batch: Cholesky, and the spectrum where that is not enough."""
    sigma = by_gain(gain, matrix)
    root = None if weight is None else weight.sqrt().unsqueeze(-1)
    sigma = sigma.clone() if root is None else sigma * root * root.mT
    sigma.diagonal(0, -2, -1).add_(alpha.unsqueeze(-1))
    lower, info = torch.linalg.cholesky_ex(sigma)
    logdet = 2 * lower.diagonal(0, -2, -1).log().sum(-1)
    failed = info.bool()
    out = inverse_of_lower(lower, failed)
    # Cholesky does not feel the scale of a row, so neither should the measure: max_i Sigma_ii (Sigma^-1)_ii
    ratio = (sigma.diagonal(0, -2, -1) * out.diagonal(0, -2, -1)).amax(-1)
    ratio = screen(ratio.masked_fill(failed, torch.inf), weight, alpha, gain)
    report = Report(torch.full_like(ratio, PRIMAL), ratio.clone(), ratio * rounding)
    if not ratio.amax().item() < DOUBTFUL * EPS / rounding:  # the one look at the host; NaN is not less
        checks.require_values(weight, alpha, gain)
        _by_spectrum(sigma, alpha, failed, out, logdet, report, rounding)
        if not quiet:
            warn_inaccurate(report)
    if root is not None:
        out = out * root * root.mT
    return (out, logdet, pack(report)), False


def _by_spectrum(
    sigma: Tensor, alpha: Tensor, failed: Tensor, out: Tensor, logdet: Tensor, report: Report, precision: float
) -> None:
    """Redo, in place, what Cholesky could not factor, and what may be singular because nothing regularises it."""
    finite = torch.isfinite(sigma).flatten(1).all(-1)
    lost = (~finite).nonzero()[:, 0]
    out[lost], logdet[lost] = torch.nan, torch.nan
    report.condition[lost] = report.error[lost] = torch.nan
    todo = (finite & (failed | ((alpha == 0) & ~(report.condition < DOUBTFUL)))).nonzero()[:, 0]
    if not todo.numel():
        return
    floor, rounding = alpha[todo].unsqueeze(-1), 8 * sigma.shape[-1] * precision
    values, vectors = torch.linalg.eigh(sigma[todo])
    top = values.amax(-1, keepdim=True)
    checks.semidefinite(values - floor, max(INDEFINITE, rounding) * top)
    values = torch.maximum(values, floor)  # Sigma is not below alpha I; what is, is rounding
    kept = (values > rounding * top) | (floor > 0)
    power = torch.where(kept, 1 / values, 0.0)
    out[todo] = torch.bmm(vectors * power.unsqueeze(1), vectors.mT)
    logdet[todo] = torch.where(kept, values, 1.0).log().sum(-1)
    least = torch.where(kept, values, torch.inf).amin(-1)
    ratio = torch.where(kept.any(-1), top.squeeze(-1) / least, 1.0)
    # a direction may look like rounding beside a row of another scale and yet be real: then the answer is not known
    missed = _rank(sigma[todo], rounding) > kept.sum(-1)
    report.route[todo], report.condition[todo] = PINV, ratio
    report.error[todo] = torch.where(missed, 1.0, ratio * precision)


def _rank(sigma: Tensor, rounding: float) -> Tensor:
    """The number of directions above rounding when all rows have the same size."""
    size = sigma.diagonal(0, -2, -1).clamp_min(0).sqrt()
    unit = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
    values = torch.linalg.eigvalsh(sigma * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    return (values > rounding * values.amax(-1, keepdim=True)).sum(-1)


def _pull(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of any order."""
    matrix, weight, alpha, gain = saved.tensors
    out, _, packed = saved.outputs
    grad, grad_logdet = grads
    # dA = -A d(cS) A - B A dalpha + alpha B dW B' and dlogdet = <A, d(cS)> + tr(B) dalpha + <(c S B)_ii, dw_i>
    grad = (grad + grad.mT) / 2
    step = grad_logdet.view(-1, 1, 1)
    inner = step * out - torch.bmm(torch.bmm(out, grad), out)  # of cS
    half = _half(matrix, weight, alpha, gain, out)
    weight_grad = None
    if weight is None:
        alpha_grad = inner.diagonal(0, -2, -1).sum(-1)
    else:
        alpha_grad = (step * half).diagonal(0, -2, -1).sum(-1) - (grad * torch.bmm(half, out)).sum((-2, -1))
        scaled = by_gain(gain, matrix)
        weight_grad = alpha.unsqueeze(-1) * (half * torch.bmm(grad, half)).sum(-2)
        weight_grad = weight_grad + grad_logdet.unsqueeze(-1) * (scaled * half.mT).sum(-1)
    singular = ((packed[:, 0] == PINV) & (alpha == 0)).view(-1, 1, 1)
    turned, weight_turned = _turn(grad, matrix, weight, gain, out)
    inner = inner + torch.where(singular, turned, 0.0)
    if weight_grad is not None:
        weight_grad = weight_grad + torch.where(singular.squeeze(-1), weight_turned, 0.0)
    gain_grad = None if gain is None else (inner * matrix).sum((-2, -1))
    return by_gain(gain, inner), weight_grad, alpha_grad, gain_grad


def _half(matrix: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, out: Tensor) -> Tensor:
    """B = (c W S + alpha I)^-1, A = B W. It exists at w = 0, where A and its root form have lost the direction.

    A column of a point that counts is A_i / w_i; of one that does not, (I - c A S)_i / alpha.
    """
    if weight is None:
        return out
    n = out.shape[-1]
    present = (weight > 1e-20 * weight.amax(-1, keepdim=True)).unsqueeze(-2)
    column = out / torch.where(present, weight.unsqueeze(-2), 1.0)
    scaled = by_gain(gain, matrix)
    floor = alpha.view(-1, 1, 1)
    rest = torch.eye(n, dtype=out.dtype, device=out.device) - torch.bmm(out, scaled)
    absent = torch.where(floor > 0, rest / torch.where(floor > 0, floor, 1.0), 0.0)
    return torch.where(present, column, absent)


def _turn(
    grad: Tensor, matrix: Tensor, weight: Tensor | None, gain: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """What a pseudo-inverse adds: its null space turns, along changes that keep the rank. (of cS, of w)"""
    scaled = by_gain(gain, matrix)
    if weight is None:
        return _turn_symmetric(grad, scaled, out), out.new_zeros(())
    # A = R M^+ R and M = R cS R with R = W^1/2, on the rows that count
    there = weight > 0
    root = torch.where(there, weight, 1.0).sqrt() * there
    back = torch.where(there, 1 / torch.where(there, root, 1.0), 0.0)
    pseudo = out * back.unsqueeze(-1) * back.unsqueeze(-2)
    m = scaled * root.unsqueeze(-1) * root.unsqueeze(-2)
    inside = grad * root.unsqueeze(-1) * root.unsqueeze(-2)
    turned = _turn_symmetric(inside, m, pseudo)
    whole = turned - torch.bmm(torch.bmm(pseudo, inside), pseudo)
    # d<G, A> / dr_i = 2 (G R M^+)_ii + 2 (gM R cS)_ii, dr = dw / 2r
    along = torch.bmm(grad * root.unsqueeze(-2), pseudo) + torch.bmm(whole * root.unsqueeze(-2), scaled)
    return turned * root.unsqueeze(-1) * root.unsqueeze(-2), along.diagonal(0, -2, -1) * back


def _turn_symmetric(x: Tensor, sigma: Tensor, pseudo: Tensor) -> Tensor:
    """(I - S S^+) X S^+S^+ and its transpose"""
    outside = x - torch.bmm(sigma, torch.bmm(pseudo, x))
    turned = torch.bmm(torch.bmm(outside, pseudo), pseudo)
    return turned + turned.mT


def _shapes(matrix: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    batch = matrix.shape[0]
    return matrix.new_empty(matrix.shape), matrix.new_empty(batch), matrix.new_empty(batch, 3)


INVERSE = Operator(
    "inverse",
    tensors="matrix weight? alpha gain?",
    options="bool quiet, float rounding",
    answers=2,
    outputs=3,  # A, log det, packed report
    solve=inverse_batch,
    shapes=_shapes,
    pull=_pull,
    differentiable=_pull,
)
