// Causal least squares that forgets: S_t = gamma_t S_{t-1} + w_t k_t k_t', B_t = gamma_t B_{t-1} + w_t k_t v_t',
// z_t = (c S_t + alpha_t I)^-1 q_t, o_t = z_t B_t. Every token has a factor of its own, in as many lanes as a register has:
// exact for any decay, with no length to choose and no iteration. What is not a factor is a product over pieces of tokens,
//
//     B_t = f_t B_0 + sum_{s<=t} D_ts w_s k_s v_s',   D_ts = gamma_{s+1} ... gamma_t,   f_t = gamma_1 ... gamma_t
//
// with sums B_0, S_0 before a piece in double. A piece in which a token asks for more than float is done in double.
#include "forget_near.h"

#include "arguments.h"

namespace INTENTION_ARCH {
namespace {

constexpr double HUGE_RATIO = __builtin_inf();

template <class S>
struct Call {
    // Of every lane: the largest ratio, |z| |S|^(1/2), ratio |z| |r| over |z r|, and the error that follows.
    struct Found {
        double ratio[WIDTH<S>] = {}, reach[WIDTH<S>] = {}, spread[WIDTH<S>] = {}, error[WIDTH<S>] = {};
    };

    const ForgetArguments& a;
    const ForgetPlan& plan;
    const Int index, d, k;  // of the group; features with their padding
    const Group<S> group;
    Arena& memory;
    Totals<S> totals;
    Piece<S> narrow;
    Piece<double> wide;
    Near<double> near;  // in double only: where float does not serve
    Piece<S> before;    // key, weight and decay of the tokens before a piece
    bool exact;    // sums are made of products in double
    Vec<S> gain;
    Found worst;

    static constexpr int HALVES = WIDTH<S> / WIDTH<double>;

    Call(const ForgetArguments& a, const ForgetPlan& plan, Int index, Arena& memory, bool backward)
        : a(a), plan(plan), index(index), d(in_panels(a.features)), k(a.columns), group(a, plan, index), memory(memory),
          exact(sizeof(S) == 8) {
        totals.place(memory, d, k);
        narrow.place(memory, d, k, backward);
        if (sizeof(S) == 4) wide.place(memory, d, k, backward), near.place(memory, wide.row, wide.told_row), before.place(memory, d, k, false);
        for (int g = 0; g < WIDTH<S>; ++g) {
            gain[g] = a.gain ? static_cast<const S*>(a.gain)[group.sequence[g]] : S(1);
        }
    }

    Int pieces() const { return ceil_div(group.longest, PIECE); }
    Int part(int lane) const { return index * WIDTH<S> + lane; }
    Int part_size() const { return a.features * (a.features + k); }

    // The sums before the group's first token.
    void begin(const double* parts) {
        totals.clear(), rounded_sums = false;
        for (int g = 0; g < group.used; ++g) {
            const Int b = group.sequence[g], size = a.features;
            if (parts) {
                const double* from = parts + part(g) * part_size();
                totals.read(g, from, from + size * size, size);
            } else if (a.gram && parts == plan.starts) {
                totals.read(g, a.gram + b * size * size, k ? a.cross + b * size * k : nullptr, size);
            }
        }
    }

    // What sums are made of, and how they fade.
    void load_tokens(Int at) {
        Piece<S>& p = narrow;
        p.n = smaller(PIECE, group.longest - at), p.gain = gain;
        group.gather(a.key, at, p.n, a.features, d, p.key);
        if (k) group.gather(a.value, at, p.n, k, k, p.value);
        group.gather_numbers(a.weight, a.tokens, 1, at, p.n, S(a.weight ? 0 : 1), p.weight);
        group.gather_numbers(a.decay, a.tokens, 1, at, p.n, S(1), p.decay);
        p.measure_decays();
    }
    void load_rest(Int at, bool grad) {
        Piece<S>& p = narrow;
        group.gather(a.query, at, p.n, a.features, d, p.query);
        group.gather_numbers(a.alpha, a.alpha_batch, a.alpha_token, at, p.n, S(1), p.alpha);
        if (grad) group.gather(a.grad, at, p.n, k, k, p.grad);
    }

