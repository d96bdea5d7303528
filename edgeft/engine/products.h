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

static const long NR = NV * VL;
static const long CHUNK = 256;       // numbers of a row that are unpacked at a time: a multiple of every type's block
static const long BYTE_GROUP = 32;   // bytes that share a scale
static const long DEPTH = 256;       // units of a panel that stay in the cache
static const long MC = 16 * MR;      // rows of C that a thread takes

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
static inline ri dot_bytes(ri c, const int32_t *b, int32_t a) {
    return (ri)vdotq_s32((int32x4_t)c, vld1q_s8((const int8_t *)b), vreinterpretq_s8_s32(vdupq_n_s32(a)));
}
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

struct Strip {  // M rows of A as units, and for bytes their scales and what the sums of a group begin with
    const int32_t *data;
    long row, col;
    const float *scale;
    const int32_t *zero;
    long groups;  // between rows
};

// c (M, N vectors) += A B over so many units; b: rows `width` units apart
template <typename T, int M, int N>
static inline void tile(long units, const Strip &a, const int32_t *b, const float *, long width, float *c, long cm) {
    typename T::sum sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = load(c + m * cm + n * VL);
    for (long k = 0; k < units; k++) {
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
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] = (BYTE_ZERO ? a.zero[m * a.groups + g] : 0) - ri{};
        for (long k = g * step; k < (g + 1) * step; k++) {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[m][n] = dot_bytes(sums[m][n], b + k * width + n * VL, a.data[m * a.row + k]);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const vf scale = load(scales + g * width + n * VL);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                float *to = c + m * cm + n * VL;
                store(to, load(to) + (vf)__builtin_convertvector(sums[m][n], rf) * (scale * a.scale[m * a.groups + g]));
            }
        }
    }
}

template <int KIND, int M, int N>
static inline void any_tile(long units, const Strip &a, const int32_t *b, const float *scales, long width, float *c, long cm) {
    if (KIND == FP32) tile<Fp32, M, N>(units, a, b, scales, width, c, cm);
    if (KIND == BF16) tile<Bf16, M, N>(units, a, b, scales, width, c, cm);
    if (KIND == INT8) byte_tile<M, N>(units, a, b, scales, width, c, cm);
}

template <int KIND, int M>
static inline void row_of_tiles(long units, const Strip &a, const int32_t *b, const float *scales, long width, float *c) {
    if (width == NR) return any_tile<KIND, M, NV>(units, a, b, scales, width, c, NR);
    for (long n = 0; n < width; n += VL) any_tile<KIND, M, 1>(units, a, b + n, scales + n, width, c + n, NR);
}

template <int KIND>
static void panel_product(long rows, long units, Strip a, const int32_t *b, const float *scales, long width, float *c) {
    for (long m = 0; m < rows;) {
        const long left = rows - m, step = left >= MR ? MR : left >= 3 ? 3 : 1;
        if (step == MR) row_of_tiles<KIND, MR>(units, a, b, scales, width, c);
        else if (step == 3) row_of_tiles<KIND, 3>(units, a, b, scales, width, c);
        else row_of_tiles<KIND, 1>(units, a, b, scales, width, c);
        m += step, c += step * NR;
        a.data += step * a.row, a.scale += step * a.groups, a.zero += step * a.groups;
    }
}

// ------------------------------------------------------------------------------------------------- packing

