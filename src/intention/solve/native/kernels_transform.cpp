// X = rows (c K'WK + alpha I)^-1 for a batch, and its first-order gradients. `query` holds the rows; there are no values.
#include "fit.h"
#include "kernels.h"

namespace INTENTION_ARCH {

template <class T>
int transform(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    const Int m = a.queries, n = a.features;
    Fit<T> fits[WIDTH<T>];
    int status = PLAIN;
    for (Int b = from; b < to;) {
        const int count = fit_next(a, b, to, true, fits, arena);
        for (int g = 0; g < count; ++g, ++b) {
            const Fit<T>& f = fits[g];
            T *out = static_cast<T*>(a.forward.out) + b * m * n, *report = static_cast<T*>(a.forward.report) + b;
            f.solve(m, f.head.query.t(), rows_of(out, n).t(), arena);
            *report = screened(a, f, ratio_of(a, f, n, arena));
            if (!(*report < T(a.easy))) status = SOME_LEFT;
            keep_factor(a, f, b, n);
        }
    }
    arena.reset();
    return status;
}

// With Y = g Sigma^-1: dSigma = -X'Y, made symmetric; the keys, weights, alpha and c see it through Sigma.
template <class T>
int transform_gradients(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    const Int n = a.points, m = a.queries, d = a.features;
    const auto& to_ = a.backward;
    for (Int b = from; b < to; ++b) {
        arena.reset();
        const Head<T> head = head_of<T>(a, b);
        const Solver<T> solve = saved_solver<T>(a, b, d, arena);
        const In<T> x = head.query, grad = matrix_of<T>(to_.grad, b, a.inner);
        const Mat<T> y = rows_of(static_cast<T*>(to_.query) + b * m * d, d), both = rows_of(arena.take<T>(d * d), d),
                     key = rows_of(static_cast<T*>(to_.key) + b * n * d, d);
        solve(m, grad.t(), y.t(), arena);
        multiply<T>(d, d, m, x.t(), y, both, -1);
        T trace = 0;
        for (Int i = 0; i < d; ++i) trace += both(i, i);
        static_cast<T*>(to_.alpha)[b] = trace;
        plus_transpose(d, both.p, arena.take<T>(d * d));
        multiply<T>(n, d, d, head.key, both, key);
        if (!to_.weight && !to_.gain) continue;
        T gain = 0;
        for (Int i = 0; i < n; ++i) {
            T along = 0;  // k_i dSigma k_i'
            for (Int j = 0; j < d; ++j) along += key(i, j) * head.key(i, j) / 2;
            const T weight = head.weight ? head.weight[i] : T(1);
            gain += weight * along;
            if (to_.weight) static_cast<T*>(to_.weight)[b * n + i] = head.gain * along;
            for (Int j = 0; j < d; ++j) key(i, j) *= head.gain * weight;
        }
        if (to_.gain) static_cast<T*>(to_.gain)[b] = gain;
    }
    arena.reset();
    return PLAIN;
}

int transform_forward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? transform<double>(a, from, to) : transform<float>(a, from, to);
}

int transform_backward(const RidgeArguments& a, Int from, Int to) {
    return a.is_double ? transform_gradients<double>(a, from, to) : transform_gradients<float>(a, from, to);
}

}  // namespace INTENTION_ARCH