    // Lanes of one half, in double.
    void widen_tokens(int half) {
        const Piece<S>& p = narrow;
        Piece<double>& q = wide;
        q.n = p.n;
        some_lanes<double, S>(p.n * p.row, p.key, half, q.key);
        some_lanes<double, S>(p.n * p.told_row, p.value, half, q.value);
        some_lanes<double, S>(p.n, p.weight, half, q.weight);
        some_lanes<double, S>(p.n, p.decay, half, q.decay);
        some_lanes<double, S>(1, &p.gain, half, &q.gain);
        q.measure_decays();
    }
    void widen_rest(int half, bool grad) {
        const Piece<S>& p = narrow;
        some_lanes<double, S>(p.n * p.row, p.query, half, wide.query);
        some_lanes<double, S>(p.n, p.alpha, half, wide.alpha);
        if (grad) some_lanes<double, S>(p.n * p.told_row, p.grad, half, wide.grad);
    }

    void load_before(Int at, bool grad) {
        group.gather(a.key, at - PIECE, PIECE, a.features, d, before.key);
        if (grad) group.gather(a.value, at - PIECE, PIECE, k, k, before.value);
        group.gather_numbers(a.weight, a.tokens, 1, at - PIECE, PIECE, S(a.weight ? 0 : 1), before.weight);
        group.gather_numbers(a.decay, a.tokens, 1, at - PIECE, PIECE, S(1), before.decay);
    }
    void widen_before(int half, bool grad) {
        Vec<double> weight[PIECE], decay[PIECE], left = one_of<double>();
        some_lanes<double, S>(PIECE * wide.row, before.key, half, near.keys);
        some_lanes<double, S>(PIECE, before.weight, half, weight);
        some_lanes<double, S>(PIECE, before.decay, half, decay);
        for (Int s = PIECE - 1; s >= 0; --s) near.counts[s] = weight[s] * left, left *= decay[s];
        std::memcpy(near.keys + PIECE * wide.row, wide.key, std::size_t(wide.n * wide.row) * sizeof(Vec<double>));
        if (grad) {
            some_lanes<double, S>(PIECE * wide.told_row, before.value, half, near.values);
            std::memcpy(near.values + PIECE * wide.told_row, wide.value, std::size_t(wide.n * wide.told_row) * sizeof(Vec<double>));
        }
        for (Int s = 0; s < PIECE + wide.n; ++s)
            near.squares[s] = dot_lanes<double>(d, near.keys + s * wide.row, near.keys + s * wide.row);
    }

    template <class T>
    Piece<T>& piece() {
        if constexpr (sizeof(T) == sizeof(S)) {
            return narrow;
        } else {
            return wide;
        }
    }

    // The sums before the piece, in the precision of the work.
    template <class T>
    void round_totals(int half, bool whole) {
        Piece<T>& p = piece<T>();
        if (sizeof(T) == sizeof(S) && rounded_sums) return;
        const double *gram = totals.gram + half * WIDTH<T>, *cross = totals.cross + half * WIDTH<T>;
        for (Int j = 0; j < d; ++j)
            for (Int i = 0; i <= j; ++i) put_gram<T>(i, j, rounded<T>(gram + (i * d + j) * WIDTH<S>), whole);
        for (Int i = 0; i < d; ++i)
            for (Int j = 0; j < k; ++j) p.cross[i * p.told_row + j] = rounded<T>(cross + (i * k + j) * WIDTH<S>);
    }

    // The sums after the piece, and for the next one what they are rounded to. x_s are rows times the decay to the end, or
    // from the start.
    template <class T>
    void add_to_totals(int half, Vec<T>* x, Vec<T>* gram_rows, Vec<T>* x2, Vec<T>* gram_rows2, Vec<T>* cross_rows,
                       const double* fade) {
        Piece<T>& p = piece<T>();
        double *gram = totals.gram + half * WIDTH<T>, *cross = totals.cross + half * WIDTH<T>;
        const bool whole = x2 || keeps_sums();
        rounded_sums = sizeof(T) == sizeof(S);
        if (x2) set_products<T>(d, d, p.n, p.by_d(x2).t(), p.by_d(gram_rows2), p.by_d(p.gram), UPPER);
        sum_products<T>(d, d, p.n, p.by_d(x).t(), p.by_d(gram_rows), UPPER, [&](Int i, Int j, Vec<T> sum) {
            if (j < i) return;
            const Vec<T> added = x2 ? sum + p.gram[i * p.row + j] : sum;
            put_gram<T>(i, j, fade_and_add<T>(gram + (i * d + j) * WIDTH<S>, fade, added), whole);
        });
        sum_products<T>(d, k, p.n, p.by_d(x).t(), p.by_k(cross_rows), FULL, [&](Int i, Int j, Vec<T> sum) {
            p.cross[i * p.told_row + j] = fade_and_add<T>(cross + (i * k + j) * WIDTH<S>, fade, sum);
        });
    }
    // Sums before the piece: `gram` whole, or as the triangle that tokens update.
    template <class T>
    void put_gram(Int i, Int j, Vec<T> x, bool whole) {
        Piece<T>& p = piece<T>();
        p.triangle[row_at(j) + i] = p.gain * x;
        if (whole) p.gram[i * p.row + j] = p.gram[j * p.row + i] = x;
    }
    bool keeps_sums() const { return a.to_decay || a.to_gain; }  // z_t S_0 r_t is wanted
    bool rounded_sums = false;                                   // those before the piece, in the precision of its tokens

