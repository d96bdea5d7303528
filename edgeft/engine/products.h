// C = A B on several threads, in float32, bf16 or bytes; sums are float32. B is packed into panels first, and unpacked from
// its type on the way. The order in which a number of C is summed depends on nothing but the kind.
//
// A panel is NR columns wide and K long. Its unit is four bytes of consecutive k: one float32, two bf16, four bytes. So all
// kinds share one loop: a unit of A, repeated, times a vector of units of B.

#pragma once
#include <vector>

#include "threads.h"
#include "unpack.h"
#include "vectors.h"

enum Kind { FP32, BF16, INT8 };

struct Left {  // A: number (m, k) at data[m * row + k * col]
    const void *data;
    int64_t row, col;
    int32_t half;  // bf16, else float32
};

struct Right {  // a matrix W: B is its transpose if `turned`, else W itself
    const uint8_t *data;
    const int64_t *order;                              // its rows as numbers of the stored ones, or null
    void (*to_float)(const void *, float *, int64_t);  // ggml's, for types that are not known here
    int64_t row_bytes, cols;
    int32_t type, block;  // ggml's number, or DENSE32, DENSE16; numbers in a block
    int32_t turned;
};

struct Out {  // C = factor * A B + bias, or C += it
    void *data;
    const float *bias;  // or null
    int64_t row;        // numbers between rows
    float factor;
    int32_t half, add;
};

enum { DENSE32 = -1, DENSE16 = -2 };

// A tile: rows of A, and vectors of B side by side. ARM multiplies by one number of a vector: there four units of a row of A
// are loaded at once, and take a register of the tile
#if defined(__aarch64__)
#define BY_LANE 1
static const int TILE_ROWS = 8, TILE_VECTORS = 2;
#else
#define BY_LANE 0
static const int TILE_ROWS = MR, TILE_VECTORS = NV;
#endif
static const long NR = TILE_VECTORS * VL;
static const long CHUNK = 256;       // numbers of a row that are unpacked at a time: a multiple of every type's block
static const long BYTE_GROUP = 32;   // bytes that share a scale
static const long DEPTH = 256;       // units of a panel that stay in the cache
static const long MC = 16 * TILE_ROWS;      // rows of C that a thread takes
static const long STEP = BY_LANE ? TILE_ROWS : 1;  // between units of a row of A in bytes

static inline long units_of(long K, int kind) { return (K + (1 << kind) - 1) >> kind; }
static inline long lanes_of(long N, long panel) { return padded(std::min(NR, N - panel * NR)); }

// ------------------------------------------------------------------------------------------------- the inner loops

// Sums stay in registers only if nothing may alias them
typedef float rf __attribute__((vector_size(VL * 4)));
typedef int32_t ri __attribute__((vector_size(VL * 4)));

struct Fp32 {
    typedef rf sum;
    static inline sum add(sum c, const int32_t *b, int32_t a) {
        float f;
        memcpy(&f, &a, 4);
        return c + load((const float *)b) * f;
    }
#if BY_LANE
    template <int LANE>
    static inline sum add_lane(sum c, ri b, ri a) {
        asm volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(c) : "w"(b), "w"(a), "i"(LANE));
        return c;
    }
#endif
};

struct Bf16 {
    typedef rf sum;
    static inline sum add(sum c, const int32_t *b, int32_t a) {
#if defined(__AVX512BF16__)
        return (sum)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(a));
#else
        const uint32_t pair = (uint32_t)a;
        const vu two = *(const vu *)b;
        float low, high;
        uint32_t l = pair << 16, h = pair & 0xffff0000u;
        memcpy(&low, &l, 4), memcpy(&high, &h, 4);
        return c + (vf)(two << 16) * low + (vf)(two & 0xffff0000u) * high;
#endif
    }
#if BY_LANE
    template <int LANE>
    static inline sum add_lane(sum c, ri b, ri a) {
        return add(c, (const int32_t *)&b, a[LANE]);
    }
#endif
};

