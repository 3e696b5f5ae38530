// One fit in every lane: A = c H + alpha I is factored, H being what a token has updated, and systems are solved.
#pragma once

#include "forget.h"
#include "lanes.h"

namespace INTENTION_ARCH {
namespace {

constexpr int ACROSS = BYTES == 64 ? 4 : BYTES == 32 ? 3 : 2;  // columns: PANEL x ACROSS sums in registers

inline Int row_at(Int i) { return i * (i + 1) / 2; }  // of a lower triangle whose rows follow each other

// As `kept`, with AVX2 too: 12 sums, 3 factors and 1 fill its registers.
template <class T>
inline Vec<T> in_register(Vec<T> v) {
#if defined(__AVX2__)
    asm("" : "+v"(v));
#endif
    return v;
}

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

// A token: what it does to H = c S, and A = H + alpha I with its factor L, the systems to solve, the smallest pivot and the
// trace of A so far.
template <class T>
struct Fit {
    const Vec<T>* key;
    Vec<T> decay, weight, alpha;  // of the weight c times
    Vec<T>*lower, *reciprocal;    // L, and of its diagonal
    const Vec<T>* right[2];
    Vec<T>* solved[2];
    Vec<T> least, trace;
};

// Columns j .. j + COLUMNS of PANEL rows from i on; j + COLUMNS <= i.
template <class T, int COLUMNS>
inline void factor_tile(Int i, Int j, const Fit<T>& fit, Vec<T>* h) {
    const Vec<T>* own[PANEL];
    const Vec<T>* other[COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) own[r] = fit.lower + row_at(i + r);
#pragma GCC unroll 4
    for (int s = 0; s < COLUMNS; ++s) other[s] = fit.lower + row_at(j + s);
    Vec<T> left[PANEL][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) {
        Vec<T>* at = h + row_at(i + r) + j;
        const Vec<T> x = fit.weight * fit.key[i + r];
#pragma GCC unroll 4
        for (int s = 0; s < COLUMNS; ++s) left[r][s] = at[s] = fit.decay * at[s] + x * fit.key[j + s];
    }
    for (Int p = 0; p < j; ++p) {
        Vec<T> y[COLUMNS];
#pragma GCC unroll 4
        for (int s = 0; s < COLUMNS; ++s) y[s] = in_register<T>(other[s][p]);
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
            const Vec<T> x = in_register<T>(own[r][p]);
#pragma GCC unroll 4
            for (int s = 0; s < COLUMNS; ++s) left[r][s] -= x * y[s];
        }
    }
#pragma GCC unroll 4
    for (int s = 0; s < COLUMNS; ++s) {
        const Vec<T> scale = fit.reciprocal[j + s];
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < s; ++p) left[r][s] -= left[r][p] * other[s][j + p];
            fit.lower[row_at(i + r) + j + s] = left[r][s] *= scale;
        }
    }
}

// Columns j .. end, whose number is a multiple of PANEL.
template <class T>
inline void factor_beside(Int i, Int j, Int end, const Fit<T>& fit, Vec<T>* h) {
    while (j < end) {
        const Int some = ACROSS == 3 && (end - j == 4 || end - j == 2) ? 2 : ACROSS;
        some == 2 ? factor_tile<T, 2>(i, j, fit, h) : factor_tile<T, ACROSS>(i, j, fit, h);
        j += some;
    }
}

