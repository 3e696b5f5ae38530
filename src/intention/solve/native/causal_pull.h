#pragma once

#include "causal_run.h"

namespace INTENTION_ARCH {
namespace {

// Sums over the tokens after a chunk, in double: z_t r_t' (d, d) and z_t g_t' (d, k).
struct Later {
    double *gram, *cross;
};

template <class S>
struct Slopes {  // of one sequence; null where not wanted
    S *query, *key, *value, *weight;
    double alpha, gain;
};

// What the gradients of a chunk work with.
template <class T>
struct Pull {
    T *query, *key, *value, *grad;  // as they are, without weights
    T *z, *r, *one, *two, *whole, *values, *seen, *also;
    T *gram, *cross;
    void place(Arena& s, Int d, Int k) {
        const Int g = k ? k : d;
        query = s.take<T>(CHUNK * d), key = s.take<T>(CHUNK * d), value = s.take<T>(CHUNK * k), grad = s.take<T>(CHUNK * g);
        z = s.take<T>(CHUNK * d), r = s.take<T>(CHUNK * d), one = s.take<T>(CHUNK * d), two = s.take<T>(CHUNK * d);
        whole = s.take<T>(CHUNK * d), values = s.take<T>(CHUNK * k), seen = s.take<T>(CHUNK * CHUNK), also = s.take<T>(CHUNK * CHUNK);
        gram = s.take<T>(d * d), cross = s.take<T>(d * k);
    }
};

// x = sums (count,) in the precision of the chunk.
template <class T>
void narrowed(const double* sums, T* x, Int count) {
    for (Int i = 0; i < count; ++i) x[i] = T(sums[i]);
}

// z_t = A_t^-1 q_t and r_t = W_t g_t, or A_t^-1 g_t without values.
template <class T>
void solve_chunk(Int n, Int d, Int k, T gain, const T* both, const T* pair, const Pull<T>& p) {
    const Int width = padded<T>(d + k);
    const In<T> query = rows_of<const T>(p.query, d), grad = rows_of<const T>(p.grad, k ? k : d);
    transformed<T>(n, d, k, gain, query, both, pair, rows_of<const T>(pair, width).t(), p.seen, p.z);
    if (k == 0) return transformed<T>(n, d, k, gain, grad, both, pair, rows_of<const T>(pair, width).t(), p.seen, p.r);
    const In<T> rows = rows_of<const T>(pair, width);
    lower_of<T>(n, k, grad, rows.at(0, d).t(), rows_of(p.seen, n));
    multiply<T>(n, d, k, grad, rows_of<const T>(both + d, width).t(), rows_of(p.r, d), T(-1));
    lower_times<T>(n, d, rows_of<const T>(p.seen, n), rows, rows_of(p.r, d), T(1), true);
}

// one = sum z_t (r_t k_s), two = sum r_t (z_t k_s), whole = sum z_t (g_t v_s), values = sum g_t (z_t k_s), over t >= s.
template <class T>
void sum_chunk(Int n, Int d, Int k, const Later& later, const Pull<T>& p) {
    const In<T> key = rows_of<const T>(p.key, d), z = rows_of<const T>(p.z, d), r = rows_of<const T>(p.r, d);
    const In<T> seen = rows_of<const T>(p.seen, n), also = rows_of<const T>(p.also, n), gram = rows_of<const T>(p.gram, d);
    upper_of<T>(n, d, key, z.t(), rows_of(p.seen, n));
    upper_of<T>(n, d, key, r.t(), rows_of(p.also, n));
    narrowed(later.gram, p.gram, d * d);
    upper_times<T>(n, d, also, z, rows_of(p.one, d));
    multiply<T>(n, d, d, key, gram.t(), rows_of(p.one, d), T(1), true);
    upper_times<T>(n, d, seen, r, rows_of(p.two, d));
    multiply<T>(n, d, d, key, gram, rows_of(p.two, d), T(1), true);
    multiply<T>(d, d, n, z.t(), r, rows_of(p.gram, d));
    add_to(later.gram, p.gram, d * d);
    if (k == 0) return;
    const In<T> value = rows_of<const T>(p.value, k), grad = rows_of<const T>(p.grad, k), cross = rows_of<const T>(p.cross, k);
    narrowed(later.cross, p.cross, d * k);
    upper_times<T>(n, k, seen, grad, rows_of(p.values, k));
    multiply<T>(n, k, d, key, cross, rows_of(p.values, k), T(1), true);
    upper_of<T>(n, k, value, grad.t(), rows_of(p.also, n));
    upper_times<T>(n, d, also, z, rows_of(p.whole, d));
    multiply<T>(n, d, k, value, cross.t(), rows_of(p.whole, d), T(1), true);
    multiply<T>(d, k, n, z.t(), grad, rows_of(p.cross, k));
    add_to(later.cross, p.cross, d * k);
}

template <class T, class S>
void write_slopes(const Sequence<S>& s, Int first, Int n, const Pull<T>& p, Slopes<S>& to) {
    const Int d = s.d, k = s.k;
    const T gain = T(s.gain);
    double alpha = 0, share = 0;
    for (Int i = 0; i < n; ++i) {
        const T weight = s.weight ? T(s.weight[first + i]) : T(1);
        double along = 0, of_one = 0;
        for (Int j = 0; j < d; ++j) {
            const Int at = i * d + j;
            const T both = (k ? p.whole[at] : T(0)) - gain * p.one[at];
            alpha -= double(p.z[at]) * double(p.r[at]);
            along += double(p.key[at]) * double(both), of_one += double(p.key[at]) * double(p.one[at]);
            if (to.query) to.query[first * d + at] = S(p.r[at]);
            if (to.key) to.key[first * d + at] = S(weight * (both - gain * p.two[at]));
        }
        share -= double(weight) * of_one;
        if (to.weight) to.weight[first + i] = S(along);
        for (Int j = 0; j < k && to.value; ++j) to.value[(first + i) * k + j] = S(weight * p.values[i * k + j]);
    }
    to.alpha += alpha, to.gain += share;
}

template <class T, class S>
void pull_chunk(const Sequence<S>& s, Int first, Int n, const S* grad, Int grad_row, const T* fits, const Later& later,
                const Pull<T>& p, Slopes<S>& to) {
    const Int d = s.d, k = s.k;
    copy_rows<T, S>(n, d, s.query + first * s.query_row, s.query_row, nullptr, p.query);
    copy_rows<T, S>(n, d, s.key + first * s.key_row, s.key_row, nullptr, p.key);
    if (k) copy_rows<T, S>(n, k, s.value + first * s.value_row, s.value_row, nullptr, p.value);
    copy_rows<T, S>(n, k ? k : d, grad + first * grad_row, grad_row, nullptr, p.grad);
    solve_chunk<T>(n, d, k, T(s.gain), fits, fits + d * padded<T>(d + k), p);
    sum_chunk<T>(n, d, k, later, p);
    write_slopes<T, S>(s, first, n, p, to);
}

template <class S>
void pull(const Sequence<S>& s, const double* gram, const double* cross, const S* grad, Int grad_row, Arena& scratch,
          const Later& later, Slopes<S>& to) {
    Kept* kept = scratch.take<Kept>(ceil_div(s.n, CHUNK));
    Pull<S> narrow;
    Pull<double> wide;
    narrow.place(scratch, s.d, s.k);
    wide.place(scratch, s.d, s.k);
    run<S>(s, gram, cross, scratch, nullptr, kept);
    for (Int c = ceil_div(s.n, CHUNK) - 1; c >= 0; --c) {
        const Int first = c * CHUNK, n = smaller(CHUNK, s.n - first);
        if (kept[c].wide) {
            pull_chunk<double, S>(s, first, n, grad, grad_row, static_cast<double*>(kept[c].fits), later, wide, to);
        } else {
            pull_chunk<S, S>(s, first, n, grad, grad_row, static_cast<S*>(kept[c].fits), later, narrow, to);
        }
    }
}

}  // namespace
}  // namespace INTENTION_ARCH
