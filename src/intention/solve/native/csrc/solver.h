// Sigma^-1 times a matrix, from the inverse or from X = U^-T (Sigma^-1 = X'X).
#pragma once

#include "arena.h"
#include "factor.h"

namespace INTENTION_ARCH {

template <class T>
struct Solver {
    Int n;
    In<T> x, inverse;  // one of them may be missing (null)

    // out = Sigma^-1 b, both n x k and in the same layout: one of their strides is 1.
    void operator()(Int k, In<T> b, Mat<T> out, Arena& arena) const {
        if (inverse.p && b.cs == 1 && k > 1) {
            multiply<T>(n, k, n, inverse, b, out);
        } else if (inverse.p) {
            multiply<T>(k, n, n, b.t(), inverse, out.t());
        } else if (b.cs == 1 && k >= WIDTH<T>) {
            by_triangles(k, b, rows_of(arena.take<T>(n * k), k), out);
        } else {
            const Mat<T> half = rows_of(arena.take<T>(k * n), n);
            multiply<T>(k, n, n, b.t(), x.t(), half);
            multiply<T>(k, n, n, half, x, out.t());
        }
    }

  private:
    // X b, then X' times that, one row of tiles at a time: of the triangles little more than what is not 0.
    void by_triangles(Int k, In<T> b, Mat<T> half, Mat<T> out) const {
        constexpr Int COLUMNS = TILE_VECTORS * WIDTH<T>;
        for (Int j = 0; j < k; j += COLUMNS) {
            const Int some = smaller(COLUMNS, k - j);
            for (Int i = 0; i < n; i += TILE_ROWS)
                column_of_tiles<T>(smaller<Int>(TILE_ROWS, n - i), some, smaller<Int>(i + TILE_ROWS, n), x.at(i, 0),
                                   b.p + j, b.rs, half.p + i * k + j, k, 1, false);
            for (Int i = 0; i < n; i += TILE_ROWS)
                column_of_tiles<T>(smaller<Int>(TILE_ROWS, n - i), some, n - i, x.at(i, i).t(), half.p + i * k + j, k,
                                   out.p + i * out.rs + j, out.rs, 1, false);
        }
    }
};

// With few columns everything n x k is kept as k rows, so that vectors lie along the longer side.
template <class T>
Mat<T> columns(Int n, Int k, bool as_rows, Arena& arena) {
    T* p = arena.take<T>(n * k);
    return as_rows ? Mat<T>{p, 1, n} : Mat<T>{p, k, 1};
}

}  // namespace INTENTION_ARCH
