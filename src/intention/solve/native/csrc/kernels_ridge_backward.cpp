// First-order gradients of ridge_forward from its coefficients and factor, as pullback.py has them.
#include "coefficients.h"
#include "kernels.h"
#include "together.h"

namespace INTENTION_ARCH {

template <class T>
struct Task {  // one element
    Head<T> head;
    In<T> grad;  // times scale
    In<T> coef;  // n x k
    Solver<T> solve;
    bool refined, as_rows;
};

template <class T>
struct Wanted {  // where gradients go; null: not needed
    T *query, *key, *value, *weight, *alpha, *alpha_terms, *gain;
};

// n x k rows side by side -> the layout in which the element is worked on
template <class T>
In<T> laid_out(Int n, Int k, In<T> rows, bool as_rows, Arena& arena) {
    if (!as_rows) return rows;
    const Mat<T> to = columns<T>(n, k, true, arena);
    transpose<T>(n, k, rows.p, rows.rs, to.p, n);
    return to;
}

// The other layout: k x n with n side by side, which is what a product x W' takes.
template <class T>
In<T> transposed(Int n, Int k, In<T> x, Arena& arena) {
    if (x.rs == 1) return x.t();
    T* to = arena.take<T>(n * k);
    transpose<T>(n, k, x.p, x.rs, to, n);
    return rows_of<const T>(to, n);
}

// -(x * y).sum() and its root sum of squares
template <class T>
void alpha_gradient(Int count, const T* x, const T* y, T* sum, T* terms) {
    constexpr Int W = WIDTH<T>;
    Vec<T> both[2] = {};
    for (Int i = 0; i < count; i += W) {
        const int some = int(smaller(W, count - i));
        const Vec<T> term = load_some<T>(x + i, some) * load_some<T>(y + i, some);
        both[0] += term;
        both[1] += term * term;
    }
    const Vec<T> sums = sums_of<T, 2>(both);
    *sum = -sums[0];
    if (terms) *terms = root(sums[1]);
}

template <class T>
void scale_rows(Int n, Int columns, const T* by, Mat<T> x) {
    for (Int i = 0; by && i < n; ++i)
        for (Int j = 0; j < columns; ++j) x(i, j) *= by[i];
}

template <class T>
T dot_rows(Int columns, const T* a, const T* b) {
    T sum = 0;
    for (Int j = 0; j < columns; ++j) sum += a[j] * b[j];
    return sum;
}

// y - c K'W(K z) - alpha z, then solved for and added to z
template <class T>
void refine_primal(const RidgeArguments& a, const Task<T>& t, In<T> y, Mat<T> z, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    const Mat<T> s = rows_of(arena.take<T>(n * k), k), rest = columns<T>(d, k, t.as_rows, arena),
                 step = columns<T>(d, k, t.as_rows, arena);
    multiply<T>(n, k, d, t.head.key, z, s);
    scale_rows(n, k, t.head.weight, s);
    multiply<T>(d, k, n, t.head.key.t(), s, rest, -t.head.gain);
    for (Int i = 0; i < d * k; ++i) rest.p[i] += y.p[i] - t.head.alpha * z.p[i];
    t.solve(k, rest, step, arena);
    for (Int i = 0; i < d * k; ++i) z.p[i] += step.p[i];
}

template <class T>
void key_gradient_primal(const RidgeArguments& a, const Task<T>& t, In<T> zt, In<T> wt, const T* rest, const T* s,
                         T* out, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    const Mat<T> to = rows_of(out, d);
    if (rest) {  // R Z' - c S W'
        multiply<T>(n, d, k, rows_of(rest, k), zt, to);
        multiply<T>(n, d, k, rows_of(s, k), wt, to, -t.head.gain, true);
    } else {  // V Z' - c K (Z W' + W Z')
        const Mat<T> both = rows_of(arena.take<T>(d * d), d);
        multiply<T>(d, d, k, zt.t(), wt, both);
        plus_transpose(d, both.p, arena.take<T>(d * d));
        multiply<T>(n, d, k, t.head.value, zt, to);
        multiply<T>(n, d, d, t.head.key, both, to, -t.head.gain, true);
    }
    scale_rows(n, d, t.head.weight, to);
}

template <class T>
void primal(const RidgeArguments& a, const Task<T>& t, const Wanted<T>& out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const Mat<T> y = columns<T>(d, k, t.as_rows, arena), z = columns<T>(d, k, t.as_rows, arena);
    multiply<T>(d, k, m, t.head.query.t(), t.grad, y);
    t.solve(k, y, z, arena);
    if (t.refined) refine_primal<T>(a, t, y, z, arena);
    const In<T> wt = transposed<T>(d, k, t.coef, arena);
    if (out.query) multiply<T>(m, d, k, t.grad, wt, rows_of(out.query, d));
    if (out.alpha) alpha_gradient(d * k, z.p, t.coef.p, out.alpha, out.alpha_terms);
    if (!(out.key || out.value || out.weight || out.gain)) return;
    T *s = out.value ? out.value : arena.take<T>(n * k), *rest = nullptr, *fitted = nullptr;
    multiply<T>(n, k, d, t.head.key, z, rows_of(s, k));
    if (2 * k < d || out.weight || out.gain) {
        fitted = arena.take<T>(n * k), rest = arena.take<T>(n * k);
        multiply<T>(n, k, d, t.head.key, t.coef, rows_of(fitted, k));
        for (Int i = 0; i < n; ++i)
            for (Int j = 0; j < k; ++j) rest[i * k + j] = t.head.value(i, j) - t.head.gain * fitted[i * k + j];
    }
    if (out.key) key_gradient_primal<T>(a, t, transposed<T>(d, k, z, arena), wt, rest, s, out.key, arena);
    for (Int i = 0; out.weight && i < n; ++i) out.weight[i] = dot_rows(k, s + i * k, rest + i * k);
    scale_rows(n, k, t.head.weight, rows_of(s, k));
    if (out.gain) *out.gain = -dot_rows(n * k, s, fitted);
}

// Sigma s = K~ y for y = Q'g, then the step of refinement that the forward took: K~ (y - c K~'s) - alpha s
template <class T>
void solve_dual(const RidgeArguments& a, const Task<T>& t, In<T> key, In<T> y, Mat<T> s, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    const Mat<T> ky = columns<T>(n, k, t.as_rows, arena);
    multiply<T>(n, k, d, key, y, ky);
    t.solve(k, ky, s, arena);
    if (!t.refined) return;
    const Mat<T> outside = columns<T>(d, k, t.as_rows, arena), step = columns<T>(n, k, t.as_rows, arena);
    std::memcpy(outside.p, y.p, std::size_t(d * k) * sizeof(T));
    multiply<T>(d, k, n, key.t(), s, outside, -t.head.gain, true);
    multiply<T>(n, k, d, key, outside, ky);
    for (Int i = 0; i < n * k; ++i) ky.p[i] -= t.head.alpha * s.p[i];
    t.solve(k, ky, step, arena);
    for (Int i = 0; i < n * k; ++i) s.p[i] += step.p[i];
}

// dw_i = (k_i Z) (v_i - c k_i W). K~Z = S and V~ - c K~W = alpha P: so alpha S_i P_i / w_i where w_i > 0; elsewhere Z
// itself, (y - c K~'S) / alpha, or K~'Sigma^-1 S where alpha = 0.
template <class T>
void weight_gradient_dual(const RidgeArguments& a, const Task<T>& t, In<T> key, In<T> y, In<T> w, In<T> s, T* out,
                          Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    T largest = 0;
    for (Int i = 0; i < n; ++i) largest = larger(largest, t.head.weight[i]);
    const Mat<T> z = columns<T>(d, k, t.as_rows, arena), kz = rows_of(arena.take<T>(k), k),
                 kw = rows_of(arena.take<T>(k), k);
    bool known = false;
    for (Int i = 0; i < n; ++i) {
        out[i] = 0;
        if (t.head.weight[i] > T(1e-20) * largest) {
            for (Int j = 0; j < k; ++j) out[i] += t.head.alpha * s(i, j) * t.coef(i, j) / t.head.weight[i];
            continue;
        }
        if (!known && t.head.alpha > 0) {
            std::memcpy(z.p, y.p, std::size_t(d * k) * sizeof(T));
            multiply<T>(d, k, n, key.t(), s, z, -t.head.gain, true);
            for (Int j = 0; j < d * k; ++j) z.p[j] /= t.head.alpha;
        } else if (!known) {
            const Mat<T> solved = columns<T>(n, k, t.as_rows, arena);
            t.solve(k, s, solved, arena);
            multiply<T>(d, k, n, key.t(), solved, z);
        }
        known = true;
        multiply<T>(1, k, d, t.head.key.at(i, 0), z, kz);
        multiply<T>(1, k, d, t.head.key.at(i, 0), w, kw);
        for (Int j = 0; j < k; ++j) out[i] += kz.p[j] * (t.head.value(i, j) - t.head.gain * kw.p[j]);
    }
}

// s, and g W' and P y' where they go, by way of the d x k matrices y = Q'g and W' = P'K~
template <class T>
void dual_by_maps(const RidgeArguments& a, const Task<T>& t, In<T> key, Mat<T> s, const Wanted<T>& out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const Mat<T> y = columns<T>(d, k, t.as_rows, arena), wt = rows_of(arena.take<T>(k * d), d);
    multiply<T>(d, k, m, t.head.query.t(), t.grad, y);
    solve_dual<T>(a, t, key, y, s, arena);
    if (out.key) multiply<T>(n, d, k, t.coef, y.t(), rows_of(out.key, d));
    if (!out.query && !out.gain && !out.weight) return;
    multiply<T>(k, d, n, t.coef.t(), key, wt);
    if (out.query) multiply<T>(m, d, k, t.grad, wt, rows_of(out.query, d));
    if (out.weight) weight_gradient_dual<T>(a, t, key, y, wt.t(), s, out.weight, arena);
    if (!out.gain) return;
    T* ks = arena.take<T>(k * d);
    multiply<T>(k, d, n, s.t(), key, rows_of(ks, d));
    *out.gain = -dot_rows(k * d, ks, wt.p);
}

// The same by way of the m x n matrices Q K~' and g P'
template <class T>
void dual_by_scores(const RidgeArguments& a, const Task<T>& t, In<T> key, Mat<T> s, const Wanted<T>& out, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const Mat<T> scores = rows_of(arena.take<T>(m * n), n), ky = columns<T>(n, k, t.as_rows, arena);
    multiply<T>(m, n, d, t.head.query, key.t(), scores);
    multiply<T>(n, k, m, scores.t(), t.grad, ky);
    t.solve(k, ky, s, arena);
    if (!out.query && !out.key) return;
    multiply<T>(m, n, k, t.grad, t.coef.t(), scores);
    if (out.query) multiply<T>(m, d, n, scores, key, rows_of(out.query, d));
    if (out.key) multiply<T>(n, d, m, scores.t(), t.head.query, rows_of(out.key, d));
}

template <class T>
void dual(const RidgeArguments& a, const Task<T>& t, const Wanted<T>& out, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    T* root_weight = t.head.weight ? arena.take<T>(n) : nullptr;
    for (Int i = 0; root_weight && i < n; ++i) root_weight[i] = root(t.head.weight[i]);
    const In<T> key = weighted(n, d, t.head.key, t.head.weight, arena);
    const Mat<T> s = columns<T>(n, k, t.as_rows, arena);
    if (scores_cost_less(a) && !t.refined && !out.gain && !out.weight) {
        dual_by_scores(a, t, key, s, out, arena);
    } else {
        dual_by_maps(a, t, key, s, out, arena);
    }
    if (out.alpha) alpha_gradient(n * k, s.p, t.coef.p, out.alpha, out.alpha_terms);
    if (out.key) {  // P y' - c (P s' + s P') K~
        const Mat<T> both = rows_of(arena.take<T>(n * n), n), to = rows_of(out.key, d);
        multiply<T>(n, n, k, t.coef, s.t(), both);
        plus_transpose(n, both.p, arena.take<T>(n * n));
        multiply<T>(n, d, n, both, key, to, -t.head.gain, true);
        scale_rows(n, d, root_weight, to);
    }
    if (out.value) {
        if (t.as_rows) {
            transpose<T>(k, n, s.p, n, out.value, k);
        } else {
            std::memcpy(out.value, s.p, std::size_t(n * k) * sizeof(T));
        }
        scale_rows(n, k, root_weight, rows_of(out.value, k));
    }
}

// column sums of an m x n matrix
template <class T>
T* sums(Int m, Int n, In<T> x, Arena& arena) {
    T* sum = arena.zeros<T>(n);
    for (Int i = 0; i < m; ++i)
        for (Int j = 0; j < n; ++j) sum[j] += x.p[i * x.rs + j];
    return sum;
}

// out = (Q - mu_K) W + mu_V with mu = sum_i w_i x_i / sum_i w_i: what the means pass on
template <class T>
void through_means(const RidgeArguments& a, const Task<T>& t, In<T> grad, const Wanted<T>& out, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns;
    T* mean_key = sums<T>(a.queries, d, rows_of(out.query, d), arena);
    T* mean_value = sums<T>(a.queries, k, grad, arena);
    const T *key = sums<T>(n, d, rows_of(out.key, d), arena), *value = sums<T>(n, k, rows_of(out.value, k), arena);
    for (Int j = 0; j < d; ++j) mean_key[j] = -mean_key[j] - key[j];
    for (Int j = 0; j < k; ++j) mean_value[j] -= value[j];
    for (Int i = 0; i < n; ++i) {
        const T share = t.head.share[i];
        for (Int j = 0; j < d; ++j) out.key[i * d + j] += share * mean_key[j];
        for (Int j = 0; j < k; ++j) out.value[i * k + j] += share * mean_value[j];
        if (out.weight)
            out.weight[i] += (dot_rows(d, t.head.key.p + i * d, mean_key) +
                              dot_rows(k, t.head.value.p + i * k, mean_value)) / t.head.total;
    }
}

template <class T>
Wanted<T> wanted(const RidgeArguments& a, Int b, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features, k = a.columns;
    const auto& to = a.backward;
    Wanted<T> out = {of_element<T>(to.query, b, m * d), of_element<T>(to.key, b, n * d), of_element<T>(to.value, b, n * k),
                     of_element<T>(to.weight, b, n),    of_element<T>(to.alpha, b, 1),   of_element<T>(to.alpha_terms, b, 1),
                     of_element<T>(to.gain, b, 1)};
    if (a.intercept) {  // the means need all three
        if (!out.query) out.query = arena.take<T>(m * d);
        if (!out.key) out.key = arena.take<T>(n * d);
        if (!out.value) out.value = arena.take<T>(n * k);
    }
    return out;
}

// g times scale
template <class T>
In<T> scaled(const RidgeArguments& a, In<T> grad, Arena& arena) {
    const Int m = a.queries, k = a.columns;
    if (a.scale == 1) return grad;
    T* to = arena.take<T>(m * k);
    for (Int i = 0; i < m; ++i)
        for (Int j = 0; j < k; ++j) to[i * k + j] = T(a.scale) * grad(i, j);
    return rows_of<const T>(to, k);
}

template <class T>
void pull(const RidgeArguments& a, Task<T>& t, In<T> grad, const Wanted<T>& out, Arena& arena) {
    t.grad = scaled(a, grad, arena);
    if (a.dual) {
        dual(a, t, out, arena);
    } else {
        primal(a, t, out, arena);
    }
    if (a.intercept && out.key) through_means(a, t, grad, out, arena);
}

// Points that are not there have no gradient, whatever the others have.
template <class T>
void clear(const RidgeArguments& a, Int b, const Wanted<T>& out) {
    const unsigned char* keep = keep_of(a, b);
    for (Int i = 0; keep && i < a.points; ++i) {
        if (keep[i]) continue;
        for (Int j = 0; out.key && j < a.features; ++j) out.key[i * a.features + j] = 0;
        for (Int j = 0; out.value && j < a.columns; ++j) out.value[i * a.columns + j] = 0;
    }
}

// With what the forward left behind
template <class T>
void pull_saved(const RidgeArguments& a, Int b, Int n, const Wanted<T>& out, Arena& arena) {
    const Int k = a.columns;
    Task<T> t;
    t.head = head_of<T>(a, b, arena);
    if (a.intercept) centre(a, t.head, arena);
    t.as_rows = !a.inverse;
    t.coef = laid_out<T>(n, k, rows_of(static_cast<const T*>(a.coef) + b * n * k, k), t.as_rows, arena);
    t.solve = saved_solver<T>(a, b, n, arena);
    t.refined = entry<T>(a.backward.route, b, 0) == REFINED;
    pull(a, t, matrix_of<T>(a.backward.grad, b, a.inner), out, arena);
}

// In double, fitted again: a factor rounded to T would lose what the forward won.
template <class T>
void pull_wide(const RidgeArguments& a, Int b, Int n, const Wanted<T>& out, Arena& arena) {
    const Int m = a.queries, d = a.features, k = a.columns;
    Fit<double> f = fit_wide<T>(a, b, n, arena);
    Task<double> t;
    t.head = f.head, t.solve = f.solve, t.as_rows = !a.inverse;
    t.refined = !(ratio_of(a, f, n, arena) < EASY_PULLED);
    const Mat<double> coef = columns<double>(n, k, t.as_rows, arena), step = columns<double>(n, k, t.as_rows, arena);
    coefficients<double>(a, f, coef, arena);
    if (t.refined) {
        refinement<double>(a, f, coef, step, arena);
        for (Int i = 0; i < n * k; ++i) coef.p[i] += step.p[i];
    }
    t.coef = coef;
    const auto room = [&](T* wanted, Int count) { return wanted ? arena.take<double>(count) : nullptr; };
    const Int rows = a.points;
    const Wanted<double> wide = {room(out.query, m * d),   room(out.key, rows * d), room(out.value, rows * k),
                                 room(out.weight, rows),   room(out.alpha, 1),      room(out.alpha_terms, 1),
                                 room(out.gain, 1)};
    pull(a, t, widened(m, k, matrix_of<T>(a.backward.grad, b, a.inner), arena), wide, arena);
    narrowed(m * d, wide.query, out.query);
    narrowed(rows * d, wide.key, out.key);
    narrowed(rows * k, wide.value, out.value);
    narrowed(rows, wide.weight, out.weight);
    narrowed(1, wide.alpha, out.alpha);
    narrowed(1, wide.alpha_terms, out.alpha_terms);
    narrowed(1, wide.gain, out.gain);
}

// alpha's gradient is a sum that may cancel: where little of its terms is left, it is made in double.
template <class T>
void make_sure_of_alpha(const RidgeArguments& a, Int b, Int n, Arena& arena) {
    constexpr T CANCELLED = T(0.1);  // as in batch.py
    T *sum = of_element<T>(a.backward.alpha, b, 1), *terms = of_element<T>(a.backward.alpha_terms, b, 1);
    if (!sum || __builtin_fabs(*sum) >= CANCELLED * *terms) return;
    arena.reset();
    pull_wide<T>(a, b, n, {nullptr, nullptr, nullptr, nullptr, sum, nullptr, nullptr}, arena);
}

template <class T>
int backward(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    const Int n = a.dual ? a.points : a.features;
    const bool narrow = sizeof(T) == 4, small = fits_lanes(a) && !a.backward.weight && !a.backward.gain;
    const auto route = [&](Int b) { return entry<T>(a.backward.route, b, 0); };
    int status = PLAIN;
    for (Int b = from; b < to;) {
        int count = int(smaller<Int>(WIDTH<T>, to - b));
        bool together = small && 2 * count >= WIDTH<T>;
        for (int g = 0; g < count && together; ++g) together = route(b + g) < REFINED;
        if (together) {
            backward_group<T>(a, b, count, arena);
        } else {
            count = 1;
            arena.reset();
            // a weight's gradient holds the residual V - KW, which float loses where the fit is close
            const bool wide = narrow && (route(b) == FLOAT64 || a.backward.weight);
            if (route(b) <= FLOAT64) {
                const Wanted<T> out = wanted<T>(a, b, arena);
                (wide ? pull_wide<T> : pull_saved<T>)(a, b, n, out, arena);
                clear(a, b, out);
            } else {
                status = SOME_LEFT;
            }
        }
        for (int g = 0; g < count && narrow; ++g)
            if (route(b + g) <= REFINED && !a.backward.weight) make_sure_of_alpha<T>(a, b + g, n, arena);
        b += count;
    }
    arena.reset();
    return status;
}

int ridge_backward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? backward<double>(a, from, to) : backward<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