// x86 multiplies bytes without a sign by bytes with one: B is moved up by 128 there, and `zero` takes that back
#if defined(__AVX512VNNI__) && VL == 16
#define DOT_BYTES 1
#define BYTE_ZERO 128
static inline ri dot_bytes(ri c, const int32_t *b, int32_t a) {
    return (ri)_mm512_dpbusd_epi32((__m512i)c, _mm512_loadu_si512(b), _mm512_set1_epi32(a));
}
#elif (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))) && VL == 8
#define DOT_BYTES 1
#define BYTE_ZERO 128
static inline ri dot_bytes(ri c, const int32_t *b, int32_t a) {
    const __m256i x = (__m256i)c, y = _mm256_loadu_si256((const __m256i *)b), z = _mm256_set1_epi32(a);
#if defined(__AVXVNNI__)
    return (ri)_mm256_dpbusd_avx_epi32(x, y, z);
#else
    return (ri)_mm256_dpbusd_epi32(x, y, z);
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT_BYTES 1
#define BYTE_ZERO 0
#else
#define DOT_BYTES 0
#define BYTE_ZERO 0
static inline ri dot_bytes(ri c, const int32_t *b, int32_t a) {
    const int8_t *x = (const int8_t *)b, *y = (const int8_t *)&a;
    for (int i = 0; i < VL; i++)
        for (int j = 0; j < 4; j++) c[i] += x[4 * i + j] * y[j];
    return c;
}
#endif

// M rows of A as units, and for bytes the scales of each group of a row and what its sums begin with. On ARM bytes stand
// as a unit of each of TILE_ROWS rows, then the next unit of each: one load takes four rows'
struct Strip {
    const int32_t *data;
    long row, col;  // units between rows, on average; between units of a row
    const float *scale;
    const int32_t *zero;
    long rows;  // scales of a group lie together, one for each of so many rows
    const int32_t *row_at(int m) const {
        const int32_t *at = data + m * row;
        asm("" : "+r"(at));  // a pointer to each row is kept: a sum each time costs more
        return at;
    }
};

#if BY_LANE
struct Bytes {
    typedef ri sum;
    template <int LANE>
    static inline sum add_lane(sum c, ri b, ri a) {
#if DOT_BYTES
        asm volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(c) : "w"(b), "w"(a), "i"(LANE));
        return c;
#else
        return dot_bytes(c, (const int32_t *)&b, a[LANE]);
#endif
    }
};

template <int N>
static inline void load_pairs(const int32_t *from, ri (&to)[N]) {
#pragma GCC unroll 8
    for (int n = 0; n + 1 < N; n += 2)
        asm volatile("ldp %q0, %q1, %2" : "=w"(to[n]), "=w"(to[n + 1]) : "Ump"(*(const ri *)(from + n * VL)));
    if (N % 2) asm volatile("ldr %q0, %1" : "=w"(to[N - 1]) : "m"(*(const ri *)(from + (N - 1) * VL)));
}

// In this order: compilers load all of B first, and then keep sums in memory
template <typename T, int LANE, int M, int N>
static inline void add_lane(typename T::sum (&sums)[M][N], const ri (&a)[M], const int32_t *b) {
    ri columns[N];
    load_pairs(b, columns);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = T::template add_lane<LANE>(sums[m][n], columns[n], a[m]);
}

// the same for one unit of rows that lie beside each other
template <typename T, int M, int N>
static inline void add_column(typename T::sum (&sums)[M][N], const int32_t *a, const int32_t *b) {
    ri rows[M / 4], columns[N];
    load_pairs(a, rows), load_pairs(b, columns);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 8
        for (int q = 0; q < M / 4; q++) {
            sums[4 * q][n] = T::template add_lane<0>(sums[4 * q][n], columns[n], rows[q]);
            sums[4 * q + 1][n] = T::template add_lane<1>(sums[4 * q + 1][n], columns[n], rows[q]);
            sums[4 * q + 2][n] = T::template add_lane<2>(sums[4 * q + 2][n], columns[n], rows[q]);
            sums[4 * q + 3][n] = T::template add_lane<3>(sums[4 * q + 3][n], columns[n], rows[q]);
        }
}

