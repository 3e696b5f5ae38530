// Q (c K'WK + alpha I)^-1 K'WV for a batch, one element (or one register of small elements) at a time.
#include "head.h"
#include "kernels.h"
#include "solver.h"

namespace INTENTION_ARCH {

template <class T>
struct Work {  // of one element, between the steps
    Head<T> head;
    In<T> key, value;  // K~, V~
    T* sigma;          // then U
    T largest;         // of Sigma's diagonal
    Pivots<T> pivots;
    Solver<T> solve;
};

// c K~'K~ + alpha I, or c K~K~' + alpha I; upper triangle, padded with a unit diagonal
template <class T>
void gram(const RidgeArguments& a, Work<T>& w, Int n, Int size, Arena& arena) {
    w.sigma = arena.zeros<T>(size * size);
    const In<T> left = a.dual ? w.key : w.key.t();
    multiply<T>(n, n, a.dual ? a.features : a.points, left, left.t(), rows_of(w.sigma, size), w.head.gain, false, UPPER);
    w.largest = -T(__builtin_inf());
    for (Int i = 0; i < n; ++i) {
        T& entry = w.sigma[i * size + i];
        entry += w.head.alpha;
        w.largest = entry > w.largest || entry != entry ? entry : w.largest;
    }
    for (Int i = n; i < size; ++i) w.sigma[i * size + i] = 1;
}

template <class T>
void factor_one(Work<T>& w, Int n, Int size, bool inverse, Arena& arena) {
    T *reciprocal = arena.take<T>(size), *x = arena.take<T>(size * size);
    w.pivots = cholesky(n, size, w.sigma, reciprocal);
    invert_factor<T>(size, w.sigma, reciprocal, x);
    w.solve = {n, rows_of<const T>(x, size), {nullptr, 0, 0}};
    if (inverse) {
        T* full = arena.take<T>(size * size);
        cross(size, x, full);
        w.solve.inverse = rows_of<const T>(full, size);
    }
}

// Small ones, as many at once as a register has lanes.
template <class T>
void factor_group(Work<T>* w, int count, Int n, Int size, bool inverse, Arena& arena) {
    constexpr int W = WIDTH<T>;
    const Int all = size * size;
    T *mixed = arena.take<T>(all * W), *apart = arena.take<T>(all * W);  // entry by entry; element by element
    Vec<T>* x = reinterpret_cast<Vec<T>*>(arena.take<T>(all * W));
    Vec<T>* inverses = reinterpret_cast<Vec<T>*>(arena.take<T>(all * W));
    const Int step = w[1].sigma - w[0].sigma;  // equal pieces of the arena
    const bool even = count == W && w[W - 1].sigma - w[0].sigma == (W - 1) * step;
    const T* from = w[0].sigma;
    if (!even) {
        for (int g = 0; g < W; ++g)
            std::memcpy(apart + g * all, w[g < count ? g : 0].sigma, std::size_t(all) * sizeof(T));
        from = apart;
    }
    for (Int i = 0; i < n; ++i) transpose<T>(W, n, from + i * size, even ? step : all, mixed + i * size * W, W);
    Pivots<T> pivots[W];
    factor_together<T>(n, size, reinterpret_cast<Vec<T>*>(mixed), x, inverses, pivots);
    for (Int i = 0; i < n; ++i) transpose<T>(n, W, reinterpret_cast<T*>(inverses + i * size), W, apart + i * size, all);
    for (int g = 0; g < count; ++g) {
        for (Int i = 0; i < n && !inverse; ++i)
            for (Int j = i; j < n; ++j) w[g].sigma[i * size + j] = mixed[(i * size + j) * W + g];
        w[g].pivots = pivots[g];
        w[g].solve = {n, {nullptr, 0, 0}, rows_of<const T>(apart + g * all, size)};
    }
}

constexpr Int PROBED = 8;  // as in factor.py

// A lower bound of Sigma's condition: its largest diagonal entry times what is known of the inverse.
template <class T>
T ratio_of(const RidgeArguments& a, const Work<T>& w, Int n, Arena& arena) {
    if (w.pivots.failed) return T(__builtin_inf());
    T grown = w.pivots.grown;
    if (a.inverse) {
        for (Int i = 0; i < n; ++i)
            if (const T x = w.solve.inverse(i, i); !(x <= grown)) grown = x;
    } else if (n > PROBED) {
        const Mat<T> b = columns<T>(n, 1, true, arena), y = columns<T>(n, 1, true, arena);
        T before = 0, after = 0;
        for (Int i = 0; i < n; ++i) b.p[i] = 1 + T(i) / T(n - 1);
        w.solve(1, b, y, arena);
        for (Int i = 0; i < n; ++i) before += b.p[i] * b.p[i], after += y.p[i] * y.p[i];
        if (const T x = root(after / before); !(x <= grown)) grown = x;
    }
    return w.largest * grown;
}

// NaN where a weight, alpha or gain is not allowed
template <class T>
T screened(const RidgeArguments& a, const Work<T>& w, T ratio) {
    bool good = w.head.alpha >= 0 && w.head.gain >= 0;
    for (Int i = 0; w.head.weight && i < a.points; ++i) good &= w.head.weight[i] >= 0;
    return good ? ratio : T(__builtin_nan(""));
}

constexpr Int QUERY_BLOCK = 64;

// scale Q W, or scale Q K~'P in the order that costs less
template <class T>
void project(const RidgeArguments& a, const Work<T>& w, In<T> coef, T scale, T* out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    if (!a.dual) {
        multiply<T>(m, k, d, w.head.query, coef, rows_of(out, k), scale);
    } else if ((n + m) * d * k <= m * n * (d + k)) {
        const Mat<T> map = columns<T>(d, k, coef.rs == 1, arena);
        multiply<T>(d, k, n, w.key.t(), coef, map);
        multiply<T>(m, k, d, w.head.query, map, rows_of(out, k), scale);
    } else {
        T* scores = arena.take<T>(smaller(QUERY_BLOCK, m) * n);
        for (Int i = 0; i < m; i += QUERY_BLOCK) {
            const Int some = smaller(QUERY_BLOCK, m - i);
            multiply<T>(some, n, d, w.head.query.at(i, 0), w.key.t(), rows_of(scores, n));
            multiply<T>(some, k, n, rows_of<const T>(scores, n), coef, rows_of(out + i * k, k), scale);
        }
    }
}

template <class T>
void predict(const RidgeArguments& a, const Work<T>& w, In<T> coef, T* out, Arena& arena) {
    project<T>(a, w, coef, T(a.scale), out, arena);
    for (Int i = 0; w.head.mean_value && i < a.queries; ++i)
        for (Int j = 0; j < a.columns; ++j) out[i * a.columns + j] += w.head.mean_value[j];
}

// One refinement step, its residual taken from K and V: V~ - c K~K~'P - alpha P, or K~'(V~ - c K~W) - alpha W
template <class T>
void refinement(const RidgeArguments& a, const Work<T>& w, In<T> coef, Mat<T> step, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns, size = w.solve.n;
    const bool as_rows = coef.rs == 1;
    const Mat<T> rest = columns<T>(size, k, as_rows, arena);
    if (a.dual) {
        const Mat<T> map = columns<T>(d, k, as_rows, arena);
        multiply<T>(d, k, n, w.key.t(), coef, map);
        for (Int i = 0; i < n; ++i)
            for (Int j = 0; j < k; ++j) rest(i, j) = w.value(i, j);
        multiply<T>(n, k, d, w.key, map, rest, -w.head.gain, true);
    } else {
        const Mat<T> missed = rows_of(arena.take<T>(n * k), k);
        copy_rows<T>(n, k, w.value, missed.p);
        multiply<T>(n, k, d, w.key, coef, missed, -w.head.gain, true);
        multiply<T>(d, k, n, w.key.t(), missed, rest);
    }
    for (Int i = 0; i < size * k; ++i) rest.p[i] -= w.head.alpha * coef.p[i];
    w.solve(k, rest, step, arena);
}

// |step| / |whole| over the entries that are finite
template <class T>
T relative_size(Int count, const T* step, const T* whole) {
    double above = 0, below = 0;
    for (Int i = 0; i < count; ++i)
        if (__builtin_isfinite(step[i]) && __builtin_isfinite(whole[i])) {
            above += double(step[i]) * step[i];
            below += double(whole[i]) * whole[i];
        }
    const double tiny = sizeof(T) == 4 ? __FLT_MIN__ : __DBL_MIN__;
    return T(__builtin_sqrt(above) / larger(__builtin_sqrt(below), tiny));
}

// Refines coefficients and prediction in place where that succeeds.
template <class T>
bool refine(const RidgeArguments& a, const Work<T>& w, Mat<T> coef, T* out, T& error, Arena& arena) {
    const Int count = a.queries * a.columns;
    const Mat<T> step = columns<T>(w.solve.n, a.columns, coef.rs == 1, arena);
    refinement<T>(a, w, coef, step, arena);
    T *moved = arena.take<T>(count), *whole = arena.take<T>(count);
    project<T>(a, w, step, 1, moved, arena);
    project<T>(a, w, coef, 1, whole, arena);
    const T size = relative_size(count, moved, whole);
    if (!(size < T(a.small_correction))) return false;
    for (Int i = 0; i < w.solve.n * a.columns; ++i) coef.p[i] += step.p[i];
    predict<T>(a, w, coef, out, arena);
    error = size;
    return true;
}

// Solution, prediction and report of one element.
template <class T>
Status finish(const RidgeArguments& a, const Work<T>& w, Int b, Int n, Int size, Arena& arena) {
    const Int k = a.columns;
    T* out = static_cast<T*>(a.forward.out) + b * a.queries * k;
    T* kept = static_cast<T*>(a.coef) + b * n * k;
    T* report = static_cast<T*>(a.forward.report) + b * 3;
    const bool as_rows = !a.inverse;
    const Mat<T> coef = as_rows ? columns<T>(n, k, true, arena) : rows_of(kept, k);
    In<T> rhs = w.value;
    if (!a.dual || as_rows) {
        const Mat<T> y = columns<T>(n, k, as_rows, arena);
        if (a.dual) {
            transpose<T>(n, k, w.value.p, w.value.rs, y.p, n);
        } else {
            multiply<T>(n, k, a.points, w.key.t(), w.value, y);
        }
        rhs = y;
    }
    w.solve(k, rhs, coef, arena);
    predict<T>(a, w, coef, out, arena);
    const T ratio = screened(a, w, ratio_of(a, w, n, arena));
    const T eps = sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__);
    report[0] = a.dual ? DUAL : PRIMAL, report[1] = ratio, report[2] = ratio * eps;
    Status status = ratio < T(a.easy) ? PLAIN : SOME_LEFT;
    if (status != PLAIN && ratio < T(a.hard) && refine(a, w, coef, out, report[2], arena))
        status = SOME_REFINED, report[0] = REFINED;
    if (as_rows) transpose<T>(k, n, coef.p, n, kept, k);
    T* matrix = static_cast<T*>(a.matrix) + b * n * n;
    if (a.inverse) {
        copy_rows<T>(n, n, w.solve.inverse, matrix);
    } else {
        for (Int i = 0; i < n; ++i) {
            std::memset(matrix + i * n, 0, std::size_t(i) * sizeof(T));
            std::memcpy(matrix + i * n + i, w.sigma + i * size + i, std::size_t(n - i) * sizeof(T));
        }
    }
    return status;
}

