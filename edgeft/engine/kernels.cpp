// What lies between a block's matrix products, in one pass over memory each: RMSNorm, SwiGLU, attention along a tree, the
// unpacking of weights, and AdamW.
//
// Every function takes plain pointers (float32, some also bf16) and a number of threads. Work is handed to threads in a fixed
// way, so that the same call with the same number of threads gives the same bits.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
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
static inline void store(bf16 *p, vf v) {
    vu bits = (vu)v;
    bits += 0x7fff + ((bits >> 16) & 1);
    *(vh *)p = __builtin_convertvector(bits >> 16, vh);
}

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

// ------------------------------------------------------------------------------------------------- small products

// C[rows(m)][0 .. nv*VL) (+)= sum_k A[m * am + k * ak] * B[cols(k)][...]; an index list stands for rows that are not in order
template <int M, int N, bool ADD>
static inline void tile(long K, const float *A, long am, long ak, const float *B, long bk, const int32_t *bi, float *C,
                        long cm, const int32_t *ci) {
    vf acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) acc[m][n] = vf{};
    for (long k = 0; k < K; k++) {
        const float *row = B + (bi ? (long)bi[k] : k) * bk;
        vf b[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) b[n] = load(row + n * VL);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vf a = all(A[m * am + k * ak]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[m][n] += a * b[n];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        float *out = C + (ci ? (long)ci[m] : m) * cm;
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(out + n * VL, ADD ? load(out + n * VL) + acc[m][n] : acc[m][n]);
    }
}

template <int N, bool ADD>
static void column(long M, long K, const float *A, long am, long ak, const float *B, long bk, const int32_t *bi, float *C,
                   long cm, const int32_t *ci) {
    long m = 0;
    for (; m + MR <= M; m += MR)
        tile<MR, N, ADD>(K, A + m * am, am, ak, B, bk, bi, C + (ci ? 0 : m * cm), cm, ci ? ci + m : ci);
    const float *a = A + m * am;
    float *c = C + (ci ? 0 : m * cm);
    const int32_t *i = ci ? ci + m : ci;
    switch (M - m) {
        case 5: tile<5, N, ADD>(K, a, am, ak, B, bk, bi, c, cm, i); break;
        case 4: tile<4, N, ADD>(K, a, am, ak, B, bk, bi, c, cm, i); break;
        case 3: tile<3, N, ADD>(K, a, am, ak, B, bk, bi, c, cm, i); break;
        case 2: tile<2, N, ADD>(K, a, am, ak, B, bk, bi, c, cm, i); break;
        case 1: tile<1, N, ADD>(K, a, am, ak, B, bk, bi, c, cm, i); break;
    }
}

// N is a multiple of VL
template <bool ADD>
static void product(long M, long N, long K, const float *A, long am, long ak, const float *B, long bk, const int32_t *bi,
                    float *C, long cm, const int32_t *ci) {
    long n = 0;
    for (; n + NV * VL <= N; n += NV * VL) column<NV, ADD>(M, K, A, am, ak, B + n, bk, bi, C + n, cm, ci);
    for (; n < N; n += VL) column<1, ADD>(M, K, A, am, ak, B + n, bk, bi, C + n, cm, ci);
}

// ------------------------------------------------------------------------------------------------- attention

// Queries and the tokens that they see: the first `above` keys are seen by all, the last `own` are the tokens
// [start, start + own), of which token j is seen by its subtree, j <= i < j + size[j].
struct Piece {
    int32_t query, asked;  // first in `queries` and `rows`, and how many
    int32_t key, above;    // first in `keys`
    int32_t start, own;
};

struct Tree {
    const Piece *pieces;
    const int32_t *queries;  // token numbers
    const int32_t *rows;     // where these queries stand in q: the same unless only some tokens ask
    const int32_t *keys;     // token numbers
    const int32_t *size;     // tokens in each token's subtree, itself included
    const int32_t *items;    // piece * groups + group, in the order in which thread t works: [bounds[t], bounds[t + 1])
    const int32_t *bounds;
};

struct Heads {
    int32_t heads, groups, width;  // query heads, key heads, numbers in each
    float scale;
};

static long padded(long n) { return (n + VL - 1) / VL * VL; }

