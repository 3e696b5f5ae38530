// What Python hands over for causal calls that forget: one block of 8-byte numbers, in the order of forget.py.
#pragma once

#include "causal.h"

struct ForgetArguments {
    std::int64_t is_double, threads;
    std::int64_t batch, tokens, features, columns;  // B, N, d, k; k = 0 without values
    CausalTensor query, key, value, grad;
    const void *weight, *decay;  // (B, N), or null: 1
    const void* alpha;           // (B, N) with any strides
    std::int64_t alpha_batch, alpha_token;
    const void* gain;            // (B,) or null
    const double *gram, *cross;  // (B, d, d), (B, d, k) of a state, or null
    double easy, easy_slopes;    // the errors of answers up to which float serves them, and slopes
    void* out;                   // (B, N, k) or (B, N, d)
    void* report;                // (B, 3): route, ratio, error
    void *to_query, *to_key, *to_value, *to_weight, *to_decay, *to_alpha;  // (B, N, ...); weight and decay may be null
    double* to_gain;                                                       // (B,), or null
    double *to_gram, *to_cross;  // (B, d, d), (B, d, k): sum D z r' + r z' and sum D z g' over all tokens, or null
};

constexpr std::int64_t PIECE = 32;  // tokens after which the sums, which are kept in double, are rounded anew
constexpr std::int64_t PANEL = 4;   // rows that are factored together; features are padded to it

// Lanes that a backward keeps of a piece between its two sweeps: z and r, two numbers a token, and with slopes of decays the
// sums before it.
inline std::int64_t kept_of_a_piece(const ForgetArguments& a) {
    const std::int64_t d = (a.features + PANEL - 1) / PANEL * PANEL;
    return 2 * PIECE * d + 2 * PIECE + (a.to_decay ? d * (d + a.columns) : 0);
}

// How sequences are cut into parts, of which a register holds one per lane.
struct ForgetPlan {
    std::int64_t parts, length;  // of each sequence; tokens of a part, of the last one maybe fewer
    double* starts;              // (B parts, d d + d k): sums before each part, null: those of the call
    double* ends;                // the same of what comes after, for the backward
    double* reports;             // (B parts, 3): whether double was needed, the worst ratio and error
    double* gains;               // (B parts): slopes of the gain
    char* room;                  // what a backward keeps between its two sweeps, null: it makes both at once
    std::int64_t room_bytes;     // of a group
};

// What a call does with some groups of lanes.
enum ForgetStage { SUMS, ANSWERS, SOLUTIONS, LATER_SUMS, SLOPES, BOTH_SWEEPS };