    template <class T>
    void add_tokens(int half) {
        Piece<T>& p = piece<T>();
        double fade[WIDTH<T>];
        for (int g = 0; g < WIDTH<T>; ++g) fade[g] = double(p.from_start[p.n - 1][g]);
        for (Int s = 0; s < p.n; ++s)
            for (Int i = 0; i < d; ++i) p.rows[s * p.row + i] = p.to_end[s] * p.weight[s] * p.key[s * p.row + i];
        add_to_totals<T>(half, p.rows, p.key, nullptr, nullptr, p.value, fade);
    }
    // Over all halves; the tokens are loaded.
    void advance() {
        if (!exact || sizeof(S) == 8) return add_tokens<S>(0);
        for (int half = 0; half < HALVES; ++half) widen_tokens(half), add_tokens<double>(half);
    }

    // Sums are those of products in double from now on: what was added since they were so is added again.
    void make_exact(Int at) {
        if (exact_until) {
            totals.copy(exact_totals), rounded_sums = false;
        } else {
            begin(plan.starts);
        }
        exact = true;
        for (Int i = exact_until; i < at; i += PIECE) load_tokens(i), advance();
        load_tokens(at);
    }
    // Float serves again: sums may be made in it, from these.
    void leave_exact(Int at) {
        if (!exact_totals.gram) exact_totals.place(memory, d, k);
        exact_totals.copy(totals);
        exact_until = at, exact = false;
    }
    Totals<S> exact_totals = {};
    Int exact_until = 0;

    // The same where few tokens are left of the past; false where too many are.
    template <int SIDES>
    bool solve_near(Found& found, int half) {
        Piece<double>& p = wide;
        widen_before(half, SIDES == 2);
        Vec<double> trace = {}, worst = {}, reach = {};
        for (Int i = 0; i < d; ++i)
            for (int g = 0; g < WIDTH<double>; ++g) trace[g] += totals.gram[i * (d + 1) * WIDTH<S> + half * WIDTH<double> + g];
        const Int size = near.window(p, trace, smaller(PIECE, d / 2));
        if (!size) return false;
        near.template solve<SIDES>(size, p);
        for (Int t = 0; t < p.n; ++t) {
            Vec<double> sum = p.from_start[t] * trace;
            for (Int s = 0; s <= t; ++s) sum += near.share(p, t, PIECE + s) * near.squares[PIECE + s];
            sum *= p.gain;
            worst = upper_of(worst, double(d) + sum / p.alpha[t]);
            reach = upper_of(reach, sum * dot_lanes<double>(d, p.solved + t * p.row, p.solved + t * p.row));
        }
        for (int g = 0; g < WIDTH<double>; ++g) {
            found.ratio[half * WIDTH<double> + g] = worst[g];
            found.reach[half * WIDTH<double> + g] = root(reach[g]);
        }
        if (SIDES == 2) measure_spread<double>(found, half);
        return true;
    }

    // z_t, and with SIDES = 2 r_t; false where a ratio is above `limit`, and then not all is done. In `reach` the largest
    // |z_t| |S_t|^(1/2): what rounding of z_t does to the answers, over the values.
    template <class T, int SIDES>
    bool solve(double limit, Found& found, int half) {
        if constexpr (sizeof(T) != sizeof(S))
            if (solve_near<SIDES>(found, half)) return true;
        Piece<T>& p = piece<T>();
        Vec<T> worst = {}, reach = {};
        for (Int t = 0; t < p.n; ++t) {
            Vec<T>*z = p.solved + t * p.row, *r = SIDES == 2 ? p.told + t * p.row : nullptr;
            Fit<T> fit = {p.key + t * p.row, p.decay[t], p.gain * p.weight[t], p.alpha[t], p.lower, p.reciprocal,
                          {p.query + t * p.row, p.rows + t * p.row}, {z, r}, {}, {}};
            solve_token<T, SIDES>(d, fit, p.triangle);
            const Vec<T> ratio = fit.trace / fit.least, none = {}, endless = none + T(HUGE_RATIO);
            worst = upper_of(worst, ratio > none ? ratio : endless);  // a pivot below 0
            reach = upper_of(reach, (fit.trace - T(d) * p.alpha[t]) * dot_lanes<T>(d, z, z));
            bool good = true;
            for (int g = 0; g < WIDTH<T>; ++g) good &= !(double(worst[g]) > limit);
            if (!good) return false;
        }
        for (int g = 0; g < WIDTH<T>; ++g) {
            found.ratio[half * WIDTH<T> + g] = double(worst[g]);
            found.reach[half * WIDTH<T> + g] = root(larger(0.0, double(reach[g])));
        }
        if (SIDES == 2) measure_spread<T>(found, half);
        return true;
    }

