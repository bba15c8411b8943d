// One query per sequence on a cache of keys and values that grows by one row, on a CPU, in float32.
//
// All there is to it is to read the cache once, as fast as memory gives it: at STREAMS places far from one another, for
// each of which the processor fetches ahead (see few_rows.cpp). Keys and values of a head lie together, row after row.
// They are taken in tiles that stay in the first cache while all query heads of that head use them.

namespace {

constexpr int64_t STREAMS = 4, TILE = 16;  // rows of a tile, at each of the places
constexpr int64_t WIDE = 8;                // vectors of a pass over values

// scores[r] = query . keys[r] for rows from first to last, and those `apart` behind them, as often as there are streams.
template <int COUNT>
void products(const float* query, const float* keys, float* scores, int64_t first, int64_t last, int64_t apart,
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

// What each score weighs, in place; their sum.
float weigh(float* scores, int64_t length) {
    float highest = scores[0];
    for (int64_t i = 1; i < length; ++i) highest = scores[i] > highest ? scores[i] : highest;
    if (highest == -INFINITY) {  // nothing weighs anything
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

// out += the values of the same rows, each times its weight.
template <int COUNT, int VECTORS>
void mix(const float* weights, const float* values, float* out, int64_t first, int64_t last, int64_t apart,
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

template <int COUNT>
void mix_all(const float* weights, const float* values, float* out, int64_t first, int64_t last, int64_t apart,
             int64_t features) {
    int64_t at = 0;
    for (; at + WIDE * LANES <= features; at += WIDE * LANES)
        mix<COUNT, WIDE>(weights, values + at, out + at, first, last, apart, features);
    for (; at < features; at += LANES) mix<COUNT, 1>(weights, values + at, out + at, first, last, apart, features);
}

}  // namespace

struct Call {
    const float *query, *new_keys, *new_values;
    float *keys, *values, *out, *scores;  // scores: of every thread, one per query of a head and row
    int64_t threads, batch, heads, groups, length, features;  // heads of keys, queries for each, rows with the new one
    int64_t query_batch, query_head, keys_batch, keys_head, values_batch, values_head;  // strides, of query and new rows
    int64_t cache_batch, cache_head;                                                    // and of both caches
    double scale;
};

// One head of the cache, with its queries.
void attend_head(const Call& c, int64_t b, int64_t h, float* scores) {
    float* keys = c.keys + b * c.cache_batch + h * c.cache_head;
    float* values = c.values + b * c.cache_batch + h * c.cache_head;
    const size_t row = c.features * sizeof(float);
    std::memcpy(keys + (c.length - 1) * c.features, c.new_keys + b * c.keys_batch + h * c.keys_head, row);
    std::memcpy(values + (c.length - 1) * c.features, c.new_values + b * c.values_batch + h * c.values_head, row);
    const float* query = c.query + b * c.query_batch + h * c.groups * c.query_head;
    const int64_t each = c.length / STREAMS, whole = STREAMS * each;
    const float scale = static_cast<float>(c.scale);
    for (int64_t at = 0; at < each; at += TILE) {
        const int64_t end = at + TILE < each ? at + TILE : each;
        for (int64_t g = 0; g < c.groups; ++g)
            products<STREAMS>(query + g * c.query_head, keys, scores + g * c.length, at, end, each, c.features, scale);
    }
    float* out = c.out + (b * c.heads + h) * c.groups * c.features;
    std::memset(out, 0, c.groups * row);
    for (int64_t g = 0; g < c.groups; ++g) {
        float* weights = scores + g * c.length;
        products<1>(query + g * c.query_head, keys, weights, whole, c.length, 0, c.features, scale);
        const float share = 1.0f / weigh(weights, c.length);
        for (int64_t i = 0; i < c.length; ++i) weights[i] *= share;
    }
    for (int64_t at = 0; at < each; at += TILE) {
        const int64_t end = at + TILE < each ? at + TILE : each;
        for (int64_t g = 0; g < c.groups; ++g)
            mix_all<STREAMS>(scores + g * c.length, values, out + g * c.features, at, end, each, c.features);
    }
    for (int64_t g = 0; g < c.groups; ++g)
        mix_all<1>(scores + g * c.length, values, out + g * c.features, whole, c.length, 0, c.features);
}

extern "C" void run(const Call* call) {
    const Call& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < c.batch * c.heads; ++i)
        attend_head(c, i / c.heads, i % c.heads, c.scores + omp_get_thread_num() * c.groups * c.length);
}
