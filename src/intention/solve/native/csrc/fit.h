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
    const T* counts;   // 0 for rows of Sigma that are those of alpha I, else 1; null: all count
    T largest;         // eigenvalue, from above; as `ratio_of` knows it better
    Pivots<T> pivots;
    Solver<T> solve;
};

constexpr Int WORTH_TURNING = 32;
constexpr double CLOSER = 80, STRETCHED = 1.25;  // of the largest eigenvalue: as in factor.py
constexpr int PRODUCTS = 3;

// Rows of c K~'K~ that are 0: points left out, features that are not there. They are apart from the others, and what is
// solved for them is exact: they say nothing of the condition.
template <class T>
const T* which_count(Int n, const T* sigma, Int size, Arena& arena) {
    T* counts = nullptr;
    for (Int i = 0; i < n; ++i) {
        if (sigma[i * size + i] != 0) continue;
        if (!counts) {
            counts = arena.take<T>(n);
            for (Int j = 0; j < n; ++j) counts[j] = 1;
        }
        counts[i] = 0;
    }
    return counts;
}

// The largest eigenvalue is at most m + s sqrt(n - 1), with the mean m of all and their spread s,
// n s^2 = |Sigma - m I|^2.
template <class T>
T largest_eigenvalue(Int n, const T* sigma, Int size, const T* counts) {
    constexpr Int W = WIDTH<T>;
    T trace = 0, rows = 0, squares = 0;
    for (Int i = 0; i < n; ++i)
        if (!counts || counts[i] != 0) trace += sigma[i * size + i], ++rows;
    const T scale = rows / trace;
    for (Int i = 0; i < n; ++i)
        if (!counts || counts[i] != 0) squares += (scale * sigma[i * size + i] - 1) * (scale * sigma[i * size + i] - 1);
    Vec<T> lane, above[2] = {};
    for (int g = 0; g < W; ++g) lane[g] = T(g);
    for (Int i = 0; i < n; ++i) {  // right of the diagonal; beyond n there are zeros
        const Int first = i / W * W;
        Vec<T> x = load<T>(sigma + i * size + first);
        x = scale * (lane > T(i - first) ? x : Vec<T>{});
        above[0] += x * x;
        for (Int j = first + W; j < size; j += W) {
            x = scale * load<T>(sigma + i * size + j);
            above[j / W % 2] += x * x;
        }
    }
    const Vec<T> both = sums_of<T, 2>(above);
    squares += 2 * (both[0] + both[1]);
    return rows > 0 ? (1 + root(squares / rows * (rows - 1))) / scale : trace;
}

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
    f.counts = which_count(n, f.sigma, size, arena);
    for (Int i = 0; i < n; ++i) f.sigma[i * size + i] += f.head.alpha;
    f.largest = largest_eigenvalue(n, f.sigma, size, f.counts);
    for (Int i = n; i < size; ++i) f.sigma[i * size + i] = 1;
}

template <class T>
void factor_one(Fit<T>& f, Int n, Int size, bool inverse, Arena& arena) {
    T *reciprocal = arena.take<T>(size), *x = arena.take<T>(size * size);
    f.pivots = cholesky(n, size, f.sigma, reciprocal, f.counts);
    invert_factor<T>(size, f.sigma, reciprocal, x);
    f.solve = {n, rows_of<const T>(x, size), {nullptr, 0, 0}};
    if (inverse) {
        T* full = arena.take<T>(size * size);
        cross(size, x, full);
        f.solve.inverse = rows_of<const T>(full, size);
    }
}

template <class T>
Lanes<T> room(Int rows, Int columns, Arena& arena) {
    return {reinterpret_cast<Vec<T>*>(arena.take<T>(rows * columns * WIDTH<T>)), columns, 1};
}