template <class T>
int forward(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    const Int n = a.dual ? a.points : a.features, size = padded<T>(n);
    const bool copies = a.intercept || a.weight.data;
    const Int copied = copies ? a.points * (a.features + a.columns) + a.queries * a.features : 0;
    const bool together = n <= SMALL && copied <= 4096 && to - from > 2;
    int status = PLAIN;
    Work<T> work[WIDTH<T> > 1 ? WIDTH<T> : 2];
    for (Int b = from; b < to;) {
        arena.reset();
        const int count = together ? int(smaller<Int>(WIDTH<T>, to - b)) : 1;
        for (int g = 0; g < count; ++g) {
            Work<T>& w = work[g];
            w.head = head_of<T>(a, b + g);
            if (a.intercept) centre(a, w.head, arena);
            w.key = weighted(a.points, a.features, w.head.key, w.head.weight, arena);
            w.value = weighted(a.points, a.columns, w.head.value, w.head.weight, arena);
            gram(a, w, n, size, arena);
        }
        if (together) {
            factor_group(work, count, n, size, bool(a.inverse), arena);
        } else {
            factor_one(work[0], n, size, bool(a.inverse), arena);
        }
        for (int g = 0; g < count; ++g) {
            status = larger<int>(status, finish(a, work[g], b + g, n, size, arena));
        }
        b += count;
    }
    arena.reset();
    return status;
}

int ridge_forward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? forward<double>(a, from, to) : forward<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
