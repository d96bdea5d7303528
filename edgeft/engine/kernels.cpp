// What lies between a block's matrix products, in one pass over memory each: RMSNorm, gates, attention along a tree, and
// AdamW. Every function takes plain pointers (float32, some also bf16) and a number of threads, and gives the same bits for
// any number of them.

#include <vector>

#include "products.h"
#include "rounding.h"
#include "threads.h"
#include "unpack.h"
#include "vectors.h"

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
    const int32_t *depth;    // tokens above each token
    const int32_t *items;    // piece * groups + group, in lists: list l is [bounds[l], bounds[l + 1])
    const int32_t *bounds;
    int32_t lists;
    int32_t window;  // a token sees itself and window - 1 above it; 0: all
};

struct Heads {
    int32_t heads, groups, width;  // query heads, key heads, numbers in each
    float scale;
    float cap;  // scores become cap * tanh(score / cap); 0: they stay
};

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

static void cap_scores(float *scores, long count, float cap) {  // count: a multiple of VL
    for (long c = 0; c < count; c += VL) store(scores + c, cap * vtanh(load(scores + c) / cap));
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
        if (t.window) {
            const int32_t *idx = t.keys + p.key, last = t.depth[i] - t.window;  // seen is what is deeper
            for (long k = 0; k < keys; k++) row[k] = t.depth[idx[k]] <= last ? -INFINITY : row[k];
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
    std::vector<Scratch> scratch(threads);
    share(t.lists, threads, [&](long list, int thread) {
        Scratch &s = scratch[thread];
        for (int at = t.bounds[list]; at < t.bounds[list + 1]; at++) {
            const Piece &p = t.pieces[t.items[at] / G];
            const long g = t.items[at] % G, keys = p.above + p.own, pad = padded(keys);
            const int32_t *idx = t.keys + p.key, *rows = t.rows + p.query;
            s.kt.resize(D * pad), s.q.resize(p.asked * D), s.p.resize(p.asked * pad);
            gather_transposed(k + g * D, G * D, idx, keys, pad, D, s.kt.data());
            for (long h = g * per; h < (g + 1) * per; h++) {
                gather(q + h * D, H * D, rows, p.asked, D, shape->scale, s.q.data());
                product<false>(p.asked, pad, D, s.q.data(), D, 1, s.kt.data(), pad, nullptr, s.p.data(), pad, nullptr);
                if (shape->cap) cap_scores(s.p.data(), p.asked * pad, shape->cap);
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
    });
}

// dq as q; dk and dv (tokens, groups * width) for every list; the first of them become the sums
void attend_back(const Tree *tree, const Heads *shape, const float *q, const float *k, const float *v, const float *out,
                 const float *lse, const float *dout, float *dq, float *const *dk, float *const *dv, long tokens,
                 int threads) {
    const Tree &t = *tree;
    const long H = shape->heads, G = shape->groups, D = shape->width, per = H / G;
    std::vector<Scratch> scratch(threads);
    share(t.lists, threads, [&](long list, int thread) {
        Scratch &s = scratch[thread];
        float *own_dk = dk[list], *own_dv = dv[list];
        std::fill(own_dk, own_dk + tokens * G * D, 0.0f), std::fill(own_dv, own_dv + tokens * G * D, 0.0f);
        for (int at = t.bounds[list]; at < t.bounds[list + 1]; at++) {
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
                if (shape->cap) cap_scores(s.p.data(), p.asked * pad, shape->cap);
                hide(p, t, keys, pad, s.p.data());
                const float share = shape->cap ? 1 / shape->cap : 0;
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
                        x = x == -INFINITY ? vf{} : x * share;  // tanh of what was capped, whose slope is 1 - tanh²
                        store(drow + c, e * (load(drow + c) - delta) * (1 - x * x));
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
    });
    share_range(tokens * G * D, 4096, threads, [&](long start, long stop) {
        for (int list = 1; list < t.lists; list++)
            for (float *const *d : {dk, dv})
#pragma omp simd
                for (long i = start; i < stop; i++) d[0][i] += d[list][i];
    });
}

// The first `turned` numbers of each head of x (rows, heads * width) in place, by the angles of each row: cosines and sines
// (rows, turned), whose halves are equal. Angle d turns the numbers d and turned / 2 + d, or the neighbours 2 d and 2 d + 1.
// sign -1 turns back, which is what the gradient needs.
void rotate(float *x, const float *cosines, const float *sines, long rows, long heads, long width, long turned,
            int neighbours, float sign, int threads) {
    const long half = turned / 2;
    share_rows(rows, heads * width, threads, [&](long r) {
        const float *c = cosines + r * turned, *s = sines + r * turned;
        for (long h = 0; h < heads; h++) {
            float *a = x + (r * heads + h) * width, *b = a + half;
            if (neighbours) {
                for (long d = 0; d < half; d++) {
                    float u = a[2 * d], w = a[2 * d + 1];
                    a[2 * d] = u * c[d] - w * sign * s[d];
                    a[2 * d + 1] = w * c[d] + u * sign * s[d];
                }
                continue;
            }
#pragma omp simd
            for (long d = 0; d < half; d++) {
                float u = a[d], w = b[d];
                a[d] = u * c[d] - w * sign * s[d];
                b[d] = w * c[d] + u * sign * s[d];
            }
        }
    });
}

// ------------------------------------------------------------------------------------------------- norms

// total = x + more (or x alone), y = weight * total / rms(total); scale (rows,) keeps 1 / rms
void norm(const float *x, const float *more, const float *weight, float eps, float *total, float *y, float *scale, long rows,
          long width, int threads) {
    share_rows(rows, width, threads, [&](long r) {
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
    });
}

// dx = weight * dy / rms - x * (sum of weight * dy * x) / (width * rms³), + what came to x by another way
void norm_back(const float *x, const float *scale, const float *weight, const float *dy, const float *other, float *dx,
               long rows, long width, int threads) {
    share_rows(rows, width, threads, [&](long r) {
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
    });
}

}

// ------------------------------------------------------------------------------------------------- gates

static const long STRIP = 4096;  // numbers that a thread takes at a time

// An activation is g * sigmoid(z(g)), and its slope s + g s (1 - s) z'(g). GELU, with tanh: z = 2 sqrt(2 / pi) (g + 0.044715 g³).
struct Silu {
    template <typename V> static V z(V g) { return g; }
    template <typename V> static V slope(V) { return V{} + 1; }
};
struct Gelu {
    template <typename V> static V z(V g) { return 1.5957691216f * (g + 0.044715f * g * g * g); }
    template <typename V> static V slope(V g) { return 1.5957691216f * (1 + 0.134145f * g * g); }
};
static inline vf sigmoid(vf z) { return 1 / (1 + vexp(-z)); }
static inline float sigmoid(float z) { return 1 / (1 + std::exp(-z)); }

// out = act(gate) * up; out may be gate or up
template <typename A, typename T>
static void gated(const T *gate, const T *up, T *out, long count, int threads) {
    share_range(count, STRIP, threads, [&](long strip, long) {
        long stop = std::min(strip + STRIP, count), i = strip;
        for (; i + VL <= stop; i += VL) {
            vf g = load(gate + i);
            store(out + i, g * sigmoid(A::z(g)) * load(up + i));
        }
        for (; i < stop; i++) {
            float g = value(gate[i]);
            put(out + i, g * sigmoid(A::z(g)) * value(up[i]));
        }
    });
}

// gate and up become their gradients; act, if asked for, what `gated` gave
template <typename A, typename T>
static void gated_back(T *gate, T *up, const T *dact, T *act, long count, int threads) {
    share_range(count, STRIP, threads, [&](long strip, long) {
        long stop = std::min(strip + STRIP, count), i = strip;
        for (; i + VL <= stop; i += VL) {
            vf g = load(gate + i), u = load(up + i), d = load(dact + i), s = sigmoid(A::z(g)), gs = g * s;
            if (act) store(act + i, gs * u);
            store(up + i, d * gs);
            store(gate + i, d * u * (s + gs * (1 - s) * A::slope(g)));
        }
        for (; i < stop; i++) {
            float g = value(gate[i]), u = value(up[i]), d = value(dact[i]), s = sigmoid(A::z(g)), gs = g * s;
            if (act) put(act + i, gs * u);
            put(up + i, d * gs);
            put(gate + i, d * u * (s + gs * (1 - s) * A::slope(g)));
        }
    });
}

extern "C" {
#define GATE(NAME, ACT)                                                                                                        \
    void NAME(const float *gate, const float *up, float *out, long count, int threads) {                                      \
        gated<ACT>(gate, up, out, count, threads);                                                                             \
    }                                                                                                                          \
    void NAME##_half(const bf16 *gate, const bf16 *up, bf16 *out, long count, int threads) {                                  \
        gated<ACT>(gate, up, out, count, threads);                                                                             \
    }                                                                                                                          \
    void NAME##_back(float *gate, float *up, const float *dact, float *act, long count, int threads) {                        \
        gated_back<ACT>(gate, up, dact, act, count, threads);                                                                  \
    }                                                                                                                          \
    void NAME##_back_half(bf16 *gate, bf16 *up, const bf16 *dact, bf16 *act, long count, int threads) {                       \
        gated_back<ACT>(gate, up, dact, act, count, threads);                                                                  \
    }

GATE(swiglu, Silu)
GATE(geglu, Gelu)
}

