// Small elements, as many at once as a register has lanes: the steps of one would wait for each other.
#pragma once

#include "fit.h"
#include "lanes.h"

namespace INTENTION_ARCH {

constexpr Int NEAR_BYTES = 1 << 20;  // of a tensor that may still be in a cache
constexpr Int LANES_HOLD = 3072;  // entries per element that stay near for a whole register of elements

inline bool fits_lanes(const RidgeArguments& a) {
    const Int n = a.dual ? a.points : a.features, rows = a.points + a.queries;
    return n <= SMALL && !a.intercept && rows * (a.features + a.columns) <= LANES_HOLD;
}

// One register of elements; lanes without an element of their own repeat the last one.
template <class T>
struct Group {
    Lanes<T> query, key, value, root_weight;  // keys and values are weighted where there is a weight
    Vec<T> alpha, gain;
    bool allowed;  // no weight, alpha or gain below 0
};

template <class T>
Lanes<T> read(Int rows, Int columns, const Tensor& x, Int inner, Int batch, Int b, int count, Int times, Arena& arena) {
    const Lanes<T> to = room<T>(rows, columns, arena);
    Spread<const T> from;
    from.row = x.row;
    Int time = b % times, in = b / times % inner, out = b / times / inner;  // counted on: a division takes long
    for (int g = 0; g < WIDTH<T>; ++g) {
        from.p[g] = static_cast<const T*>(x.data) + out * x.outer + in * x.inner;
        if (g + 1 < count && ++time == times) {
            time = 0;
            if (++in == inner) in = 0, ++out;
        }
    }
    if (batch * rows * columns * Int(sizeof(T)) <= NEAR_BYTES) {
        mix<T, false>(rows, columns, from, to.p, 0);
    } else {
        mix<T, true>(rows, columns, from, to.p, matrix_of<T>(x, (b + WIDTH<T>) / times, inner).p - from.p[0]);
    }
    return to;
}

template <class T>
void write(Int rows, Int columns, int count, Lanes<T> from, void* to, Int b) {
    Spread<T> place;
    place.row = columns;
    for (int g = 0; g < WIDTH<T>; ++g) place.p[g] = static_cast<T*>(to) + (b + smaller(g, count - 1)) * rows * columns;
    unmix<T>(rows, columns, count, from.p, place);
}

template <class T>
Vec<T> read_each(const PerElement& x, Int b, int count, T otherwise) {
    if (!x.data || !x.step) return Vec<T>{} + entry<T>(x, 0, otherwise);
    Vec<T> to;
    for (int g = 0; g < WIDTH<T>; ++g) to[g] = entry<T>(x, b + smaller(g, count - 1), otherwise);
    return to;
}

// Zeros for points that are not there.
template <class T>
void clear_lanes(const RidgeArguments& a, Int b, int count, Int columns, Lanes<T> x) {
    const Vec<T> none = {};
    for (Int i = 0; a.keep.data && i < a.points; ++i) {
        Vec<T> there = none;
        for (int g = 0; g < WIDTH<T>; ++g) there[g] = keep_of(a, b + smaller(g, count - 1))[i];
        for (Int j = 0; j < columns; ++j) x(i, j) = there > none ? x(i, j) : none;
    }
}

template <class T>
Group<T> read_group(const RidgeArguments& a, Int b, int count, bool with_values, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    Group<T> group;
    group.query = read<T>(a.queries, d, a.query, a.inner, a.batch, b, count, 1, arena);
    group.key = read<T>(n, d, a.key, a.inner, a.batch, b, count, a.times, arena);
    clear_lanes<T>(a, b, count, d, group.key);
    if (with_values) {
        group.value = read<T>(n, k, a.value, a.inner, a.batch, b, count, a.times, arena);
        clear_lanes<T>(a, b, count, k, group.value);
    }
    group.alpha = read_each<T>(a.alpha, b, count, 0), group.gain = read_each<T>(a.gain, b, count, 1);
    group.root_weight.p = nullptr;
    group.allowed = true;
    for (int g = 0; g < WIDTH<T>; ++g) group.allowed &= group.alpha[g] >= 0 && group.gain[g] >= 0;
    if (!a.weight.data) return group;
    const Tensor weight = {a.weight.data, a.weight.step, 0, n};
    group.root_weight = read<T>(1, n, weight, 1, a.batch, b, count, 1, arena);
    for (Int i = 0; i < n; ++i) {
        Vec<T>& w = group.root_weight(0, i);
        for (int g = 0; g < WIDTH<T>; ++g) group.allowed &= w[g] >= 0;
        w = roots(w);
        for (Int j = 0; j < d; ++j) group.key(i, j) *= w;
        for (Int j = 0; j < k && with_values; ++j) group.value(i, j) *= w;
    }
    return group;
}

// Sigma^-1 times a matrix, from the inverse where it is there, or from X = U^-T.
template <class T>
struct GroupSolver {
    Int n;
    Lanes<T> x, inverse;