    // r_t lies in the span of the keys, and rounding puts ratio eps |r_t| beside it, which meets z_t there: by how much
    // more than z_t r_t, the slope of alpha.
    template <class T>
    void measure_spread(Found& found, int half) {
        const Piece<T>& p = piece<T>();
        Vec<T> together = {}, apart = {};
        for (Int t = 0; t < p.n; ++t) {
            const Vec<T>*z = p.solved + t * p.row, *r = p.told + t * p.row;
            const Vec<T> both = dot_lanes<T>(d, z, r);
            together = upper_of(together, both * both);
            apart = upper_of(apart, dot_lanes<T>(d, z, z) * dot_lanes<T>(d, r, r));
        }
        for (int g = 0; g < WIDTH<T>; ++g) {
            const int lane = half * WIDTH<T> + g;
            largest_slope[lane] = larger(largest_slope[lane], double(together[g]));
            const double share = largest_slope[lane] > 0 ? root(double(apart[g]) / largest_slope[lane]) : 0;
            found.spread[lane] = found.ratio[lane] * share;
        }
    }
    double largest_slope[WIDTH<S>] = {};

    // Of (n, k)
    template <class T>
    Vec<T> largest_square(const Vec<T>* x) {
        const Piece<T>& p = piece<T>();
        Vec<T> largest = {};
        for (Int t = 0; t < p.n; ++t)
            for (Int i = 0; i < k; ++i) largest = upper_of(largest, x[t * p.told_row + i] * x[t * p.told_row + i]);
        return largest;
    }

    // The squares of the piece's largest answers: those themselves, or from g_t o_t = z_t p_t over |g_t|.
    template <class T>
    Vec<T> squares_of_answers(bool slopes) {
        const Piece<T>& p = piece<T>();
        Vec<T> largest = {};
        if (!slopes) return largest_square<T>(p.rows);
        for (Int t = 0; t < p.n; ++t) {
            const Vec<T> both = dot_lanes<T>(d, p.solved + t * p.row, p.rows + t * p.row);
            const Vec<T> size = dot_lanes<T>(k, p.grad + t * p.told_row, p.grad + t * p.told_row), none = {};
            largest = upper_of(largest, size > none ? 4 * both * both / size : none);
        }
        return largest;
    }

    // Whether a piece may stay as it is: its errors over the largest answer so far, by the rounding of z_t.
    template <class T>
    bool judge(Found& found, int half, bool slopes) {
        const double eps = sizeof(T) == 4 ? __FLT_EPSILON__ : __DBL_EPSILON__;
        const Vec<T> values = largest_square<T>(piece<T>().value), answers = squares_of_answers<T>(slopes);
        bool good = true;
        for (int g = 0; g < WIDTH<T>; ++g) {
            const int lane = half * WIDTH<T> + g;
            largest_value[lane] = larger(largest_value[lane], double(values[g]));
            largest_answer[lane] = larger(largest_answer[lane], double(answers[g]));
            const double scale = largest_answer[lane] > 0 ? root(largest_value[lane] / largest_answer[lane]) : 0;
            const double ratio = larger(found.ratio[lane], slopes ? found.spread[lane] : 0);
            found.error[lane] = eps * (k ? larger(scale * found.reach[lane], USUAL * ratio) : ratio);
            good &= !(found.error[lane] > (slopes ? a.easy_slopes : a.easy));
        }
        return good || sizeof(T) == 8;
    }
    double largest_value[WIDTH<S>] = {}, largest_answer[WIDTH<S>] = {};

    // p_t = B_t g_t in `rows`, and B_0 g_t in `others`.
    template <class T>
    void tell() {
        Piece<T>& p = piece<T>();
        set_products<T>(p.n, d, k, p.by_k(p.grad), p.by_k(p.cross).t(), p.by_d(p.others));
        later_pairs<T>(p.n, k, p.by_k(p.value), p.by_k(p.grad), p.pairs[0]);
        for (Int t = 0; t < p.n; ++t) {
            for (Int i = 0; i < d; ++i) p.rows[t * p.row + i] = p.from_start[t] * p.others[t * p.row + i];
            for (Int s = 0; s <= t; ++s) p.pairs[0][s * p.n + t] *= p.share[t * p.n + s] * p.weight[s];
        }
        add_earlier<T>(p.n, d, p.pairs[0], p.by_d(p.key), p.by_d(p.rows));
    }

