"""The softmax forms: what sigma-Intention hands to torch's fused attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention import _checks as checks
from intention._call import masks_and_weights as masks
from intention._call.arguments import flatten, unflatten_report
from intention._call.masks_and_weights import Counted
from intention.solve.ladder import DUAL, FLOAT64, PINV, PRIMAL, TOLERATED, Report, has_float64, warn_inaccurate
from intention.solve.problem import Problem
from intention.solve.ridge.by_route import is_dual
from intention.solve.torch_state import compiling, gradient_free, look
from intention.solve.transform.fused import SMALL_ROUNDING, rounding, sigma, watched
from intention.solve.transform.transform import transform

LARGEST_EXPONENT = 80.0
SMALLEST_SCALE = 1e-3  # in the kernel, where it divides Sigma; its inverse is the largest
# How much of cond(Sigma) times rounding counts where a gradient is wanted: its error then stays below 1e-4.
GRADIENTS = 0.1
UNSEEN = 0.1  # of a query, the share that keys leave unseen, from which it counts


def fused(inputs: Problem, scale: float) -> tuple[Tensor, Report] | None:
    """The whole answer in one compiled kernel, or None: an element is beyond it, a call is transformed, ..."""
    if inputs.weight is not None:
        return None
    problem, restore = flatten(inputs)
    scaled = _over_scale(problem, scale)
    found = None if scaled is None else sigma(scaled)
    if found is None:
        return None
    return restore(found[0]), unflatten_report(found[1], inputs)


def fused_plain(problem: Problem, scale: float) -> Tensor | None:
    """The same for a call without broadcasting, in a fraction of the time."""
    scaled = _over_scale(problem, scale)
    if scaled is None:
        return None
    if gradient_free(*scaled):
        found = sigma(scaled)
        return None if found is None else found[0]
    found = sigma(scaled.expanded())
    return None if found is None else found[0].reshape(*problem.query.shape[:-1], problem.value.shape[-1])


def _over_scale(problem: Problem, scale: float) -> Problem | None:
    """Sigma / scale in the place of Sigma: queries that are rounded once more move a score by eps |q| |Sigma^-1 k|."""
    if scale == 1:
        return problem
    if not SMALLEST_SCALE <= scale <= 1 / SMALLEST_SCALE:
        return None
    gain = torch.ones_like(problem.alpha) if problem.gain is None else problem.gain
    return Problem(problem.query, problem.key, problem.value, problem.weight, problem.alpha / scale, gain / scale)


def transform_shared(inputs: Problem, solver: str) -> tuple[Tensor, Tensor, Report]:
    """(queries, keys, report) for the softmax: Q Sigma^-1 and K, or Q and G^-1 K where the dual Gram is smaller.

    Both give the scores Q Sigma^-1 K'. With float weights the first is used at any shape: it has a derivative at w = 0.
    """
    if is_dual(solver, inputs.key) and inputs.weight is None:
        # scores Q K'(c KK' + alpha I)^-1 = Q (G^-1 K)': the transform acts on the keys
        problem, restore = flatten(Problem(inputs.key, *inputs[1:]))
        points = Problem.of_points(problem.key.mT, problem.key.mT, None, problem.alpha, problem.gain)
        moved, packed = transform(points, transform_solver(solver))
        report = unflatten_report(packed, inputs)
        route = torch.where(report.route == PRIMAL, DUAL, report.route)
        return inputs.query, restore(moved.mT), Report(route, report.condition, report.error)
    problem, restore = flatten(inputs)
    moved, packed = transform(problem, transform_solver(solver))
    return restore(moved), inputs.key, unflatten_report(packed, inputs)


def transform_solver(solver: str) -> str:
    return "cholesky" if solver in ("primal", "dual") else solver


def centred_key(inputs: Problem, keep: Tensor | None) -> Tensor:
    """Keys minus their weighted mean. Scores change by a constant per query only, which a softmax does not see."""
    key, weight, share = inputs.key, inputs.weight, None
    if weight is not None:
        total = weight.sum(-1, keepdim=True)
        share = (weight / torch.where(total > 0, total, 1.0)).unsqueeze(-2)
    for _ in range(2):  # the second pass removes the rounding of the first mean
        key = key - (key.mean(-2, keepdim=True) if share is None else share @ key)
    return masks.fill(key, keep)


def scored(moved: Tensor, key: Tensor, report: Report, solver: str, inputs: Problem) -> tuple[Tensor, Report, bool]:
    """(queries, report with the error of the scores, whether they must be computed again in float64).

    Named solvers are not certified.
    """
    with torch.no_grad():
        error = rounding(moved, key)
        # without alpha nothing holds back what the SVD knows least of: Sigma^+ is off by its condition, twice that of K
        bare = (inputs.alpha == 0) & (report.route == PINV)
        lost = torch.where(bare, torch.finfo(torch.float64).eps * report.condition, 0.0).nan_to_num(0.0)
        told = torch.fmax(_worst(error, report.error.shape), lost).to(report.error.dtype)
    report = Report(report.route, report.condition, torch.fmax(report.error, told))
    if solver != "auto" or not report.error.numel():
        return moved, report, False
    if compiling():  # a graph has one precision
        return watched(moved, torch.fmax(error, lost.amax())), report, False
    largest = coarse = max(look(error).amax().item(), look(lost).amax().item())
    slopes = None
    if not gradient_free(moved, key):  # the gradient of X is rounded before it is multiplied by Sigma^-1
        slopes = GRADIENTS * torch.finfo(moved.dtype).eps * look(report.condition)
        coarse = max(coarse, slopes.amax().item(), rounding_of_alpha(moved, report, inputs))
    if coarse > SMALL_ROUNDING and moved.dtype != torch.float64 and has_float64(moved.device):
        return moved, report, True
    if slopes is not None and slopes.amax().item() > TOLERATED:  # values may be right where gradients are not
        error = torch.fmax(report.error, slopes.to(report.error))
        report = Report(report.route, report.condition, error)
        largest = max(largest, TOLERATED)
    if largest >= TOLERATED:
        warn_inaccurate(Report(*(look(x) for x in report)))
    return moved, report, False


def rounding_of_alpha(moved: Tensor, report: Report, inputs: Problem) -> float:
    """How much of alpha's gradient is the rounding of what comes back from the softmax: eps cond(Sigma)^2.

    <Q Sigma^-1, g Sigma^-1> along what no key has: X is Q / alpha there, and g is rounding.
    """
    alpha = inputs.alpha
    if gradient_free(alpha):
        return 0.0
    with torch.no_grad():
        whole = torch.linalg.vector_norm(inputs.query, dim=-1).amax(-1)
        unseen = alpha * torch.linalg.vector_norm(moved, dim=-1).amax(-1) > UNSEEN * whole
        condition = torch.where(report.route == DUAL, 0.0, report.condition)
    largest = look(condition).amax().item() if bool(look(unseen).any()) else 0.0
    return GRADIENTS * torch.finfo(moved.dtype).eps * largest**2


def narrowed(report: Report, dtype: torch.dtype) -> Report:
    """The report of what was computed in float64 and is rounded to `dtype`."""
    route = torch.where(report.route < FLOAT64, FLOAT64, report.route)
    return Report(*(x.to(dtype) for x in (route, report.condition, report.error + torch.finfo(dtype).eps)))


def _worst(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """The largest over all dimensions that `lead` does not have."""
    if x.dim() > len(lead):
        x = x.flatten(0, x.dim() - len(lead) - 1).amax(0) if lead else x.amax()
    own = [i for i in range(-x.dim(), 0) if lead[i] == 1]
    return (x.amax(own, keepdim=True) if own else x).expand(lead)


def counted_softmax(
    query: Tensor, key: Tensor, value: Tensor, counted: Counted, dropout_p: float, is_causal: bool
) -> Tensor:
    """Softmax attention (scale 1) in which points count as `counted` says."""
    m, n, place = query.shape[-2], key.shape[-2], query.device
    if counted.weight is not None and not gradient_free(counted.weight):
        mask, is_causal = masks.score_mask(
            Counted(counted.keep, None, counted.log, counted.per_query), is_causal, m, n, place
        )
        if is_causal:
            mask = masks.triangle(m, n, place)
        return _weighted_softmax(query, key, value, counted.weight, mask, dropout_p)
    mask, is_causal = masks.score_mask(counted, is_causal, m, n, place)
    return softmax_attention(query, key, value, mask, dropout_p, is_causal, 1.0, False)


def _weighted_softmax(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, mask: Tensor | None, dropout_p: float
) -> Tensor:
    """sum_i w_i exp(s_i) v_i / sum_i w_i exp(s_i): at w_i = 0 it has a derivative, which log w_i has not."""
    scores = query @ key.mT
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    weight = weight.unsqueeze(-2)
    there = weight > 0
    logs = scores + torch.where(there, weight, 1.0).log()
    top = torch.where(there, logs, -torch.inf).amax(-1, keepdim=True).detach()
    top = torch.where(top > -torch.inf, top, 0.0)
    # only the derivative of a point that is not there can be beyond what exp can express
    share = (logs - top).clamp_max(LARGEST_EXPONENT).exp() * torch.where(there, 1.0, weight)
    total = share.sum(-1, keepdim=True)
    share = TF.dropout(share / torch.where(total > 0, total, 1.0), dropout_p)
    return torch.where(total > 0, share @ value, 0.0)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """F.scaled_dot_product_attention on 4-D tensors, where it is fused; other leading dimensions are reshaped."""
    heads = 1 if gqa else 0  # the head dimension is left to torch
    lead = checks.leading(query=query.shape[: -2 - heads], key=key.shape[: -2 - heads], value=value.shape[: -2 - heads])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)  # torch reads a mask of another precision as if it had that of the queries
    if mask is not None and not gqa:
        lead = checks.leading(context=lead, mask=tuple(mask.shape[:-2]))
    rows = (math.prod(lead),) if gqa else (math.prod(lead[:-1]), lead[-1] if lead else 1)

    def four(x: Tensor) -> Tensor:
        own = x.shape[-2 - heads :]
        if x.shape != (*lead, *own):
            x = x.expand(*lead, *own)
        return x if x.dim() == 4 else x.reshape(*rows, *own)

    if mask is not None and mask.dim() > 2:
        own = mask.shape[-2 - heads :]
        mask = mask.expand(*lead, *own).reshape(*rows, *own)
    elif mask is not None and mask.dim() < 2:
        mask = mask.expand(1, key.shape[-2])
    q, k, v = four(query), four(key), four(value)
    out = TF.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)
    return out if len(lead) == len(rows) else out.reshape(*lead, *out.shape[len(rows) :])
