// The first tokens of a sequence, before which nothing was seen: P = I / alpha and W = 0.
//
// They share one triangular factor, of I + c K K' / alpha, which is cheaper than to go block by block. In double: while
// there are as few tokens as features Sigma has a large condition, whatever alpha is.
#pragma once

#include "causal_blocks.h"

namespace INTENTION_ARCH {
namespace {

constexpr Int MOST = 128;  // tokens of a first chunk

// Half as many again as features: for keys that point everywhere Sigma is then one that float serves.
inline Int first_tokens(Int d) { return smaller(MOST, ceil_div(3 * d, 2 * CHUNK) * CHUNK); }

// What a first chunk works with.
struct First {
    double *key, *value, *pair, *turned, *inner, *pivots;
    void place(Arena& s, Int d, Int k) {
        key = s.take<double>(MOST * d), value = s.take<double>(MOST * k), pair = s.take<double>(MOST * apart<double>(d, k));
        turned = s.take<double>(d * MOST), inner = s.take<double>(MOST * MOST), pivots = s.take<double>(MOST);
    }
};

// both = [I / alpha, 0]
template <class T>
void start(Int d, Int k, double alpha, Work<T>& w) {
    const Int width = apart<T>(d, k);
    for (Int i = 0; i < d * width; ++i) w.both[i] = 0;
    for (Int i = 0; i < d; ++i) w.both[i * width + i] = T(1 / alpha);
}

// pair = [E, Y] of the first tokens: R R' = I + c K K' / alpha, E = R^-1 K / alpha, Y = R^-1 V.
template <class S>
void fit_first(const Sequence<S>& s, Int first, Int n, const First& f) {
    const Int d = s.d, k = s.k, width = apart<double>(d, k), columns = padded<double>(d + k), size = padded<double>(n);
    const double inverse = 1 / s.alpha;
    const S* weight = s.weight ? s.weight + first : nullptr;
    copy_rows<double, S>(n, d, s.key + first * s.key_row, s.key_row, weight, f.key);
    if (k) copy_rows<double, S>(n, k, s.value + first * s.value_row, s.value_row, weight, f.value);
    for (Int i = 0; i < size; ++i) {
        double* row = f.pair + i * width;
        for (Int j = 0; j < columns; ++j) row[j] = 0;
        for (Int j = 0; j < d && i < n; ++j) row[j] = inverse * f.key[i * d + j];
        for (Int j = 0; j < k && i < n; ++j) row[d + j] = f.value[i * k + j];
    }
    transpose<double>(n, d, f.key, d, f.turned, n);
    multiply<double>(n, n, d, rows_of<const double>(f.pair, width), rows_of<const double>(f.turned, n), rows_of(f.inner, size), s.gain,
                     false, UPPER);
    add_unit(n, size, f.inner);
    cholesky<double>(n, size, f.inner, f.pivots);
    half_solve(size, f.inner, f.pivots, columns, f.pair, width);
}

// o_t = sum_{s<=t} (q_t E_s) Y_s, or q_t / alpha - c sum_{s<=t} (q_t E_s) E_s without values. The rooms of keys, values
// and the factor are used up.
template <class S>
void answer_first(const Sequence<S>& s, Int first, Int n, const First& f, S* out) {
    const Int d = s.d, k = s.k, width = apart<double>(d, k), columns = k ? k : d;
    const In<double> pair = rows_of<const double>(f.pair, width), seen = rows_of<const double>(f.inner, n);
    double* answer = k ? f.value : f.key;
    copy_rows<double, S>(n, d, s.query + first * s.query_row, s.query_row, nullptr, f.key);
    transpose<double>(n, d, f.pair, width, f.turned, n);
    lower_of<double>(n, d, rows_of<const double>(f.key, d), rows_of<const double>(f.turned, n), rows_of(f.inner, n));
    for (Int i = 0; i < n * d && !k; ++i) f.key[i] /= s.alpha;
    lower_times<double>(n, columns, seen, k ? pair.at(0, d) : pair, rows_of(answer, columns), k ? 1 : -s.gain, !k);
    for (Int i = 0; i < n * columns; ++i) out[first * columns + i] = S(answer[i]);
}

// Keeps the fits of n tokens before which nothing was seen; rows (n, width) are their [E, Y], null: zeros.
template <class T>
void keep_first(Int first, Int n, Int d, Int k, double alpha, T gain, bool wide, const T* rows, Work<T>& w, Arena& scratch,
                Kept* kept) {
    const Int width = apart<T>(d, k);
    start<T>(d, k, alpha, w);
    for (Int at = 0; at < n; at += CHUNK) {
        const Int some = smaller(CHUNK, n - at);
        T* pair = keep<T>(first + at, d, k, wide, w, scratch, kept);
        if (!rows) {
            for (Int i = 0; i < some * width; ++i) pair[i] = 0;
            continue;
        }
        __builtin_memcpy(pair, rows + at * width, some * width * sizeof(T));
        if (at + some < n) pass_block<T>(some, d, k, gain, rows + at * width, w);
    }
}

// Answers of the first tokens, or, with `kept`, their fits.
template <class S>
void run_first(const Sequence<S>& s, Int first, Int n, Sums& sums, bool last, const First& f, Work<double>& w, Arena& scratch,
               S* out, Kept* kept) {
    const Int d = s.d, k = s.k;
    fit_first<S>(s, first, n, f);
    if (!last) {
        const In<double> key = rows_of<const double>(f.key, d);
        multiply<double>(d, d, n, key.t(), key, rows_of(w.gram, d), 1, false, UPPER);
        multiply<double>(d, k, n, key.t(), rows_of<const double>(f.value, k), rows_of(w.cross, k));
        add_chunk<double>(d, k, w, sums);
    }
    if (kept) return keep_first<double>(first, n, d, k, s.alpha, s.gain, sizeof(S) < sizeof(double), f.pair, w, scratch, kept);
    answer_first<S>(s, first, n, f, out);
}

// Tokens that do not count, before the first one that does: answers are 0, or q_t / alpha without values.
template <class S>
void run_unseen(const Sequence<S>& s, Int first, Int n, Work<S>& w, Arena& scratch, S* out, Kept* kept) {
    const Int d = s.d, k = s.k;
    if (kept) return keep_first<S>(first, n, d, k, s.alpha, S(s.gain), false, nullptr, w, scratch, kept);
    for (Int i = first; i < first + n; ++i)
        for (Int j = 0; j < (k ? k : d); ++j) out[i * (k ? k : d) + j] = k ? S(0) : S(s.query[i * s.query_row + j] / s.alpha);
}

}  // namespace
}  // namespace INTENTION_ARCH