// to (width, pad) = from[idx]ᵀ, zeros in what was padded
static void gather_transposed(const float *from, long stride, const int32_t *idx, long count, long pad, long width,
                              float *to) {
    for (long k0 = 0; k0 < count; k0 += VL) {
        long stop = std::min(k0 + VL, count);
        for (long d = 0; d < width; d++)
            for (long k = k0; k < stop; k++) to[d * pad + k] = from[(long)idx[k] * stride + d];
    }
    for (long d = 0; d < width; d++)
        for (long k = count; k < pad; k++) to[d * pad + k] = 0;
}

static void gather(const float *from, long stride, const int32_t *idx, long count, long width, float scale, float *to) {
    for (long m = 0; m < count; m++) {
        const float *row = from + (long)idx[m] * stride;
        for (long d = 0; d < width; d++) to[m * width + d] = scale * row[d];
    }
}

// -inf where a query does not see a key, and in what was padded
static void hide(const Piece &p, const Tree &t, long keys, long pad, float *scores) {
    for (long m = 0; m < p.asked; m++) {
        float *row = scores + m * pad;
        int32_t i = t.queries[p.query + m];
        float *own = row + p.above;
        const int32_t *size = t.size + p.start;
        const int32_t from = i - p.start;
#pragma omp simd
        for (int32_t j = 0; j < p.own; j++) {  // without a branch: several at a time
            float x = own[j];
            own[j] = (j > from) | (from >= j + size[j]) ? -INFINITY : x;
        }
        for (long k = keys; k < pad; k++) row[k] = -INFINITY;
    }
}

struct Scratch {
    std::vector<float> kt, vt, q, dout, p, dp;
};

extern "C" {

// q (rows, heads * width), k and v (tokens, groups * width), all rotated; out as q; lse (rows, heads): log of the sum of
// exponentials, from which the backward pass has the weights again
void attend(const Tree *tree, const Heads *shape, const float *q, const float *k, const float *v, float *out, float *lse,
            int threads) {
    const Tree &t = *tree;
    const long H = shape->heads, G = shape->groups, D = shape->width, per = H / G;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        Scratch s;
        for (int at = t.bounds[thread]; at < t.bounds[thread + 1]; at++) {
            const Piece &p = t.pieces[t.items[at] / G];
            const long g = t.items[at] % G, keys = p.above + p.own, pad = padded(keys);
            const int32_t *idx = t.keys + p.key, *rows = t.rows + p.query;
            s.kt.resize(D * pad), s.q.resize(p.asked * D), s.p.resize(p.asked * pad);
            gather_transposed(k + g * D, G * D, idx, keys, pad, D, s.kt.data());
            for (long h = g * per; h < (g + 1) * per; h++) {
                gather(q + h * D, H * D, rows, p.asked, D, shape->scale, s.q.data());
                product<false>(p.asked, pad, D, s.q.data(), D, 1, s.kt.data(), pad, nullptr, s.p.data(), pad, nullptr);
                hide(p, t, keys, pad, s.p.data());
                for (long m = 0; m < p.asked; m++) {
                    float *row = s.p.data() + m * pad;
                    vf top = load(row);
                    for (long c = VL; c < pad; c += VL) {
                        vf x = load(row + c);
                        top = x > top ? x : top;
                    }
                    float most = top[0];
                    for (int i = 1; i < VL; i++) most = std::max(most, top[i]);
                    vf total = vf{};
                    for (long c = 0; c < pad; c += VL) {
                        vf x = load(row + c), e = vexp(x - most);
                        e = x == -INFINITY ? vf{} : e;
                        total += e;
                        store(row + c, e);
                    }
                    float whole = sum(total), inverse = 1 / whole;
                    for (long c = 0; c < pad; c += VL) store(row + c, load(row + c) * inverse);
                    lse[(long)rows[m] * H + h] = most + std::log(whole);
                }
                product<false>(p.asked, D, keys, s.p.data(), pad, 1, v + g * D, G * D, idx, out + h * D, H * D, rows);
            }
        }
    }
}

