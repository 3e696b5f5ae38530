// exp of a vector whose entries are at most 0: those of a softmax minus their largest.
#pragma once

#include "vector.h"

namespace INTENTION_ARCH {

template <class T>
struct Exp;

// e^x = 2^n e^r with n = round(x / ln 2) and e^r = 1 + r + r^2 p(r), |r| <= ln 2 / 2. ln 2 is split so that n times its
// first part is exact. p is Chebyshev's: 1e-8 (float) and 2e-17 (double) from e^r.
template <>
struct Exp<float> {
    typedef std::uint32_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int MANTISSA = 23;
    static constexpr float LOWEST = -87.33f;  // below it the result has no full precision: 0
    static constexpr float ROUNDING = 0x1.8p23f, LN2 = 0.693359375f, LN2_REST = -2.12194440e-4f;
    static constexpr int TERMS = 5;
    static constexpr float P[TERMS] = {1.39262508e-3f, 8.36323288e-3f, 4.16665542e-2f, 1.66665767e-1f, 0.5f};
};
template <>
struct Exp<double> {
    typedef std::uint64_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int MANTISSA = 52;
    static constexpr double LOWEST = -708.39;
    static constexpr double ROUNDING = 0x1.8p52, LN2 = 6.93145751953125e-1, LN2_REST = 1.42860682030941723212e-6;
    static constexpr int TERMS = 10;
    static constexpr double P[TERMS] = {2.5100472505694996e-8,   2.76202015910315488e-7,  2.75572682769056962e-6,
                                        2.48015210578682052e-5,  1.9841269863171556e-4,   1.38888889173670806e-3,
                                        8.3333333333300382e-3,   4.16666666666238205e-2,  0.166666666666666675,
                                        0.500000000000000103};
};

// Within 2 units in the last place. What is very negative gives 0, NaN stays NaN.
template <class T>
inline Vec<T> exponential(Vec<T> x) {
    using E = Exp<T>;
    using Bits = typename E::Bits;
    const Vec<T> none = {}, one = none + 1;
    const Vec<T> shifted = x * T(1.44269504088896340736) + E::ROUNDING;  // its last bits are n
    const Vec<T> n = shifted - E::ROUNDING;
    const Vec<T> r = x - n * E::LN2 - n * E::LN2_REST;
    Vec<T> p = none + E::P[0];
#pragma GCC unroll 16
    for (int i = 1; i < E::TERMS; ++i) p = p * r + E::P[i];
    const Vec<T> power = (Vec<T>)(((Bits)shifted << E::MANTISSA) + (Bits)one);  // 2^n
    const Vec<T> y = (p * (r * r) + r) * power + power;
    return x < E::LOWEST ? none : y;
}

}  // namespace INTENTION_ARCH
