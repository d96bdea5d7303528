// Weights in ggml's types, unpacked: the same bits as ggml's own code.

#pragma once
#include <vector>

#include "threads.h"
#include "vectors.h"

// ggml's half precision, exactly
static inline float half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 f;
    memcpy(&f, &h, 2);
    return f;
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    float f;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + 0x38000000);
    else {  // below the smallest normal number: rest * 2^-24
        f = rest * 5.9604644775390625e-8f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    memcpy(&f, &bits, 4);
    return f;
#endif
}

typedef uint8_t vb __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t vs __attribute__((vector_size(16), aligned(1), may_alias));

// 16 numbers scale * q + low
template <typename T>
static inline void spread(vs q, float scale, float low, T *out) {
    for (int i = 0; i < 16; i += VL) {
        int32_t wide[VL];
        for (int j = 0; j < VL; j++) wide[j] = ((const int8_t *)&q)[i + j];
        vf x = __builtin_convertvector(*(const vi *)wide, vf) * scale;
#if defined(__x86_64__)
        asm("" : "+x"(x));  // no fused multiply-add: ggml's x86 code has none
#endif
        store(out + i, x + low);
    }
}

template <typename T>
static inline void q8_0(const uint8_t *in, T *out) {  // scale, 32 signed bytes
    float scale = half(in);
    spread(*(const vs *)(in + 2), scale, 0.0f, out);
    spread(*(const vs *)(in + 18), scale, 0.0f, out + 16);
}

template <typename T>
static inline void q4_0(const uint8_t *in, T *out) {  // scale, 32 nibbles, of which 8 stands for zero
    float scale = half(in);
    vb nibbles = *(const vb *)(in + 2);
    spread((vs)(nibbles & 15) - 8, scale, 0.0f, out);
    spread((vs)(nibbles >> 4) - 8, scale, 0.0f, out + 16);
}

template <typename T>
static inline void q4_1(const uint8_t *in, T *out) {  // scale, minimum, 32 nibbles
    float scale = half(in), low = half(in + 2);
    vb nibbles = *(const vb *)(in + 4);
    spread((vs)(nibbles & 15), scale, low, out);
    spread((vs)(nibbles >> 4), scale, low, out + 16);
}

// The scale and the minimum of each 32 of 256 numbers, 6 bits each: eight of them in 12 bytes
struct Scales {
    float scale[8], low[8];
    Scales(const uint8_t *in) {  // factors of both, then the 12 bytes
        float d = half(in), m = half(in + 2);
        const uint8_t *s = in + 4;
        for (int i = 0; i < 4; i++) {
            scale[i] = d * (s[i] & 63), low[i] = -(m * (s[i + 4] & 63));
            scale[i + 4] = d * ((s[i + 8] & 15) | (s[i] >> 6) << 4);
            low[i + 4] = -(m * ((s[i + 8] >> 4) | (s[i + 4] >> 6) << 4));
        }
    }
};

template <typename T>
static inline void q4_k(const uint8_t *in, T *out) {  // scales, 4 times 32 bytes: the low nibbles, then the high ones
    Scales s(in);
    for (int i = 0; i < 8; i += 2)
        for (int j = 0; j < 32; j += 16) {
            vb nibbles = *(const vb *)(in + 16 + 16 * i + j);
            spread((vs)(nibbles & 15), s.scale[i], s.low[i], out + 32 * i + j);
            spread((vs)(nibbles >> 4), s.scale[i + 1], s.low[i + 1], out + 32 * i + 32 + j);
        }
}

template <typename T>
static inline void q5_k(const uint8_t *in, T *out) {  // as q4_k; 32 bytes before the nibbles hold every fifth bit
    Scales s(in);
    for (int i = 0; i < 8; i += 2)
        for (int j = 0; j < 32; j += 16) {
            vb nibbles = *(const vb *)(in + 48 + 16 * i + j), high = *(const vb *)(in + 16 + j) >> i;
            spread((vs)((nibbles & 15) | (high & 1) << 4), s.scale[i], s.low[i], out + 32 * i + j);
            spread((vs)((nibbles >> 4) | (high & 2) << 3), s.scale[i + 1], s.low[i + 1], out + 32 * i + 32 + j);
        }
}

template <typename T>
static inline void q6_k(const uint8_t *in, T *out) {  // 128 bytes of low nibbles, 64 of high pairs, 16 scales, a factor
    const int8_t *scales = (const int8_t *)in + 192;
    float d = half(in + 208);
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 32; j += 16) {
            vb one = *(const vb *)(in + 64 * i + j), two = *(const vb *)(in + 64 * i + 32 + j);
            vb high = *(const vb *)(in + 128 + 32 * i + j);
            vb q[4] = {(one & 15) | (high & 3) << 4, (two & 15) | (high & 12) << 2, one >> 4 | (high & 48),
                       two >> 4 | (high & 192) >> 2};
            for (int k = 0; k < 4; k++)
                spread((vs)q[k] - 32, d * scales[8 * i + 2 * k + j / 16], 0.0f, out + 128 * i + 32 * k + j);
        }
}

template <typename T>
static inline void q2_k(const uint8_t *in, T *out) {  // 16 scales and minima of 4 bits, 64 bytes of pairs, their factors
    float d = half(in + 80), m = half(in + 82);
    for (int i = 0; i < 16; i++) {  // 16 numbers each
        vb pairs = *(const vb *)(in + 16 + 32 * (i / 8) + 16 * (i % 2)) >> (i % 8 / 2 * 2);
        spread((vs)(pairs & 3), d * (in[i] & 15), -(m * (in[i] >> 4)), out + 16 * i);
    }
}

