// The first tokens of a sequence, before which nothing was seen: P = I / alpha and W = 0.
//
// They share one triangular factor, of G = I + c K K' / alpha, which is cheaper than to go block by block. It is made in
// double, and so is E = R^-1 K / alpha: while there are as few tokens as features Sigma has a large condition, whatever
// alpha is, and E cancels by as much. The rest loses its root only, so it may be made in float.
#pragma once

#include "causal_blocks.h"

namespace INTENTION_ARCH {
namespace {

constexpr Int MOST = 128;  // tokens of a first chunk

// Half as many again as features: for keys that point everywhere Sigma is then one that float serves.
inline Int first_tokens(Int d) { return smaller(MOST, ceil_div(3 * d, 2 * CHUNK) * CHUNK); }

// What a first chunk works with: its factor and E in double, ...
struct First {
    double *rows, *turned, *upper, *pivots;
    void place(Arena& s, Int d) {
        rows = s.take<double>(MOST * padded<double>(d)), turned = s.take<double>(d * MOST), upper = s.take<double>(MOST * MOST);
        pivots = s.take<double>(MOST);
    }
};

// ... and the rest in the precision of the answers.
template <class T>
struct FirstRows {
    T *pair, *turned, *inner, *pivots, *query, *answer;  // the last two are room for copies
    void place(Arena& s, Int d, Int k) {
        pair = s.take<T>(MOST * apart<T>(d, k)), turned = s.take<T>(d * MOST), inner = s.take<T>(MOST * MOST);
        pivots = s.take<T>(MOST), query = s.take<T>(MOST * d), answer = s.take<T>(MOST * larger(d, k));
    }
};

// both = [I / alpha, 0]
template <class T>
void start(Int d, Int k, double alpha, Work<T>& w) {
    const Int width = apart<T>(d, k);
    for (Int i = 0; i < d * width; ++i) w.both[i] = 0;
    for (Int i = 0; i < d; ++i) w.both[i * width + i] = T(1 / alpha);
}

// Up to this condition of G (its norm) float serves for Y and the answers: errors grow with its root, and are 1e-6 in the
// median, at most 6e-6 (keys of low rank), measured. Without values, and for gradients, P enters, which loses all of it.
constexpr double FLOAT_ROWS = 1500;

// How many tokens float serves, and the condition of their G. Whole strips: none depends on tokens after it.
struct Gentle {
    Int tokens;
    double condition;
};

inline Gentle gentle_tokens(Int n, Int size, const double* upper) {
    double squares = 0;
    Gentle found = {0, 1};
    for (Int b = 0; b < n; b += STRIP) {
        double above[STRIP] = {};
        for (Int i = 0; i < b; ++i)
            for (Int l = 0; l < STRIP; ++l) above[l] += upper[i * size + b + l] * upper[i * size + b + l];
        for (Int i = b; i < b + STRIP; ++i)
            for (Int j = i; j < b + STRIP; ++j) above[j - b] += (j > i ? 1 : .5) * upper[i * size + j] * upper[i * size + j];
        for (Int l = 0; l < STRIP; ++l) squares += 2 * above[l];
        const double condition = __builtin_sqrt(squares);  // its eigenvalues are 1 and more
        if (!(condition < FLOAT_ROWS)) break;
        found = {smaller(b + STRIP, n), condition};
    }
    return found;
}

// R R' = G and E = R^-1 K / alpha, from tokens in double.
template <class S>
Gentle factor_first(const Sequence<S>& s, Int first, Int n, Int size, const First& f) {
    const Int d = s.d, width = padded<double>(d);
    for (Int i = 0; i < size; ++i)
        for (Int j = i < n ? d : 0; j < width; ++j) f.rows[i * width + j] = 0;
    copy_rows<double, S>(n, d, s.key + first * s.key_row, s.key_row, s.weight ? s.weight + first : nullptr, f.rows, width);
    transpose<double>(n, d, f.rows, width, f.turned, n);
    multiply<double>(n, n, d, rows_of<const double>(f.rows, width), rows_of<const double>(f.turned, n), rows_of(f.upper, size),
                     s.gain / s.alpha, false, UPPER);
    add_unit(n, size, f.upper);
    const Gentle gentle = gentle_tokens(n, size, f.upper);
    cholesky<double>(n, size, f.upper, f.pivots);
    for (Int i = 0; i < n * width; ++i) f.rows[i] *= 1 / s.alpha;
    half_solve(size, f.upper, f.pivots, width, f.rows, width);
    return gentle;
}

// pair = [E, Y] of the first tokens, Y = R^-1 V.
template <class T, class S>
void fit_first(const Sequence<S>& s, Int first, Int n, Int size, const First& f, const FirstRows<T>& r) {
    const Int d = s.d, k = s.k, width = apart<T>(d, k), from = d / WIDTH<T> * WIDTH<T>, columns = padded<T>(d + k);
    for (Int i = 0; i < size; ++i)
        for (Int j = from; j < columns; ++j) r.pair[i * width + j] = 0;
    if (k) {
        const S* weight = s.weight ? s.weight + first : nullptr;
        copy_rows<T, S>(n, k, s.value + first * s.value_row, s.value_row, weight, r.pair + d, width);
        for (Int i = 0; i < size; ++i) {
            r.pivots[i] = T(f.pivots[i]);
            for (Int j = i / WIDTH<T> * WIDTH<T>; j < size; ++j) r.inner[i * size + j] = T(f.upper[i * size + j]);
        }
        half_solve(size, r.inner, r.pivots, columns - from, r.pair + from, width);
    }
    for (Int i = 0; i < size; ++i)
        for (Int j = 0; j < d; ++j) r.pair[i * width + j] = T(f.rows[i * padded<double>(d) + j]);
}

// o_t = sum_{s<=t} (q_t E_s) Y_s, or q_t / alpha - c sum_{s<=t} (q_t E_s) E_s without values. The room of the factor is
// used up.
template <class T, class S>
void answer_first(const Sequence<S>& s, Int first, Int n, const FirstRows<T>& r, S* out) {
    const Int d = s.d, k = s.k, width = apart<T>(d, k), columns = k ? k : d;
    const In<T> pair = rows_of<const T>(r.pair, width), seen = rows_of<const T>(r.inner, n);
    const In<T> query = in_place_or_copied<T, S>(n, d, s.query + first * s.query_row, s.query_row, nullptr, r.query);
    transpose<T>(n, d, r.pair, width, r.turned, n);
    // q E cancels where keys come back: in float one long sum rounds twice as much
    lower_of<T>(n, d, query, rows_of<const T>(r.turned, n), rows_of(r.inner, n), SHORT);
    T* answer = r.answer;
    if constexpr (sizeof(T) == sizeof(S)) answer = out + first * columns;
    for (Int i = 0; i < n && !k; ++i)
        for (Int j = 0; j < d; ++j) answer[i * d + j] = query(i, j) / T(s.alpha);
    lower_times<T>(n, columns, seen, k ? pair.at(0, d) : pair, rows_of(answer, columns), k ? T(1) : T(-s.gain), !k);
    if constexpr (sizeof(T) < sizeof(S) || sizeof(T) > sizeof(S))
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

// The sums of the first tokens.
template <class T, class S>
void sum_first(const Sequence<S>& s, Int first, Int n, Work<T>& w, Sums& sums) {
    for (Int at = 0; at < n; at += SPAN) {
        const Int some = smaller(SPAN, n - at);
        sum_rows<T>(some, s.d, s.k, load_rows<T, S>(s, first + at, some, w), at > 0, w);
    }
    sums.empty = true;
    add_chunk<T>(s.d, s.k, w, sums);
}

// Answers of the first tokens, or, with `kept`, their fits. Returns how many were made in float, and their condition.
template <class S>
Gentle run_first(const Sequence<S>& s, Int first, Int n, const First& f, const FirstRows<double>& wide, const FirstRows<S>& narrow,
                 Work<double>& w, Arena& scratch, S* out, Kept* kept) {
    const Int d = s.d, k = s.k, size = ceil_div(n, STRIP) * STRIP;
    Gentle gentle = factor_first<S>(s, first, n, size, f);
    if (kept || k == 0) gentle.tokens = 0;
    if (gentle.tokens < n) fit_first<double, S>(s, first, n, size, f, wide);
    if (kept) {
        keep_first<double>(first, n, d, k, s.alpha, s.gain, sizeof(S) < sizeof(double), wide.pair, w, scratch, kept);
        return gentle;
    }
    if (gentle.tokens < n) answer_first<double, S>(s, first, n, wide, out);
    if (gentle.tokens) {
        fit_first<S, S>(s, first, gentle.tokens, size, f, narrow);
        answer_first<S, S>(s, first, gentle.tokens, narrow, out);
    }
    return gentle;
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
