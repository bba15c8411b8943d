// One query per sequence on a cache of keys and values that grows by one row, on a CPU, in float32.
//
// All there is to it is to read the cache once, as fast as memory gives it. Keys and values of a head lie together, row
// after row; they are taken in tiles that stay in the first cache while all query heads of that head use them.

namespace {

constexpr int64_t LINE = 16, AHEAD = 1024;  // floats of a cache line, and how many of them to ask for before
constexpr int64_t TILE = 64, WIDE = 8;      // rows of a tile, vectors of a pass over values

// Ask for what is needed soon: the processor by itself does not look beyond a page, and rows go on.
inline void ahead(const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i += LINE) __builtin_prefetch(from + AHEAD + i);
}

// scores[r] = query . keys[r], four rows at a time for the additions not to wait for one another.
void products(const float* query, const float* keys, float* scores, int64_t rows, int64_t features, float scale) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        Floats sum[4] = {};
        const float* first = keys + row * features;
        ahead(first, 4 * features);
        for (int64_t f = 0; f < features; f += LANES) {
            const Floats part = load(query + f);
            for (int i = 0; i < 4; ++i) sum[i] += part * load(first + i * features + f);
        }
        for (int i = 0; i < 4; ++i) scores[row + i] = total(sum[i]) * scale;
    }
    for (; row < rows; ++row) {
        Floats sum = {};
        for (int64_t f = 0; f < features; f += LANES) sum += load(query + f) * load(keys + row * features + f);
        scores[row] = total(sum) * scale;
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

// out += the values of a tile, each times its weight.
void mix(const float* weights, const float* values, float* out, int64_t rows, int64_t features) {
    for (int64_t first = 0; first < features; first += WIDE * LANES) {
        const int64_t count = (features - first) / LANES < WIDE ? (features - first) / LANES : WIDE;
        Floats sum[WIDE];
        for (int64_t i = 0; i < count; ++i) sum[i] = load(out + first + i * LANES);
        if (count == WIDE) {
            for (int64_t row = 0; row < rows; ++row) {
                const float* value = values + row * features + first;
                ahead(value, WIDE * LANES);
                for (int64_t i = 0; i < WIDE; ++i) sum[i] += weights[row] * load(value + i * LANES);
            }
        } else {
            for (int64_t row = 0; row < rows; ++row) {
                const float* value = values + row * features + first;
                for (int64_t i = 0; i < count; ++i) sum[i] += weights[row] * load(value + i * LANES);
            }
        }
        for (int64_t i = 0; i < count; ++i) store(out + first + i * LANES, sum[i]);
    }
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
    for (int64_t at = 0; at < c.length; at += TILE) {
        const int64_t rows = c.length - at < TILE ? c.length - at : TILE;
        for (int64_t g = 0; g < c.groups; ++g)
            products(query + g * c.query_head, keys + at * c.features, scores + g * c.length + at, rows, c.features,
                     static_cast<float>(c.scale));
    }
    float* out = c.out + (b * c.heads + h) * c.groups * c.features;
    std::memset(out, 0, c.groups * row);
    for (int64_t g = 0; g < c.groups; ++g) {
        float* weights = scores + g * c.length;
        const float share = 1.0f / weigh(weights, c.length);
        for (int64_t i = 0; i < c.length; ++i) weights[i] *= share;
    }
    for (int64_t at = 0; at < c.length; at += TILE) {
        const int64_t rows = c.length - at < TILE ? c.length - at : TILE;
        for (int64_t g = 0; g < c.groups; ++g)
            mix(scores + g * c.length + at, values + at * c.features, out + g * c.features, rows, c.features);
    }
}

extern "C" void attend(const Call* call) {
    const Call& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < c.batch * c.heads; ++i)
        attend_head(c, i / c.heads, i % c.heads, c.scores + omp_get_thread_num() * c.groups * c.length);
}
