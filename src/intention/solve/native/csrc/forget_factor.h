// One fit in every lane: A = c H + alpha I is factored, H being what a token has updated, and systems are solved.
#pragma once

#include "forget.h"
#include "lanes.h"

namespace INTENTION_ARCH {
namespace {

constexpr int ACROSS = BYTES == 64 ? 4 : 2;          // columns: PANEL x ACROSS sums in registers

inline Int row_at(Int i) { return i * (i + 1) / 2; }  // of a lower triangle whose rows follow each other

#if defined(__AVX512F__)
inline Vec<float> reciprocal_root(Vec<float> x) {
    const Vec<float> y = (Vec<float>)_mm512_rsqrt14_ps((__m512)x);
    return y * (1.5f - 0.5f * x * y * y);
}
inline Vec<double> reciprocal_root(Vec<double> x) {
    Vec<double> y = (Vec<double>)_mm512_rsqrt14_pd((__m512d)x);
    y = y * (1.5 - 0.5 * x * y * y);
    return y * (1.5 - 0.5 * x * y * y);
}
#else
template <class V>
inline V reciprocal_root(V x) {
    return 1 / roots(x);
}
#endif

template <class V>
inline V lower_of(V a, V b) {
    return b < a ? b : a;
}
template <class V>
inline V upper_of(V a, V b) {
    return b > a ? b : a;
}

// A token: what it does to H, and what A is made of.
template <class T>
struct Step {
    const Vec<T>* key;
    Vec<T> decay, weight, gain, alpha;
};

// Of the factor: the diagonal's reciprocals, and the smallest pivot and the trace of A so far.
template <class T>
struct Pivots {
    Vec<T>* reciprocal;
    Vec<T> least, trace;
};

// Columns j .. j + ACROSS of PANEL rows from i on; j + ACROSS <= i.
template <class T>
inline void factor_beside(Int i, Int j, const Step<T>& step, Vec<T>* h, Vec<T>* lower, const Vec<T>* reciprocal) {
    const Vec<T>* own[PANEL];
    const Vec<T>* other[ACROSS];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) own[r] = lower + row_at(i + r);
#pragma GCC unroll 4
    for (int s = 0; s < ACROSS; ++s) other[s] = lower + row_at(j + s);
    Vec<T> sum[PANEL][ACROSS] = {};
    for (Int p = 0; p < j; ++p) {
        Vec<T> y[ACROSS];
#pragma GCC unroll 4
        for (int s = 0; s < ACROSS; ++s) y[s] = kept<T>(other[s][p]);
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
            const Vec<T> x = kept<T>(own[r][p]);
#pragma GCC unroll 4
            for (int s = 0; s < ACROSS; ++s) sum[r][s] += x * y[s];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) {
        Vec<T>* at = h + row_at(i + r) + j;
        Vec<T>* to = lower + row_at(i + r) + j;
        const Vec<T> x = step.weight * step.key[i + r];
        Vec<T> found[ACROSS];
#pragma GCC unroll 4
        for (int s = 0; s < ACROSS; ++s) {
            at[s] = step.decay * at[s] + x * step.key[j + s];
            found[s] = step.gain * at[s] - sum[r][s];
        }
#pragma GCC unroll 4
        for (int s = 0; s < ACROSS; ++s) {
#pragma GCC unroll 4
            for (int p = 0; p < s; ++p) found[s] -= found[p] * other[s][j + p];
            to[s] = found[s] *= reciprocal[j + s];
        }
    }
}

// The diagonal block of PANEL rows from i on, and the rows' part of L^-1 of the right-hand sides.
template <class T, int SIDES>
inline void factor_diagonal(Int i, const Step<T>& step, Vec<T>* h, Vec<T>* lower, Pivots<T>& pivots,
                            const Vec<T>* const* right, Vec<T>* const* half) {
    Vec<T>* own[PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) own[r] = lower + row_at(i + r);
    Vec<T> sum[PANEL][PANEL] = {}, seen[SIDES][PANEL] = {};
    for (Int p = 0; p < i; ++p) {
        Vec<T> x[PANEL];
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
            x[r] = kept<T>(own[r][p]);
#pragma GCC unroll 4
            for (int s = 0; s <= r; ++s) sum[r][s] += x[r] * x[s];
        }
#pragma GCC unroll 2
        for (int b = 0; b < SIDES; ++b) {
            const Vec<T> y = half[b][p];
#pragma GCC unroll 4
            for (int r = 0; r < PANEL; ++r) seen[b][r] += x[r] * y;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) {
        Vec<T>* at = h + row_at(i + r) + i;
        const Vec<T> x = step.weight * step.key[i + r];
#pragma GCC unroll 4
        for (int s = 0; s <= r; ++s) {
            at[s] = step.decay * at[s] + x * step.key[i + s];
            Vec<T> a = step.gain * at[s];
            if (s == r) {
                a += step.alpha;
                pivots.trace += a;
            }
            a -= sum[r][s];
#pragma GCC unroll 4
            for (int p = 0; p < s; ++p) a -= sum[r][p] * sum[s][p];  // the block's own factor, so far
            if (s < r) {
                sum[r][s] = own[r][i + s] = a * pivots.reciprocal[i + s];
            } else {
                pivots.least = lower_of(pivots.least, a);
                const Vec<T> y = reciprocal_root(a);
                pivots.reciprocal[i + r] = y, own[r][i + r] = a * y;
            }
        }
    }
#pragma GCC unroll 2
    for (int b = 0; b < SIDES; ++b)
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
            Vec<T> y = right[b][i + r] - seen[b][r];
#pragma GCC unroll 4
            for (int p = 0; p < r; ++p) y -= sum[r][p] * half[b][i + p];
            half[b][i + r] = y * pivots.reciprocal[i + r];
        }
}

