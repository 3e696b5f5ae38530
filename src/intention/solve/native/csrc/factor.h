// Sigma = U'U, U^-T and Sigma^-1, for one matrix and for as many small ones at once as a register has lanes.
//
// Matrices are padded to whole registers (n to `size`) with a unit diagonal: no loop has a rest, and the padding stays
// what it is. X = U^-T = L^-1 is lower triangular with zeros above; solving with it is two products.
#pragma once

#include "lanes.h"

namespace INTENTION_ARCH {

// What the accuracy of a factor is judged by.
template <class T>
struct Pivots {
    T grown;  // the largest of 1 / diag U^2, of the rows that count
    bool failed;
};

// The diagonal block of one register's width: U over the upper triangle, 1 / diag U. Only `count` rows are not padding.
// Rows are scaled to U at the end: a step waits for a division, not for a root and a division.
template <class T>
inline bool factor_block(int count, T* s, Int ld, T* inverse_root) {
    constexpr int W = WIDTH<T>;
    Vec<T> x[W], pivots = Vec<T>{} + T(1);
    bool good = true;
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = load<T>(s + r * ld);
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
        if (j >= count) break;
        T pivot = x[j][j];
        if (!(pivot > 0)) good = false, pivot = 1;
        pivots[j] = pivot;
        store<T>(s + j * ld, x[j]);
        const Vec<T> row = x[j] / pivot;
#pragma GCC unroll 16
        for (int i = j + 1; i < W; ++i) x[i] -= s[j * ld + i] * row;
    }
    store<T>(inverse_root, T(1) / roots(pivots));
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store<T>(s + j * ld, x[j] * inverse_root[j]);
    return good;
}

// U_bb^-T times a block of rows, in place: forward substitution, one register of columns at a time.
template <class T>
inline void substitute(const T* u, Int ldu, const T* inverse_root, T* rows, Int ld, Int vectors) {
    constexpr int W = WIDTH<T>;
    for (Int v = 0; v < vectors; ++v, rows += W) {
        Vec<T> x[W];
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r) x[r] = load<T>(rows + r * ld);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) {
            x[j] *= inverse_root[j];
            store<T>(rows + j * ld, x[j]);
#pragma GCC unroll 16
            for (int i = j + 1; i < W; ++i) x[i] -= u[j * ldu + i] * x[j];
        }
    }
}

// U over the upper triangle of s, a block of rows at a time: what is above is subtracted, then the block is factored.
// `counts` is 1 or 0 for each row; null: all count.
template <class T>
Pivots<T> cholesky(Int n, Int size, T* s, T* inverse_root, const T* counts = nullptr) {
    constexpr Int W = WIDTH<T>;
    Pivots<T> pivots = {0, false};
    for (Int b = 0; b < size; b += W) {
        const Mat<T> above = rows_of(s + b, size), block = above.at(b, 0);
        if (b) multiply<T>(W, size - b, b, above.t(), above, block, -1, true);
        if (!factor_block<T>(int(smaller(W, n - b)), block.p, size, inverse_root + b)) pivots.failed = true;
        substitute<T>(block.p, size, inverse_root + b, block.p + W, size, (size - b) / W - 1);
    }
    for (Int i = 0; i < n; ++i)
        if (!counts || counts[i] != 0) pivots.grown = larger(pivots.grown, inverse_root[i] * inverse_root[i]);
    return pivots;
}

// X = U^-T
template <class T>
void invert_factor(Int size, const T* u, const T* inverse_root, T* x) {
    constexpr Int W = WIDTH<T>, COLUMNS = TILE_VECTORS * W;
    for (Int b = 0; b < size; b += W) {
        T* row = x + b * size;
        for (Int j = 0; j < b; j += COLUMNS) {
            const In<T> above = rows_of(u + j * size + b, size), done = rows_of<const T>(x + j * size + j, size);
            multiply<T>(W, smaller(COLUMNS, b - j), b - j, above.t(), done, rows_of(row + j, size), -1);
        }
        for (Int r = 0; r < W; ++r) {
            for (Int j = b; j < size; j += W) store<T>(row + r * size + j, Vec<T>{});
            row[r * size + b + r] = 1;
        }
        substitute<T>(u + b * size + b, size, inverse_root + b, row, size, b / W + 1);
    }
}

// Sigma^-1 = X'X, one register of columns at a time: below X's diagonal only.
template <class T>
void cross(Int size, const T* x, T* out) {
    constexpr Int W = WIDTH<T>;
    for (Int j = 0; j < size; j += W)
        column_of_tiles<T>(j + W, W, size - j, {x + j * size, 1, size}, x + j * size + j, size, out + j, size, 1, false);
    for (Int j = 0; j < size; j += W)
        transpose<T>(W, size - j - W, out + j * size + j + W, size, out + (j + W) * size + j, size);
}

// Compiled once for all files, in kernels_shared.cpp.
#define INTENTION_FACTORS(PREFIX, T)                                    \
    PREFIX template Pivots<T> cholesky<T>(Int, Int, T*, T*, const T*);  \
    PREFIX template void invert_factor<T>(Int, const T*, const T*, T*); \
    PREFIX template void cross<T>(Int, const T*, T*);

INTENTION_FACTORS(extern, float)
INTENTION_FACTORS(extern, double)

constexpr Int SMALL = 16;  // up to this size the steps of one factorisation wait for each other: many run at once

// The same for WIDTH matrices side by side, as lanes.h has them, SIDE rows at a time.

