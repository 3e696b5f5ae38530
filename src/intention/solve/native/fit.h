// Sigma = c K'WK + alpha I of an element (or its N x N counterpart), its factor and how far that can be trusted.
#pragma once

#include "head.h"
#include "solver.h"

namespace INTENTION_ARCH {

template <class T>
struct Fit {  // of one element, between the steps
    Head<T> head;
    In<T> key, value;  // K~, V~
    In<T> turned;      // K~', copied where it is used often
    T* sigma;          // then U
    T largest;         // of Sigma's diagonal
    Pivots<T> pivots;
    Solver<T> solve;
};

constexpr Int WORTH_TURNING = 32;

// c K~'K~ + alpha I, or c K~K~' + alpha I; upper triangle, padded with a unit diagonal
template <class T>
void gram(const RidgeArguments& a, Fit<T>& f, Int n, Int size, Arena& arena) {
    f.sigma = size == n ? arena.take<T>(size * size) : arena.zeros<T>(size * size);
    f.turned = f.key.t();
    if (a.dual && n >= WORTH_TURNING && scores_cost_less(a)) {
        T* copy = arena.take<T>(a.features * n);
        transpose<T>(n, a.features, f.key.p, f.key.rs, copy, n);
        f.turned = rows_of<const T>(copy, n);
    }
    const In<T> left = a.dual ? f.key : f.turned, right = a.dual ? f.turned : f.key;
    multiply<T>(n, n, a.dual ? a.features : a.points, left, right, rows_of(f.sigma, size), f.head.gain, false, UPPER);
    f.largest = -T(__builtin_inf());
    for (Int i = 0; i < n; ++i) {
        T& entry = f.sigma[i * size + i];
        entry += f.head.alpha;
        f.largest = entry > f.largest || entry != entry ? entry : f.largest;
    }
    for (Int i = n; i < size; ++i) f.sigma[i * size + i] = 1;
}

template <class T>
void factor_one(Fit<T>& f, Int n, Int size, bool inverse, Arena& arena) {
    T *reciprocal = arena.take<T>(size), *x = arena.take<T>(size * size);
    f.pivots = cholesky(n, size, f.sigma, reciprocal);
    invert_factor<T>(size, f.sigma, reciprocal, x);
    f.solve = {n, rows_of<const T>(x, size), {nullptr, 0, 0}};
    if (inverse) {
        T* full = arena.take<T>(size * size);
        cross(size, x, full);
        f.solve.inverse = rows_of<const T>(full, size);
    }
}

// Small ones, as many at once as a register has lanes.
template <class T>
void factor_group(Fit<T>* f, int count, Int n, Int size, bool inverse, Arena& arena) {
    constexpr int W = WIDTH<T>;
    const Int all = size * size;
    T *mixed = arena.take<T>(all * W), *apart = arena.take<T>(all * W);  // entry by entry; element by element
    Vec<T>* x = reinterpret_cast<Vec<T>*>(arena.take<T>(all * W));
    Vec<T>* inverses = reinterpret_cast<Vec<T>*>(arena.take<T>(all * W));
    const Int step = f[1].sigma - f[0].sigma;  // equal pieces of the arena
    const bool even = count == W && f[W - 1].sigma - f[0].sigma == (W - 1) * step;
    const T* from = f[0].sigma;
    if (!even) {
        for (int g = 0; g < W; ++g)
            std::memcpy(apart + g * all, f[g < count ? g : 0].sigma, std::size_t(all) * sizeof(T));
        from = apart;
    }
    for (Int i = 0; i < n; ++i) transpose<T>(W, n, from + i * size, even ? step : all, mixed + i * size * W, W);
    Pivots<T> pivots[W];
    Vec<T>*u = reinterpret_cast<Vec<T>*>(mixed), reciprocal[SMALL];
    cholesky_together<T>(n, size, u, reciprocal, pivots);
    invert_together<T>(n, size, u, reciprocal, x, inverses);
    for (Int i = 0; i < n; ++i) transpose<T>(n, W, reinterpret_cast<T*>(inverses + i * size), W, apart + i * size, all);
    for (int g = 0; g < count; ++g) {
        for (Int i = 0; i < n && !inverse; ++i)
            for (Int j = i; j < n; ++j) f[g].sigma[i * size + j] = mixed[(i * size + j) * W + g];
        f[g].pivots = pivots[g];
        f[g].solve = {n, {nullptr, 0, 0}, rows_of<const T>(apart + g * all, size)};
    }
}

template <class T>
T* diagonal_of_inverse(const Solver<T>& solve, Arena& arena) {
    constexpr Int W = WIDTH<T>;
    T* diagonal = arena.take<T>(padded<T>(solve.n));
    if (solve.inverse.p) {
        for (Int i = 0; i < solve.n; ++i) diagonal[i] = solve.inverse(i, i);
        return diagonal;
    }
    for (Int j = 0; j < solve.n; j += W) {  // columns of X, which is padded and starts with zeros
        Vec<T> even = {}, odd = {};
        for (Int i = j; i < padded<T>(solve.n); i += 2) {
            const Vec<T> x = load<T>(solve.x.p + i * solve.x.rs + j), y = load<T>(solve.x.p + (i + 1) * solve.x.rs + j);
            even += x * x, odd += y * y;
        }
        store<T>(diagonal + j, even + odd);
    }
    return diagonal;
}

constexpr Int PROBED = 8;  // as in factor.py

// A lower bound of Sigma's condition: its largest diagonal entry times what is known of the inverse.
template <class T>
T ratio_of(const RidgeArguments& a, const Fit<T>& f, Int n, Arena& arena) {
    if (f.pivots.failed) return T(__builtin_inf());
    T grown = f.pivots.grown;
    if (a.inverse) {
        const T* diagonal = diagonal_of_inverse(f.solve, arena);
        for (Int i = 0; i < n; ++i)
            if (!(diagonal[i] <= grown)) grown = diagonal[i];
    } else if (n > PROBED) {
        const Mat<T> b = columns<T>(n, 1, true, arena), y = columns<T>(n, 1, true, arena);
        T before = 0, after = 0;
        for (Int i = 0; i < n; ++i) b.p[i] = 1 + T(i) / T(n - 1);
        f.solve(1, b, y, arena);
        for (Int i = 0; i < n; ++i) before += b.p[i] * b.p[i], after += y.p[i] * y.p[i];
        if (const T x = root(after / before); !(x <= grown)) grown = x;
    }
    return f.largest * grown;
}

// NaN where a weight, alpha or gain is not allowed
template <class T>
T screened(const RidgeArguments& a, const Fit<T>& f, T ratio) {
    bool good = f.head.alpha >= 0 && f.head.gain >= 0;
    for (Int i = 0; f.head.weight && i < a.points; ++i) good &= f.head.weight[i] >= 0;
    return good ? ratio : T(__builtin_nan(""));
}

// Fits the next elements, one or as many small ones as a register has lanes; returns how many. Without `whole` an inverse
// is not written out: its factors will do.
template <class T>
int fit_next(const RidgeArguments& a, Int b, Int to, bool whole, Fit<T>* fits, Arena& arena) {
    const Int n = a.dual ? a.points : a.features, size = padded<T>(n);
    const bool copies = a.intercept || a.weight.data;
    const Int copied = copies ? a.points * (a.features + a.columns) + a.queries * a.features : 0;
    const bool together = n <= SMALL && copied <= 4096 && to - b > 2;
    const int count = together ? int(smaller<Int>(WIDTH<T>, to - b)) : 1;
    arena.reset();
    for (int g = 0; g < count; ++g) {
        Fit<T>& f = fits[g];
        f.head = head_of<T>(a, b + g);
        if (a.intercept) centre(a, f.head, arena);
        f.key = weighted(a.points, a.features, f.head.key, f.head.weight, arena);
        f.value = weighted(a.points, a.columns, f.head.value, f.head.weight, arena);
        gram(a, f, n, size, arena);
    }
    if (together) {
        factor_group(fits, count, n, size, bool(a.inverse), arena);
    } else {
        factor_one(fits[0], n, size, a.inverse && whole, arena);
    }
    return count;
}

// Sigma^-1, or L = U' with zeros above
template <class T>
void keep_factor(const RidgeArguments& a, const Fit<T>& f, Int b, Int n) {
    if (!a.matrix) return;
    T* matrix = static_cast<T*>(a.matrix) + b * n * n;
    if (a.inverse) {
        copy_rows<T>(n, n, f.solve.inverse, matrix);
        return;
    }
    transpose<T>(n, n, f.sigma, padded<T>(n), matrix, n);
    for (Int i = 0; i < n; ++i) std::memset(matrix + i * n + i + 1, 0, std::size_t(n - i - 1) * sizeof(T));
}

// The solver that a forward left behind.
template <class T>
Solver<T> saved_solver(const RidgeArguments& a, Int b, Int n, Arena& arena) {
    const T* matrix = static_cast<const T*>(a.matrix) + b * n * n;
    if (a.inverse) return {n, {nullptr, 0, 0}, rows_of(matrix, n)};  // symmetric
    const Int size = padded<T>(n);
    T *u = arena.zeros<T>(size * size), *reciprocal = arena.take<T>(size), *x = arena.take<T>(size * size);
    transpose<T>(n, n, matrix, n, u, size);
    for (Int i = 0; i < size; ++i) {
        if (i >= n) u[i * size + i] = 1;
        reciprocal[i] = 1 / u[i * size + i];
    }
    invert_factor<T>(size, u, reciprocal, x);
    return {n, rows_of<const T>(x, size), {nullptr, 0, 0}};
}

}  // namespace INTENTION_ARCH
