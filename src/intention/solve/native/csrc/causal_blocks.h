// The fits of blocks of tokens, one after the other, and their answers.
#pragma once

#include "arena.h"
#include "causal_rows.h"
#include "causal_triangles.h"

namespace INTENTION_ARCH {
namespace {

constexpr Int BLOCK = 16;  // tokens that share a triangular factor
constexpr Int CHUNK = 32;  // tokens whose gradients are made together
constexpr Int SPAN = 32;   // tokens that are loaded, and summed up, together: long sums round more

template <class T>
constexpr double EPSILON = sizeof(T) == 4 ? __FLT_EPSILON__ : __DBL_EPSILON__;

struct Sums {  // of all tokens so far
    bool empty;
    double *gram, *cross;  // (d, d), of which the upper triangle counts, and (d, k)
};

// How far apart rows of [P, -W] and [E, Y] are: an odd number of registers, so that they do not all want the same few
// places of the cache.
template <class T>
Int apart(Int d, Int k) {
    return (ceil_div(d + k, WIDTH<T>) | 1) * WIDTH<T>;
}

// What the blocks of a chunk work with, in the precision of the chunk.
template <class T>
struct Work {
    T *query, *key, *value;  // (SPAN, d), (SPAN, d), (SPAN, k): room for copies
    T *both, *pair, *turned, *inner, *seen, *answer;
    T *gram, *cross, *half, *pivots;  // sums of a chunk; the first also serves `inverse`
    void place(Arena& s, Int d, Int k) {
        query = s.take<T>(SPAN * d), key = s.take<T>(SPAN * d), value = s.take<T>(SPAN * k);
        both = s.take<T>(d * apart<T>(d, k)), pair = s.zeros<T>(BLOCK * apart<T>(d, k)), turned = s.take<T>(d * BLOCK);
        inner = s.take<T>(BLOCK * BLOCK), seen = s.take<T>(BLOCK * BLOCK), answer = s.take<T>(BLOCK * (d + k));
        const Int size = padded<T>(d);
        gram = s.take<T>(size * size), cross = s.take<T>(d * k), half = s.take<T>(size * size), pivots = s.take<T>(larger(size, BLOCK));
    }
};

template <class T, class S>
Rows<T> load_rows(const Sequence<S>& s, Int first, Int n, const Work<T>& w) {
    const S* weight = s.weight ? s.weight + first : nullptr;
    return {in_place_or_copied<T, S>(n, s.d, s.query + first * s.query_row, s.query_row, nullptr, w.query),
            in_place_or_copied<T, S>(n, s.d, s.key + first * s.key_row, s.key_row, weight, w.key),
            s.k ? in_place_or_copied<T, S>(n, s.k, s.value + first * s.value_row, s.value_row, weight, w.value) : In<T>{w.value, 0, 1}};
}

// The largest diagonal entries of Sigma before and after a chunk.
struct Largest {
    double before, after;
};

template <class S>
Largest largest_of(const Sequence<S>& s, Int first, Int n, const Sums& sums, double* diagonal) {
    const auto top = [&] {
        double found = 0;
        for (Int j = 0; j < s.d; ++j)
            if (!(diagonal[j] <= found)) found = diagonal[j];  // NaN stays
        return s.gain * found + s.alpha;
    };
    for (Int j = 0; j < s.d; ++j) diagonal[j] = sums.empty ? 0.0 : sums.gram[j * s.d + j];
    const double before = top();
    for (Int i = first; i < first + n; ++i) {
        const S* key = s.key + i * s.key_row;
        const double weight = s.weight ? double(s.weight[i]) : 1.0;
        for (Int j = 0; j < s.d; ++j) diagonal[j] += weight * double(key[j]) * double(key[j]);
    }
    return {before, top()};
}

// both = [P, -W] from the sums; returns the largest diagonal entry of P, infinite where there is no factor.
template <class T, class S>
double fit_before(const Sequence<S>& s, const Sums& sums, Work<T>& w) {
    const Int d = s.d, k = s.k, width = apart<T>(d, k), size = padded<T>(d);
    for (Int i = 0; i < d * width; ++i) w.both[i] = 0;
    for (Int i = 0; i < size * size; ++i) w.gram[i] = 0;
    for (Int i = 0; i < d; ++i)
        for (Int j = 0; j < d; ++j) w.gram[i * size + j] = T(s.gain * sums.gram[i * d + j]);
    for (Int i = 0; i < size; ++i) w.gram[i * size + i] += T(i < d ? s.alpha : 1);
    if (!inverse(d, w.gram, w.half, w.both, width, w.pivots)) return __builtin_inf();
    double top = 0;
    for (Int i = 0; i < d; ++i) top = larger(top, double(w.both[i * width + i]));
    for (Int i = 0; i < d * k; ++i) w.cross[i] = T(sums.cross[i]);
    multiply<T>(d, k, d, rows_of<const T>(w.both, width), rows_of<const T>(w.cross, k), rows_of(w.both + d, width), T(-1));
    return top;
}

// By how much k P is smaller than k and P are, for keys like those so far: sqrt(top^2 tr(S) / tr(P S P)), with
// Sigma = c S + alpha I and c P S P = P - alpha P^2. Large where keys come back, as in a space of few dimensions.
template <class T, class S>
double lost(const Sequence<S>& s, const Sums& sums, double top, const Work<T>& w) {
    double keys = 0, trace = 0, squares = 0;
    for (Int i = 0; i < s.d; ++i) {
        const T* row = w.both + i * apart<T>(s.d, s.k);
        keys += s.gain * sums.gram[i * s.d + i], trace += double(row[i]), squares += dot(row, row, s.d);
    }
    return top * __builtin_sqrt(keys / (trace - s.alpha * squares));
}

// pair = [K P, V - c K W] of a block's rows.
template <class T>
void move_block(Int n, Int d, Int k, T gain, const Rows<T>& rows, const Work<T>& w, T* pair) {
    const Int width = apart<T>(d, k), columns = padded<T>(d + k);
    multiply<T>(n, columns, d, rows.key, rows_of<const T>(w.both, width), rows_of(pair, width));
    for (Int i = 0; i < n; ++i) {
        const T* value = rows.value.at(i, 0).p;
        T* right = pair + i * width + d;
        for (Int j = 0; j < k; ++j) right[j] = gain * right[j] + value[j];
    }
}

// I + A for an A of which the upper triangle counts, (n, n), padded to (size, size).
template <class T>
void add_unit(Int n, Int size, T* a) {
    for (Int i = 0; i < size; ++i)
        for (Int j = larger(i, n); j < size; ++j) a[i * size + j] = 0;
    for (Int i = 0; i < size; ++i) a[i * size + i] = i < n ? a[i * size + i] + 1 : T(1);
}

// pair = [E, Y] of a block's rows.
template <class T>
void fit_block(Int n, Int d, Int k, T gain, const Rows<T>& rows, const Work<T>& w, T* pair) {
    const Int width = apart<T>(d, k), size = padded<T>(n);
    move_block<T>(n, d, k, gain, rows, w, pair);
    transpose<T>(n, d, rows.key.p, rows.key.rs, w.turned, BLOCK);
    multiply<T>(n, n, d, rows_of<const T>(pair, width), rows_of<const T>(w.turned, BLOCK), rows_of(w.inner, size), gain, false, UPPER);
    add_unit(n, size, w.inner);
    cholesky<T>(n, size, w.inner, w.pivots);  // eigenvalues are 1 and more where the ratio is served
    half_solve(size, w.inner, w.pivots, padded<T>(d + k), pair, width);
}

// both = [P, -W] with the tokens of a block.
template <class T>
void pass_block(Int n, Int d, Int k, T gain, const T* rows, Work<T>& w) {
    const Int width = apart<T>(d, k), together = gain == 1 ? padded<T>(d + k) : d;
    const In<T> pair = rows_of<const T>(rows, width);
    multiply<T>(d, together, n, pair.t(), pair, rows_of(w.both, width), -gain, true, UPPER);
    if (together == d) multiply<T>(d, k, n, pair.t(), pair.at(0, d), rows_of(w.both + d, width), T(-1), true);
    mirror<T>(d, w.both, width);
}

// x_t A_t^-1 for rows x_t (n, d), from P, E and E'.
template <class T>
void transformed(Int n, Int d, T gain, In<T> x, In<T> inverse, In<T> rows, In<T> turned, T* seen, T* out) {
    lower_of<T>(n, d, x, turned, rows_of(seen, n));
    multiply<T>(n, d, d, x, inverse, rows_of(out, d));
    lower_times<T>(n, d, rows_of<const T>(seen, n), rows, rows_of(out, d), -gain, true);
}

template <class T>
void answers(Int n, Int d, Int k, T gain, In<T> query, const Work<T>& w, T* out) {
    const Int width = apart<T>(d, k);
    const In<T> both = rows_of<const T>(w.both, width), pair = rows_of<const T>(w.pair, width), turned = rows_of<const T>(w.turned, BLOCK);
    transpose<T>(n, d, w.pair, width, w.turned, BLOCK);
    if (k == 0) return transformed<T>(n, d, gain, query, both, pair, turned, w.seen, out);
    lower_of<T>(n, d, query, turned, rows_of(w.seen, n));
    multiply<T>(n, k, d, query, both.at(0, d), rows_of(out, k), T(-1));
    lower_times<T>(n, k, rows_of<const T>(w.seen, n), pair.at(0, d), rows_of(out, k), T(1), true);
}

template <class T, class S>
void write_answers(Int n, Int d, Int k, T gain, In<T> query, const Work<T>& w, S* out) {
    if constexpr (sizeof(T) == sizeof(S)) {
        answers<T>(n, d, k, gain, query, w, out);
    } else {
        answers<T>(n, d, k, gain, query, w, w.answer);
        for (Int i = 0; i < n * (k ? k : d); ++i) out[i] = S(w.answer[i]);
    }
}

template <class T>
void add_to(double* sums, const T* x, Int count) {
    for (Int i = 0; i < count; ++i) sums[i] += double(x[i]);
}

// K'WK and K'WV of some rows, or added to what is there.
template <class T>
void sum_rows(Int n, Int d, Int k, const Rows<T>& rows, bool add, Work<T>& w) {
    multiply<T>(d, d, n, rows.key.t(), rows.key, rows_of(w.gram, d), T(1), add, UPPER);
    multiply<T>(d, k, n, rows.key.t(), rows.value, rows_of(w.cross, k), T(1), add);
}

// Adds a chunk's K'WK and K'WV to the sums.
template <class T>
void add_chunk(Int d, Int k, const Work<T>& w, Sums& sums) {
    if (sums.empty) {
        for (Int i = 0; i < d * d; ++i) sums.gram[i] = 0;
        for (Int i = 0; i < d * k; ++i) sums.cross[i] = 0;
        sums.empty = false;
    }
    for (Int i = 0; i < d; ++i) add_to(sums.gram + i * d + i, w.gram + i * d + i, d - i);
    add_to(sums.cross, w.cross, d * k);
}

// Where the fits of a chunk of CHUNK tokens are kept for its gradients: P and -W' before it (d + k, d), then its [E, Y].
struct Kept {
    void* fits;
    bool wide;
};

// Where the [E, Y] of the block at token `at` are kept. Keeps P and -W' where a chunk begins.
template <class T>
T* keep(Int at, Int d, Int k, bool wide, const Work<T>& w, Arena& scratch, Kept* kept) {
    const Int width = apart<T>(d, k);
    Kept& here = kept[at / CHUNK];
    if (at % CHUNK == 0) {
        T* fits = scratch.take<T>((d + k) * d + CHUNK * width);
        for (Int i = 0; i < d; ++i) __builtin_memcpy(fits + i * d, w.both + i * width, d * sizeof(T));
        transpose<T>(d, k, w.both + d, width, fits + d * d, d);
        here = {fits, wide};
    }
    return static_cast<T*>(here.fits) + (d + k) * d + at % CHUNK * width;
}

// Fits that were made in double, in the precision of the call.
template <class S>
void narrow_kept(Int d, Int k, Arena& scratch, Kept& kept) {
    const Int from_width = apart<double>(d, k), width = apart<S>(d, k), before = (d + k) * d;
    const double* from = static_cast<const double*>(kept.fits);
    S* to = scratch.take<S>(before + CHUNK * width);
    for (Int i = 0; i < before; ++i) to[i] = S(from[i]);
    for (Int i = 0; i < CHUNK; ++i)
        for (Int j = 0; j < d + k; ++j) to[before + i * width + j] = S(from[before + i * from_width + j]);
    kept = {to, false};
}

}  // namespace
}  // namespace INTENTION_ARCH