// The diagonal block of PANEL rows from i on, and the rows' part of L^-1 of the right-hand sides.
template <class T, int SIDES>
inline void factor_diagonal(Int i, Fit<T>& fit, Vec<T>* h) {
    Vec<T>* own[PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) own[r] = fit.lower + row_at(i + r);
    Vec<T> left[PANEL][PANEL], seen[SIDES][PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) {
        Vec<T>* at = h + row_at(i + r) + i;
        const Vec<T> x = fit.weight * fit.key[i + r];
#pragma GCC unroll 4
        for (int s = 0; s <= r; ++s) left[r][s] = at[s] = fit.decay * at[s] + x * fit.key[i + s];
        left[r][r] += fit.alpha;
        fit.trace += left[r][r];
#pragma GCC unroll 2
        for (int b = 0; b < SIDES; ++b) seen[b][r] = fit.right[b][i + r];
    }
    const auto see = [&](Int p) {
        Vec<T> y[SIDES];
#pragma GCC unroll 2
        for (int b = 0; b < SIDES; ++b) y[b] = fit.solved[b][p];
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
            const Vec<T> x = own[r][p];
#pragma GCC unroll 2
            for (int b = 0; b < SIDES; ++b) seen[b][r] -= x * y[b];
        }
    };
    for (Int p = 0; p < i; ++p) {
        Vec<T> x[PANEL];
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) {
            x[r] = in_register<T>(own[r][p]);
#pragma GCC unroll 4
            for (int s = 0; s <= r; ++s) left[r][s] -= x[r] * x[s];
        }
        if (BYTES == 64) see(p);
    }
    if (BYTES != 64)  // the sums above and these do not fit into the registers together
        for (Int p = 0; p < i; ++p) see(p);
#pragma GCC unroll 4
    for (int s = 0; s < PANEL; ++s) {
        const Vec<T> pivot = left[s][s], scale = reciprocal_root(pivot);
        fit.least = lower_of(fit.least, pivot);
        fit.reciprocal[i + s] = scale, own[s][i + s] = pivot * scale;
#pragma GCC unroll 4
        for (int r = s + 1; r < PANEL; ++r) {
            own[r][i + s] = left[r][s] *= scale;
#pragma GCC unroll 4
            for (int p = s + 1; p <= r; ++p) left[r][p] -= left[r][s] * left[p][s];
        }
#pragma GCC unroll 2
        for (int b = 0; b < SIDES; ++b) {
            const Vec<T> y = fit.solved[b][i + s] = seen[b][s] * scale;
#pragma GCC unroll 4
            for (int r = s + 1; r < PANEL; ++r) seen[b][r] -= left[r][s] * y;
        }
    }
}

// L'z = y of PANEL rows from i on, in place, and what it takes from the rows before.
template <class T, int SIDES>
inline void substitute_back(Int i, const Fit<T>& fit) {
    const Vec<T>* own[PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < PANEL; ++r) own[r] = fit.lower + row_at(i + r);
    Vec<T> z[SIDES][PANEL];
#pragma GCC unroll 2
    for (int b = 0; b < SIDES; ++b)
#pragma GCC unroll 4
        for (int r = PANEL - 1; r >= 0; --r) {
            Vec<T> y = fit.solved[b][i + r];
#pragma GCC unroll 4
            for (int p = PANEL - 1; p > r; --p) y -= own[p][i + r] * z[b][p];
            fit.solved[b][i + r] = z[b][r] = y * fit.reciprocal[i + r];
        }
    for (Int j = 0; j < i; ++j) {
        Vec<T> x[PANEL];
#pragma GCC unroll 4
        for (int r = 0; r < PANEL; ++r) x[r] = own[r][j];
#pragma GCC unroll 2
        for (int b = 0; b < SIDES; ++b) {
            Vec<T> y = fit.solved[b][j];
#pragma GCC unroll 4
            for (int r = 0; r < PANEL; ++r) y -= x[r] * z[b][r];
            fit.solved[b][j] = y;
        }
    }
}

// H after a token and A^-1 of SIDES right-hand sides. The trace of A over its least pivot is nearly its condition.
// Not inlined: registers are few.
template <class T, int SIDES>
__attribute__((noinline)) void solve_token(Int d, Fit<T>& fit, Vec<T>* h) {
    fit.least = fit.alpha * 0 + T(1e30), fit.trace = Vec<T>{};
    for (Int i = 0; i < d; i += PANEL) {
        factor_beside<T>(i, 0, i, fit, h);
        factor_diagonal<T, SIDES>(i, fit, h);
    }
    for (Int i = d - PANEL; i >= 0; i -= PANEL) substitute_back<T, SIDES>(i, fit);
}

}  // namespace
}  // namespace INTENTION_ARCH