// Small ones, as many at once as a register has lanes.
template <class T>
void factor_group(Fit<T>* f, int count, Int n, Int size, bool inverse, Arena& arena) {
    constexpr int W = WIDTH<T>;
    const Int all = size * size;
    T *mixed = arena.take<T>(all * W), *apart = arena.take<T>(all * W);  // entry by entry; element by element
    const Lanes<T> u = {reinterpret_cast<Vec<T>*>(mixed), size, 1}, x = room<T>(size, size, arena),
                   inverses = room<T>(size, size, arena);
    const Int step = f[1].sigma - f[0].sigma;  // equal pieces of the arena
    const bool even = count == W && f[W - 1].sigma - f[0].sigma == (W - 1) * step;
    const T* from = f[0].sigma;
    if (!even) {
        for (int g = 0; g < W; ++g)
            std::memcpy(apart + g * all, f[g < count ? g : 0].sigma, std::size_t(all) * sizeof(T));
        from = apart;
    }
    for (Int i = 0; i < n; ++i) transpose<T>(W, n, from + i * size, even ? step : all, mixed + i * size * W, W);
    Vec<T> reciprocal[SMALL];
    const auto failed = cholesky_together<T>(n, u, reciprocal);
    invert_together<T>(n, u, reciprocal, x);
    cross_together<T>(n, x, inverses);
    for (Int i = 0; i < n; ++i) transpose<T>(n, W, reinterpret_cast<T*>(&inverses(i, 0)), W, apart + i * size, all);
    for (int g = 0; g < count; ++g) {
        for (Int i = 0; i < n && !inverse; ++i)
            for (Int j = i; j < n; ++j) f[g].sigma[i * size + j] = mixed[(i * size + j) * W + g];
        f[g].pivots = {0, failed[g] != 0};  // the diagonal of the inverse says more than they do
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

// Sigma's largest eigenvalue, nearly: how much the last of some products with it stretches a vector.
template <class T>
T stretch(const RidgeArguments& a, const Fit<T>& f, Int n, Arena& arena) {
    const Int other = a.dual ? a.features : a.points;
    const In<T> there = a.dual ? f.key : f.key.t(), back = there.t();
    const Mat<T> x = columns<T>(n, 1, true, arena), y = columns<T>(n, 1, true, arena),
                 half = columns<T>(other, 1, true, arena);
    const T scale = 1 / f.largest;  // so that nothing overflows
    T before = 0, after = 0;
    for (Int i = 0; i < n; ++i) x.p[i] = (T(37 * i % 64) - T(31.5)) * (f.counts ? f.counts[i] : 1);
    for (int product = 0; product < PRODUCTS; ++product) {
        before = after = 0;
        multiply<T>(1, other, n, x.t(), there, half.t());
        multiply<T>(1, n, other, half.t(), back, y.t(), f.head.gain * scale);
        for (Int i = 0; i < n; ++i) {
            before += x.p[i] * x.p[i];
            x.p[i] = y.p[i] + f.head.alpha * scale * x.p[i];
            after += x.p[i] * x.p[i];
        }
    }
    return f.largest * root(after / before);
}

// An estimate of Sigma's condition, as in factor.py: its largest eigenvalue from above, that of its inverse from below.
template <class T>
T ratio_of(const RidgeArguments& a, Fit<T>& f, Int n, Arena& arena) {
    if (f.pivots.failed) return T(__builtin_inf());
    T grown = f.pivots.grown;
    if (a.inverse || n <= SMALL) {
        const T* diagonal = diagonal_of_inverse(f.solve, arena);
        for (Int i = 0; i < n; ++i)
            if (!(diagonal[i] <= grown) && (!f.counts || f.counts[i] != 0)) grown = diagonal[i];
    } else {
        const Mat<T> b = columns<T>(n, 1, true, arena), y = columns<T>(n, 1, true, arena);
        T before = 0, after = 0;
        for (Int i = 0; i < n; ++i) b.p[i] = (1 + T(i) / T(n - 1)) * (f.counts ? f.counts[i] : 1);
        f.solve(1, b, y, arena);
        for (Int i = 0; i < n; ++i) before += b.p[i] * b.p[i], after += y.p[i] * y.p[i];
        if (const T x = root(after / before); !(x <= grown)) grown = x;
    }
    if (f.largest * grown >= T(CLOSER))
        if (const T less = T(STRETCHED) * stretch(a, f, n, arena); less < f.largest) f.largest = less;
    const T ratio = f.largest * grown;
    return ratio < 1 ? 1 : ratio;  // below where no row counts
}

// NaN where a weight, alpha or gain is not allowed
template <class T>
T screened(const RidgeArguments& a, const Fit<T>& f, T ratio) {
    bool good = f.head.alpha >= 0 && f.head.gain >= 0;
    for (Int i = 0; f.head.weight && i < a.points; ++i) good &= f.head.weight[i] >= 0;
    return good ? ratio : T(__builtin_nan(""));
}

// Sigma of an element whose head is there
template <class T>
void prepare(const RidgeArguments& a, Fit<T>& f, Int n, Int size, Arena& arena) {
    if (a.intercept) centre(a, f.head, arena);
    f.key = weighted(a.points, a.features, f.head.key, f.head.weight, arena);
    f.value = weighted(a.points, a.columns, f.head.value, f.head.weight, arena);
    gram(a, f, n, size, arena);
}

// Element b in double, for the rungs of the ladder above T's own; without the inverse.
template <class T>
Fit<double> fit_wide(const RidgeArguments& a, Int b, Int n, Arena& arena) {
    Fit<double> f;
    f.head = widened(a, head_of<T>(a, b, arena), arena);
    prepare(a, f, n, padded<double>(n), arena);
    factor_one(f, n, padded<double>(n), false, arena);
    return f;
}

// Fits the next elements, one or as many small ones as a register has lanes; returns how many. Without `whole` an inverse
// is not written out: its factors will do.
template <class T>
int fit_next(const RidgeArguments& a, Int b, Int to, bool whole, Fit<T>* fits, Arena& arena) {
    const Int n = a.dual ? a.points : a.features, size = padded<T>(n);
    const bool copies = a.intercept || a.weight.data || a.keep.data;
    const Int copied = copies ? a.points * (a.features + a.columns) + a.queries * a.features : 0;
    const bool together = n <= SMALL && copied <= 4096 && to - b > 2;
    const int count = together ? int(smaller<Int>(WIDTH<T>, to - b)) : 1;
    arena.reset();
    for (int g = 0; g < count; ++g) {
        fits[g].head = head_of<T>(a, b + g, arena);
        prepare(a, fits[g], n, size, arena);
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
