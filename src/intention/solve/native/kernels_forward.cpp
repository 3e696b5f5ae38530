// Q (c K'WK + alpha I)^-1 K'WV for a batch, one element (or one register of small elements) at a time.
#include "fit.h"
#include "kernels.h"
#include "together.h"

namespace INTENTION_ARCH {

constexpr Int QUERY_BLOCK = 64;

// scale Q W, or scale Q K~'P in the order that costs less
template <class T>
void project(const RidgeArguments& a, const Fit<T>& f, In<T> coef, T scale, T* out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    if (!a.dual) {
        multiply<T>(m, k, d, f.head.query, coef, rows_of(out, k), scale);
    } else if (!scores_cost_less(a)) {
        const Mat<T> map = columns<T>(d, k, coef.rs == 1, arena);
        multiply<T>(d, k, n, f.key.t(), coef, map);
        multiply<T>(m, k, d, f.head.query, map, rows_of(out, k), scale);
    } else {
        T* scores = arena.take<T>(smaller(QUERY_BLOCK, m) * n);
        for (Int i = 0; i < m; i += QUERY_BLOCK) {
            const Int some = smaller(QUERY_BLOCK, m - i);
            multiply<T>(some, n, d, f.head.query.at(i, 0), f.turned, rows_of(scores, n));
            multiply<T>(some, k, n, rows_of<const T>(scores, n), coef, rows_of(out + i * k, k), scale);
        }
    }
}

// scale (Q K~'Sigma^-1) V~
template <class T>
void weigh(const RidgeArguments& a, const Fit<T>& f, T* out, Arena& arena) {
    const Int n = a.points, m = a.queries, k = a.columns;
    const Mat<T> scores = rows_of(arena.take<T>(m * n), n), weights = rows_of(arena.take<T>(m * n), n);
    multiply<T>(m, n, a.features, f.head.query, f.turned, scores);
    multiply<T>(m, n, n, scores, f.solve.inverse, weights);
    multiply<T>(m, k, n, weights, f.value, rows_of(out, k), T(a.scale));
}

// One refinement step, its residual taken from K and V: V~ - c K~K~'P - alpha P, or K~'(V~ - c K~W) - alpha W
template <class T>
void refinement(const RidgeArguments& a, const Fit<T>& f, In<T> coef, Mat<T> step, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns, size = f.solve.n;
    const bool as_rows = coef.rs == 1;
    const Mat<T> rest = columns<T>(size, k, as_rows, arena);
    if (a.dual) {
        const Mat<T> map = columns<T>(d, k, as_rows, arena);
        multiply<T>(d, k, n, f.key.t(), coef, map);
        for (Int i = 0; i < n; ++i)
            for (Int j = 0; j < k; ++j) rest(i, j) = f.value(i, j);
        multiply<T>(n, k, d, f.key, map, rest, -f.head.gain, true);
    } else {
        const Mat<T> missed = rows_of(arena.take<T>(n * k), k);
        copy_rows<T>(n, k, f.value, missed.p);
        multiply<T>(n, k, d, f.key, coef, missed, -f.head.gain, true);
        multiply<T>(d, k, n, f.key.t(), missed, rest);
    }
    for (Int i = 0; i < size * k; ++i) rest.p[i] -= f.head.alpha * coef.p[i];
    f.solve(k, rest, step, arena);
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

// Refines coefficients and prediction (without means) in place where that succeeds.
template <class T>
bool refine(const RidgeArguments& a, const Fit<T>& f, Mat<T> coef, T* out, T& error, Arena& arena) {
    const Int count = a.queries * a.columns;
    const Mat<T> step = columns<T>(f.solve.n, a.columns, coef.rs == 1, arena);
    refinement<T>(a, f, coef, step, arena);
    T* moved = arena.take<T>(count);
    project<T>(a, f, step, T(a.scale), moved, arena);
    const T size = relative_size(count, moved, out);
    if (!(size < T(a.small_correction))) return false;
    for (Int i = 0; i < f.solve.n * a.columns; ++i) coef.p[i] += step.p[i];
    for (Int i = 0; i < count; ++i) out[i] += moved[i];
    error = size;
    return true;
}

// Coefficients and prediction (without means), refined where the factor alone is not trusted.
template <class T>
Status solve_for(const RidgeArguments& a, const Fit<T>& f, Int b, Int n, T* out, T* report, Arena& arena) {
    const Int k = a.columns;
    T* kept = a.coef ? static_cast<T*>(a.coef) + b * n * k : arena.take<T>(n * k);
    const bool as_rows = !a.inverse;
    const Mat<T> coef = as_rows ? columns<T>(n, k, true, arena) : rows_of(kept, k);
    In<T> rhs = f.value;
    if (!a.dual || as_rows) {
        const Mat<T> y = columns<T>(n, k, as_rows, arena);
        if (a.dual) {
            transpose<T>(n, k, f.value.p, f.value.rs, y.p, n);
        } else {
            multiply<T>(n, k, a.points, f.key.t(), f.value, y);
        }
        rhs = y;
    }
    f.solve(k, rhs, coef, arena);
    project<T>(a, f, coef, T(a.scale), out, arena);
    const T ratio = report[1];
    Status status = ratio < T(a.easy) ? PLAIN : SOME_LEFT;
    if (status != PLAIN && ratio < T(a.hard) && refine(a, f, coef, out, report[2], arena))
        status = SOME_REFINED, report[0] = REFINED;
    if (as_rows && a.coef) transpose<T>(k, n, coef.p, n, kept, k);
    return status;
}

// Solution, prediction and report of one element.
template <class T>
Status finish(const RidgeArguments& a, const Fit<T>& f, Int b, Int n, Arena& arena) {
    const Int k = a.columns;
    T *out = static_cast<T*>(a.forward.out) + b * a.queries * k, *report = static_cast<T*>(a.forward.report) + b * 3;
    const T ratio = screened(a, f, ratio_of(a, f, n, arena));
    const T eps = sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__);
    report[0] = a.dual ? DUAL : PRIMAL, report[1] = ratio, report[2] = ratio * eps;
    Status status = PLAIN;
    if (ratio < T(a.easy) && f.solve.inverse.p && weights_cost_less(a)) {
        weigh(a, f, out, arena);
    } else {
        status = solve_for(a, f, b, n, out, report, arena);
    }
    for (Int i = 0; f.head.mean_value && i < a.queries; ++i)
        for (Int j = 0; j < k; ++j) out[i * k + j] += f.head.mean_value[j];
    keep_factor(a, f, b, n);
    return status;
}

template <class T>
int forward(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    Fit<T> fits[WIDTH<T>];
    int status = PLAIN;
    const bool small = fits_lanes(a), whole = a.matrix || a.columns > (a.dual ? a.points : a.features);
    for (Int b = from; b < to;) {
        const int lanes = int(smaller<Int>(WIDTH<T>, to - b));
        if (small && 2 * lanes >= WIDTH<T> && forward_group<T>(a, b, lanes, arena)) {
            b += lanes;
            continue;
        }
        const int count = fit_next(a, b, to, whole, fits, arena);
        for (int g = 0; g < count; ++g)
            status = larger<int>(status, finish(a, fits[g], b + g, a.dual ? a.points : a.features, arena));
        b += count;
    }
    arena.reset();
    return status;
}

int ridge_forward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? forward<double>(a, from, to) : forward<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
