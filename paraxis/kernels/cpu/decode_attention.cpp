// Decode attention: one query per sequence, and a KV cache to which one row is appended, on a CPU, in float32.
//
// It is bound by reading the KV cache once, at the bandwidth of the memory: as STREAMS streams far from one another,
// each of which the hardware prefetches (see gemv.cpp). The rows of a head are contiguous. They are read in tiles that
// stay in the L1 cache while all query heads of that key head use them.

namespace {

constexpr int64_t STREAMS = 4, TILE = 16;  // rows of a tile, in each stream
constexpr int64_t VECTORS_PER_PASS = 8;    // of a pass over values

// scores[r] = query . keys[r] * scale for rows first to last of COUNT streams, which are `apart` rows from one another.
template <int COUNT>
void dot_products(const float* query, const float* keys, float* scores, int64_t first, int64_t last, int64_t apart,
                  int64_t features, float scale) {
    for (int64_t row = first; row < last; ++row) {
        Floats sum[COUNT] = {};
        for (int64_t f = 0; f < features; f += LANES) {
            const Floats part = load(query + f);
            for (int i = 0; i < COUNT; ++i) sum[i] += part * load(keys + (row + i * apart) * features + f);
        }
        for (int i = 0; i < COUNT; ++i) scores[row + i * apart] = total(sum[i]) * scale;
    }
}

// out += weight * value of the same rows, for VECTORS vectors of features.
template <int COUNT, int VECTORS>
void accumulate(const float* weights, const float* values, float* out, int64_t first, int64_t last, int64_t apart,
                int64_t features) {
    Floats sum[VECTORS];
    for (int v = 0; v < VECTORS; ++v) sum[v] = load(out + v * LANES);
    for (int64_t row = first; row < last; ++row)
        for (int i = 0; i < COUNT; ++i) {
            const float* value = values + (row + i * apart) * features;
            for (int v = 0; v < VECTORS; ++v) sum[v] += weights[row + i * apart] * load(value + v * LANES);
        }
    for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, sum[v]);
}

// The same for all features.
template <int COUNT>
void accumulate_all(const float* weights, const float* values, float* out, int64_t first, int64_t last, int64_t apart,
                    int64_t features) {
    constexpr int64_t step = VECTORS_PER_PASS * LANES;
    int64_t at = 0;
    for (; at + step <= features; at += step)
        accumulate<COUNT, VECTORS_PER_PASS>(weights, values + at, out + at, first, last, apart, features);
    for (; at < features; at += LANES)
        accumulate<COUNT, 1>(weights, values + at, out + at, first, last, apart, features);
}

}  // namespace

struct Call {
    const float *query, *new_keys, *new_values;
    float *keys, *values, *out, *scores;  // scores: per thread, one per query head of a key head and row
    int64_t threads, batch, heads, groups, length, features;  // key heads, query heads of each, rows with the new one
    int64_t query_batch, query_head, keys_batch, keys_head, values_batch, values_head;  // strides: query and new rows,
    int64_t cache_batch, cache_head;                                                    // keys and values of the cache
    double scale;
};

// One key head of the KV cache, with all its query heads.
void attend_head(const Call& c, int64_t b, int64_t h, float* scores) {
    float* keys = c.keys + b * c.cache_batch + h * c.cache_head;
    float* values = c.values + b * c.cache_batch + h * c.cache_head;
    const size_t row = c.features * sizeof(float);
    std::memcpy(keys + (c.length - 1) * c.features, c.new_keys + b * c.keys_batch + h * c.keys_head, row);
    std::memcpy(values + (c.length - 1) * c.features, c.new_values + b * c.values_batch + h * c.values_head, row);
    const float* query = c.query + b * c.query_batch + h * c.groups * c.query_head;
    const int64_t each = c.length / STREAMS, streamed = STREAMS * each;
    const float scale = static_cast<float>(c.scale);
    for (int64_t at = 0; at < each; at += TILE) {
        const int64_t end = at + TILE < each ? at + TILE : each;
        for (int64_t g = 0; g < c.groups; ++g)
            dot_products<STREAMS>(query + g * c.query_head, keys, scores + g * c.length, at, end, each, c.features,
                                  scale);
    }
    float* out = c.out + (b * c.heads + h) * c.groups * c.features;
    std::memset(out, 0, c.groups * row);
    for (int64_t g = 0; g < c.groups; ++g) {
        float* weights = scores + g * c.length;
        dot_products<1>(query + g * c.query_head, keys, weights, streamed, c.length, 0, c.features, scale);
        const float normalizer = 1.0f / exponentiate(weights, c.length);
        for (int64_t i = 0; i < c.length; ++i) weights[i] *= normalizer;
    }
    for (int64_t at = 0; at < each; at += TILE) {
        const int64_t end = at + TILE < each ? at + TILE : each;
        for (int64_t g = 0; g < c.groups; ++g)
            accumulate_all<STREAMS>(scores + g * c.length, values, out + g * c.features, at, end, each, c.features);
    }
    for (int64_t g = 0; g < c.groups; ++g)
        accumulate_all<1>(scores + g * c.length, values, out + g * c.features, streamed, c.length, 0, c.features);
}

extern "C" void run(const Call* call) {
    const Call& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < c.batch * c.heads; ++i)
        attend_head(c, i / c.heads, i % c.heads, c.scores + omp_get_thread_num() * c.groups * c.length);
}