// The rows that are left of a block of U: its inverse transposed times them, from the left.
template <class T, int R>
inline void substitute_lanes(Int columns, Lanes<T> u, const Vec<T>* reciprocal, Lanes<T> rows) {
    Vec<T> corner[R][R];
#pragma GCC unroll 4
    for (int j = 0; j < R; ++j)
#pragma GCC unroll 4
        for (int i = j + 1; i < R; ++i) corner[j][i] = u(j, i);
    for (Int c = 0; c < columns; ++c) {
        Vec<T> x[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) x[r] = rows(r, c);
#pragma GCC unroll 4
        for (int j = 0; j < R; ++j) {
            rows(j, c) = x[j] *= reciprocal[j];
#pragma GCC unroll 4
            for (int i = j + 1; i < R; ++i) x[i] -= corner[j][i] * x[j];
        }
    }
}

template <class T>
inline void substitute_lanes(Int rank, Int columns, Lanes<T> u, const Vec<T>* reciprocal, Lanes<T> rows) {
    switch (rank) {
        case 1: return substitute_lanes<T, 1>(columns, u, reciprocal, rows);
        case 2: return substitute_lanes<T, 2>(columns, u, reciprocal, rows);
        case 3: return substitute_lanes<T, 3>(columns, u, reciprocal, rows);
        default: return substitute_lanes<T, SIDE>(columns, u, reciprocal, rows);
    }
}

// U of a block on the diagonal, and its diagonal upside down. Returns which lanes failed.
template <class T, int R>
inline auto factor_corner(Lanes<T> s, Vec<T>* reciprocal) {
    const Vec<T> none = {};
    auto failed = none != none;
    Vec<T> u[R][R];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int l = i; l < R; ++l) u[i][l] = s(i, l);
#pragma GCC unroll 4
    for (int j = 0; j < R; ++j) {
        const auto good = u[j][j] > none;
        failed |= ~good;
        const Vec<T> scale = reciprocal[j] = T(1) / roots(good ? u[j][j] : none + T(1));
#pragma GCC unroll 4
        for (int l = j; l < R; ++l) s(j, l) = u[j][l] *= scale;
#pragma GCC unroll 4
        for (int i = j + 1; i < R; ++i)
#pragma GCC unroll 4
            for (int l = i; l < R; ++l) u[i][l] -= u[j][i] * u[j][l];
    }
    return failed;
}

template <class T>
inline auto factor_corner(Int rank, Lanes<T> s, Vec<T>* reciprocal) {
    switch (rank) {
        case 1: return factor_corner<T, 1>(s, reciprocal);
        case 2: return factor_corner<T, 2>(s, reciprocal);
        case 3: return factor_corner<T, 3>(s, reciprocal);
        default: return factor_corner<T, SIDE>(s, reciprocal);
    }
}

// Sigma's upper triangle becomes U; its diagonal upside down in `reciprocal`. Returns which lanes failed.
template <class T>
auto cholesky_together(Int n, Lanes<T> s, Vec<T>* reciprocal) {
    const Vec<T> none = {};
    auto failed = none != none;
    for (Int i = 0; i < n; i += SIDE) {
        const Int some = smaller<Int>(SIDE, n - i), right = i + some;
        if (i) lane_tiles<T>(some, n - i, i, s.at(0, i).t(), s.at(0, i), s.at(i, i), none - T(1), true);
        failed |= factor_corner<T>(some, s.at(i, i), reciprocal + i);
        substitute_lanes<T>(some, n - right, s.at(i, i), reciprocal + i, s.at(i, right));
    }
    return failed;
}

// X = U^-T; right of its blocks on the diagonal nothing is written.
template <class T>
void invert_together(Int n, Lanes<T> u, const Vec<T>* reciprocal, Lanes<T> x) {
    const Vec<T> none = {}, one = none + T(1);
    for (Int i = 0; i < n; i += SIDE) {
        const Int some = smaller<Int>(SIDE, n - i);
        for (Int j = 0; j < i; j += SIDE)
            lane_tiles<T>(some, SIDE, i - j, u.at(j, i).t(), x.at(j, j), x.at(i, j), none - T(1), false);
        for (Int r = 0; r < some; ++r)
            for (Int c = 0; c < some; ++c) x(i + r, i + c) = r == c ? one : none;
        substitute_lanes<T>(some, i + some, u.at(i, i), reciprocal + i, x.at(i, 0));
    }
}

// Sigma^-1 = X'X
template <class T>
void cross_together(Int n, Lanes<T> x, Lanes<T> inverse) {
    const Vec<T> one = Vec<T>{} + T(1);
    for (Int j = 0; j < n; j += SIDE) {
        const Int some = smaller<Int>(SIDE, n - j);
        lane_tiles<T>(some, j + some, n - j, x.at(j, j).t(), x.at(j, 0), inverse.at(j, 0), one, false);
        for (Int r = j; r < j + some; ++r)
            for (Int c = 0; c < r; ++c) inverse(c, r) = inverse(r, c);
    }
}

// Sigma^-1 b = X'(X b)
template <class T>
void solve_together(Int n, Int k, Lanes<T> x, Lanes<T> b, Lanes<T> half, Lanes<T> out) {
    const Vec<T> one = Vec<T>{} + T(1);
    for (Int i = 0; i < n; i += SIDE) {
        const Int some = smaller<Int>(SIDE, n - i);
        lane_tiles<T>(some, k, i + some, x.at(i, 0), b, half.at(i, 0), one, false);
    }
    for (Int i = 0; i < n; i += SIDE)
        lane_tiles<T>(smaller<Int>(SIDE, n - i), k, n - i, x.at(i, i).t(), half.at(i, 0), out.at(i, 0), one, false);
}

}  // namespace INTENTION_ARCH