// dq as q; dk and dv (tokens, groups * width) for every thread, zeros at first, to be added up
void attend_back(const Tree *tree, const Heads *shape, const float *q, const float *k, const float *v, const float *out,
                 const float *lse, const float *dout, float *dq, float *const *dk, float *const *dv, int threads) {
    const Tree &t = *tree;
    const long H = shape->heads, G = shape->groups, D = shape->width, per = H / G;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        Scratch s;
        float *own_dk = dk[thread], *own_dv = dv[thread];
        for (int at = t.bounds[thread]; at < t.bounds[thread + 1]; at++) {
            const Piece &p = t.pieces[t.items[at] / G];
            const long g = t.items[at] % G, keys = p.above + p.own, pad = padded(keys);
            const int32_t *idx = t.keys + p.key, *rows = t.rows + p.query;
            s.kt.resize(D * pad), s.vt.resize(D * pad), s.q.resize(p.asked * D), s.dout.resize(p.asked * D);
            s.p.resize(p.asked * pad), s.dp.resize(p.asked * pad);
            gather_transposed(k + g * D, G * D, idx, keys, pad, D, s.kt.data());
            gather_transposed(v + g * D, G * D, idx, keys, pad, D, s.vt.data());
            for (long h = g * per; h < (g + 1) * per; h++) {
                gather(q + h * D, H * D, rows, p.asked, D, shape->scale, s.q.data());
                gather(dout + h * D, H * D, rows, p.asked, D, 1, s.dout.data());
                product<false>(p.asked, pad, D, s.q.data(), D, 1, s.kt.data(), pad, nullptr, s.p.data(), pad, nullptr);
                product<false>(p.asked, pad, D, s.dout.data(), D, 1, s.vt.data(), pad, nullptr, s.dp.data(), pad, nullptr);
                hide(p, t, keys, pad, s.p.data());
                for (long m = 0; m < p.asked; m++) {
                    float *row = s.p.data() + m * pad, *drow = s.dp.data() + m * pad;
                    const float *o = out + (long)rows[m] * H * D + h * D, *d = s.dout.data() + m * D;
                    vf dot = vf{};
                    for (long c = 0; c < D; c += VL) dot += load(o + c) * load(d + c);
                    float delta = sum(dot), log_sum = lse[(long)rows[m] * H + h];  // delta = sum of dP * P
                    for (long c = 0; c < pad; c += VL) {
                        vf x = load(row + c), e = vexp(x - log_sum);
                        e = x == -INFINITY ? vf{} : e;
                        store(row + c, e);
                        store(drow + c, e * (load(drow + c) - delta));
                    }
                }
                product<true>(keys, D, p.asked, s.p.data(), 1, pad, s.dout.data(), D, nullptr, own_dv + g * D, G * D, idx);
                product<true>(keys, D, p.asked, s.dp.data(), 1, pad, s.q.data(), D, nullptr, own_dk + g * D, G * D, idx);
                product<false>(p.asked, D, keys, s.dp.data(), pad, 1, k + g * D, G * D, idx, dq + h * D, H * D, rows);
                for (long m = 0; m < p.asked; m++) {
                    float *row = dq + (long)rows[m] * H * D + h * D;
                    for (long c = 0; c < D; c += VL) store(row + c, load(row + c) * shape->scale);
                }
            }
        }
    }
}

// x (rows, heads * width) in place, by the angles of each row: cosines and sines (rows, width), whose halves are equal.
// sign -1 turns back, which is what the gradient needs.
void rotate(float *x, const float *cosines, const float *sines, long rows, long heads, long width, float sign, int threads) {
    const long half = width / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *c = cosines + r * width, *s = sines + r * width;
        for (long h = 0; h < heads; h++) {
            float *a = x + (r * heads + h) * width, *b = a + half;
#pragma omp simd
            for (long d = 0; d < half; d++) {
                float u = a[d], w = b[d];
                a[d] = u * c[d] - w * sign * s[d];
                b[d] = w * c[d] + u * sign * s[d];
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------- norms

// total = x + more (or x alone), y = weight * total / rms(total); scale (rows,) keeps 1 / rms
void norm(const float *x, const float *more, const float *weight, float eps, float *total, float *y, float *scale, long rows,
          long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *in = x + r * width;
        if (more) {
            const float *add = more + r * width;
            float *to = total + r * width;
#pragma omp simd
            for (long d = 0; d < width; d++) to[d] = in[d] + add[d];
            in = to;
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long d = 0; d < width; d++) squares += in[d] * in[d];
        float inverse = 1 / std::sqrt(squares / width + eps);
        scale[r] = inverse;
        float *to = y + r * width;
#pragma omp simd
        for (long d = 0; d < width; d++) to[d] = in[d] * inverse * weight[d];
    }
}

// dx = weight * dy / rms - x * (sum of weight * dy * x) / (width * rms³), + what came to x by another way
void norm_back(const float *x, const float *scale, const float *weight, const float *dy, const float *other, float *dx,
               long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *in = x + r * width, *d_y = dy + r * width;
        float *to = dx + r * width, dot = 0, s = scale[r];
#pragma omp simd reduction(+ : dot)
        for (long d = 0; d < width; d++) dot += weight[d] * d_y[d] * in[d];
        dot *= s * s * s / width;
        if (other) {
            const float *add = other + r * width;
#pragma omp simd
            for (long d = 0; d < width; d++) to[d] = add[d] + s * weight[d] * d_y[d] - dot * in[d];
        } else {
#pragma omp simd
            for (long d = 0; d < width; d++) to[d] = s * weight[d] * d_y[d] - dot * in[d];
        }
    }
}

}

