// Rows of a matrix rounded onto a grid, value = d scale level(code) + m low, for the error r H rᵀ of a row, where
// H = E[x xᵀ] of its inputs: what export/rounding.py does in plain torch. ROWS of them at a time, side by side.

#pragma once
#include <cmath>
#include <vector>

#include "vectors.h"

struct Grid {
    const float *target, *scale, *low;  // (rows, cols); low: null where there is no m
    float *d, *m;                       // (rows, blocks), refitted
    uint8_t *codes;                     // (rows, cols)
    const float *levels;                // by code, ascending
    const float *h, *lower;             // (cols, cols): H, and the transposed upper Cholesky factor of its inverse
    int64_t rows, cols, block;
    int32_t count, even, rounds;  // levels; whether they are evenly spaced by 1
    float ridge;
};

struct RowRounder {
    static constexpr int ROWS = 16;
    typedef float lanes[ROWS];
    const Grid &g;
    const long n, blocks, first;
    std::vector<float> target, scale, low, level, error, d, m, step, floor_, a, right;
    std::vector<uint8_t> code;

    RowRounder(const Grid &g, long first)
        : g(g), n(g.cols), blocks(g.cols / g.block), first(first), target(n * ROWS), scale(n * ROWS), low(g.low ? n * ROWS : 0),
          level(n * ROWS), error(n * ROWS), d(blocks * ROWS), m(blocks * ROWS), step(n * ROWS), floor_(n * ROWS), code(n * ROWS) {
        for (int r = 0; r < ROWS; r++) {
            const long row = std::min(first + r, g.rows - 1);
            for (long k = 0; k < n; k++) {
                target[k * ROWS + r] = g.target[row * n + k], scale[k * ROWS + r] = g.scale[row * n + k];
                if (g.low) low[k * ROWS + r] = g.low[row * n + k];
            }
            for (long b = 0; b < blocks; b++) {
                d[b * ROWS + r] = g.d[row * blocks + b];
                if (g.low) m[b * ROWS + r] = g.m[row * blocks + b];
            }
        }
        spread();
    }

    // steps and floors of all columns
    void spread() {
        for (long k = 0; k < n; k++)
#pragma omp simd
            for (int r = 0; r < ROWS; r++) {
                step[k * ROWS + r] = d[k / g.block * ROWS + r] * scale[k * ROWS + r];
                floor_[k * ROWS + r] = g.low ? m[k / g.block * ROWS + r] * low[k * ROWS + r] : 0;
            }
    }

    // sum over [from, to) of row[j] x[j]
    static void dot(const float *row, const float *x, long from, long to, float *out) {
        lanes each[4] = {};
        long j = from;
        for (; j + 4 <= to; j += 4)
            for (int i = 0; i < 4; i++)
#pragma omp simd
                for (int r = 0; r < ROWS; r++) each[i][r] += row[j + i] * x[(j + i) * ROWS + r];
        for (; j < to; j++)
#pragma omp simd
            for (int r = 0; r < ROWS; r++) each[0][r] += row[j] * x[j * ROWS + r];
#pragma omp simd
        for (int r = 0; r < ROWS; r++) out[r] = each[0][r] + each[1][r] + each[2][r] + each[3][r];
    }

    // the codes nearest to these levels
    void choose(long k, const float *wanted) {
        const float least = g.levels[0], most = g.levels[g.count - 1];
        for (int r = 0; r < ROWS; r++) {
            int at;
            if (g.even) {
                at = (int)(std::nearbyint(std::min(std::max(wanted[r], least), most)) - least);
            } else {
                for (at = 0; at + 1 < g.count && wanted[r] > (g.levels[at] + g.levels[at + 1]) / 2;) at++;
            }
            code[k * ROWS + r] = (uint8_t)at, level[k * ROWS + r] = g.levels[at];
        }
    }

    // GPTQ: each column makes up for the errors of those before it, as far as it can before it is rounded
    void pass_errors_on() {
        for (long k = 0; k < n; k++) {
            lanes before, wanted, left;
            const float *row = g.lower + k * n;
            dot(row, error.data(), 0, k, before);
            for (int r = 0; r < ROWS; r++) {
                const float s = step[k * ROWS + r];
                left[r] = target[k * ROWS + r] - before[r] - floor_[k * ROWS + r];
                wanted[r] = s == 0 ? 0 : left[r] / s;
            }
            choose(k, wanted);
            for (int r = 0; r < ROWS; r++)
                error[k * ROWS + r] = (left[r] - step[k * ROWS + r] * level[k * ROWS + r]) / row[k];
        }
    }

    // of the present codes and scales
    void find_errors() {
        for (long i = 0; i < n * ROWS; i++) error[i] = target[i] - step[i] * level[i] - floor_[i];
    }

