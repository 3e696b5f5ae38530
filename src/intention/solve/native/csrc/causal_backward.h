// The gradients of a sequence, chunk by chunk of tokens from the last to the first.
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
    bool has_gain;
    double alpha, gain;
};

// What the gradients of a chunk work with.
template <class T>
struct Pull {
    T *query, *key, *value, *grad;  // room for copies
    T *z, *r, *whole, *two, *values, *seen, *also;
    T *gram, *cross;  // what is later, in the precision of the chunk
    T* turned;        // a transpose that is used at once
    void place(Arena& s, Int d, Int k) {
        query = s.take<T>(CHUNK * d), key = s.take<T>(CHUNK * d), value = s.take<T>(CHUNK * k), grad = s.take<T>(CHUNK * (k ? k : d));
        z = s.take<T>(CHUNK * d), r = s.take<T>(CHUNK * d), whole = s.take<T>(CHUNK * d), two = s.take<T>(CHUNK * d);
        values = s.take<T>(CHUNK * k), seen = s.take<T>(CHUNK * CHUNK), also = s.take<T>(CHUNK * CHUNK);
        gram = s.take<T>(d * d), cross = s.take<T>(d * k), turned = s.take<T>((d + k) * larger(d, CHUNK));
    }
};

// The rows of a chunk as they are, without weights.
template <class T>
struct Given {
    In<T> query, key, value, grad;
};

// x' (columns, n)
template <class T>
In<T> turned(Int n, Int columns, In<T> x, const Pull<T>& p) {
    transpose<T>(n, columns, x.p, x.rs, p.turned, n);
    return rows_of<const T>(p.turned, n);
}

// x = sums (count,) in the precision of the chunk.
template <class T>
void narrowed(const double* sums, T* x, Int count) {
    for (Int i = 0; i < count; ++i) x[i] = T(sums[i]);
}

// Adds x to the sums and reads them again: once through the memory instead of twice.
template <class T>
void add_and_narrow(double* sums, T* x, Int count) {
    for (Int i = 0; i < count; ++i) x[i] = T(sums[i] += double(x[i]));
}

// z_t = A_t^-1 q_t and r_t = W_t g_t, or A_t^-1 g_t without values.
template <class T>
void solve_chunk(Int n, Int d, Int k, T gain, const T* fits, const Given<T>& x, const Pull<T>& p) {
    const Int width = apart<T>(d, k);
    const In<T> before = rows_of(fits, d), rows = rows_of(fits + (d + k) * d, width), across = turned<T>(n, d + k, rows, p);
    transformed<T>(n, d, gain, x.query, before, rows, across, p.seen, p.z);
    if (k == 0) return transformed<T>(n, d, gain, x.grad, before, rows, across, p.seen, p.r);
    lower_of<T>(n, k, x.grad, across.at(d, 0), rows_of(p.seen, n));
    for (Int j = 0; j < k; j += SHORT)
        multiply<T>(n, d, smaller(SHORT, k - j), x.grad.at(0, j), before.at(d + j, 0), rows_of(p.r, d), T(-1), j > 0);
    lower_times<T>(n, d, rows_of<const T>(p.seen, n), rows, rows_of(p.r, d), T(1), true);
}

// Over t >= s: whole = sum z_t (g_t v_s - c r_t k_s), two = sum r_t (z_t k_s), values = sum g_t (z_t k_s).
template <class T>
void sum_chunk(Int n, Int d, Int k, T gain, const Later& later, const Given<T>& x, const Pull<T>& p) {
    const In<T> z = rows_of<const T>(p.z, d), r = rows_of<const T>(p.r, d);
    const In<T> seen = rows_of<const T>(p.seen, n), also = rows_of<const T>(p.also, n);
    upper_of<T>(n, d, x.key, turned<T>(n, d, z, p), rows_of(p.seen, n), T(1), false);
    upper_of<T>(n, d, x.key, turned<T>(n, d, r, p), rows_of(p.also, n), -gain, false);
    if (k) upper_of<T>(n, k, x.value, turned<T>(n, k, x.grad, p), rows_of(p.also, n), T(1), true);
    const In<T> gram = rows_of<const T>(p.gram, d), cross = rows_of<const T>(p.cross, k);
    upper_times<T>(n, d, seen, r, rows_of(p.two, d));
    multiply<T>(n, d, d, x.key, gram, rows_of(p.two, d), T(1), true);
    upper_times<T>(n, d, also, z, rows_of(p.whole, d));
    multiply<T>(n, d, d, x.key, turned<T>(d, d, gram, p), rows_of(p.whole, d), -gain, true);
    multiply<T>(d, d, n, z.t(), r, rows_of(p.gram, d));
    add_and_narrow(later.gram, p.gram, d * d);
    if (k == 0) return;
    upper_times<T>(n, k, seen, x.grad, rows_of(p.values, k));
    multiply<T>(n, k, d, x.key, cross, rows_of(p.values, k), T(1), true);
    multiply<T>(n, d, k, x.value, turned<T>(d, k, cross, p), rows_of(p.whole, d), T(1), true);
    multiply<T>(d, k, n, z.t(), x.grad, rows_of(p.cross, k));
    add_and_narrow(later.cross, p.cross, d * k);
}