// The sums of a group of bytes
template <int M, int N>
static inline void sum_group(ri (&sums)[M][N], const int32_t *a, const int32_t *b, long width) {
#if DOT_BYTES
    if constexpr (M == 8 && N == 2) {  // in one piece: compilers move sums from register to register
        ri a0, a1, b0, b1;
#define ROW(one, two, a, lane)                        \
    "sdot %" #one ".4s, %18.16b, %" #a ".4b[" #lane "]\n" \
    "sdot %" #two ".4s, %19.16b, %" #a ".4b[" #lane "]\n"
#define UNIT(at)                                                                                 \
    "ldp %q16, %q17, [%20, " #at "]\n"                                                           \
    "ldp %q18, %q19, [%21, " #at "]\n"                                                           \
    ROW(0, 1, 16, 0) ROW(2, 3, 16, 1) ROW(4, 5, 16, 2) ROW(6, 7, 16, 3)                          \
    ROW(8, 9, 17, 0) ROW(10, 11, 17, 1) ROW(12, 13, 17, 2) ROW(14, 15, 17, 3)
#define ZERO(one, two) "movi %" #one ".4s, 0\nmovi %" #two ".4s, 0\n"
#define OUT(m) "=&w"(sums[m][0]), "=&w"(sums[m][1])
        asm volatile(ZERO(0, 1) ZERO(2, 3) ZERO(4, 5) ZERO(6, 7) ZERO(8, 9) ZERO(10, 11) ZERO(12, 13) ZERO(14, 15)
                     UNIT(0) UNIT(32) UNIT(64) UNIT(96) UNIT(128) UNIT(160) UNIT(192) UNIT(224)
                     : OUT(0), OUT(1), OUT(2), OUT(3), OUT(4), OUT(5), OUT(6), OUT(7),
                       "=&w"(a0), "=&w"(a1), "=&w"(b0), "=&w"(b1)
                     : "r"(a), "r"(b)
                     : "memory");
#undef ROW
#undef UNIT
#undef ZERO
#undef OUT
        return;
    }
#endif
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = ri{};
#pragma GCC unroll 8
    for (int k = 0; k < BYTE_GROUP / 4; k++) add_column<Bytes, M, N>(sums, a + k * TILE_ROWS, b + k * width);
}

template <typename T, int M, int N>
static inline void add_four(typename T::sum (&sums)[M][N], const int32_t *const (&rows)[M], long k, const int32_t *b,
                            long width) {
    ri four[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) asm volatile("ldr %q0, %1" : "=w"(four[m]) : "m"(*(const ri *)(rows[m] + k)));
    b += k * width;
    add_lane<T, 0, M, N>(sums, four, b);
    add_lane<T, 1, M, N>(sums, four, b + width);
    add_lane<T, 2, M, N>(sums, four, b + 2 * width);
    add_lane<T, 3, M, N>(sums, four, b + 3 * width);
}
#endif

// c (M, N vectors) += A B over so many units; b: rows `width` units apart
template <typename T, int M, int N>
static inline void tile(long units, const Strip &a, const int32_t *b, const float *, long width, float *c, long cm) {
    typename T::sum sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = load(c + m * cm + n * VL);
    long k = 0;
#if BY_LANE
    if (a.col == 1) {
        const int32_t *rows[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) rows[m] = a.row_at(m);
        for (; k + 4 <= units; k += 4) add_four<T, M, N>(sums, rows, k, b, width);
    }
    if constexpr (M % 4 == 0)
        for (; a.row == 1 && k < units; k++) add_column<T, M, N>(sums, a.data + k * a.col, b + k * width);
#endif
    for (; k < units; k++) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                sums[m][n] = T::add(sums[m][n], b + k * width + n * VL, a.data[m * a.row + k * a.col]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(c + m * cm + n * VL, sums[m][n]);
}

// the same for bytes, of which each group has scales of its own: scales (groups, width)
template <int M, int N>
static inline void byte_tile(long units, const Strip &a, const int32_t *b, const float *scales, long width, float *c,
                             long cm) {
    const long step = BYTE_GROUP / 4;
    for (long g = 0; g < units / step; g++) {
        ri sums[M][N];
#if BY_LANE
        sum_group(sums, a.data + g * step * STEP, b + g * step * width, width);
#else
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] = (BYTE_ZERO ? a.zero[g * a.rows + m] : 0) - ri{};
        for (long k = g * step; k < (g + 1) * step; k++) {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[m][n] = dot_bytes(sums[m][n], b + k * width + n * VL, a.data[m * a.row + k]);
        }
#endif
        float *sum = c;
        const float *row_scales = a.scale + g * a.rows;
        rf column[N];
#if BY_LANE
        asm("" : "+r"(sum));  // else c is kept in registers that there are not, and saved beside them
        rf some[M / 4];
#pragma GCC unroll 8
        for (int m = 0; m < M; m += 4) some[m / 4] = load(row_scales + m);
#endif
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) column[n] = load(scales + g * width + n * VL);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            float *to = sum + m * cm;
#if BY_LANE
            const float scale = some[m / 4][m % 4];
#else
            const float scale = row_scales[m];
#endif
            rf now[N];
#if BY_LANE
            ri before[N];
            load_pairs((const int32_t *)to, before);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) now[n] = (rf)before[n];
#else
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) now[n] = load(to + n * VL);
#endif
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) now[n] += __builtin_convertvector(sums[m][n], rf) * (column[n] * scale);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) store(to + n * VL, now[n]);
        }
    }
}

