// Many small elements at once: entry (i, j) of all of them is one vector, one lane per element.
#pragma once

#include "product.h"

namespace INTENTION_ARCH {

template <class T>
using Lanes = Mat<Vec<T>>;

constexpr int SIDE = BYTES == 64 ? 4 : 2;  // SIDE x SIDE sums in registers

template <class T, int R, int S>
void lane_tile(Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale, bool add) {
    Vec<T> sum[R][S] = {};
    for (Int l = 0; l < depth; ++l) {
        Vec<T> row[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) row[s] = kept<T>(b(l, s));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vec<T> x = kept<T>(a(r, l));
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) sum[r][s] += x * row[s];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) c(r, s) = add ? c(r, s) + scale * sum[r][s] : scale * sum[r][s];
}

template <class T, int R>
inline auto lane_tile_of(Int columns) {
    if constexpr (SIDE == 4) {
        if (columns >= 4) return lane_tile<T, R, 4>;
        if (columns == 3) return lane_tile<T, R, 3>;
    }
    return columns >= 2 ? lane_tile<T, R, 2> : lane_tile<T, R, 1>;
}

template <class T>
inline auto lane_tile_of(Int rows, Int columns) {
    if constexpr (SIDE == 4) {
        if (rows >= 4) return lane_tile_of<T, 4>(columns);
        if (rows == 3) return lane_tile_of<T, 3>(columns);
    }
    return rows >= 2 ? lane_tile_of<T, 2>(columns) : lane_tile_of<T, 1>(columns);
}

template <class T>
void multiply_lanes(Int m, Int n, Int depth, Lanes<T> a, Lanes<T> b, Lanes<T> c, Vec<T> scale, bool add = false,
                    Part part = FULL) {
    for (Int i = 0; i < m; i += SIDE)
        for (Int j = part == UPPER ? i : 0; j < n; j += SIDE)
            lane_tile_of<T>(m - i, n - j)(depth, a.at(i, 0), b.at(0, j), c.at(i, j), scale, add);
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

// With AHEAD what lies as many entries further on is asked for: the matrices that are read next.
template <class T, bool AHEAD>
void mix(Int rows, Int columns, Spread<const T> from, Vec<T>* to, Int ahead) {
    constexpr int W = WIDTH<T>;
    join(rows, columns, from.row);
    for (Int i = 0; i < rows; ++i)
        for (Int j = 0; j < columns; j += W) {
            const int some = int(smaller<Int>(W, columns - j));
            Vec<T> x[W];
#pragma GCC unroll 16
            for (int g = 0; g < W; ++g) {
                const T* p = from.p[g] + i * from.row + j;
                x[g] = load_some<T>(p, some);
                if (AHEAD) __builtin_prefetch(p + ahead, 0, 2);
            }
            turn<T>(x);
#pragma GCC unroll 16
            for (int r = 0; r < W; ++r) {
                if (r >= some) break;
                to[i * columns + j + r] = x[r];
            }
        }
}

template <class T>
void unmix(Int rows, Int columns, int count, const Vec<T>* from, Spread<T> to) {
    constexpr int W = WIDTH<T>;
    join(rows, columns, to.row);
    const Vec<T> none = {};
    for (Int i = 0; i < rows; ++i)
        for (Int j = 0; j < columns; j += W) {
            const int some = int(smaller<Int>(W, columns - j));
            Vec<T> x[W];
#pragma GCC unroll 16
            for (int r = 0; r < W; ++r) x[r] = r < some ? from[i * columns + j + r] : none;
            turn<T>(x);
#pragma GCC unroll 16
            for (int g = 0; g < W; ++g) {
                if (g >= count) break;
                store_some<T>(to.p[g] + i * to.row + j, x[g], some);
            }
        }
}

}  // namespace INTENTION_ARCH
