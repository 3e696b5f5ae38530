// The fits of a sequence, chunk by chunk of tokens, and its answers.
#pragma once

#include "causal_first.h"

namespace INTENTION_ARCH {
namespace {

constexpr Int LONGEST = 512;  // tokens between two Gram matrices that are factored
// Float serves up to a ratio of 30, as in factor.py. Here: up to 10 before a chunk in which Sigma grows up to 3 times, so
// that later tokens hardly ever change the precision of earlier ones; and where the products k P lose a factor of 8 at
// most. The first tokens of all are fitted in double.
constexpr double EASY_BEFORE = 10, GROWTH = 3, LITTLE = 8;
// Up to this ratio the gradients of the first tokens are made in float from their fits in double, if what follows is easy
// and there are values: without them P enters twice, and more is lost.
constexpr double GENTLE = 200;

// Answers of a chunk, or, with `kept`, its fits.
template <class T, class S>
void run_chunk(const Sequence<S>& s, Int first, Int count, Sums& sums, bool last, Work<T>& w, Arena& scratch,
               S* out, Kept* kept) {
    const Int d = s.d, k = s.k, end = first + count;
    const T gain = T(s.gain);
    Rows<T> span = {};
    bool summed = false;
    for (Int at = first; at < end; at += BLOCK) {
        const Int n = smaller(BLOCK, end - at);
        if ((at - first) % SPAN == 0) {
            const Int some = smaller(SPAN, end - at);
            span = load_rows<T, S>(s, at, some, w);
            if (!last && counted(s, at, some)) {
                sum_rows<T>(some, d, k, span, summed, w);
                summed = true;
            }
        }
        const Rows<T> rows = span.from((at - first) % SPAN);
        T* pair = kept ? keep<T>(at, d, k, sizeof(T) > sizeof(S), w, scratch, kept) : w.pair;
        if (!kept) {
            prefetch_rows<false>(n, d, s.query + at * s.query_row, s.query_row);
            prefetch_rows<true>(n, k ? k : d, out + at * (k ? k : d), k ? k : d);
        }
        const bool counts = counted(s, at, n) > 0;  // else the fit is that of the block before
        if (counts) {
            fit_block<T>(n, d, k, gain, rows, w, pair);
        } else {
            for (Int i = 0; i < n * apart<T>(d, k); ++i) pair[i] = 0;
        }
        if (!kept) write_answers<T, S>(n, d, k, gain, rows.query, w, out + at * (k ? k : d));
        if (counts && at + n < end) pass_block<T>(n, d, k, gain, pair, w);
    }
    if (summed) add_chunk<T>(d, k, w, sums);
}

// Sigma grows up to GROWTH times within a chunk, if keys are alike. After a state of which little is known: MOST.
inline Int next_tokens(Int seen) { return seen ? smaller(larger(seen * 5 / 3, CHUNK), LONGEST) : MOST; }

inline double worse(double a, double b) { return a != a || a > b ? a : b; }  // NaN stays

struct Outcome {
    double ratio, error;
    bool wide;
};

// All chunks of a sequence in order, each in the precision that it needs.
template <class S>
Outcome run(const Sequence<S>& s, const double* gram, const double* cross, Arena& scratch, S* out, Kept* kept) {
    Work<S> narrow;
    Work<double> wide;
    narrow.place(scratch, s.d, s.k);
    wide.place(scratch, s.d, s.k);
    First start;
    FirstRows<double> start_wide;
    FirstRows<S> start_narrow;
    start.place(scratch, s.d), start_wide.place(scratch, s.d, s.k), start_narrow.place(scratch, s.d, s.k);
    Sums sums = {gram == nullptr, scratch.take<double>(s.d * s.d), scratch.take<double>(s.d * s.k)};
    double* diagonal = scratch.take<double>(s.d);
    if (gram) __builtin_memcpy(sums.gram, gram, s.d * s.d * sizeof(double));
    if (gram && s.k) __builtin_memcpy(sums.cross, cross, s.d * s.k * sizeof(double));
    Outcome found = {0, 0, false};
    Int begun = -1;  // where the first chunk is, if it may be narrowed
    Int started = -1, ended = -1;  // the first chunk
    for (Int at = 0, seen = 0, count = 0; at < s.n; at += count) {
        if (sums.empty && !counted(s, at, smaller(CHUNK, s.n - at))) {
            count = smaller(CHUNK, s.n - at);
            run_unseen<S>(s, at, count, narrow, scratch, out, kept);
            continue;
        }
        count = sums.empty ? smaller(until(s, at, CHUNK, first_tokens(s.d)), MOST) : until(s, at, CHUNK, next_tokens(seen));
        const bool last = at + count == s.n;
        const Largest largest = largest_of<S>(s, at, count, sums, diagonal);
        double top = 1 / s.alpha, smallest = EPSILON<double>, rounded = 0;
        if (sums.empty) {
            const Gentle gentle = run_first<S>(s, at, count, start, start_wide, start_narrow, wide, scratch, out, kept);
            if (gentle.tokens) rounded = __builtin_sqrt(gentle.condition) * EPSILON<S>;
            if (!last) sum_first<S, S>(s, at, count, narrow, sums);
            started = at, ended = at + count;
            found.wide = sizeof(S) == 4 && gentle.tokens < count;
            if (kept && s.k && sizeof(S) == 4 && largest.after * top < GENTLE) begun = at;
        } else {
            const bool steady = sizeof(S) == 8 || (largest.before > s.alpha && largest.after < GROWTH * largest.before);
            top = steady ? fit_before<S, S>(s, sums, narrow) : 0.0;
            const bool easy = steady && largest.before * top < EASY_BEFORE && lost<S, S>(s, sums, top, narrow) < LITTLE;
            if (sizeof(S) == 4 && !easy) {
                if (at == ended) sum_first<double, S>(s, started, ended - started, wide, sums);  // those of float round too much
                top = fit_before<double, S>(s, sums, wide);
                run_chunk<double, S>(s, at, count, sums, last, wide, scratch, out, kept);
                found.wide = true;
            } else {
                smallest = EPSILON<S>;
                for (Int i = begun; begun >= 0 && i < at; i += CHUNK) narrow_kept<S>(s.d, s.k, scratch, kept[i / CHUNK]);
                run_chunk<S, S>(s, at, count, sums, last, narrow, scratch, out, kept);
            }
        }
        if (begun < at) begun = -1;
        // eigenvalues are at least diagonal entries: of Sigma after the chunk, of its inverse before it
        const double ratio = largest.after * top, error = larger(ratio * smallest, rounded);
        found.ratio = worse(found.ratio, ratio), found.error = worse(found.error, error);
        seen += counted(s, at, count);
    }
    return found;
}

}  // namespace
}  // namespace INTENTION_ARCH
