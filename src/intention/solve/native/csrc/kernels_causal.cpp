// Causal least squares: the fit of token t sees tokens <= t. One sequence at a time, block by block of tokens.
//
// The formulas and their names are those of solve/causal/: P = A^-1 and W before a block; R R' = I + c K P K',
// E = R^-1 K P, Y = R^-1 (V - c K W); then P - c E'E and W + E'Y. P is factored anew from sums in double at every
// chunk, so nothing drifts; a chunk that float does not serve is done in double.
#include "causal.h"

#include "arguments.h"
#include "causal_backward.h"

namespace INTENTION_ARCH {
namespace {

template <class S>
Sequence<S> sequence_of(const CausalArguments& a, Int b) {
    const auto rows = [b](const CausalTensor& x) { return x.data ? static_cast<const S*>(x.data) + b * x.batch : nullptr; };
    return {a.tokens,
            a.features,
            a.columns,
            rows(a.query),
            rows(a.key),
            rows(a.value),
            a.weight ? static_cast<const S*>(a.weight) + b * a.tokens : nullptr,
            a.query.row,
            a.key.row,
            a.value.row,
            double(static_cast<const S*>(a.alpha)[b]),
            a.gain ? double(static_cast<const S*>(a.gain)[b]) : 1.0};
}

// No weight, alpha or gain below 0, and none that is not a number.
template <class S>
bool allowed(const Sequence<S>& s) {
    bool good = s.alpha >= 0 && s.gain >= 0;
    for (Int i = 0; s.weight && i < s.n; ++i) good &= s.weight[i] >= 0;
    return good;
}

template <class S>
int solve_sequences(const CausalArguments& a, Int from, Int to) {
    static thread_local Arena memory;
    const Int d = a.features, k = a.columns, width = k ? k : d;
    constexpr S eps = sizeof(S) == 4 ? S(__FLT_EPSILON__) : S(__DBL_EPSILON__);
    int status = PLAIN;
    for (Int b = from; b < to; ++b) {
        memory.reset();
        const double* gram = a.gram ? a.gram + b * d * d : nullptr;
        const double* cross = a.cross ? a.cross + b * d * k : nullptr;
        const Sequence<S> sequence = sequence_of<S>(a, b);
        const Outcome found = run<S>(sequence, gram, cross, memory, static_cast<S*>(a.out) + b * a.tokens * width, nullptr);
        S* report = static_cast<S*>(a.report) + 3 * b;
        report[0] = found.wide ? FLOAT64 : PRIMAL, report[1] = S(found.ratio), report[2] = S(found.error) + eps;
        if (!(found.ratio < a.largest && found.error + eps < a.worst && allowed(sequence))) status = SOME_LEFT;
    }
    return status;
}

template <class S>
void pull_sequences(const CausalArguments& a, Int from, Int to) {
    const Int n = a.tokens, d = a.features, k = a.columns;
    Arena memory;
    const auto part = [](void* x, Int at) { return x ? static_cast<S*>(x) + at : nullptr; };
    for (Int b = from; b < to; ++b) {
        memory.reset();
        const double* gram = a.gram ? a.gram + b * d * d : nullptr;
        const double* cross = a.cross ? a.cross + b * d * k : nullptr;
        Slopes<S> slopes = {part(a.to_query, b * n * d), part(a.to_key, b * n * d), part(a.to_value, b * n * k),
                            part(a.to_weight, b * n), a.gain != nullptr, 0, 0};
        const Later later = a.later_gram ? Later{a.later_gram + b * d * d, a.later_cross + b * d * k}
                                         : Later{memory.zeros<double>(d * d), memory.zeros<double>(d * k)};
        pull<S>(sequence_of<S>(a, b), gram, cross, static_cast<const S*>(a.grad.data) + b * a.grad.batch, a.grad.row,
                memory, later, slopes);
        a.to_alpha[b] = slopes.alpha, a.to_gain[b] = slopes.gain;
    }
}

}  // namespace

int causal_forward(const CausalArguments& a, Int from, Int to) {
    return a.is_double ? solve_sequences<double>(a, from, to) : solve_sequences<float>(a, from, to);
}
int causal_backward(const CausalArguments& a, Int from, Int to) {
    a.is_double ? pull_sequences<double>(a, from, to) : pull_sequences<float>(a, from, to);
    return PLAIN;
}

}  // namespace INTENTION_ARCH