// ------------------------------------------------------------------------------------------------- SwiGLU

static const long STRIP = 4096;  // numbers that a thread takes at a time

// out = gate * sigmoid(gate) * up; out may be gate or up
template <typename T>
static void gated(const T *gate, const T *up, T *out, long count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long strip = 0; strip < count; strip += STRIP) {
        long stop = std::min(strip + STRIP, count), i = strip;
        for (; i + VL <= stop; i += VL) {
            vf g = load(gate + i);
            store(out + i, g / (1 + vexp(-g)) * load(up + i));
        }
        for (; i < stop; i++) {
            float g = value(gate[i]);
            put(out + i, g / (1 + std::exp(-g)) * value(up[i]));
        }
    }
}

// gate and up become their gradients; act, if asked for, what `gated` gave
template <typename T>
static void gated_back(T *gate, T *up, const T *dact, T *act, long count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long strip = 0; strip < count; strip += STRIP) {
        long stop = std::min(strip + STRIP, count), i = strip;
        for (; i + VL <= stop; i += VL) {
            vf g = load(gate + i), u = load(up + i), d = load(dact + i), s = 1 / (1 + vexp(-g)), gs = g * s;
            if (act) store(act + i, gs * u);
            store(up + i, d * gs);
            store(gate + i, d * u * (s + gs * (1 - s)));
        }
        for (; i < stop; i++) {
            float g = value(gate[i]), u = value(up[i]), d = value(dact[i]), s = 1 / (1 + std::exp(-g)), gs = g * s;
            if (act) put(act + i, gs * u);
            put(up + i, d * gs);
            put(gate + i, d * u * (s + gs * (1 - s)));
        }
    }
}

extern "C" {
void swiglu(const float *gate, const float *up, float *out, long count, int threads) {
    gated(gate, up, out, count, threads);
}

void swiglu_half(const bf16 *gate, const bf16 *up, bf16 *out, long count, int threads) {
    gated(gate, up, out, count, threads);
}

void swiglu_back(float *gate, float *up, const float *dact, float *act, long count, int threads) {
    gated_back(gate, up, dact, act, count, threads);
}

void swiglu_back_half(bf16 *gate, bf16 *up, const bf16 *dact, bf16 *act, long count, int threads) {
    gated_back(gate, up, dact, act, count, threads);
}
}

// ---------------------------------------------------------------- between bf16 products and what is float32

extern "C" {
// sum += x
void add_half(float *sum, const bf16 *x, long count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long strip = 0; strip < count; strip += STRIP) {
        long stop = std::min(strip + STRIP, count), i = strip;
        for (; i + VL <= stop; i += VL) store(sum + i, load(sum + i) + load(x + i));
        for (; i < stop; i++) sum[i] += value(x[i]);
    }
}

// x (rows, width) += bias (width)
void add_bias_half(bf16 *x, const float *bias, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        bf16 *row = x + r * width;
        long i = 0;
        for (; i + VL <= width; i += VL) store(row + i, load(row + i) + load(bias + i));
        for (; i < width; i++) put(row + i, value(row[i]) + bias[i]);
    }
}