template <int KIND, int M, int N>
static inline void any_tile(long units, const Strip &a, const int32_t *b, const float *scales, long width, float *c, long cm) {
    if constexpr (KIND == FP32) tile<Fp32, M, N>(units, a, b, scales, width, c, cm);
    if constexpr (KIND == BF16) tile<Bf16, M, N>(units, a, b, scales, width, c, cm);
    if constexpr (KIND == INT8) byte_tile<M, N>(units, a, b, scales, width, c, cm);
}

template <int KIND, int M>
static inline void row_of_tiles(long units, const Strip &a, const int32_t *b, const float *scales, long width, float *c) {
    if (width == NR) return any_tile<KIND, M, TILE_VECTORS>(units, a, b, scales, width, c, NR);
    for (long n = 0; n < width; n += VL) any_tile<KIND, M, 1>(units, a, b + n, scales + n, width, c + n, NR);
}

template <int KIND>
static void panel_product(long rows, long units, Strip a, const int32_t *b, const float *scales, long width, float *c) {
    // Interleaved rows are tiles of four or more, the last of which may be of nothing
    constexpr int FEW = BY_LANE && KIND == INT8 ? 4 : 3, ONE = BY_LANE && KIND == INT8 ? 4 : 1;
    for (long m = 0; m < rows;) {
        const long left = rows - m, step = left >= TILE_ROWS || (FEW == 4 && left > 4) ? TILE_ROWS : left >= FEW ? FEW : ONE;
        if (step == TILE_ROWS) row_of_tiles<KIND, TILE_ROWS>(units, a, b, scales, width, c);
        else if (step == FEW) row_of_tiles<KIND, FEW>(units, a, b, scales, width, c);
        else row_of_tiles<KIND, ONE>(units, a, b, scales, width, c);
        m += step, c += step * NR;
        a.data += step * a.row, a.scale += step, a.zero += step;
    }
}

// ------------------------------------------------------------------------------------------------- packing

// Where a number of a row of W stands. Rows of a dense W may have others between them; packed ones have none
static inline const uint8_t *number_of(const Right &w, long row, long start) {
    const int64_t before = w.type == DENSE32 ? start * 4 : w.type == DENSE16 ? start * 2 : start * w.row_bytes / w.cols;
    return w.data + (w.order ? w.order[row] : row) * w.row_bytes + before;
}

// numbers [start, start + count) of a row of W
static void read(const Right &w, long row, long start, long count, float *to) {
    const uint8_t *in = number_of(w, row, start);
    if (w.type == DENSE32) memcpy(to, in, count * 4);
    else if (w.type == DENSE16) widen((const bf16 *)in, count, to);
    else if (w.to_float) w.to_float(in, to, count);
    else unpack_blocks(in, w.type, to, count / w.block);
}

static inline vi shuffled(vi x, vi y, vi places) {
#if defined(__clang__)
    vi out;
    for (int i = 0; i < VL; i++) out[i] = places[i] < VL ? x[places[i]] : y[places[i] - VL];
    return out;
#else
    return __builtin_shuffle(x, y, places);
#endif
}

