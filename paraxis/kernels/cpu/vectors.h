// Vectors of float32 by the vector extensions of GCC and clang, for any processor. Prepended to every CPU kernel.

#if defined(__clang__)
#pragma clang fp contract(fast) reassociate(off)  // fused multiply-add
#else
#pragma GCC optimize("fp-contract=fast,no-unsafe-math-optimizations")
#endif

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 8;  // floats of a vector

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(float))));

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline float total(Floats value) {
    return ((value[0] + value[4]) + (value[2] + value[6])) + ((value[1] + value[5]) + (value[3] + value[7]));
}

// e^x for x <= 0: 2^integral, built from its bits, times the Taylor series of the rest, at most half of log(2).
inline Floats exponential(Floats x) {
    const float lowest = -87.0f;
    x = x < lowest ? Floats{} + lowest : x;
    const Floats shifted = x * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const Floats integral = shifted - 12582912.0f;
    const Floats rest = (x - integral * 0.693359375f) + integral * 2.12194440e-4f;
    Floats series = Floats{} + 1.0f / 5040;
    series = series * rest + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest * rest + rest + 1.0f;
    const Ints power = (__builtin_convertvector(integral, Ints) + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &power, sizeof scale);
    return series * scale;
}

// exp(score - max) in place, for a softmax; returns their sum.
inline float exponentiate(float* scores, int64_t length) {
    float highest = scores[0];
    for (int64_t i = 1; i < length; ++i) highest = scores[i] > highest ? scores[i] : highest;
    if (highest == -INFINITY) {  // every row is masked: the result is zero
        std::memset(scores, 0, length * sizeof(float));
        return 1;
    }
    float sum = 0;
    int64_t i = 0;
    Floats several = {};
    for (; i + LANES <= length; i += LANES) {
        const Floats weights = exponential(load(scores + i) - highest);
        store(scores + i, weights);
        several += weights;
    }
    for (; i < length; ++i) sum += scores[i] = std::exp(scores[i] - highest);
    return sum + total(several);
}

}  // namespace