    // o_t, in `rows`
    template <class T>
    void answer() {
        Piece<T>& p = piece<T>();
        later_pairs<T>(p.n, d, p.by_d(p.key), p.by_d(p.solved), p.pairs[0]);
        set_products<T>(p.n, k, d, p.by_d(p.solved), p.by_k(p.cross), p.by_k(p.rows));
        for (Int t = 0; t < p.n; ++t) {
            for (Int i = 0; i < k; ++i) p.rows[t * p.told_row + i] *= p.from_start[t];
            for (Int s = 0; s <= t; ++s) p.pairs[0][s * p.n + t] *= p.share[t * p.n + s] * p.weight[s];
        }
        add_earlier<T>(p.n, k, p.pairs[0], p.by_k(p.value), p.by_k(p.rows));
    }

    // A piece in the precision of its tokens, then, if that does not serve, in double. `work` solves it: work(T(), half)
    // tells whether that serves. What double finds easy is tried in float the next time.
    template <class Work>
    void each_precision(Int at, bool grad, Work work) {
        Found found;
        bool good = false;
        const bool whole = keeps_sums();
        if (!hard) {
            round_totals<S>(0, whole);
            good = work(S(), 0, found);
            if (sizeof(S) == 8) good = true;
        }
        if constexpr (sizeof(S) == 4) {
            if (!good) {
                if (!exact) make_exact(at), load_rest(at, grad);
                load_before(at, grad);
                for (int half = 0; half < HALVES; ++half) {
                    widen_tokens(half), widen_rest(half, grad), round_totals<double>(half, whole);
                    work(double(), half, found);
                }
                hard = false;
                for (int g = 0; g < WIDTH<S>; ++g) hard |= !(found.error[g] * WIDENING < (grad ? a.easy_slopes : a.easy));
                wide_pieces = true;
            }
        }
        for (int g = 0; g < WIDTH<S>; ++g) {
            worst.ratio[g] = larger(worst.ratio[g], found.ratio[g]), worst.error[g] = larger(worst.error[g], found.error[g]);
        }
        is_wide = !good;
        if (sizeof(S) == 4 && good && exact) leave_exact(at);
    }
    static constexpr double USUAL = 0.05;  // of a ratio: what it does to errors of most keys
    static constexpr double WIDENING = __FLT_EPSILON__ / __DBL_EPSILON__;
    static constexpr double STEEPEST = 1e5;  // beyond this ratio float is not tried to the end
    bool hard = false, is_wide = false, wide_pieces = false;

    void forward() {
        begin(plan.starts);
        for (Int at = 0; at < group.longest; at += PIECE) {
            load_tokens(at), load_rest(at, false);
            each_precision(at, false, [&](auto kind, int half, Found& found) {
                using T = decltype(kind);
                if (!solve<T, 1>(sizeof(T) == 4 ? STEEPEST : HUGE_RATIO, found, half)) return false;
                Piece<T>& p = piece<T>();
                if (k) answer<T>();
                if (!judge<T>(found, half, false)) return false;
                put_rows<T>(k ? p.rows : p.solved, half, at, k ? k : a.features, k ? p.told_row : p.row, narrow.others, a.out);
                return true;
            });
            if (at + PIECE < group.longest) advance();
        }
        report();
    }

    // Rows of a half, in double put together in `all_halves`; the last one writes all.
    template <class T>
    void put_rows(const Vec<T>* rows, int half, Int at, Int columns, Int step, Vec<S>* all_halves, void* to) {
        const Vec<S>* all = reinterpret_cast<const Vec<S>*>(rows);
        if constexpr (sizeof(T) != sizeof(S)) {
            put_lanes<T, S>(narrow.n * step, rows, half, all_halves);
            if (half + 1 < HALVES) return;
            all = all_halves;
        }
        group.scatter(all, at, narrow.n, columns, step, static_cast<S*>(to), a.tokens);
    }

    void report() {
        for (int g = 0; g < group.used; ++g) {
            double* to = plan.reports + 3 * part(g);
            to[0] = wide_pieces, to[1] = worst.ratio[g], to[2] = worst.error[g];
        }
    }

    // ---- backward: z_t and r_t forwards, then slopes backwards ----

