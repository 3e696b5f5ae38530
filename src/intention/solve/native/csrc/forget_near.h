// Fits of which few tokens are left: with rows u_s k_s, u_s^2 = D_ts w_s, of the W last tokens,
//
//     z_t = (q_t - c sum_s u_s y_s k_s) / alpha,   r_t = sum_s u_s x_s k_s,
//     (alpha I + c [u_r u_s k_r k_s]) [y, x] = [u_s k_s q_t, u_s v_s g_t]
//
// A factor of W rows in the place of d, where those before the W tokens change A_t by less than FORGOTTEN of alpha. r_t
// is not (B_t g_t - ...) / alpha: g v - c r k, which slopes of keys are made of, is as small as alpha.
#pragma once

#include "forget_piece.h"

namespace INTENTION_ARCH {
namespace {

constexpr double FORGOTTEN = 1e-10;

// The PIECE tokens before a piece, and room for the fits of it.
template <class T>
struct Near {
    Vec<T>*keys, *values;         // (2 PIECE, d), (2 PIECE, k): those before it, then its own
    Vec<T>* counts;               // (PIECE): of those before it, D to their end times w
    Vec<T>*squares, *left;        // |k|^2 of all, and what of A_t's trace lies before its last W tokens (PIECE)
    Vec<T>*pairs, *seen[2];       // (2 PIECE, 2 PIECE): keys with keys; (2 PIECE, PIECE): with queries, values with slopes
    Vec<T>*roots, *right[2], *y[2], *none;  // of one token (PIECE)

    void place(Arena& memory, Int row, Int told_row) {
        const auto take = [&](Int count) { return memory.take<Vec<T>>(count); };
        keys = take(2 * PIECE * row), values = take(2 * PIECE * told_row), counts = take(PIECE), squares = take(2 * PIECE), left = take(PIECE);
        pairs = take(4 * PIECE * PIECE), roots = take(PIECE), none = take(PIECE);
        for (int b = 0; b < 2; ++b) seen[b] = take(2 * PIECE * PIECE), right[b] = take(PIECE), y[b] = take(PIECE);
    }

    // D_ts w_s of token t of the piece and row i of the keys.
    Vec<T> share(const Piece<T>& p, Int t, Int i) const {
        return i < PIECE ? p.from_start[t] * counts[i] : p.share[t * p.n + i - PIECE] * p.weight[i - PIECE];
    }

    // How many tokens serve every token of the piece, a multiple of PANEL; 0: more than `most`. `trace`: that of the sums
    // before the piece.
    Int window(const Piece<T>& p, Vec<T> trace, Int most) {
        for (Int t = 0; t < p.n; ++t) {
            left[t] = p.from_start[t] * trace;
            for (Int s = 0; s <= t; ++s) left[t] += share(p, t, PIECE + s) * squares[PIECE + s];
        }
        for (Int w = 0; w < most; w += PANEL) {
            bool all = true;
            for (Int t = 0; t < p.n; ++t) {
                for (Int i = PIECE + t - w; i > PIECE + t - w - PANEL; --i) left[t] -= share(p, t, i) * squares[i];
                for (int g = 0; g < WIDTH<T>; ++g)
                    all &= p.gain[g] > 0 && __builtin_fabs(p.gain[g] * left[t][g]) < FORGOTTEN * p.alpha[t][g];
            }
            if (all) return w + PANEL;
        }
        return 0;
    }

    // z_t, and with SIDES = 2 r_t, by the last `size` tokens of each.
    template <int SIDES>
    void solve(Int size, Piece<T>& p) {
        const Int first = PIECE - size, all = size + p.n;
        const Lanes<T> own = {keys + first * p.row, p.row, 1}, told = {values + first * p.told_row, p.told_row, 1};
        set_products<T>(all, all, p.d, own, own.t(), {pairs, all, 1}, UPPER);
        set_products<T>(all, p.n, p.d, own, p.by_d(p.query).t(), {seen[0], p.n, 1});
        if (SIDES == 2) set_products<T>(all, p.n, p.k, told, p.by_k(p.grad).t(), {seen[1], p.n, 1});
        for (Int i = 0; i < size; ++i) none[i] = Vec<T>{};
        for (Int t = 0; t < p.n; ++t) {
            const Int begin = t + 1;  // of the window, in `own`
            for (Int i = 0; i < size; ++i) {
                roots[i] = INTENTION_ARCH::roots(share(p, t, first + begin + i));
                for (int b = 0; b < SIDES; ++b) right[b][i] = roots[i] * seen[b][(begin + i) * p.n + t];
                const Vec<T> scale = p.gain * roots[i];
                for (Int j = 0; j <= i; ++j)
                    p.triangle[row_at(i) + j] = scale * roots[j] * pairs[(begin + j) * all + begin + i];
            }
            Fit<T> fit = {none, one_of<T>(), Vec<T>{}, p.alpha[t], p.lower, p.reciprocal,
                          {right[0], right[1]}, {y[0], y[1]}, {}, {}};
            solve_token<T, SIDES>(size, fit, p.triangle);
            for (int b = 0; b < SIDES; ++b)
                for (Int i = 0; i < size; ++i) y[b][i] *= roots[i];
            const Vec<T> inverse = 1 / p.alpha[t];
            for (Int j = 0; j < p.d; ++j) {
                Vec<T> sum[2] = {};
                for (Int i = 0; i < size; ++i)
#pragma GCC unroll 2
                    for (int b = 0; b < SIDES; ++b) sum[b] += y[b][i] * own(begin + i, j);
                p.solved[t * p.row + j] = (p.query[t * p.row + j] - p.gain * sum[0]) * inverse;
                if (SIDES == 2) p.told[t * p.row + j] = sum[1] + 0 * p.rows[t * p.row + j];  // B_t g_t may be NaN
            }
        }
    }
};

}  // namespace
}  // namespace INTENTION_ARCH