// numbers [start, start + count) of a row of W
static void read(const Right &w, long row, long start, long count, float *to) {
    const uint8_t *in = w.data + (w.order ? w.order[row] : row) * w.row_bytes + start * w.row_bytes / w.cols;
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

// a group's bytes, moved up by `zero`, and its scale
static inline float to_bytes(const float *x, uint8_t *to, int zero) {
    vf most = vf{};
    for (int i = 0; i < BYTE_GROUP; i += VL) {
        vf v = load(x + i), up = v < 0 ? -v : v;
        most = up > most ? up : most;
    }
    float top = 0;
    for (int i = 0; i < VL; i++) top = std::max(top, most[i]);
    const float scale = top / 127, inverse = top > 0 ? 127 / top : 0;
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    for (int i = 0; i < BYTE_GROUP; i += VL) {
        const vf rounded = load(x + i) * inverse + magic;
        const vi codes = (vi)rounded - 0x4b400000 + zero;
        typedef uint8_t vbytes __attribute__((vector_size(VL), aligned(1), may_alias));
        *(vbytes *)(to + i) = __builtin_convertvector((vu)codes, vbytes);
    }
    return scale;
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
static void pack_turned(const Right &w, long N, long K, int kind, long panel, int32_t *to, float *scales) {
    const long width = lanes_of(N, panel), groups = CHUNK / BYTE_GROUP;
    std::vector<float> numbers(CHUNK + VL), row_scales(VL * groups);
    std::vector<int32_t> units(VL * CHUNK);
    for (long k = 0; k < K; k += CHUNK) {
        const long count = std::min(CHUNK, K - k), some = units_of(count, kind);
        for (long n = 0; n < width; n += VL) {
            std::fill(units.begin(), units.end(), 0), std::fill(row_scales.begin(), row_scales.end(), 0.0f);
            for (long r = 0; r < VL && panel * NR + n + r < N; r++) {
                read(w, panel * NR + n + r, k, count, numbers.data());
                to_units(numbers.data(), count, kind, units.data() + r * CHUNK, row_scales.data() + r * groups);
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
                    for (int r = 0; r < VL; r++) scales[(k / BYTE_GROUP + g) * width + n + r] = row_scales[r * groups + g];
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

// ------------------------------------------------------------------------------------------------- the product

// What a product needs beside its operands, in one piece of memory: the packed B, and A where it has to be converted
struct Plan {
    long units, groups, panels;
    size_t b, scales, a, a_scales, a_zero, bytes;
    bool converts;
    Plan(const Left &left, long M, long N, long K, int kind) {
        units = units_of(K, kind), groups = kind == INT8 ? K / BYTE_GROUP : 0, panels = (N + NR - 1) / NR;
        converts = kind == INT8 || (kind == BF16 && (!left.half || left.col != 1 || left.row % 2 || K % 2));
        const size_t lanes = (size_t)padded(N), rows = converts ? M : 0;
        b = 0, scales = b + lanes * units * 4, a = scales + lanes * groups * 4;
        a_scales = a + rows * units * 4, a_zero = a_scales + rows * groups * 4, bytes = a_zero + rows * groups * 4;
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

static void convert_bytes(const Left &a, long K, long first, long last, uint8_t *to, float *scales, int32_t *zero) {
    const long groups = K / BYTE_GROUP;
    for (long m = first; m < last; m++)
        for (long g = 0; g < groups; g++) {
            float x[BYTE_GROUP];
            read(a, m, g * BYTE_GROUP, BYTE_GROUP, x);
            uint8_t *codes = to + m * K + g * BYTE_GROUP;
            scales[m * groups + g] = to_bytes(x, codes, 0);
            int32_t total = 0;
            for (long i = 0; i < BYTE_GROUP; i++) total += (int8_t)codes[i];
            zero[m * groups + g] = -BYTE_ZERO * total;
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

template <int KIND>
static void multiply(const Strip &whole, const int32_t *b, const float *scales, const Out &out, long M, long N, long K,
                     int threads) {
    const long units = units_of(K, KIND), groups = K / BYTE_GROUP, panels = (N + NR - 1) / NR, strips = (M + MC - 1) / MC;
    // panels that a thread takes at a time: a block of A is read once for all of them
    const long some = strips * panels < 32 * threads ? 1 : std::max<long>(1, 128 / NR);
    const long sets = (panels + some - 1) / some;
    share(strips * sets, threads, [&](long piece, int) {
        const long m = piece % strips * MC, rows = std::min(MC, M - m), first = piece / strips * some;
        const long last = std::min(first + some, panels);
        std::vector<float> sums((last - first) * MC * NR);
        for (long k = 0; k < units; k += DEPTH)
            for (long p = first; p < last; p++) {
                const long width = lanes_of(N, p), g = k * 4 / BYTE_GROUP;
                Strip a = whole;
                a.data += m * a.row + k * a.col, a.scale += m * a.groups + g, a.zero += m * a.groups + g;
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

// C (M, N) = A (M, K) B (K, N). In bytes: K is a multiple of BYTE_GROUP, B is turned, and its rows lie close.
void multiply_matrices(const Left *left, const Right *right, const Out *out, long M, long N, long K, int kind, void *scratch,
                       int threads) {
    const Plan plan(*left, M, N, K, kind);
    char *memory = (char *)scratch;
    int32_t *b = (int32_t *)(memory + plan.b), *a = (int32_t *)(memory + plan.a), *zero = (int32_t *)(memory + plan.a_zero);
    float *scales = (float *)(memory + plan.scales), *a_scales = (float *)(memory + plan.a_scales);
    const long rows = right->turned ? NR : 32, all_b = right->turned ? plan.panels : (plan.units + rows - 1) / rows;
    const long all_a = plan.converts ? (M + 31) / 32 : 0;
    share(all_b + all_a, threads, [&](long piece, int) {
        if (piece >= all_b) {
            const long first = (piece - all_b) * 32, last = std::min(first + 32, M);
            if (kind == INT8) convert_bytes(*left, K, first, last, (uint8_t *)a, a_scales, zero);
            else convert_bf16(*left, M, K, first, last, a);
        } else if (right->turned)
            pack_turned(*right, N, K, kind, piece, b + piece * NR * plan.units, scales + piece * NR * plan.groups);
        else pack_rows(*right, N, K, kind, piece * rows, std::min((piece + 1) * rows, plan.units), b);
    });
    Strip strip = {a, plan.units, 1, a_scales, zero, plan.groups};
    if (!plan.converts) {
        strip.data = (const int32_t *)left->data;
        strip.row = left->half ? left->row / 2 : left->row, strip.col = left->half ? 1 : left->col;
    } else if (kind == BF16 && left->col != 1) strip.row = 1, strip.col = M;
    if (kind == FP32) multiply<FP32>(strip, b, scales, *out, M, N, K, threads);
    if (kind == BF16) multiply<BF16>(strip, b, scales, *out, M, N, K, threads);
    if (kind == INT8) multiply<INT8>(strip, b, scales, *out, M, N, K, threads);
}

int multiplies_bytes(void) { return DOT_BYTES; }
}
