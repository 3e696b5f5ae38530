// Many small elements at once: entry (i, j) of all of them is one vector, one lane per element.
#pragma once

#include "product.h"

namespace INTENTION_ARCH {

template <class T>
using Lanes = Mat<Vec<T>>;

constexpr int SIDE = 4, ACROSS = BYTES == 64 ? 4 : 2;  // SIDE x ACROSS sums in registers

template <class T, int R, int S>
inline void lane_tile(Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale, bool add) {
    Vec<T> sum[R][S] = {};
    const Vec<T>*left = a.p, *right = b.p;
    for (Int l = 0; l < depth; ++l, left += a.cs, right += b.rs) {
        Vec<T> row[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) row[s] = kept<T>(right[s * b.cs]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> x = kept<T>(left[r * a.rs]);
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) sum[r][s] += x * row[s];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) c(r, s) = add ? c(r, s) + scale * sum[r][s] : scale * sum[r][s];
}

// R rows of C, one tile after the other.
template <class T, int R>
void lane_tiles(Int n, Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale, bool add) {
    Int j = 0;
    for (; j + ACROSS <= n; j += ACROSS) lane_tile<T, R, ACROSS>(depth, a, b.at(0, j), c.at(0, j), scale, add);
    if constexpr (ACROSS == 4) {
        if (n - j == 3) return lane_tile<T, R, 3>(depth, a, b.at(0, j), c.at(0, j), scale, add);
        if (n - j == 2) return lane_tile<T, R, 2>(depth, a, b.at(0, j), c.at(0, j), scale, add);
    }
    if (j < n) lane_tile<T, R, 1>(depth, a, b.at(0, j), c.at(0, j), scale, add);
}

template <class T>
inline void lane_tiles(Int m, Int n, Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale, bool add) {
    switch (m) {
        case 1: return lane_tiles<T, 1>(n, depth, a, b, c, scale, add);
        case 2: return lane_tiles<T, 2>(n, depth, a, b, c, scale, add);
        case 3: return lane_tiles<T, 3>(n, depth, a, b, c, scale, add);
        default: return lane_tiles<T, SIDE>(n, depth, a, b, c, scale, add);
    }
}

template <class T>
void multiply_lanes(Int m, Int n, Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale, bool add = false,
                    Part part = FULL) {
    constexpr int TALL = 2 * SIDE;  // of a single column: each sum waits for itself
    Int i = 0;
    for (; n == 1 && i + TALL <= m; i += TALL) lane_tile<T, TALL, 1>(depth, a.at(i, 0), b, c.at(i, 0), scale, add);
    for (; i < m; i += SIDE) {
        const Int j = part == UPPER ? i : 0;
        lane_tiles<T>(smaller<Int>(SIDE, m - i), n - j, depth, a.at(i, 0), b.at(0, j), c.at(i, j), scale, add);
    }
}

// Matrices of WIDTH elements, wherever they lie.
template <class T>
struct Spread {
    T* p[WIDTH<T>];
    Int row;
};

// Rows that follow each other without a gap are one long row: fewer blocks with a rest.
inline void join(Int& rows, Int& columns, Int row) {
    if (row == columns) columns *= rows, rows = 1;
}

template <class T, bool AHEAD, bool WHOLE>
inline void mix_block(int some, Int at, const Spread<const T>& from, Vec<T>* to, Int ahead) {
    constexpr int W = WIDTH<T>;
    Vec<T> x[W];
#pragma GCC unroll 16
    for (int g = 0; g < W; ++g) {
        const T* p = from.p[g] + at;
        x[g] = WHOLE ? load<T>(p) : load_part(p, some);
        if (AHEAD) __builtin_prefetch(p + ahead, 0, 2);
    }
    turn<T>(x);
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) {
        if (!WHOLE && r >= some) break;
        to[r] = x[r];
    }
}

// With AHEAD what lies as many entries further on is asked for: the matrices that are read next.
template <class T, bool AHEAD>
void mix(Int rows, Int columns, Spread<const T> from, Vec<T>* to, Int ahead) {
    constexpr int W = WIDTH<T>;
    join(rows, columns, from.row);
    for (Int i = 0; i < rows; ++i, to += columns) {
        Int j = 0;
        for (; j + W <= columns; j += W) mix_block<T, AHEAD, true>(W, i * from.row + j, from, to + j, ahead);
        if (j < columns) mix_block<T, AHEAD, false>(int(columns - j), i * from.row + j, from, to + j, ahead);
    }
}

template <class T, bool WHOLE>
inline void unmix_block(int some, int count, Int at, const Vec<T>* from, const Spread<T>& to) {
    constexpr int W = WIDTH<T>;
    const Vec<T> none = {};
    Vec<T> x[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = WHOLE || r < some ? from[r] : none;
    turn<T>(x);
#pragma GCC unroll 16
    for (int g = 0; g < W; ++g) {
        if (!WHOLE && g >= count) break;
        if (WHOLE) {
            store<T>(to.p[g] + at, x[g]);
        } else {
            store_some<T>(to.p[g] + at, x[g], some);
        }
    }
}

template <class T>
void unmix(Int rows, Int columns, int count, const Vec<T>* from, Spread<T> to) {
    constexpr int W = WIDTH<T>;
    join(rows, columns, to.row);
    for (Int i = 0; i < rows; ++i, from += columns) {
        Int j = 0;
        for (; count == W && j + W <= columns; j += W) unmix_block<T, true>(W, W, i * to.row + j, from + j, to);
        for (; j < columns; j += W)
            unmix_block<T, false>(int(smaller<Int>(W, columns - j)), count, i * to.row + j, from + j, to);
    }
}

}  // namespace INTENTION_ARCH