// ---------------------------------------------------------------- sums and conversions

extern "C" {
// out = x + y
void add(const float *x, const float *y, float *out, long count, int threads) {
    share_range(count, STRIP, threads, [&](long start, long stop) {
#pragma omp simd
        for (long i = start; i < stop; i++) out[i] = x[i] + y[i];
    });
}

void to_bf16(const float *x, bf16 *out, long count, int threads) {
    share_range(count, STRIP, threads, [&](long start, long stop) { narrow(x + start, stop - start, out + start); });
}

// out (width) = sums over the rows of x (rows, width)
void sum_rows_half(const bf16 *x, float *out, long rows, long width, int threads) {
    const long block = 4 * VL;
    share_range(width, block, threads, [&](long start, long) {
        const long stop = std::min(start + block, width);
        for (long i = start; i < stop; i++) out[i] = 0;
        for (long r = 0; r < rows; r++) {
            const bf16 *row = x + r * width;
            long i = start;
            for (; i + VL <= stop; i += VL) store(out + i, load(out + i) + load(row + i));
            for (; i < stop; i++) out[i] += value(row[i]);
        }
    });
}
}

// ------------------------------------------------------------------------------------------------- cross-entropy

static void cap_row(float *row, long width, float cap) {
    long i = 0;
    for (; i + VL <= width; i += VL) store(row + i, cap * vtanh(load(row + i) / cap));
    for (; i < width; i++) row[i] = cap * std::tanh(row[i] / cap);
}