    // What the first sweep leaves to the second of a piece: z, r (n, d), z_t B_0 g_t - c z_t S_0 r_t and z_t S_0 r_t (n),
    // and where slopes of decays are wanted [B_0, c S_0 / 2] (d, k + d), all in lanes of the precision of its work.
    Int kept_lanes() const { return kept_of_a_piece(a); }
    Int kept_bytes() const { return kept_lanes() * HALVES * Int(sizeof(Vec<double>)); }
    template <class T>
    Vec<T>* kept_of(Int piece, int half) {
        Vec<double>* at = reinterpret_cast<Vec<double>*>(room + piece * kept_bytes()) + half * kept_lanes();
        return reinterpret_cast<Vec<T>*>(at);
    }
    char* room = nullptr;
    bool* wide_at = nullptr;

    void find_room() {
        const Int size = pieces() * (kept_bytes() + 64);
        room = plan.room ? plan.room + index * plan.room_bytes : memory.take<char>(size);
        wide_at = reinterpret_cast<bool*>(room + pieces() * kept_bytes());
    }

    template <class T>
    void keep(Int at, int half) {
        const Piece<T>& p = piece<T>();
        Vec<T>* to = kept_of<T>(at / PIECE, half);
        for (Int t = 0; t < p.n; ++t)
            for (Int i = 0; i < d; ++i)
                to[t * d + i] = p.solved[t * p.row + i], to[(PIECE + t) * d + i] = p.told[t * p.row + i];
        to += 2 * PIECE * d;
        if (!a.to_decay && !a.to_gain) return;
        set_products<T>(p.n, d, d, p.by_d(p.solved), p.by_d(p.gram), p.by_d(p.rows));
        for (Int t = 0; t < p.n; ++t) {
            const Vec<T> spread = dot_lanes<T>(d, p.rows + t * p.row, p.told + t * p.row);
            to[t] = dot_lanes<T>(d, p.others + t * p.row, p.solved + t * p.row) - p.gain * spread, to[PIECE + t] = spread;
        }
        if (!a.to_decay) return;
        to += 2 * PIECE;
        for (Int i = 0; i < d; ++i, to += d + k) {
            for (Int j = 0; j < k; ++j) to[j] = p.cross[i * p.told_row + j];
            for (Int j = 0; j < d; ++j) to[k + j] = T(0.5) * p.gain * p.gram[i * p.row + j];
        }
    }

    void first_sweep() {
        find_room();
        begin(plan.starts);
        for (Int at = 0; at < group.longest; at += PIECE) {
            load_tokens(at), load_rest(at, true);
            each_precision(at, true, [&](auto kind, int half, Found& found) {
                using T = decltype(kind);
                tell<T>();
                if (!solve<T, 2>(sizeof(T) == 4 ? STEEPEST : HUGE_RATIO, found, half)) return false;
                if (!judge<T>(found, half, true)) return false;
                keep<T>(at, half);
                return true;
            });
            wide_at[at / PIECE] = is_wide;
            if (at + PIECE < group.longest) advance();
        }
    }

    // The sums of what the group's tokens tell of those before.
    template <class T>
    void add_slopes(int half) {
        Piece<T>& p = piece<T>();
        double fade[WIDTH<T>];
        for (int g = 0; g < WIDTH<T>; ++g) fade[g] = double(p.from_start[p.n - 1][g]);
        for (Int t = 0; t < p.n; ++t)
            for (Int i = 0; i < d; ++i) {
                p.rows[t * p.row + i] = p.from_start[t] * p.solved[t * p.row + i];
                p.others[t * p.row + i] = p.from_start[t] * p.told[t * p.row + i];
            }
        add_to_totals<T>(half, p.rows, p.told, p.others, p.solved, p.grad, fade);
    }

    template <class T>
    void take_kept(Int at, int half) {
        Piece<T>& p = piece<T>();
        const Vec<T>* from = kept_of<T>(at / PIECE, half);
        for (Int t = 0; t < p.n; ++t)
            for (Int i = 0; i < d; ++i)
                p.solved[t * p.row + i] = from[t * d + i], p.told[t * p.row + i] = from[(PIECE + t) * d + i];
    }

