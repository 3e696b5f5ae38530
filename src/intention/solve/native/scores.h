// The scores Q Sigma^-1 K' of sigma-Intention: they exist for one block of queries and keys at a time.
#pragma once

#include "exponential.h"
#include "fit.h"

namespace INTENTION_ARCH {

constexpr Int KEYS = 192;  // of a block: its scores, values and keys stay near

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

}  // namespace INTENTION_ARCH