// VL by VL units in place: after log2 VL times of interleaving its halves, a matrix is turned
static inline void turn(vi *rows) {
    vi low, high;
    for (int i = 0; i < VL; i++) low[i] = i / 2 + i % 2 * VL, high[i] = low[i] + VL / 2;
#pragma GCC unroll 4
    for (int half = 1; half < VL; half *= 2) {
        vi next[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL / 2; i++) {
            next[2 * i] = shuffled(rows[i], rows[i + VL / 2], low);
            next[2 * i + 1] = shuffled(rows[i], rows[i + VL / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) rows[i] = next[i];
    }
}

// x * factor + zero, rounded to bytes
static inline void round_to_bytes(const float *x, long count, float factor, int zero, uint8_t *to) {
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest byte
#if BY_LANE
    for (long i = 0; i < count; i += 16) {
        uint32x4_t codes[4];
        for (int k = 0; k < 4; k++) codes[k] = (uint32x4_t)(load(x + i + 4 * k) * factor + magic);
        const uint16x8_t one = vuzp1q_u16((uint16x8_t)codes[0], (uint16x8_t)codes[1]);
        const uint16x8_t two = vuzp1q_u16((uint16x8_t)codes[2], (uint16x8_t)codes[3]);
        *(vb *)(to + i) = (vb)vuzp1q_u8((uint8x16_t)one, (uint8x16_t)two) + (uint8_t)zero;
    }
#else
    for (long i = 0; i < count; i += VL) {
        const vi codes = (vi)(load(x + i) * factor + magic) - 0x4b400000 + zero;
        typedef uint8_t vbytes __attribute__((vector_size(VL), aligned(1), may_alias));
        *(vbytes *)(to + i) = __builtin_convertvector((vu)codes, vbytes);
    }
#endif
}

// a group's bytes, moved up by `zero`, and its scale
static inline float to_bytes(const float *x, uint8_t *to, int zero) {
    vf most = vf{};
    for (int i = 0; i < BYTE_GROUP; i += VL) {
        const vf up = (vf)(*(const vi *)(x + i) & 0x7fffffff);
        most = up > most ? up : most;
    }
    float top = 0;
    for (int i = 0; i < VL; i++) top = std::max(top, most[i]);
    round_to_bytes(x, BYTE_GROUP, top > 0 ? 127 / top : 0, zero, to);
    return top / 127;
}

static inline void put_bytes(vb one, vb two, uint8_t *to) {
    *(vb *)to = one + BYTE_ZERO, *(vb *)(to + 16) = two + BYTE_ZERO;
}

// These have scale * q + low in each group
static inline bool has_lows(int type) { return type == 3 || type == 12; }

// Numbers of a row of W as bytes, exactly, straight from the types whose groups are that long. False: none of these
static inline bool read_bytes(const Right &w, long row, long start, long count, uint8_t *to, float *scales, float *lows) {
    const uint8_t *in = number_of(w, row, start);
    const long groups = count / BYTE_GROUP;
    const vb low = vb{} + 15;
    switch (w.type) {
        case 2:  // Q4_0
            for (long g = 0; g < groups; g++, in += 18, to += BYTE_GROUP) {
                const vb q = *(const vb *)(in + 2);
                put_bytes((q & low) - 8, (q >> 4) - 8, to), scales[g] = half(in);
            }
            return true;
        case 3:  // Q4_1
            for (long g = 0; g < groups; g++, in += 20, to += BYTE_GROUP) {
                const vb q = *(const vb *)(in + 4);
                put_bytes(q & low, q >> 4, to), scales[g] = half(in), lows[g] = half(in + 2);
            }
            return true;
        case 8:  // Q8_0
            for (long g = 0; g < groups; g++, in += 34, to += BYTE_GROUP)
                put_bytes(*(const vb *)(in + 2), *(const vb *)(in + 18), to), scales[g] = half(in);
            return true;
        case 12:  // Q4_K
            for (long g = 0; g < groups; g += 8, in += 144) {
                const Scales s(in);
                for (int i = 0; i < 8; i += 2, to += 2 * BYTE_GROUP) {
                    const vb one = *(const vb *)(in + 16 + 16 * i), two = *(const vb *)(in + 32 + 16 * i);
                    put_bytes(one & low, two & low, to), put_bytes(one >> 4, two >> 4, to + BYTE_GROUP);
                }
                std::copy(s.scale, s.scale + 8, scales + g), std::copy(s.low, s.low + 8, lows + g);
            }
            return true;
    }
    return false;
}

// `count` numbers as units
static inline void to_units(const float *x, long count, int kind, int32_t *to, float *scales) {
    if (kind == FP32) memcpy(to, x, count * 4);
    else if (kind == BF16) narrow(x, count, (bf16 *)to);
    else
        for (long g = 0; g < count / BYTE_GROUP; g++)
            scales[g] = to_bytes(x + g * BYTE_GROUP, (uint8_t *)to + g * BYTE_GROUP, BYTE_ZERO);
}

// a panel of B = Wᵀ: VL rows of W become VL columns
static void pack_turned(const Right &w, long N, long K, int kind, long panel, int32_t *to, float *scales, float *lows) {
    const long width = lanes_of(N, panel), groups = CHUNK / BYTE_GROUP;
    std::vector<float> numbers(CHUNK + VL), row_scales(VL * groups), row_lows(VL * groups);
    std::vector<int32_t> units(VL * CHUNK);
    for (long k = 0; k < K; k += CHUNK) {
        const long count = std::min(CHUNK, K - k), some = units_of(count, kind);
        for (long n = 0; n < width; n += VL) {
            if (panel * NR + n + VL > N || count % 4) std::fill(units.begin(), units.end(), 0);
            for (long r = 0; r < VL && panel * NR + n + r < N; r++) {
                uint8_t *bytes = (uint8_t *)(units.data() + r * CHUNK);
                float *of_row = row_scales.data() + r * groups, *low_of_row = row_lows.data() + r * groups;
                if (kind == INT8 && read_bytes(w, panel * NR + n + r, k, count, bytes, of_row, low_of_row)) continue;
                read(w, panel * NR + n + r, k, count, numbers.data());
                to_units(numbers.data(), count, kind, units.data() + r * CHUNK, of_row);
            }
            for (long u = 0; u < some; u += VL) {
                vi square[VL];
                for (int r = 0; r < VL; r++) square[r] = *(const vi *)&units[r * CHUNK + u];
                turn(square);
                for (int i = 0; i < std::min<long>(VL, some - u); i++)
                    *(vi *)(to + (units_of(k, kind) + u + i) * width + n) = square[i];
            }
            if (kind == INT8)
                for (long g = 0; g < count / BYTE_GROUP; g++)
                    for (int r = 0; r < VL; r++) {
                        const long at = (k / BYTE_GROUP + g) * width + n + r;
                        scales[at] = row_scales[r * groups + g];
                        if (has_lows(w.type)) lows[at] = row_lows[r * groups + g];
                    }
        }
    }
}

// units [first, last) of all panels of B = W, in float32 or bf16
static void pack_rows(const Right &w, long N, long K, int kind, long first, long last, int32_t *to) {
    const long units = units_of(K, kind);
    float one[CHUNK + VL], two[CHUNK + VL];
    for (long u = first; u < last; u++)
        for (long n = 0; n < N; n += CHUNK) {
            const long count = std::min(CHUNK, N - n);
            for (long i = count; i < padded(count); i++) one[i] = two[i] = 0;
            read(w, kind == FP32 ? u : 2 * u, n, count, one);
            if (kind == BF16 && 2 * u + 1 < K) read(w, 2 * u + 1, n, count, two);
            else if (kind == BF16) std::fill(two, two + count, 0.0f);
            for (long i = 0; i < count; i += VL) {
                const long panel = (n + i) / NR;
                int32_t *place = to + panel * NR * units + u * lanes_of(N, panel) + (n + i) % NR;
                *(vi *)place = kind == FP32 ? (vi)load(one + i) : (vi)(bf16_bits(load(one + i)) | bf16_bits(load(two + i)) << 16);
            }
        }
}

// the same in bytes: each column has scales of its own for groups of rows
static void pack_byte_rows(const Right &w, long N, long K, long first, long last, int32_t *to, float *scales) {
    const long each = BYTE_GROUP / 4, units = K / 4, groups = K / BYTE_GROUP;
    const vf magic = all(12582912.0f);  // as in round_to_bytes
    std::vector<float> numbers(BYTE_GROUP * (CHUNK + VL));
    for (long g = first / each; g < last / each; g++)
        for (long n = 0; n < N; n += CHUNK) {
            const long count = std::min(CHUNK, N - n);
            for (long r = 0; r < BYTE_GROUP; r++) {
                float *row = numbers.data() + r * (CHUNK + VL);
                read(w, g * BYTE_GROUP + r, n, count, row);
                std::fill(row + count, row + padded(count), 0.0f);
            }
            for (long i = 0; i < count; i += VL) {
                const float *column = numbers.data() + i;
                vf most = vf{};
                for (long r = 0; r < BYTE_GROUP; r++) {
                    const vf up = (vf)((vi)load(column + r * (CHUNK + VL)) & 0x7fffffff);
                    most = up > most ? up : most;
                }
                const vf factor = most > 0 ? 127 / most : vf{};
                const long panel = (n + i) / NR, lanes = lanes_of(N, panel), at = (n + i) % NR;
                store(scales + panel * NR * groups + g * lanes + at, most / 127);
                int32_t *place = to + panel * NR * units + g * each * lanes + at;
                for (long u = 0; u < each; u++, place += lanes) {
                    vi unit = vi{};
                    for (int j = 0; j < 4; j++, column += CHUNK + VL)
                        unit |= (((vi)(load(column) * factor + magic) - 0x4b400000 + BYTE_ZERO) & 255) << 8 * j;
                    *(vi *)place = unit;
                }
            }
        }
}

// ------------------------------------------------------------------------------------------------- the product

// What a product needs beside its operands, in one piece of memory: the packed B, and A where it has to be converted
struct Plan {
    long units, groups, panels, rows;  // rows of A that there is place for, if it is converted
    size_t b, scales, lows, a, a_scales, a_zero, a_sums, bytes;
    bool converts;
    Plan(const Left &left, long M, long N, long K, int kind) {
        units = units_of(K, kind), groups = kind == INT8 ? K / BYTE_GROUP : 0, panels = (N + NR - 1) / NR;
        converts = kind == INT8 || (kind == BF16 && (!left.half || left.col != 1 || left.row % 2 || K % 2));
        rows = converts ? (M + STEP - 1) / STEP * STEP : 0;
        const size_t lanes = (size_t)padded(N);
        b = 0, scales = b + lanes * units * 4, lows = scales + lanes * groups * 4, a = lows + lanes * groups * 4;
        a_scales = a + rows * units * 4, a_zero = a_scales + rows * groups * 4, a_sums = a_zero + rows * groups * 4;
        bytes = a_sums + rows * groups * 4;
    }
};

// numbers [start, start + count) of a row of A, whose columns lie close
static void read(const Left &a, long m, long start, long count, float *to) {
    if (a.half) widen((const bf16 *)a.data + m * a.row + start, count, to);
    else memcpy(to, (const float *)a.data + m * a.row + start, count * 4);
}

// bf16: rows of units, or where k is the far index units [k][M]
static void convert_bf16(const Left &a, long M, long K, long first, long last, int32_t *to) {
    const long units = units_of(K, BF16);
    float one[CHUNK + VL] = {}, two[CHUNK + VL] = {};
    if (a.col == 1) {
        for (long m = first; m < last; m++)
            for (long k = 0; k < K; k += CHUNK) {
                const long count = std::min(CHUNK, K - k);
                one[count] = 0;  // the other half of the last unit
                read(a, m, k, count, one);
                narrow(one, count + count % 2, (bf16 *)(to + m * units) + k);
            }
        return;
    }
    const Left turned = {a.data, a.col, 1, a.half};
    for (long u = 0; u < units; u++)
        for (long m = first; m < last; m += CHUNK) {
            const long count = std::min(CHUNK, last - m);
            read(turned, 2 * u, m, count, one);
            if (2 * u + 1 < K) read(turned, 2 * u + 1, m, count, two);
            else std::fill(two, two + count, 0.0f);
            int32_t *place = to + u * M + m;
            long i = 0;
            for (; i + VL <= count; i += VL) *(vu *)(place + i) = bf16_bits(load(one + i)) | bf16_bits(load(two + i)) << 16;
            for (; i < count; i++) put((bf16 *)(place + i), one[i]), put((bf16 *)(place + i) + 1, two[i]);
        }
}

// M: rows that there is place for
static void convert_bytes(const Left &a, long M, long K, long first, long last, int32_t *to, float *scales, int32_t *zero,
                          float *sums) {
    const long groups = K / BYTE_GROUP, units = K / 4;
    for (long m = first; m < last; m++)
        for (long g = 0; g < groups; g++) {
            float x[BYTE_GROUP];
            int32_t codes[BYTE_GROUP / 4];
            read(a, m, g * BYTE_GROUP, BYTE_GROUP, x);
            scales[g * M + m] = to_bytes(x, (uint8_t *)codes, 0);
            int32_t total = 0;
            for (long i = 0; i < BYTE_GROUP; i++) total += ((int8_t *)codes)[i];
            zero[g * M + m] = -BYTE_ZERO * total;
            sums[m * groups + g] = scales[g * M + m] * total;  // of what is multiplied: their errors cancel
            int32_t *place = to + (BY_LANE ? m / TILE_ROWS * TILE_ROWS : m) * units + g * BYTE_GROUP / 4 * STEP + m % STEP;
            for (long u = 0; u < BYTE_GROUP / 4; u++) place[u * STEP] = codes[u];
        }
}

template <typename T>
static void write_rows(const Out &out, long m, long n, long rows, long count, const float *from) {
    for (long r = 0; r < rows; r++, from += NR) {
        T *to = (T *)out.data + (m + r) * out.row + n;
        long i = 0;
        for (; i + VL <= count; i += VL) {
            vf x = load(from + i) * out.factor;
            if (out.bias) x += load(out.bias + n + i);
            store(to + i, out.add ? load(to + i) + x : x);
        }
        for (; i < count; i++) {
            const float x = from[i] * out.factor + (out.bias ? out.bias[n + i] : 0.0f);
            put(to + i, out.add ? value(to[i]) + x : x);
        }
    }
}

// lows: of the groups of B, and sums: of those of A, of which C gets the product; or null
template <int KIND>
static void multiply(const Strip &whole, const int32_t *b, const float *scales, const float *lows, const float *a_sums,
                     const Out &out, long M, long N, long K, int threads) {
    const long units = units_of(K, KIND), groups = K / BYTE_GROUP, panels = (N + NR - 1) / NR, strips = (M + MC - 1) / MC;
    // panels that a thread takes at a time: a block of A is read once for all of them
    const long some = strips * panels < 32 * threads ? 1 : std::max<long>(1, 128 / NR);
    const long sets = (panels + some - 1) / some;
    share(strips * sets, threads, [&](long piece, int) {
        const long m = piece % strips * MC, rows = std::min(MC, M - m), first = piece / strips * some;
        const long last = std::min(first + some, panels);
        std::vector<float> sums((last - first) * MC * NR);
        for (long p = first; lows && p < last; p++) {
            const Strip a = {(const int32_t *)a_sums + m * groups, groups, 1, whole.scale, whole.zero, whole.rows};
            panel_product<FP32>(rows, groups, a, (const int32_t *)lows + p * NR * groups, scales, lanes_of(N, p),
                                sums.data() + (p - first) * MC * NR);
        }
        for (long k = 0; k < units; k += DEPTH)
            for (long p = first; p < last; p++) {
                const long width = lanes_of(N, p), g = k * 4 / BYTE_GROUP;
                Strip a = whole;
                a.data += m * a.row + k * a.col, a.scale += m + g * a.rows, a.zero += m + g * a.rows;
                panel_product<KIND>(rows, std::min(DEPTH, units - k), a, b + p * NR * units + k * width,
                                    scales + p * NR * groups + g * width, width, sums.data() + (p - first) * MC * NR);
            }
        for (long p = first; p < last; p++) {
            const auto write = out.half ? write_rows<bf16> : write_rows<float>;
            write(out, m, p * NR, rows, std::min(NR, N - p * NR), sums.data() + (p - first) * MC * NR);
        }
    });
}

extern "C" {
// Bytes of scratch that `multiply_matrices` needs
int64_t product_bytes(const Left *left, long M, long N, long K, int kind) { return Plan(*left, M, N, K, kind).bytes; }

// C (M, N) = A (M, K) B (K, N). In bytes: K is a multiple of BYTE_GROUP, and the rows of A lie close.
void multiply_matrices(const Left *left, const Right *right, const Out *out, long M, long N, long K, int kind, void *scratch,
                       int threads) {
    const Plan plan(*left, M, N, K, kind);
    char *memory = (char *)scratch;
    int32_t *b = (int32_t *)(memory + plan.b), *a = (int32_t *)(memory + plan.a), *zero = (int32_t *)(memory + plan.a_zero);
    float *scales = (float *)(memory + plan.scales), *a_scales = (float *)(memory + plan.a_scales);
    float *lows = (float *)(memory + plan.lows), *a_sums = (float *)(memory + plan.a_sums);
    const long rows = right->turned ? NR : 32, all_b = right->turned ? plan.panels : (plan.units + rows - 1) / rows;
    const long all_a = plan.converts ? (M + 31) / 32 : 0;
    share(all_b + all_a, threads, [&](long piece, int) {
        if (piece >= all_b) {
            const long first = (piece - all_b) * 32, last = std::min(first + 32, M);
            if (kind == INT8) convert_bytes(*left, plan.rows, K, first, last, a, a_scales, zero, a_sums);
            else convert_bf16(*left, M, K, first, last, a);
        } else if (right->turned) {
            const long group = piece * NR * plan.groups;
            pack_turned(*right, N, K, kind, piece, b + piece * NR * plan.units, scales + group, lows + group);
        } else {
            const long first = piece * rows, last = std::min(first + rows, plan.units);
            if (kind == INT8) pack_byte_rows(*right, N, K, first, last, b, scales);
            else pack_rows(*right, N, K, kind, first, last, b);
        }
    });
    Strip strip = {a, plan.units, kind == INT8 ? STEP : 1, a_scales, zero, plan.rows};
    if (!plan.converts) {
        strip.data = (const int32_t *)left->data;
        strip.row = left->half ? left->row / 2 : left->row, strip.col = left->half ? 1 : left->col;
    } else if (kind == BF16 && left->col != 1) strip.row = 1, strip.col = M;
    if (kind == FP32) multiply<FP32>(strip, b, scales, nullptr, nullptr, *out, M, N, K, threads);
    if (kind == BF16) multiply<BF16>(strip, b, scales, nullptr, nullptr, *out, M, N, K, threads);
    if (kind == INT8)
        multiply<INT8>(strip, b, scales, right->turned && has_lows(right->type) ? lows : nullptr, a_sums, *out, M, N, K, threads);
}

int multiplies_bytes(void) { return DOT_BYTES; }
}