    // The second sweep over a half of a piece: its slopes, then what it adds to the sums.
    template <class T>
    void slopes(Int at, int half) {
        Piece<T>& p = piece<T>();
        const Int n = p.n;
        round_totals<T>(half, true);  // cross: sum D z g'; gram: sum D (z r' + r z')
        Vec<T>*seen = p.pairs[0], *also = p.pairs[1], *missed = p.pairs[2], *faded = p.pairs[3];
        later_pairs<T>(n, d, p.by_d(p.key), p.by_d(p.solved), seen);   // z_t k_s
        later_pairs<T>(n, d, p.by_d(p.key), p.by_d(p.told), also);     // r_t k_s
        later_pairs<T>(n, k, p.by_k(p.value), p.by_k(p.grad), missed);  // g_t v_s, then less c r_t k_s
        Vec<T>*to_weight = p.numbers[0], *to_alpha = p.numbers[1], *to_decay = p.numbers[2], *far = p.numbers[3];
        Vec<T> gain_slope = {};
        const Vec<T>* kept = kept_of<T>(at / PIECE, half) + 2 * PIECE * d;
        for (Int s = 0; s < n; ++s) {
            to_weight[s] = Vec<T>{};
            for (Int t = s; t < n; ++t) {
                const Int i = s * n + t;
                const Vec<T> share = p.share[t * n + s];
                gain_slope -= share * p.weight[s] * seen[i] * also[i];
                missed[i] -= p.gain * also[i];
                to_weight[s] += share * seen[i] * missed[i];
            }
            to_alpha[s] = -dot_lanes<T>(d, p.solved + s * p.row, p.told + s * p.row);
            if (a.to_gain) gain_slope -= p.from_start[s] * kept[PIECE + s];
        }
        // keys: D_es (C v - c M k), then sum D_ts (z_t missed - c r_t seen)
        set_products<T>(n, d, k, p.by_k(p.value), p.by_k(p.cross).t(), p.by_d(p.rows));
        for (Int s = 0; s < n; ++s) far[s] = dot_lanes<T>(d, p.key + s * p.row, p.rows + s * p.row);
        add_products<T>(n, d, d, p.by_d(p.key), p.by_d(p.gram), p.by_d(p.rows), -p.gain);
        for (Int s = 0; s < n; ++s) {
            far[s] = T(0.5) * (far[s] + dot_lanes<T>(d, p.key + s * p.row, p.rows + s * p.row));
            to_weight[s] += p.to_end[s] * far[s];
            for (Int i = 0; i < d; ++i) p.rows[s * p.row + i] *= p.to_end[s];
        }
        if (a.to_decay) decay_slopes<T>(kept + 2 * PIECE, kept, seen, missed, far, faded, to_decay);
        for (Int s = 0; s < n; ++s)
            for (Int t = s; t < n; ++t) missed[s * n + t] *= p.share[t * n + s], seen[s * n + t] *= p.share[t * n + s];
        add_later<T>(n, d, missed, p.by_d(p.solved), p.by_d(p.rows), one_of<T>());
        add_later<T>(n, d, seen, p.by_d(p.told), p.by_d(p.rows), -p.gain);
        for (Int s = 0; s < n; ++s)
            for (Int i = 0; i < d; ++i) p.rows[s * p.row + i] *= p.weight[s];
        put_rows<T>(p.rows, half, at, a.features, p.row, narrow.rows, a.to_key);
        set_products<T>(n, k, d, p.by_d(p.key), p.by_k(p.cross), p.by_k(p.rows));
        for (Int s = 0; s < n; ++s)
            for (Int i = 0; i < k; ++i) p.rows[s * p.told_row + i] *= p.to_end[s];
        add_later<T>(n, k, seen, p.by_k(p.grad), p.by_k(p.rows), one_of<T>());
        for (Int s = 0; s < n; ++s)
            for (Int i = 0; i < k; ++i) p.rows[s * p.told_row + i] *= p.weight[s];
        put_rows<T>(p.rows, half, at, k, p.told_row, narrow.others, a.to_value);
        put_rows<T>(p.told, half, at, a.features, p.row, narrow.told, a.to_query);
        put_numbers<T>(to_weight, half, at, a.to_weight), put_numbers<T>(to_alpha, half, at, a.to_alpha);
        put_numbers<T>(to_decay, half, at, a.to_decay);
        for (int g = 0; g < WIDTH<T>; ++g) gain_total[half * WIDTH<T> + g] += double(gain_slope[g]);
        add_slopes<T>(half);
    }
    double gain_total[WIDTH<S>] = {};

    template <class T>
    void put_numbers(const Vec<T>* numbers, int half, Int at, void* to) {
        if (!to) return;
        Vec<S> all[PIECE];
        put_lanes<T, S>(narrow.n, numbers, half, all);
        group.scatter_numbers(all, at, narrow.n, half * WIDTH<T>, (half + 1) * WIDTH<T>, to, a.tokens);
    }