    void operator()(Int k, Lanes<T> b, Lanes<T> out, Arena& arena) const {
        if (inverse.p) {
            multiply_lanes<T>(n, k, n, inverse, b, out, Vec<T>{} + T(1));
        } else {
            solve_together<T>(n, k, x, b, room<T>(n, k, arena), out);
        }
    }
};

template <class T>
struct GroupFit {
    Lanes<T> upper;  // U
    GroupSolver<T> solve;
    Vec<T> ratio;
    bool failed;
};

template <class T>
Vec<T> most(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;  // b where it is NaN
}

// As `largest_eigenvalue`
template <class T>
Vec<T> largest_eigenvalues(Int n, Lanes<T> sigma, const Vec<T>* counts) {
    const Vec<T> none = {};
    Vec<T> trace = none, rows = none, squares = none, above = none;
    for (Int i = 0; i < n; ++i) trace += counts[i] * sigma(i, i), rows += counts[i];
    const Vec<T> scale = rows / trace;
    for (Int i = 0; i < n; ++i) {
        const Vec<T> x = counts[i] * (scale * sigma(i, i) - 1);
        squares += x * x;
        for (Int j = i + 1; j < n; ++j) above += scale * sigma(i, j) * (scale * sigma(i, j));
    }
    return rows > none ? (1 + roots((squares + 2 * above) / rows * (rows - 1))) / scale : none;
}

template <class T>
GroupFit<T> fit_group(const RidgeArguments& a, const Group<T>& group, Int n, bool inverse, Arena& arena) {
    const Vec<T> none = {};
    GroupFit<T> fit = {room<T>(n, n, arena), {n, room<T>(n, n, arena), {nullptr, 0, 0}}, none, false};
    const Lanes<T> x = fit.solve.x, left = a.dual ? group.key : group.key.t();
    multiply_lanes<T>(n, n, a.dual ? a.features : a.points, left, left.t(), fit.upper, group.gain, false, UPPER);
    Vec<T> reciprocal[SMALL], counts[SMALL], grown = none;
    for (Int i = 0; i < n; ++i) {
        counts[i] = fit.upper(i, i) == none ? none : none + T(1);
        fit.upper(i, i) += group.alpha;
    }
    const Vec<T> largest = largest_eigenvalues<T>(n, fit.upper, counts);
    const auto failed = cholesky_together<T>(n, fit.upper, reciprocal);
    invert_together<T>(n, fit.upper, reciprocal, x);
    if (inverse) {
        fit.solve.inverse = room<T>(n, n, arena);
        cross_together<T>(n, x, fit.solve.inverse);
    }
    for (int g = 0; g < WIDTH<T>; ++g) fit.failed |= failed[g] != 0;
    for (Int i = 0; i < n; ++i) {
        Vec<T> diagonal = none;  // of Sigma^-1
        for (Int l = i; l < n; ++l) diagonal += x(l, i) * x(l, i);
        grown = most<T>(grown, counts[i] * diagonal);
    }
    fit.ratio = most<T>(none + T(1), largest * grown);
    return fit;
}

// scale (Q K~'Sigma^-1) V~
template <class T>
void weigh_group(const RidgeArguments& a, const Group<T>& group, Lanes<T> inverse, Lanes<T> out, Arena& arena) {
    const Int n = a.points, m = a.queries, k = a.columns;
    const Vec<T> none = {}, one = none + T(1);
    const Lanes<T> scores = room<T>(m, n, arena), weights = room<T>(m, n, arena);
    multiply_lanes<T>(m, n, a.features, group.query, group.key.t(), scores, one);
    multiply_lanes<T>(m, n, n, scores, inverse, weights, one);
    multiply_lanes<T>(m, k, n, weights, group.value, out, none + T(a.scale));
}

// Coefficients and prediction
template <class T>
void solve_group(const RidgeArguments& a, const Group<T>& group, const GroupSolver<T>& solve, Lanes<T> coef,
                 Lanes<T> out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const Vec<T> none = {}, one = none + T(1), scale = none + T(a.scale);
    Lanes<T> rhs = group.value;
    if (!a.dual) {
        rhs = room<T>(d, k, arena);
        multiply_lanes<T>(d, k, n, group.key.t(), group.value, rhs, one);
    }
    solve(k, rhs, coef, arena);
    if (!a.dual) {
        multiply_lanes<T>(m, k, d, group.query, coef, out, scale);
    } else if (!scores_cost_less(a)) {
        const Lanes<T> map = room<T>(d, k, arena);
        multiply_lanes<T>(d, k, n, group.key.t(), coef, map, one);
        multiply_lanes<T>(m, k, d, group.query, map, out, scale);
    } else {
        const Lanes<T> scores = room<T>(m, n, arena);
        multiply_lanes<T>(m, n, d, group.query, group.key.t(), scores, one);
        multiply_lanes<T>(m, k, n, scores, coef, out, scale);
    }
}

// Everything of a forward; false (and nothing said) where an element needs more than the plain factor.
template <class T>
bool forward_group(const RidgeArguments& a, Int b, int count, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns, size = a.dual ? n : d;
    arena.reset();
    const Group<T> group = read_group<T>(a, b, count, true, arena);
    const bool weighed = weights_cost_less(a);
    const GroupFit<T> fit = fit_group<T>(a, group, size, a.inverse || weighed, arena);
    if (fit.failed || !group.allowed) return false;
    for (int g = 0; g < count; ++g)
        if (!(fit.ratio[g] < T(a.easy))) return false;
    const Lanes<T> out = room<T>(m, k, arena);
    if (weighed) {
        weigh_group<T>(a, group, fit.solve.inverse, out, arena);
    } else {
        const Lanes<T> coef = room<T>(size, k, arena);
        solve_group<T>(a, group, fit.solve, coef, out, arena);
        if (a.coef) write<T>(size, k, count, coef, a.coef, b);
    }
    write<T>(m, k, count, out, a.forward.out, b);
    if (a.matrix) {
        for (Int i = 0; i < size; ++i)
            for (Int j = 0; j < i; ++j) fit.upper(i, j) = fit.upper(j, i), fit.upper(j, i) = Vec<T>{};
        write<T>(size, size, count, a.inverse ? fit.solve.inverse : fit.upper, a.matrix, b);
    }
    const T eps = sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__);
    T* report = static_cast<T*>(a.forward.report) + b * 3;
    for (int g = 0; a.forward.report && g < count; ++g, report += 3)
        report[0] = a.dual ? DUAL : PRIMAL, report[1] = fit.ratio[g], report[2] = fit.ratio[g] * eps;
    return true;
}

