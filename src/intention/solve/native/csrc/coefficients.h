// W or P of an element from its factor, and one step of refinement.
#pragma once

#include "fit.h"

namespace INTENTION_ARCH {

// The conditions up to which a factor in double needs no refinement where the answer is a float, or a gradient: that of
// alpha holds their square.
constexpr double EASY_WIDE = 1e7, EASY_PULLED = 1e4;
constexpr double SMALL_CORRECTION = 2e-5;  // that is accepted in double, as in factor.py

// Sigma^-1 K~'V~, or Sigma^-1 V~
template <class T>
void coefficients(const RidgeArguments& a, const Fit<T>& f, Mat<T> coef, Arena& arena) {
    const Int n = f.solve.n, k = a.columns;
    const bool as_rows = coef.rs == 1;
    In<T> rhs = f.value;
    if (!a.dual || as_rows) {
        const Mat<T> y = columns<T>(n, k, as_rows, arena);
        if (a.dual) {
            transpose<T>(n, k, f.value.p, f.value.rs, y.p, n);
        } else {
            multiply<T>(n, k, a.points, f.key.t(), f.value, y);
        }
        rhs = y;
    }
    f.solve(k, rhs, coef, arena);
}

// One refinement step, its residual taken from K and V: V~ - c K~K~'P - alpha P, or K~'(V~ - c K~W) - alpha W
template <class T>
void refinement(const RidgeArguments& a, const Fit<T>& f, In<T> coef, Mat<T> step, Arena& arena) {
    const Int n = a.points, d = a.features, k = a.columns, size = f.solve.n;
    const bool as_rows = coef.rs == 1;
    const Mat<T> rest = columns<T>(size, k, as_rows, arena);
    if (a.dual) {
        const Mat<T> map = columns<T>(d, k, as_rows, arena);
        multiply<T>(d, k, n, f.key.t(), coef, map);
        for (Int i = 0; i < n; ++i)
            for (Int j = 0; j < k; ++j) rest(i, j) = f.value(i, j);
        multiply<T>(n, k, d, f.key, map, rest, -f.head.gain, true);
    } else {
        const Mat<T> missed = rows_of(arena.take<T>(n * k), k);
        copy_rows<T>(n, k, f.value, missed.p);
        multiply<T>(n, k, d, f.key, coef, missed, -f.head.gain, true);
        multiply<T>(d, k, n, f.key.t(), missed, rest);
    }
    for (Int i = 0; i < size * k; ++i) rest.p[i] -= f.head.alpha * coef.p[i];
    f.solve(k, rest, step, arena);
}

}  // namespace INTENTION_ARCH
