// Q (c K'WK + alpha I)^-1 K'WV for a batch, one element (or one register of small elements) at a time.
#include "coefficients.h"
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

// The answer so far is that of centred points.
template <class T>
void add_means(const RidgeArguments& a, const Head<T>& head, T* out) {
    for (Int i = 0; head.mean_value && i < a.queries; ++i)
        for (Int j = 0; j < a.columns; ++j) out[i * a.columns + j] += head.mean_value[j];
}

// scale (Q K~'Sigma^-1) V~
template <class T>
void weigh(const RidgeArguments& a, const Fit<T>& f, T* out, Arena& arena) {
    const Int n = a.points, m = a.queries, k = a.columns;
    const Mat<T> scores = rows_of(arena.take<T>(m * n), n), weights = rows_of(arena.take<T>(m * n), n);
    multiply<T>(m, n, a.features, f.head.query, f.turned, scores);
    multiply<T>(m, n, n, scores, f.solve.inverse, weights);
    multiply<T>(m, k, n, weights, f.value, rows_of(out, k), T(a.scale));
    add_means(a, f.head, out);
}

// |step| / |whole| over the entries that are finite
template <class T>
T relative_size(Int count, const T* step, const T* whole) {
    Vec<T> both[2] = {};
    for (Int i = 0; i < count; i += WIDTH<T>) {
        const int some = int(smaller<Int>(WIDTH<T>, count - i));
        const Vec<T> x = load_some<T>(step + i, some), y = load_some<T>(whole + i, some);
        both[0] += x * x, both[1] += y * y;
    }
    const Vec<T> sums = sums_of<T, 2>(both);
    if (sums[0] > 0 && sums[1] > 0 && __builtin_isfinite(sums[0] + sums[1])) return root(sums[0] / sums[1]);
    double above = 0, below = 0;
    for (Int i = 0; i < count; ++i)
        if (__builtin_isfinite(step[i]) && __builtin_isfinite(whole[i])) {
            above += double(step[i]) * step[i];
            below += double(whole[i]) * whole[i];
        }
    const double tiny = sizeof(T) == 4 ? __FLT_MIN__ : __DBL_MIN__;
    return T(__builtin_sqrt(above) / larger(__builtin_sqrt(below), tiny));
}

// What is accepted: a plain factor whose ratio is below `easy`, a refined one below `hard` whose step is small.
struct Limits {
    double easy, hard, step;
};

// Refines coefficients and prediction (without means) in place where that succeeds.
template <class T>
bool refine(const RidgeArguments& a, const Fit<T>& f, double limit, Mat<T> coef, T* out, T& error, Arena& arena) {
    const Int count = a.queries * a.columns;
    const Mat<T> step = columns<T>(f.solve.n, a.columns, coef.rs == 1, arena);
    refinement<T>(a, f, coef, step, arena);
    T* moved = arena.take<T>(count);
    project<T>(a, f, step, T(a.scale), moved, arena);
    const T size = relative_size(count, moved, out);
    if (!(size < T(limit))) return false;
    for (Int i = 0; i < f.solve.n * a.columns; ++i) coef.p[i] += step.p[i];
    for (Int i = 0; i < count; ++i) out[i] += moved[i];
    error = size;
    return true;
}

// Coefficients and prediction, refined where the factor alone is not trusted. `report`: route, ratio, error.
template <class T>
Status solve_for(const RidgeArguments& a, const Fit<T>& f, const Limits& limits, T* kept, T* out, T* report,
                 Arena& arena) {
    const Int n = f.solve.n, k = a.columns;
    const bool as_rows = !a.inverse;
    const Mat<T> coef = as_rows ? columns<T>(n, k, true, arena) : rows_of(kept, k);
    coefficients<T>(a, f, coef, arena);
    project<T>(a, f, coef, T(a.scale), out, arena);
    const T ratio = report[1];
    Status status = ratio < T(limits.easy) ? PLAIN : SOME_LEFT;
    if (status != PLAIN && ratio < T(limits.hard) &&
        refine(a, f, limits.step, coef, out, report[2], arena))
        status = SOME_REFINED, report[0] = REFINED;
    add_means(a, f.head, out);
    if (as_rows && a.coef) transpose<T>(k, n, coef.p, n, kept, k);
    return status;
}

// An element that T does not serve, in double.
template <class T>
Status climb(const RidgeArguments& a, Int b, Int n, T* out, T* report, Arena& arena) {
    constexpr double EPS = __FLT_EPSILON__;
    const Int k = a.columns, count = a.queries * k;
    Fit<double> f = fit_wide<T>(a, b, n, arena);
    const double ratio = screened(a, f, ratio_of(a, f, n, arena));
    // alpha = 0 and keys that are dependent up to their own rounding: ladder.py says so
    if (f.head.alpha == 0 && !(ratio < 1 / (16 * EPS * EPS))) return SOME_LEFT;
    double *wide = arena.take<double>(count), told[3] = {FLOAT64, ratio, ratio * __DBL_EPSILON__};
    const Limits limits = {EASY_WIDE, __builtin_inf(), SMALL_CORRECTION};
    if (solve_for<double>(a, f, limits, arena.take<double>(n * k), wide, told, arena) == SOME_LEFT) return SOME_LEFT;
    narrowed(count, wide, out);
    report[0] = FLOAT64, report[1] = T(ratio), report[2] = T(told[2] + EPS);
    return SOME_REFINED;
}

// Solution, prediction and report of one element.
template <class T>
Status finish(const RidgeArguments& a, Fit<T>& f, Int b, Int n, Arena& arena) {
    const Int k = a.columns;
    T *out = static_cast<T*>(a.forward.out) + b * a.queries * k, told[3];
    T* report = a.forward.report ? static_cast<T*>(a.forward.report) + b * 3 : told;
    const T ratio = screened(a, f, ratio_of(a, f, n, arena));
    const T eps = sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__);
    report[0] = a.dual ? DUAL : PRIMAL, report[1] = ratio, report[2] = ratio * eps;
    Status status = SOME_LEFT;
    keep_factor(a, f, b, n);
    if (ratio < T(a.easy) && f.solve.inverse.p && weights_cost_less(a)) {
        weigh(a, f, out, arena);
        return PLAIN;
    }
    if (ratio < T(a.hard)) {
        T* kept = a.coef ? static_cast<T*>(a.coef) + b * n * k : arena.take<T>(n * k);
        status = solve_for(a, f, {a.easy, a.hard, a.step}, kept, out, report, arena);
    }
    if constexpr (sizeof(T) == 4) {
        if (status == SOME_LEFT) return climb(a, b, n, out, report, arena);
    }
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