// What a forward left behind.
template <class T>
GroupSolver<T> saved_solver(const RidgeArguments& a, Int b, int count, Int n, Arena& arena) {
    const Lanes<T> saved = read<T>(n, n, {a.matrix, n * n, 0, n}, 1, a.batch, b, count, 1, arena);
    if (a.inverse) return {n, {nullptr, 0, 0}, saved};
    const GroupSolver<T> solve = {n, room<T>(n, n, arena), {nullptr, 0, 0}};
    Vec<T> reciprocal[SMALL];
    for (Int i = 0; i < n; ++i) reciprocal[i] = T(1) / saved(i, i);
    invert_together<T>(n, saved.t(), reciprocal, solve.x);
    return solve;
}

template <class T>
void scale_lanes(Int rows, Int columns, Lanes<T> by, Lanes<T> x) {
    for (Int i = 0; by.p && i < rows; ++i)
        for (Int j = 0; j < columns; ++j) x(i, j) *= by(0, i);
}

// -(x * y).sum() and its root sum of squares
template <class T>
void alpha_gradient_group(const RidgeArguments& a, Int b, int count, Int size, const Vec<T>* x, const Vec<T>* y) {
    Vec<T> total = {}, squares = {};
    for (Int i = 0; i < size; ++i) {
        total += x[i] * y[i];
        squares += x[i] * y[i] * (x[i] * y[i]);
    }
    squares = roots(squares);
    for (int g = 0; g < count; ++g) {
        static_cast<T*>(a.backward.alpha)[b + g] = -total[g];
        static_cast<T*>(a.backward.alpha_terms)[b + g] = squares[g];
    }
}