    // each code in turn becomes the best, given all others
    void look_again() {
        find_errors();
        for (long k = 0; k < n; k++) {
            lanes slope, wanted;
            dot(g.h + k * n, error.data(), 0, n, slope);
            const float own = g.h[k * n + k];
            for (int r = 0; r < ROWS; r++) {
                const float s = step[k * ROWS + r];
                wanted[r] = level[k * ROWS + r] + (s == 0 ? 0 : slope[r] / own / s);
            }
            choose(k, wanted);
            for (int r = 0; r < ROWS; r++) {
                const long i = k * ROWS + r;
                error[i] = target[i] - step[i] * level[i] - floor_[i];
            }
        }
    }

    static float half(float x) {  // to the nearest fp16
        if (std::fabs(x) < 6.103515625e-5f) return std::nearbyint(x * 16777216.0f) / 16777216.0f;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
        memcpy(&x, &bits, 4);
        return x;
    }

    // d and m of all blocks at once, for the present codes: least squares, weighted by H; a (size, size), lower half
    void refit_scales() {
        const long size = blocks * (g.low ? 2 : 1);
        std::vector<float> unit(n * ROWS);  // what d multiplies
        for (long i = 0; i < n * ROWS; i++) unit[i] = scale[i] * level[i];
        a.assign(size * size * ROWS, 0), right.assign(size * ROWS, 0);
        find_errors();
        auto add = [&](long row, long col, const float *x, const float *y) {
            float *to = a.data() + (row * size + col) * ROWS;
#pragma omp simd
            for (int r = 0; r < ROWS; r++) to[r] += x[r] * y[r];
        };
        for (long i = 0; i < n; i++) {
            const long s = i / g.block;
            const float *row = g.h + i * n, *u = unit.data() + i * ROWS, *v = g.low ? low.data() + i * ROWS : nullptr;
            lanes y;
            for (long t = 0; t < blocks; t++) {
                const long from = t * g.block, to = from + g.block;
                if (t > s && !v) break;
                dot(row, unit.data(), from, to, y);
                if (t <= s) add(s, t, u, y);
                if (v) add(blocks + s, t, v, y);
                if (v && t <= s) {
                    dot(row, low.data(), from, to, y);
                    add(blocks + s, blocks + t, v, y);
                }
            }
            dot(row, error.data(), 0, n, y);
            for (int r = 0; r < ROWS; r++) right[s * ROWS + r] += u[r] * y[r];
            if (v)
                for (int r = 0; r < ROWS; r++) right[(blocks + s) * ROWS + r] += v[r] * y[r];
        }
        solve(size);
        for (long i = 0; i < blocks * ROWS; i++) {
            d[i] = half(d[i] + right[i]);
            if (g.low) m[i] = half(m[i] + right[blocks * ROWS + i]);
        }
        spread();
    }

    // a x = right by Cholesky's factors, in place
    void solve(long size) {
        for (int r = 0; r < ROWS; r++) {
            float mean = 0;
            for (long i = 0; i < size; i++) mean += a[(i * size + i) * ROWS + r] / size;
            for (long i = 0; i < size; i++) a[(i * size + i) * ROWS + r] *= 1 + g.ridge;
            for (long i = 0; i < size; i++) a[(i * size + i) * ROWS + r] += 1e-6f * std::max(mean, 1e-12f);
        }
        auto at = [&](long i, long j) { return a.data() + (i * size + j) * ROWS; };
        for (long i = 0; i < size; i++)
            for (long j = 0; j <= i; j++) {
                float *x = at(i, j);
                for (long k = 0; k < j; k++) {
                    const float *y = at(i, k), *z = at(j, k);
#pragma omp simd
                    for (int r = 0; r < ROWS; r++) x[r] -= y[r] * z[r];
                }
                const float *own = at(j, j);
                for (int r = 0; r < ROWS; r++) x[r] = i == j ? std::sqrt(std::max(x[r], 1e-20f)) : x[r] / own[r];
            }
        for (long i = 0; i < size; i++)
            for (int r = 0; r < ROWS; r++) {
                float x = right[i * ROWS + r];
                for (long k = 0; k < i; k++) x -= at(i, k)[r] * right[k * ROWS + r];
                right[i * ROWS + r] = x / at(i, i)[r];
            }
        for (long i = size - 1; i >= 0; i--)
            for (int r = 0; r < ROWS; r++) {
                float x = right[i * ROWS + r];
                for (long k = i + 1; k < size; k++) x -= at(k, i)[r] * right[k * ROWS + r];
                right[i * ROWS + r] = x / at(i, i)[r];
            }
    }

    void run() {
        pass_errors_on();
        for (int round = 0; round < g.rounds; round++) refit_scales(), look_again();
        for (int r = 0; r < ROWS && first + r < g.rows; r++) {
            const long row = first + r;
            for (long k = 0; k < n; k++) g.codes[row * n + k] = code[k * ROWS + r];
            for (long b = 0; b < blocks; b++) {
                g.d[row * blocks + b] = d[b * ROWS + r];
                if (g.low) g.m[row * blocks + b] = m[b * ROWS + r];
            }
        }
    }
};