    // Of decay t: <C_t, B_{t-1}> - c <G_t, S_{t-1}>, of pairs on both sides of it, near or far; nothing is divided.
    template <class T>
    void decay_slopes(const Vec<T>* before, const Vec<T>* read, const Vec<T>* seen, const Vec<T>* missed, const Vec<T>* far,
                      Vec<T>* across, Vec<T>* to) {
        Piece<T>& p = piece<T>();
        const Int n = p.n;
        Vec<T> both = {};
        for (Int i = 0; i < d; ++i, before += d + k)
            both += dot_lanes<T>(k, before, p.cross + i * p.told_row) - dot_lanes<T>(d, before + k, p.gram + i * p.row);
        for (Int t = 0; t < n; ++t) across[t] = Vec<T>{};  // sum_{s<t} D_{t-1,s} w_s seen missed, of each later token
        Vec<T> from = one_of<T>(), told = {};              // decay from the start to t - 1; sum_{s<t} D_{t-1,s} w_s far_s
        for (Int t = 0; t < n; ++t) {
            Vec<T> near = {};
            for (Int l = t; l < n; ++l) near += p.share[l * n + t] * (across[l] + from * read[l]);
            to[t] = near + p.to_end[t] * (told + from * both);
            from = p.from_start[t];
            told = p.decay[t] * told + p.weight[t] * far[t];
            for (Int l = t + 1; l < n; ++l)
                across[l] = p.decay[t] * across[l] + p.weight[t] * seen[t * n + l] * missed[t * n + l];
        }
    }
    template <class Work>
    void backwards(Work work) {
        for (Int i = pieces() - 1; i >= 0; --i) {
            const Int at = i * PIECE;
            load_tokens(at), load_rest(at, true);
            if (!wide_at[i]) {
                take_kept<S>(at, 0);
                work(S(), at, 0);
                continue;
            }
            if constexpr (sizeof(S) == 4)
                for (int half = 0; half < HALVES; ++half) {
                    widen_tokens(half), widen_rest(half, true), take_kept<double>(at, half);
                    work(double(), at, half);
                }
        }
    }
    void later_sums() {
        find_room();
        begin(nullptr);
        backwards([&](auto kind, Int, int half) { add_slopes<decltype(kind)>(half); });
        put_parts(plan.ends);
    }
    void second_sweep() {
        if (!room) find_room();
        begin_later();
        backwards([&](auto kind, Int at, int half) { slopes<decltype(kind)>(at, half); });
        for (int g = 0; g < group.used; ++g) {
            const Int b = group.sequence[g], size = a.features;
            if (a.to_gain) plan.gains[part(g)] = gain_total[g];
            if (a.to_gram && plan.parts == 1) totals.write(g, a.to_gram + b * size * size, a.to_cross + b * size * k, size);
        }
    }
    void begin_later() {
        if (plan.ends) return begin(plan.ends);
        totals.clear(), rounded_sums = false;
    }

    // The sums of the group's own tokens.
    void sums() {
        begin(nullptr);
        exact = true;
        for (Int at = 0; at < group.longest; at += PIECE) load_tokens(at), advance();
        put_parts(plan.starts);
    }
    void put_parts(double* parts) {
        for (int g = 0; g < group.used; ++g) {
            double* to = parts + part(g) * part_size();
            totals.write(g, to, to + a.features * a.features, a.features);
        }
    }
};

template <class S>
void run(const ForgetArguments& a, const ForgetPlan& plan, ForgetStage stage, Int index, Arena& memory) {
    memory.reset();
    Call<S> call(a, plan, index, memory, stage != ANSWERS && stage != SUMS);
    if (stage == SUMS) call.sums();
    if (stage == ANSWERS) call.forward();
    if (stage == SOLUTIONS || stage == BOTH_SWEEPS) call.first_sweep();
    if (stage == LATER_SUMS) call.later_sums();
    if (stage == SLOPES || stage == BOTH_SWEEPS) call.second_sweep();
}

// What has faded below 1e-38 counts as 0 meanwhile: such numbers take a hundred times longer.
class Flushed {
  public:
#if defined(__SSE2__)
    Flushed() : before(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~Flushed() { __builtin_ia32_ldmxcsr(before); }

  private:
    const unsigned before;
#endif
};

}  // namespace

int forget(const ForgetArguments& a, const ForgetPlan& plan, ForgetStage stage, Int from, Int to) {
    static thread_local Arena memory;
    [[maybe_unused]] const Flushed flushed;
    for (Int i = from; i < to; ++i) a.is_double ? run<double>(a, plan, stage, i, memory) : run<float>(a, plan, stage, i, memory);
    return PLAIN;
}

}  // namespace INTENTION_ARCH