// S, then Q's gradient over Q and K~'s into `to`, by way of the d x k matrices Q'g and K~'P or the m x n matrices Q K~'
// and g P', whichever are smaller.
template <class T>
void dual_group(const RidgeArguments& a, const Group<T>& group, Lanes<T> grad, Lanes<T> coef,
                const GroupSolver<T>& solve, Lanes<T> s, Lanes<T> to, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const Vec<T> one = Vec<T>{} + T(1);
    const Lanes<T> seen = room<T>(n, k, arena), both = room<T>(n, n, arena);
    if (scores_cost_less(a)) {
        const Lanes<T> scores = room<T>(m, n, arena);
        multiply_lanes<T>(m, n, d, group.query, group.key.t(), scores, one);
        multiply_lanes<T>(n, k, m, scores.t(), grad, seen, one);
        multiply_lanes<T>(m, n, k, grad, coef.t(), scores, one);
        if (a.backward.key) multiply_lanes<T>(n, d, m, scores.t(), group.query, to, one);
        if (a.backward.query) multiply_lanes<T>(m, d, n, scores, group.key, group.query, one);
    } else {
        const Lanes<T> map = room<T>(d, k, arena);
        multiply_lanes<T>(d, k, m, group.query.t(), grad, map, one);
        multiply_lanes<T>(n, k, d, group.key, map, seen, one);
        if (a.backward.key) multiply_lanes<T>(n, d, k, coef, map.t(), to, one);
        multiply_lanes<T>(d, k, n, group.key.t(), coef, map, one);
        if (a.backward.query) multiply_lanes<T>(m, d, k, grad, map.t(), group.query, one);
    }
    solve(k, seen, s, arena);
    if (!a.backward.key) return;
    multiply_lanes<T>(n, n, k, coef, s.t(), both, one);
    for (Int i = 0; i < n; ++i)
        for (Int j = 0; j <= i; ++j) both(i, j) = both(j, i) = both(i, j) + both(j, i);
    multiply_lanes<T>(n, d, n, both, group.key, to, -group.gain, true);
}

// The same of the primal, with Z (d, k) and S = K~Z: R Z' - c S W' with R = V~ - c K~W
template <class T>
void primal_group(const RidgeArguments& a, const Group<T>& group, Lanes<T> grad, Lanes<T> coef,
                  const GroupSolver<T>& solve, Lanes<T> z, Lanes<T> s, Lanes<T> to, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const Vec<T> one = Vec<T>{} + T(1);
    const Lanes<T> y = room<T>(d, k, arena);
    multiply_lanes<T>(d, k, m, group.query.t(), grad, y, one);
    solve(k, y, z, arena);
    multiply_lanes<T>(n, k, d, group.key, z, s, one);
    if (a.backward.query) multiply_lanes<T>(m, d, k, grad, coef.t(), group.query, one);
    if (!a.backward.key) return;
    multiply_lanes<T>(n, k, d, group.key, coef, group.value, -group.gain, true);
    multiply_lanes<T>(n, d, k, group.value, z.t(), to, one);
    multiply_lanes<T>(n, d, k, s, coef.t(), to, -group.gain, true);
}

// Gradients of a register of elements that the plain factor served; none of weight and gain.
template <class T>
void backward_group(const RidgeArguments& a, Int b, int count, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns, size = a.dual ? n : d;
    arena.reset();
    const Group<T> group = read_group<T>(a, b, count, !a.dual, arena);
    const Lanes<T> grad = read<T>(m, k, a.backward.grad, a.inner, a.batch, b, count, 1, arena);
    const Lanes<T> coef = read<T>(size, k, {a.coef, size * k, 0, k}, 1, a.batch, b, count, 1, arena);
    const GroupSolver<T> solve = saved_solver<T>(a, b, count, size, arena);
    for (Int i = 0; a.scale != 1 && i < m * k; ++i) grad.p[i] *= T(a.scale);
    const Lanes<T> s = room<T>(n, k, arena), solved = a.dual ? s : room<T>(d, k, arena), key = room<T>(n, d, arena);
    if (a.dual) {
        dual_group<T>(a, group, grad, coef, solve, s, key, arena);
    } else {
        primal_group<T>(a, group, grad, coef, solve, solved, s, key, arena);
    }
    if (a.backward.query) write<T>(m, d, count, group.query, a.backward.query, b);
    if (a.backward.alpha) alpha_gradient_group<T>(a, b, count, size * k, solved.p, coef.p);
    scale_lanes<T>(n, d, group.root_weight, key);
    clear_lanes<T>(a, b, count, d, key);
    if (a.backward.key) write<T>(n, d, count, key, a.backward.key, b);
    scale_lanes<T>(n, k, group.root_weight, s);
    clear_lanes<T>(a, b, count, k, s);
    if (a.backward.value) write<T>(n, k, count, s, a.backward.value, b);
}

}  // namespace INTENTION_ARCH