template <typename T>
static inline void q3_k(const uint8_t *in, T *out) {  // 32 bytes of high bits, 64 of pairs, 16 scales of 6 bits, a factor
    const uint8_t *s = in + 96;
    float d = half(in + 108);
    for (int i = 0; i < 16; i++) {
        int scale = (i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> (i / 4 * 2) & 3) << 4;
        vb pairs = *(const vb *)(in + 32 + 32 * (i / 8) + 16 * (i % 2)) >> (i % 8 / 2 * 2);
        vb high = *(const vb *)(in + 16 * (i % 2)) >> (i / 8 * 4 + i % 8 / 2);
        spread((vs)((pairs & 3) | (high & 1) << 2) - 4, d * (scale - 32), 0.0f, out + 16 * i);
    }
}

// bit i of `bits` as the fifth bit of nibble i
static inline vb fifth(vb nibbles, uint32_t bits) {
    for (int i = 0; i < 16; i++) nibbles[i] |= (bits >> i & 1) << 4;
    return nibbles;
}

template <typename T, bool MINIMUM>
static inline void q5(const uint8_t *in, T *out) {  // scale, a minimum or 16 for zero, 32 high bits, 32 nibbles
    float scale = half(in), low = MINIMUM ? half(in + 2) : 0.0f;
    const uint8_t *rest = in + (MINIMUM ? 4 : 2);
    const int8_t zero = MINIMUM ? 0 : 16;
    uint32_t bits;
    memcpy(&bits, rest, 4);
    vb nibbles = *(const vb *)(rest + 4);
    spread((vs)fifth(nibbles & 15, bits) - zero, scale, low, out);
    spread((vs)fifth(nibbles >> 4, bits >> 16) - zero, scale, low, out + 16);
}

// ggml's 16 values of IQ4: not at equal distances
static const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline vs look_up(vb index) {
#if defined(__SSSE3__)
    return (vs)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)IQ4), (__m128i)index);
#else
    vs out;
    for (int i = 0; i < 16; i++) out[i] = IQ4[index[i]];
    return out;
#endif
}

template <typename T>
static inline void iq4(const uint8_t *nibbles, float scale, T *out) {  // 32 numbers
    vb both = *(const vb *)nibbles;
    spread(look_up(both & 15), scale, 0.0f, out);
    spread(look_up(both >> 4), scale, 0.0f, out + 16);
}

template <typename T>
static inline void iq4_nl(const uint8_t *in, T *out) { iq4(in + 2, half(in), out); }

template <typename T>
static inline void iq4_xs(const uint8_t *in, T *out) {  // a factor, 8 scales of 6 bits, 128 bytes of nibbles
    uint16_t high;
    memcpy(&high, in + 2, 2);
    for (int i = 0; i < 8; i++) {
        int scale = (in[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4;
        iq4(in + 8 + 16 * i, half(in) * (scale - 32), out + 32 * i);
    }
}

template <typename T, int BYTES, int VALUES, void (*UNPACK)(const uint8_t *, T *)>
static void each_block(const uint8_t *in, T *out, long blocks) {
    for (long b = 0; b < blocks; b++) UNPACK(in + b * BYTES, out + b * VALUES);
}

template <typename T>
static void unpack_blocks(const uint8_t *in, int type, T *out, long blocks) {
    switch (type) {
        case 2: return each_block<T, 18, 32, q4_0<T>>(in, out, blocks);
        case 3: return each_block<T, 20, 32, q4_1<T>>(in, out, blocks);
        case 6: return each_block<T, 22, 32, q5<T, false>>(in, out, blocks);
        case 7: return each_block<T, 24, 32, q5<T, true>>(in, out, blocks);
        case 8: return each_block<T, 34, 32, q8_0<T>>(in, out, blocks);
        case 10: return each_block<T, 84, 256, q2_k<T>>(in, out, blocks);
        case 11: return each_block<T, 110, 256, q3_k<T>>(in, out, blocks);
        case 12: return each_block<T, 144, 256, q4_k<T>>(in, out, blocks);
        case 13: return each_block<T, 176, 256, q5_k<T>>(in, out, blocks);
        case 14: return each_block<T, 210, 256, q6_k<T>>(in, out, blocks);
        case 20: return each_block<T, 18, 32, iq4_nl<T>>(in, out, blocks);
        case 23: return each_block<T, 136, 256, iq4_xs<T>>(in, out, blocks);
    }
}

template <typename T>
static void unpack_to(const uint8_t *in, int type, T *out, long blocks, int bytes, int values, int threads) {
    share_range(blocks, 4096 / values, threads, [&](long start, long stop) {
        unpack_blocks(in + start * bytes, type, out + start * values, stop - start);
    });
}

extern "C" {
// Blocks of a ggml type, by its number; bytes and numbers of a block
void unpack(const uint8_t *in, int type, float *out, long blocks, int bytes, int values, int threads) {
    unpack_to(in, type, out, blocks, bytes, values, threads);
}
void unpack_half(const uint8_t *in, int type, bf16 *out, long blocks, int bytes, int values, int threads) {
    unpack_to(in, type, out, blocks, bytes, values, threads);
}

// Packed rows of any type by ggml's own function, rounded to bf16 while they are in the cache
void unpack_rows_half(const uint8_t *in, void (*to_float)(const void *, float *, int64_t), bf16 *out, long rows, long cols,
                      long row_bytes, int threads) {
    share_range(rows, 16, threads, [&](long start, long stop) {
        std::vector<float> row(cols + VL);
        for (long r = start; r < stop; r++) {
            to_float(in + r * row_bytes, row.data(), cols);
            long i = 0;
            for (; i + VL <= cols; i += VL) store(out + r * cols + i, load(&row[i]));
            for (; i < cols; i++) put(out + r * cols + i, row[i]);
        }
    });
}
}