// out (width) = sums over the rows of x (rows, width)
void sum_rows_half(const bf16 *x, float *out, long rows, long width, int threads) {
    const long block = 4 * VL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < width; start += block) {
        const long stop = std::min(start + block, width);
        for (long i = start; i < stop; i++) out[i] = 0;
        for (long r = 0; r < rows; r++) {
            const bf16 *row = x + r * width;
            long i = start;
            for (; i + VL <= stop; i += VL) store(out + i, load(out + i) + load(row + i));
            for (; i < stop; i++) out[i] += value(row[i]);
        }
    }
}
}

// ---------------------------------------------------------------- lite branches: r numbers a token, r a multiple of VL

// to (rows, width) float32 = a part of x, whose rows are so far apart
static void widen(const bf16 *x, long stride, long rows, long width, float *to) {
    for (long r = 0; r < rows; r++, x += stride, to += width) {
        long i = 0;
        for (; i + VL <= width; i += VL) store(to + i, load(x + i));
        for (; i < width; i++) to[i] = value(x[i]);
    }
}

extern "C" {
// out (rows, r) = x (rows, width) aᵀ, a (r, width)
void project_half(const bf16 *x, const float *a, float *out, long rows, long width, long r, int threads) {
    const long strip = 8 * MR;
    std::vector<float> turned(width * r);
    for (long k = 0; k < r; k++)
        for (long i = 0; i < width; i++) turned[i * r + k] = a[k * width + i];
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> some(strip * width);
#pragma omp for schedule(static)
        for (long start = 0; start < rows; start += strip) {
            const long count = std::min(strip, rows - start);
            widen(x + start * width, width, count, width, some.data());
            product<false>(count, r, width, some.data(), width, 1, turned.data(), r, nullptr, out + start * r, r, nullptr);
        }
    }
}

// out (width, r) = dyᵀ mid, dy (rows, width), mid (rows, r)
void expand_back_half(const bf16 *dy, const float *mid, float *out, long rows, long width, long r, int threads) {
    const long strip = 16 * MR, piece = 64;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> some(strip * piece);
#pragma omp for schedule(static)
        for (long start = 0; start < width; start += strip) {
            const long count = std::min(strip, width - start);
            std::fill(out + start * r, out + (start + count) * r, 0.0f);
            for (long row = 0; row < rows; row += piece) {
                const long few = std::min(piece, rows - row);
                widen(dy + row * width + start, width, few, count, some.data());
                product<true>(count, r, few, some.data(), 1, count, mid + row * r, r, nullptr, out + start * r, r, nullptr);
            }
        }
    }
}
}

// ---------------------------------------------------------------- some columns of a matrix

template <typename T>
static void pick(const T *x, const int64_t *columns, T *out, long rows, long width, long count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < count; c++) out[r * count + c] = x[r * width + columns[c]];
}

template <typename T>
static void place(const float *part, const int64_t *columns, T *out, long rows, long width, long count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < count; c++) put(out + r * width + columns[c], part[r * count + c]);
}

extern "C" {
// out (rows, count) = these columns of x (rows, width)
void pick_columns(const float *x, const int64_t *columns, float *out, long rows, long width, long count, int threads) {
    pick(x, columns, out, rows, width, count, threads);
}
void pick_columns_half(const bf16 *x, const int64_t *columns, bf16 *out, long rows, long width, long count, int threads) {
    pick(x, columns, out, rows, width, count, threads);
}
// these columns of out (rows, width) = part (rows, count)
void place_columns(const float *part, const int64_t *columns, float *out, long rows, long width, long count, int threads) {
    place(part, columns, out, rows, width, count, threads);
}
void place_columns_half(const float *part, const int64_t *columns, bf16 *out, long rows, long width, long count, int threads) {
    place(part, columns, out, rows, width, count, threads);
}
}

// ---------------------------------------------------------------- packed weights

// ggml's half precision, exactly
static inline float half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(h);
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
static void each_block(const uint8_t *in, T *out, long blocks, int threads) {
    const long step = 4096 / VALUES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long strip = 0; strip < blocks; strip += step)
        for (long b = strip; b < std::min(strip + step, blocks); b++) UNPACK(in + b * BYTES, out + b * VALUES);
}