extern "C" {
// losses (rows): of each row of logits (rows, width) against its target; logits become their gradients. With a cap they are
// taken of cap * tanh(logit / cap).
void cross_entropy(float *logits, const int64_t *targets, double *losses, long rows, long width, float cap, int threads) {
    share_rows(rows, width, threads, [&](long r) {
        float *row = logits + r * width, most = row[0];
        if (cap) cap_row(row, width, cap), most = row[0];
#pragma omp simd reduction(max : most)
        for (long i = 0; i < width; i++) most = std::max(most, row[i]);
        const float wanted = row[targets[r]], share = cap ? 1 / cap : 0;
        vf some = vf{};
        float total = 0;
        long i = 0;
        for (; i + VL <= width; i += VL) {
            const vf e = vexp(load(row + i) - most);
            some += e;
            if (!cap) store(row + i, e);
        }
        for (; i < width; i++) {
            const float e = std::exp(row[i] - most);
            total += e;
            if (!cap) row[i] = e;
        }
        total += sum(some);
        losses[r] = std::log((double)total) - (wanted - most);
        const float inverse = 1 / total;
        if (!cap) {
#pragma omp simd
            for (long k = 0; k < width; k++) row[k] *= inverse;
            row[targets[r]] -= 1;
            return;
        }
        // capped logits are needed until here: their exponentials are computed again, and each has the slope 1 - tanh²
        for (i = 0; i + VL <= width; i += VL) {
            const vf x = load(row + i), t = x * share;
            store(row + i, vexp(x - most) * inverse * (1 - t * t));
        }
        for (; i < width; i++) row[i] = std::exp(row[i] - most) * inverse * (1 - row[i] * share * row[i] * share);
        row[targets[r]] -= 1 - wanted * share * wanted * share;
    });
}

void cap_rows(float *x, long rows, long width, float cap, int threads) {
    share_rows(rows, width, threads, [&](long r) { cap_row(x + r * width, width, cap); });
}
}

// ---------------------------------------------------------------- some columns of a matrix

template <typename T>
static void pick(const T *x, const int64_t *columns, T *out, long rows, long width, long count, int threads) {
    share_rows(rows, width, threads, [&](long r) {
        for (long c = 0; c < count; c++) out[r * count + c] = x[r * width + columns[c]];
    });
}

template <typename T>
static void place(const float *part, const int64_t *columns, T *out, long rows, long width, long count, int threads) {
    share_rows(rows, width, threads, [&](long r) {
        for (long c = 0; c < count; c++) put(out + r * width + columns[c], part[r * count + c]);
    });
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
    share_groups(count, GROUP, threads, [&](long i) {
        step_group(w, half, g + i, m + i, v + i, i, std::min<long>(GROUP, count - i), *rule);
    });
}

void adamw_bf16(void *w, int half, const float *g, bf16 *m, bf16 *v, long count, const Rule *rule, int threads) {
    share_groups(count, GROUP, threads, [&](long start) {
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
    });
}

// scales: (groups, 2), the largest first and second moment of each
void adamw_bytes(
    void *w, int half, const float *g, uint8_t *m, uint8_t *v, float *scales, long count, const Rule *rule, int threads) {
    share_groups(count, GROUP, threads, [&](long start) {
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
    });
}

// The sum of squares, the same whatever the threads
double squares(const float *x, long count, int threads) {
    const long strip = 1 << 14;
    std::vector<double> parts((count + strip - 1) / strip);
    share_range(count, strip, threads, [&](long start, long) {
        long i = start, stop = std::min(start + strip, count);
        vf each[4] = {};
        for (; i + 4 * VL <= stop; i += 4 * VL)
            for (int k = 0; k < 4; k++) each[k] += load(x + i + k * VL) * load(x + i + k * VL);
        double total = sum(each[0]) + sum(each[1]) + sum(each[2]) + sum(each[3]);
        for (; i < stop; i++) total += (double)x[i] * x[i];
        parts[start / strip] = total;
    });
    double total = 0;
    for (double part : parts) total += part;
    return total;
}

void round_rows(const Grid *grid, int threads) {
    share_range(grid->rows, RowRounder::ROWS, threads, [&](long start, long) { RowRounder(*grid, start).run(); });
}

int vector_lanes(void) { return VL; }
}
