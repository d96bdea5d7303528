// A vector of the processor, numbers in bf16, and what is computed of them alone.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#define NV 4  // vectors side by side in a tile: MR * NV accumulators and NV + 1 others stay within the registers
#define MR 6
#elif defined(__AVX__)
#define VL 8
#define NV 2
#define MR 6
#else  // NEON: 32 registers of four
#define VL 4
#define NV 4
#define MR 6
#endif

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));

static inline vf load(const float *p) { return *(const vf *)p; }
static inline void store(float *p, vf v) { *(vf *)p = v; }
static inline vf all(float x) { return x - vf{}; }

// bf16: the upper half of a float32, rounded to the nearest, ties to even
typedef uint16_t bf16;
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));

static inline vf load(const bf16 *p) { return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16); }
static inline vu bf16_bits(vf v) {
    vu bits = (vu)v;
    bits += 0x7fff + ((bits >> 16) & 1);
    return bits >> 16;
}
static inline void store(bf16 *p, vf v) { *(vh *)p = __builtin_convertvector(bf16_bits(v), vh); }

static inline float value(float x) { return x; }
static inline float value(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline void put(float *p, float x) { *p = x; }
static inline void put(bf16 *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float sum(vf v) {
    float s = 0;
    for (int i = 0; i < VL; i++) s += v[i];
    return s;
}

// e^x to 1e-7: x = n ln 2 + r, and a polynomial for e^r on [-ln 2 / 2, ln 2 / 2]
static inline vf vexp(vf x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)e;
}

// tanh to 1e-6: an odd polynomial of degree 13 over an even one of degree 6, on [-7.9, 7.9]
static inline vf vtanh(vf x) {
    x = x < -7.9f ? all(-7.9f) : x;
    x = x > 7.9f ? all(7.9f) : x;
    const vf y = x * x;
    vf p = all(-2.76076847742355e-16f);
    p = p * y + 2.00018790482477e-13f;
    p = p * y + -8.60467152213735e-11f;
    p = p * y + 5.12229709037114e-08f;
    p = p * y + 1.48572235717979e-05f;
    p = p * y + 6.37261928875436e-04f;
    p = p * y + 4.89352455891786e-03f;
    vf q = all(1.19825839466702e-06f);
    q = q * y + 1.18534705686654e-04f;
    q = q * y + 2.26843463243900e-03f;
    q = q * y + 4.89352518554385e-03f;
    return x * p / q;
}

static inline long padded(long n) { return (n + VL - 1) / VL * VL; }

static inline void widen(const bf16 *x, long count, float *to) {
    long i = 0;
    for (; i + VL <= count; i += VL) store(to + i, load(x + i));
    for (; i < count; i++) to[i] = value(x[i]);
}
static inline void narrow(const float *x, long count, bf16 *to) {
    long i = 0;
    for (; i + VL <= count; i += VL) store(to + i, load(x + i));
    for (; i < count; i++) put(to + i, x[i]);
}