template <typename T>
static void unpack_to(const uint8_t *in, int type, T *out, long blocks, int threads) {
    switch (type) {
        case 2: return each_block<T, 18, 32, q4_0<T>>(in, out, blocks, threads);
        case 3: return each_block<T, 20, 32, q4_1<T>>(in, out, blocks, threads);
        case 6: return each_block<T, 22, 32, q5<T, false>>(in, out, blocks, threads);
        case 7: return each_block<T, 24, 32, q5<T, true>>(in, out, blocks, threads);
        case 8: return each_block<T, 34, 32, q8_0<T>>(in, out, blocks, threads);
        case 10: return each_block<T, 84, 256, q2_k<T>>(in, out, blocks, threads);
        case 11: return each_block<T, 110, 256, q3_k<T>>(in, out, blocks, threads);
        case 12: return each_block<T, 144, 256, q4_k<T>>(in, out, blocks, threads);
        case 13: return each_block<T, 176, 256, q5_k<T>>(in, out, blocks, threads);
        case 14: return each_block<T, 210, 256, q6_k<T>>(in, out, blocks, threads);
        case 20: return each_block<T, 18, 32, iq4_nl<T>>(in, out, blocks, threads);
        case 23: return each_block<T, 136, 256, iq4_xs<T>>(in, out, blocks, threads);
    }
}

extern "C" {
// Blocks of ggml's types, by their numbers
void unpack(const uint8_t *in, int type, float *out, long blocks, int threads) {
    unpack_to(in, type, out, blocks, threads);
}
void unpack_half(const uint8_t *in, int type, bf16 *out, long blocks, int threads) {
    unpack_to(in, type, out, blocks, threads);
}

// Packed rows of any type by ggml's own function, rounded to bf16 while they are in the cache
void unpack_rows_half(const uint8_t *in, void (*to_float)(const void *, float *, int64_t), bf16 *out, long rows, long cols,
                      long row_bytes, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> row(cols + VL);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            to_float(in + r * row_bytes, row.data(), cols);
            long i = 0;
            for (; i + VL <= cols; i += VL) store(out + r * cols + i, load(&row[i]));
            for (; i < cols; i++) put(out + r * cols + i, row[i]);
        }
    }
}
}

// ------------------------------------------------------------------------------------------------- AdamW

// Weights are kept as float32 or bf16, AdamW's two moments as float32, as bf16, or as bytes. What is stored in fewer bits
// is rounded up or down by chance, with the odds that make it right on average: a moment moves by 1 % of its value a step,
// less than the distance to the next number, and would else never move at all.

#define GROUP 256  // numbers that share a scale, where moments are bytes

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// the same for the same number and seed, whatever the threads (lowbias32)
static inline uint32_t chance(uint32_t number, uint32_t seed) {
    uint32_t x = number * 0x9e3779b9u + seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// A byte stands for a share of the group's largest: a floating-point number with 3 bits of fraction, of which `codes` is 1.
// codes = 255 reaches down to 2^-31 (second moments), 127 with a sign to 2^-15 (first ones: their root).
static inline float share_of(uint32_t code, int32_t codes) { return of_bits((code + (127 * 8 - codes)) << 20); }
static inline uint32_t code_of(float share, uint32_t random, int32_t codes) {
    int32_t code = (int32_t)((bits_of(share) + (random & 0xfffff)) >> 20) - (127 * 8 - codes);
    return (uint32_t)std::min(std::max(code, 0), codes);
}

struct Rule {
    float lr, beta1, beta2, eps, decay;
    float first, second;  // 1 - beta^step
    float factor;         // of the gradient
    uint32_t seed;
};

// new moments and weights of up to GROUP numbers
static inline void adamw_group(float *w, const float *g, float *m, float *v, long count, const Rule &r) {
    const float rate = r.lr / r.first, keep = 1 - r.lr * r.decay, root = 1 / r.second;
#pragma omp simd
    for (long i = 0; i < count; i++) {
        float d = g[i] * r.factor;
        m[i] = r.beta1 * m[i] + (1 - r.beta1) * d;
        v[i] = r.beta2 * v[i] + (1 - r.beta2) * d * d;
        w[i] = w[i] * keep - rate * m[i] / (std::sqrt(v[i] * root) + r.eps);
    }
}

// the same for weights of either type; those in bf16 are rounded by chance, independently of the moments
static inline void step_group(
    void *w, int half, const float *g, float *m, float *v, long start, long count, const Rule &r) {
    if (!half) return adamw_group((float *)w + start, g, m, v, count, r);
    bf16 *stored = (bf16 *)w + start;
    float now[GROUP];
#pragma omp simd
    for (long i = 0; i < count; i++) now[i] = of_bits((uint32_t)stored[i] << 16);
    adamw_group(now, g, m, v, count, r);
#pragma omp simd
    for (long i = 0; i < count; i++)
        stored[i] = (bf16)((bits_of(now[i]) + (chance((uint32_t)(start + i), ~r.seed) & 0xffff)) >> 16);
}

extern "C" {
void adamw(void *w, int half, const float *g, float *m, float *v, long count, const Rule *rule, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < count; i += GROUP)
        step_group(w, half, g + i, m + i, v + i, i, std::min<long>(GROUP, count - i), *rule);
}

void adamw_bf16(void *w, int half, const float *g, bf16 *m, bf16 *v, long count, const Rule *rule, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < count; start += GROUP) {
        long n = std::min<long>(GROUP, count - start);
        bf16 *mh = m + start, *vh = v + start;
        float first[GROUP], second[GROUP];
#pragma omp simd
        for (long i = 0; i < n; i++) first[i] = of_bits((uint32_t)mh[i] << 16), second[i] = of_bits((uint32_t)vh[i] << 16);
        step_group(w, half, g + start, first, second, start, n, *rule);
#pragma omp simd
        for (long i = 0; i < n; i++) {
            uint32_t random = chance((uint32_t)(start + i), rule->seed);
            mh[i] = (bf16)((bits_of(first[i]) + (random & 0xffff)) >> 16);
            vh[i] = (bf16)((bits_of(second[i]) + (random >> 16)) >> 16);
        }
    }
}