// L'z = y, in place.
template <class T, int SIDES>
inline void back(Int d, const Vec<T>* lower, const Vec<T>* reciprocal, Vec<T>* const* half) {
    for (Int i = d - PANEL; i >= 0; i -= PANEL) {
        const Vec<T>* own[PANEL];
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) own[r] = lower + row_at(i + r);
        Vec<T> z[SIDES][PANEL];
#pragma GCC unroll 2
        for (int b = 0; b < SIDES; ++b)
#pragma GCC unroll 4
            for (int r = PANEL - 1; r >= 0; --r) {
                Vec<T> y = half[b][i + r];
#pragma GCC unroll 4
                for (int p = PANEL - 1; p > r; --p) y -= own[p][i + r] * z[b][p];
                half[b][i + r] = z[b][r] = y * reciprocal[i + r];
            }
        for (Int j = 0; j < i; ++j) {
            Vec<T> x[PANEL];
#pragma GCC unroll 4
            for (int r = 0; r < PANEL; ++r) x[r] = own[r][j];
#pragma GCC unroll 2
            for (int b = 0; b < SIDES; ++b) {
                Vec<T> y = half[b][j];
#pragma GCC unroll 4
                for (int r = 0; r < PANEL; ++r) y -= x[r] * z[b][r];
                half[b][j] = y;
            }
        }
    }
}

// H after a token and A^-1 of SIDES right-hand sides. The trace of A over its least pivot is nearly its condition.
// Not inlined: registers are few.
template <class T, int SIDES>
__attribute__((noinline)) Pivots<T> solve_token(Int d, const Step<T>& step, Vec<T>* h, Vec<T>* lower, Vec<T>* reciprocal,
                   const Vec<T>* const* right, Vec<T>* const* solved) {
    Pivots<T> pivots = {reciprocal, step.alpha * 0 + T(1e30), Vec<T>{}};
    for (Int i = 0; i < d; i += PANEL) {
        for (Int j = 0; j < i; j += ACROSS) factor_beside<T>(i, j, step, h, lower, reciprocal);
        factor_diagonal<T, SIDES>(i, step, h, lower, pivots, right, solved);
    }
    back<T, SIDES>(d, lower, reciprocal, solved);
    return pivots;
}

}  // namespace
}  // namespace INTENTION_ARCH
