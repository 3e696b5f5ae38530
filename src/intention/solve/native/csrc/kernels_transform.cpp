// X = rows (c K'WK + alpha I)^-1 for a batch, and its first-order gradients. `query` holds the rows; there are no values.
#include "kernels.h"
#include "scores.h"
#include "in_double.h"

namespace INTENTION_ARCH {

// out = X, refined; the queries lie along the lanes as those of sigma-Intention do. Returns the size of the step.
template <class T>
T solve_refined(const RidgeArguments& a, const Sigma<T>& sigma, In<T> rows, T* out, Arena& arena) {
    const Int m = a.queries, d = a.features;
    const Blocks<T> blocks(m);
    const Refinement<T> refinement(a, arena);
    T *b = arena.take<T>(d * Blocks<T>::QUERIES), *z = arena.take<T>(d * Blocks<T>::QUERIES), size = 0;
    for (Int i = 0; i < m; i += blocks.step) {
        const Int some = blocks.rows(i), width = padded<T>(some);
        turn_rows<T>(some, d, width, rows.at(i, 0), b);
        size = larger(size, solve_columns<T>(a, sigma, width, b, z, refinement, arena));
        transpose<T>(d, some, z, width, out + i * d, d);
    }
    return size;
}

// The same element in double, rounded at the end.
template <class T>
Status move_in_double(const RidgeArguments& a, Int b, T* report, Arena& arena) {
    const Int count = a.queries * a.features;
    RidgeArguments wide = in_double<T>(a, b, arena);
    double told[3], *out = arena.take<double>(count);
    wide.coef = wide.matrix = nullptr;  // a backward makes them again
    wide.forward.out = out, wide.forward.report = told;
    if (transform_forward(wide, 0, 1) == SOME_LEFT) return SOME_LEFT;
    narrow(count, out, static_cast<T*>(a.forward.out) + b * count);
    report[0] = FLOAT64, report[1] = T(told[1]), report[2] = T(told[2] + double(__FLT_EPSILON__));
    return SOME_REFINED;
}

template <class T>
Status move(const RidgeArguments& a, Fit<T>& f, Int b, Arena& arena) {
    const Int m = a.queries, d = a.features;
    T *out = static_cast<T*>(a.forward.out) + b * m * d, *report = static_cast<T*>(a.forward.report) + b * 3;
    const T ratio = screened(a, f, ratio_of(a, f, d, arena));
    report[0] = PRIMAL, report[1] = ratio, report[2] = ratio * (sizeof(T) == 4 ? T(__FLT_EPSILON__) : T(__DBL_EPSILON__));
    keep_factor(a, f, b, d);
    if (ratio < T(a.easy)) {
        f.solve(m, f.head.query.t(), rows_of(out, d).t(), arena);
        return PLAIN;
    }
    if constexpr (sizeof(T) == 4) return move_in_double(a, b, report, arena);
    if (!(ratio < T(a.hard))) return SOME_LEFT;
    report[0] = FLOAT64;
    report[2] = solve_refined<T>(a, {f.key, f.head.alpha, f.head.gain, f.solve, true}, f.head.query, out, arena);
    return report[2] < T(a.step) ? SOME_REFINED : SOME_LEFT;
}

template <class T>
int transform(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    Fit<T> fits[WIDTH<T>];
    int status = PLAIN;
    for (Int b = from; b < to;) {
        const int count = fit_next(a, b, to, true, fits, arena);
        for (int g = 0; g < count; ++g, ++b) status = larger<int>(status, move(a, fits[g], b, arena));
    }
    arena.reset();
    return status;
}

template <class T>
struct Moved {  // what the backward of one element reads and writes
    Head<T> head;
    Sigma<T> sigma;
    In<T> x, grad;
    T *rows, *key, *weight, *alpha, *gain;
};

// With Y = g Sigma^-1: dSigma = -X'Y, made symmetric; the keys, weights, alpha and c see it through Sigma.
template <class T>
void move_back(const RidgeArguments& a, const Moved<T>& e, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features;
    const Mat<T> y = rows_of(e.rows, d), both = rows_of(arena.take<T>(d * d), d), key = rows_of(e.key, d);
    if (e.sigma.refined) {
        solve_refined<T>(a, e.sigma, e.grad, e.rows, arena);
    } else {
        e.sigma.solve(m, e.grad.t(), y.t(), arena);
    }
    multiply<T>(d, d, m, e.x.t(), y, both, -1);
    *e.alpha = 0;
    for (Int i = 0; i < d; ++i) *e.alpha += both(i, i);
    plus_transpose(d, both.p, arena.take<T>(d * d));
    multiply<T>(n, d, d, e.head.key, both, key);
    if (!e.weight && !e.gain) return;
    T gain = 0;
    for (Int i = 0; i < n; ++i) {
        T along = 0;  // k_i dSigma k_i'
        for (Int j = 0; j < d; ++j) along += key(i, j) * e.head.key(i, j) / 2;
        const T weight = e.head.weight ? e.head.weight[i] : T(1);
        gain += weight * along;
        if (e.weight) e.weight[i] = e.head.gain * along;
        for (Int j = 0; j < d; ++j) key(i, j) *= e.head.gain * weight;
    }
    if (e.gain) *e.gain = gain;
}

// An element that float could not do: X and gradients in double, rounded at the end.
template <class T>
void move_back_in_double(const RidgeArguments& a, Int b, Arena& arena) {
    const Int n = a.points, m = a.queries, d = a.features;
    RidgeArguments wide = in_double<T>(a, b, arena);
    double told[3] = {}, *out = arena.take<double>(m * d);
    wide.coef = nullptr, wide.matrix = arena.take<double>(d * d);
    wide.forward.out = out, wide.forward.report = told;
    transform_forward(wide, 0, 1);
    const Tensor grad = tensor_in_double(m, d, matrix_of<T>(a.backward.grad, b, a.inner), arena);
    double *rows = arena.take<double>(m * d), *key = arena.take<double>(n * d), alpha, gain;
    const auto& to = a.backward;
    double* weight = to.weight ? arena.take<double>(n) : nullptr;
    wide.backward = {{told, 0}, out, grad, rows, key, nullptr, weight, &alpha, nullptr, to.gain ? &gain : nullptr};
    transform_backward(wide, 0, 1);
    narrow(m * d, rows, of_element<T>(to.query, b, m * d));
    narrow(n * d, key, of_element<T>(to.key, b, n * d));
    narrow(n, weight, of_element<T>(to.weight, b, n));
    narrow(1, &alpha, of_element<T>(to.alpha, b, 1));
    narrow(1, &gain, of_element<T>(to.gain, b, 1));
}

template <class T>
int transform_gradients(const RidgeArguments& a, Int from, Int to) {
    static thread_local Arena arena;
    const Int n = a.points, m = a.queries, d = a.features;
    const auto& wanted = a.backward;
    for (Int b = from; b < to; ++b) {
        arena.reset();
        const T route = entry<T>(wanted.route, b, PRIMAL);
        if constexpr (sizeof(T) == 4) {
            if (route == FLOAT64) {
                move_back_in_double<T>(a, b, arena);
                continue;
            }
        }
        const Head<T> head = head_of<T>(a, b, arena);
        const In<T> key = route == FLOAT64 ? weighted(n, d, head.key, head.weight, arena) : head.key;
        const In<T> x = rows_of(static_cast<const T*>(wanted.out) + b * m * d, d);
        move_back<T>(a, {head, {key, head.alpha, head.gain, saved_solver<T>(a, b, d, arena), route == FLOAT64}, x,
                    matrix_of<T>(wanted.grad, b, a.inner), of_element<T>(wanted.query, b, m * d),
                    of_element<T>(wanted.key, b, n * d), of_element<T>(wanted.weight, b, n),
                    of_element<T>(wanted.alpha, b, 1), of_element<T>(wanted.gain, b, 1)},
                arena);
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