// scales: (groups, 2), the largest first and second moment of each
void adamw_bytes(
    void *w, int half, const float *g, uint8_t *m, uint8_t *v, float *scales, long count, const Rule *rule, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < count; start += GROUP) {
        long n = std::min<long>(GROUP, count - start);
        uint8_t *mb = m + start, *vb = v + start;
        float *scale = scales + start / GROUP * 2, first[GROUP], second[GROUP];
#pragma omp simd
        for (long i = 0; i < n; i++) {
            uint32_t code = mb[i] & 127, sign = (uint32_t)(mb[i] & 128) << 24;
            first[i] = of_bits(code ? bits_of(share_of(code, 127) * scale[0]) | sign : sign);
            second[i] = share_of(vb[i], 255) * scale[1];  // never nothing: a first moment may be left to be divided by it
        }
        step_group(w, half, g + start, first, second, start, n, *rule);
        float most1 = 0, most2 = 0;
#pragma omp simd reduction(max : most1, most2)
        for (long i = 0; i < n; i++) most1 = std::max(most1, std::fabs(first[i])), most2 = std::max(most2, second[i]);
        float part1 = most1 > 0 ? 1 / most1 : 0, part2 = most2 > 0 ? 1 / most2 : 0;
#pragma omp simd
        for (long i = 0; i < n; i++) {
            uint32_t random = chance((uint32_t)(start + i), rule->seed);
            mb[i] = (uint8_t)(code_of(std::fabs(first[i]) * part1, random, 127) | (bits_of(first[i]) >> 24 & 128));
            vb[i] = (uint8_t)code_of(second[i] * part2, random >> 12, 255);
        }
        scale[0] = most1, scale[1] = most2;
    }
}

// The sum of squares, the same whatever the threads
double squares(const float *x, long count, int threads) {
    const long strip = 1 << 14;
    std::vector<double> parts((count + strip - 1) / strip);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < count; start += strip) {
        long i = start, stop = std::min(start + strip, count);
        vf each[4] = {};
        for (; i + 4 * VL <= stop; i += 4 * VL)
            for (int k = 0; k < 4; k++) each[k] += load(x + i + k * VL) * load(x + i + k * VL);
        double total = sum(each[0]) + sum(each[1]) + sum(each[2]) + sum(each[3]);
        for (; i < stop; i++) total += (double)x[i] * x[i];
        parts[start / strip] = total;
    }
    double total = 0;
    for (double part : parts) total += part;
    return total;
}

int vector_lanes(void) { return VL; }
}