template <class T, class S>
void write_slopes(const Sequence<S>& s, Int first, Int n, In<T> keys, const Pull<T>& p, Slopes<S>& to) {
    const Int d = s.d, k = s.k;
    const T gain = T(s.gain);
    to.alpha -= dot(p.z, p.r, n * d);
    for (Int i = 0; i < n; ++i) {
        const T weight = s.weight ? T(s.weight[first + i]) : T(1);
        const T *key = keys.at(i, 0).p, *whole = p.whole + i * d, *two = p.two + i * d;
        if (to.has_gain) to.gain -= double(weight) * dot(key, two, d);  // sum (z_t k_s) (r_t k_s)
        if (to.weight) to.weight[first + i] = S(dot(key, whole, d));
        for (Int j = 0; j < d && to.query; ++j) to.query[(first + i) * d + j] = S(p.r[i * d + j]);
        for (Int j = 0; j < d && to.key; ++j) to.key[(first + i) * d + j] = S(weight * (whole[j] - gain * two[j]));
        for (Int j = 0; j < k && to.value; ++j) to.value[(first + i) * k + j] = S(weight * p.values[i * k + j]);
    }
}

template <class T, class S>
void pull_chunk(const Sequence<S>& s, Int first, Int n, const S* grad, Int grad_row, const T* fits, const Later& later,
                const Pull<T>& p, Slopes<S>& to) {
    const Int d = s.d, k = s.k;
    const auto rows = [=](Int columns, const S* from, Int row, T* room) {
        return in_place_or_copied<T, S>(n, columns, from + first * row, row, nullptr, room);
    };
    const Given<T> x = {rows(d, s.query, s.query_row, p.query), rows(d, s.key, s.key_row, p.key),
                        k ? rows(k, s.value, s.value_row, p.value) : In<T>{}, rows(k ? k : d, grad, grad_row, p.grad)};
    solve_chunk<T>(n, d, k, T(s.gain), fits, x, p);
    sum_chunk<T>(n, d, k, T(s.gain), later, x, p);
    write_slopes<T, S>(s, first, n, x.key, p, to);
}

template <class S>
void pull(const Sequence<S>& s, const double* gram, const double* cross, const S* grad, Int grad_row, Arena& scratch,
          const Later& later, Slopes<S>& to) {
    const Int chunks = ceil_div(s.n, CHUNK);
    Kept* kept = scratch.take<Kept>(chunks);
    Pull<S> narrow;
    Pull<double> wide;
    narrow.place(scratch, s.d, s.k);
    wide.place(scratch, s.d, s.k);
    run<S>(s, gram, cross, scratch, nullptr, kept);
    for (Int c = chunks - 1; c >= 0; --c) {
        const bool changes = c + 1 == chunks || kept[c].wide != kept[c + 1].wide;
        const auto work = [&](const auto& p, const auto* fits) {
            if (changes) narrowed(later.gram, p.gram, s.d * s.d), narrowed(later.cross, p.cross, s.d * s.k);
            pull_chunk(s, c * CHUNK, smaller(CHUNK, s.n - c * CHUNK), grad, grad_row, fits, later, p, to);
        };
        kept[c].wide ? work(wide, static_cast<double*>(kept[c].fits)) : work(narrow, static_cast<S*>(kept[c].fits));
    }
}

}  // namespace
}  // namespace INTENTION_ARCH
