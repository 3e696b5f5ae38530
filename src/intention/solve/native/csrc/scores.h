// The scores Q Sigma^-1 K' of sigma-Intention: they exist for one block of queries and keys at a time.
//
// With N >= d Sigma is d x d, and the queries are transformed: X' = Sigma^-1 Q', then S' = K X'. With fewer points its
// N x N counterpart G = c KK' + alpha I is the smaller, and gives all scores of a query at once: S' = G^-1 (K Q').
#pragma once

#include "exponential.h"
#include "fit.h"

namespace INTENTION_ARCH {

constexpr Int KEYS = 192;  // of a block: its scores, values and keys stay near

inline Int keys_at_once(const RidgeArguments& a) { return a.dual ? a.points : smaller(KEYS, a.points); }
inline Int size_of(const RidgeArguments& a) { return a.dual ? a.points : a.features; }

// How the queries of an element are divided. Those of a block lie side by side, keys below each other: largest, sums and
// exponentials need nothing across the lanes, and keys are read as they come.
template <class T>
struct Blocks {
    static constexpr Int QUERIES = TILE_VECTORS * WIDTH<T>;
    Int queries, step;

    explicit Blocks(Int m) : queries(m) {
        step = ceil_div(ceil_div(m, WIDTH<T>), ceil_div(m, QUERIES)) * WIDTH<T>;
    }
    Int rows(Int i) const { return smaller(step, queries - i); }
};

// to (n x width) = rows (m x n)', 0 in lanes without a row
template <class T>
void turn_rows(Int m, Int n, Int width, In<T> rows, T* to) {
    if (m < width) std::memset(to, 0, std::size_t(n * width) * sizeof(T));
    transpose<T>(m, n, rows.p, rows.rs, to, width);
}

// `vectors` registers of lanes: what a template over their number is called with
template <template <class, int> class Step, class T>
inline auto step_of(Int vectors) {
    if constexpr (TILE_VECTORS >= 4) {
        if (vectors == 4) return Step<T, 4>::run;
        if (vectors == 3) return Step<T, 3>::run;
    }
    return vectors == 2 ? Step<T, 2>::run : Step<T, 1>::run;
}

// What solving needs to know of an element.
template <class T>
struct Sigma {
    In<T> key;  // K~
    T alpha, gain;
    Solver<T> solve;
    bool refined;  // the factor alone is not trusted

};

// Room for a refinement step, which only double takes: float that is not enough gives way to double.
template <class T>
struct Refinement {
    T *fitted = nullptr, *rest = nullptr, *step = nullptr;

    Refinement(const RidgeArguments& a, Arena& arena) {
        if (sizeof(T) == 4) return;
        fitted = arena.take<T>((a.dual ? a.features : a.points) * Blocks<T>::QUERIES);
        rest = arena.take<T>(size_of(a) * Blocks<T>::QUERIES);
        step = arena.take<T>(size_of(a) * Blocks<T>::QUERIES);
    }
};

// z = Sigma^-1 b, both with `width` columns. Returns the size of the refinement step relative to z, 0 without one; its
// residual is taken from K, not from the Gram: b - c X'(X z) - alpha z with X = K~ or K~'.
template <class T>
T solve_columns(const RidgeArguments& a, const Sigma<T>& s, Int width, const T* b, T* z, const Refinement<T>& r, Arena& arena) {
    const Int n = s.solve.n, others = a.dual ? a.features : a.points;
    s.solve(width, rows_of(b, width), rows_of(z, width), arena);
    if (!s.refined) return 0;
    const In<T> x = a.dual ? s.key.t() : s.key;
    multiply<T>(others, width, n, x, rows_of<const T>(z, width), rows_of(r.fitted, width));
    for (Int i = 0; i < n * width; ++i) r.rest[i] = b[i] - s.alpha * z[i];
    multiply<T>(n, width, others, x.t(), rows_of<const T>(r.fitted, width), rows_of(r.rest, width), -s.gain, true);
    s.solve(width, rows_of<const T>(r.rest, width), rows_of(r.step, width), arena);
    T above = 0, below = 0;
    for (Int i = 0; i < n * width; ++i) {
        z[i] += r.step[i];
        if (!__builtin_isfinite(z[i])) continue;  // a NaN query must not hide the others
        above += r.step[i] * r.step[i], below += z[i] * z[i];
    }
    return below > 0 ? root(above / below) : T(0);
}

// The largest norm of a column of x (n x width), and of a row of x (m x n); what is not a number is passed over.
template <class T>
T longest_column(Int n, Int width, const T* x) {
    T longest = 0;
    for (Int v = 0; v < width; v += WIDTH<T>) {
        Vec<T> sum = {};
        for (Int i = 0; i < n; ++i) {
            const Vec<T> entries = load<T>(x + i * width + v);
            sum += entries * entries;
        }
        for (int lane = 0; lane < WIDTH<T>; ++lane) longest = sum[lane] > longest ? sum[lane] : longest;
    }
    return root(longest);
}
template <class T>
T longest_row(Int m, Int n, In<T> x) {
    constexpr Int W = WIDTH<T>;
    T longest = 0;
    for (Int i = 0; i < m; ++i) {
        Vec<T> sum[1] = {};
        for (Int j = 0; j < n; j += W) {
            const Vec<T> entries = load_some<T>(x.p + i * x.rs + j, int(smaller(W, n - j)));
            sum[0] += entries * entries;
        }
        const T length = sums_of<T, 1>(sum)[0];
        longest = length > longest ? length : longest;
    }
    return root(longest);
}

// The queries of a block along the lanes.
template <class T>
struct Turned {
    T *query;   // (d, queries): Q'
    T *mapped;  // (N, queries): K Q', in the dual
    T *moved;   // (d, queries): Sigma^-1 Q'; in the dual (N, queries): G^-1 K Q', the scores themselves
    Refinement<T> refinement;

    Turned(const RidgeArguments& a, Arena& arena)
        : query(arena.take<T>(Blocks<T>::QUERIES * a.features)),
          mapped(a.dual ? arena.take<T>(Blocks<T>::QUERIES * a.points) : query),
          moved(arena.take<T>(Blocks<T>::QUERIES * size_of(a))),
          refinement(a, arena) {}

    // Fills them from m queries; returns the size of the refinement step.
    T fill(const RidgeArguments& a, const Sigma<T>& s, Int m, Int width, In<T> rows, Arena& arena) const {
        turn_rows<T>(m, a.features, width, rows, query);
        if (a.dual)
            multiply<T>(a.points, width, a.features, s.key, rows_of<const T>(query, width), rows_of(mapped, width));
        return solve_columns<T>(a, s, width, mapped, moved, refinement, arena);
    }

    // Scores (keys, queries) of the keys from j on; in the dual of all
    void scores(const RidgeArguments& a, In<T> key, Int j, Int keys, Int width, T* to) const {
        if (a.dual) {
            std::memcpy(to, moved, std::size_t(keys * width) * sizeof(T));
        } else {
            multiply<T>(keys, width, a.features, key.at(j, 0), rows_of<const T>(moved, width), rows_of(to, width));
        }
    }
};

}  // namespace INTENTION_ARCH
