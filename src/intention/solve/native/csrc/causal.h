// What Python hands over for causal calls: one block of 8-byte numbers. The order is that of the formats in causal.py.
#pragma once

#include <cstdint>

struct CausalTensor {  // (batch, tokens, columns) with columns side by side
    const void* data;
    std::int64_t batch, row;
};

struct CausalArguments {
    std::int64_t is_double, threads;
    std::int64_t batch, tokens, features, columns;  // B, N, d, k; k = 0 without values
    CausalTensor query, key, value, grad;
    const void *weight, *alpha, *gain;  // (B, N), (B,), (B,); weight and gain may be null
    const double *gram, *cross;         // (B, d, d), (B, d, k) of a state, or null
    void* out;                          // (B, N, k) or (B, N, d)
    void* report;                       // (B, 3): route, ratio, error
    double largest, worst;              // ratio and error from which on a sequence is to be solved in another way
    void *to_query, *to_key, *to_value, *to_weight;
    double *to_alpha, *to_gain;
    double *later_gram, *later_cross;  // (B, d, d), (B, d, k): zeros, then the sums over all tokens; null: nobody asks
};
