// Vectors of one register, for whatever instruction set this file is compiled for.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef INTENTION_ARCH
#define INTENTION_ARCH baseline
#endif

// Everything lives in the namespace of its instruction set: the linker must never merge two of them. For the same
// reason no template of the standard library is used here.
namespace INTENTION_ARCH {

using Int = std::int64_t;

#if defined(__AVX512F__)
constexpr int BYTES = 64;
constexpr int TILE_VECTORS = 4;  // 6 x 4 sums, 4 operands: 28 of 32 registers
constexpr int DOT_COLUMNS = 5, DOT_SUMS = 16;  // 3 x 5 or 4 x 4 sums: one register when they are added up
#elif defined(__AVX2__)
constexpr int BYTES = 32;
constexpr int TILE_VECTORS = 2;
constexpr int DOT_COLUMNS = 2, DOT_SUMS = 8;
#else
constexpr int BYTES = 16;
constexpr int TILE_VECTORS = 2;
constexpr int DOT_COLUMNS = 2, DOT_SUMS = 8;
#endif
constexpr int TILE_ROWS = 6;

template <class T>
struct Simd {
    static constexpr int W = BYTES / int(sizeof(T));
    typedef T V __attribute__((vector_size(BYTES)));
    typedef T Loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
};
template <class T>
using Vec = typename Simd<T>::V;
template <class T>
constexpr int WIDTH = Simd<T>::W;

template <class T>
inline T smaller(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T larger(T a, T b) {
    return a < b ? b : a;
}
inline Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
template <class T>
inline Int padded(Int n) {
    return ceil_div(n, WIDTH<T>) * WIDTH<T>;
}

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

#if defined(__AVX512F__)
inline Vec<float> roots(Vec<float> x) { return (Vec<float>)_mm512_sqrt_ps((__m512)x); }
inline Vec<double> roots(Vec<double> x) { return (Vec<double>)_mm512_sqrt_pd((__m512d)x); }
#elif defined(__AVX2__)
inline Vec<float> roots(Vec<float> x) { return (Vec<float>)_mm256_sqrt_ps((__m256)x); }
inline Vec<double> roots(Vec<double> x) { return (Vec<double>)_mm256_sqrt_pd((__m256d)x); }
#else
template <class V>
inline V roots(V x) {
    for (int i = 0; i < int(sizeof(x) / sizeof(x[0])); ++i) x[i] = root(x[i]);
    return x;
}
#endif

template <class T>
inline Vec<T> load(const T* p) {
    return *reinterpret_cast<const typename Simd<T>::Loose*>(p);
}
// In a register: gcc would load it again for every product that it is in.
template <class T>
inline Vec<T> kept(Vec<T> v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#endif
    return v;
}
template <class T>
inline void store(T* p, Vec<T> v) {
    *reinterpret_cast<typename Simd<T>::Loose*>(p) = v;
}

// The first `count` entries; the rest reads as 0 and is not touched.
template <class T>
inline Vec<T> load_part(const T* p, int count) {
    Vec<T> v = {};
    for (int i = 0; i < count; ++i) v[i] = p[i];
    return v;
}
template <class T>
inline void store_part(T* p, Vec<T> v, int count) {
    for (int i = 0; i < count; ++i) p[i] = v[i];
}
#if defined(__AVX512F__)
inline Vec<float> load_part(const float* p, int count) {
    return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
inline Vec<double> load_part(const double* p, int count) {
    return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p);
}
inline void store_part(float* p, Vec<float> v, int count) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
}
inline void store_part(double* p, Vec<double> v, int count) {
    _mm512_mask_storeu_pd(p, __mmask8((1u << count) - 1), (__m512d)v);
}
#elif defined(__AVX2__)
inline __m256i mask_of(int count, float) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m256i mask_of(int count, double) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
inline Vec<float> load_part(const float* p, int count) { return (Vec<float>)_mm256_maskload_ps(p, mask_of(count, 0.f)); }
inline Vec<double> load_part(const double* p, int count) {
    return (Vec<double>)_mm256_maskload_pd(p, mask_of(count, 0.));
}
inline void store_part(float* p, Vec<float> v, int count) { _mm256_maskstore_ps(p, mask_of(count, 0.f), (__m256)v); }
inline void store_part(double* p, Vec<double> v, int count) { _mm256_maskstore_pd(p, mask_of(count, 0.), (__m256d)v); }
#endif

// The first S entries, S known.
template <class T, int S>
inline void store_first(T* p, Vec<T> v) {
#if defined(__AVX512F__)
    store_part(p, v, S);
#else  // without masks worth their while
    for (int i = 0; i < S; ++i) p[i] = v[i];
#endif
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define INTENTION_SHUFFLE 1
#endif
#endif

#ifdef INTENTION_SHUFFLE
template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    using type = Indices<I...>;
};

// Lanes come in blocks of 2 H: the first or second halves of the blocks of a, then those of b.
template <class T, int H, int SECOND, int... I>
inline Vec<T> halves(Vec<T> a, Vec<T> b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / H * 2 * H + I % H + SECOND * H)...);
}
// Lanes from S on, then anything.
template <class T, int S, int... I>
inline Vec<T> shifted(Vec<T> a, Indices<I...>) {
    return __builtin_shufflevector(a, a, (I + S)...);
}
template <class T, int S>
inline Vec<T> shifted(Vec<T> a) {
    return shifted<T, S>(a, typename Count<WIDTH<T>>::type());
}
// Adds the halves of every block: the sums of a, then those of b.
template <class T, int H>
inline Vec<T> fold(Vec<T> a, Vec<T> b) {
    using All = typename Count<WIDTH<T>>::type;
    return halves<T, H, 0>(a, b, All()) + halves<T, H, 1>(a, b, All());
}
// The sums of the lanes of each of x[0 .. COUNT), side by side; COUNT is at most WIDTH. x is overwritten.
template <class T, int COUNT, int H = WIDTH<T> / 2>
inline Vec<T> sums_of(Vec<T>* x) {
    constexpr int LEFT = (COUNT + 1) / 2;
#pragma GCC unroll 8
    for (int i = 0; i < LEFT; ++i) x[i] = fold<T, H>(x[2 * i], x[2 * i + (2 * i + 1 < COUNT)]);
    if constexpr (H > 1) {
        return sums_of<T, LEFT, H / 2>(x);
    } else {
        return x[0];
    }
}
#else
template <class T, int S>
inline Vec<T> shifted(Vec<T> a) {
    Vec<T> b = a;
    for (int i = S; i < WIDTH<T>; ++i) b[i - S] = a[i];
    return b;
}
template <class T, int COUNT>
inline Vec<T> sums_of(Vec<T>* x) {
    Vec<T> sums = {};
    for (int i = 0; i < COUNT; ++i)
        for (int lane = 0; lane < WIDTH<T>; ++lane) sums[i] += x[i][lane];
    return sums;
}
#endif

}  // namespace INTENTION_ARCH
